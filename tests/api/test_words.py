"""Names are nouns or verbs in the infinitive, and a docstring's first line stands alone."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "paramserve"
ROOT = "."

STORY = frozenset({"brought", "came", "gone", "hear", "heard", "said", "say", "told", "went"})
"""Words of storytelling, which name neither a thing nor an action of the field."""
PARTICIPLES = STORY | {
    "asked",
    "begun",
    "chosen",
    "drawn",
    "forgotten",
    "found",
    "given",
    "held",
    "kept",
    "known",
    "left",
    "lost",
    "made",
    "meant",
    "met",
    "seen",
    "sent",
    "shown",
    "taken",
    "torn",
    "wanted",
}
"""Participles that say what was done and not what the thing is; before a noun they are fine."""
BUDGET: dict[str, int] = {
    ROOT: 1,
    "checkpoint": 3,
    "cli": 2,
    "core": 51,
    "launch": 3,
    "messages": 16,
    "observe": 2,
    "training": 1,
}
"""Most names in a folder that are such a word; lower it with each rename. ROOT: modules in none."""
LEANING = ("As ", "By ", "From ", "Of ", "Since ", "The same ", "Then ", "Those ", "Whose ")
"""Openings of a docstring that need the name, or the line above, to make sense."""
PERSONS = re.compile(
    r"\b(anybody|everybody|nobody|somebody|whoever|those who|one who|strangers?|ghosts?|mended|"
    r"bec(?:a|o)mes? of|com(?:e|es|ing) of|came of|comes? to nothing|makes? way|lets? go)\b",
    re.IGNORECASE,
)
"""Words of a story, in comments, docstrings and messages: name the actor and the standard verb."""
FIXED = frozenset({("observe/checkpoints.py", "told")})
"""Words of `STORY` that stay: a name that users have."""


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each definition, argument, variable and attribute of a module, with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.MatchAs(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each docstring of a module, its classes, functions and attributes, with its line."""
    for node in ast.walk(tree):
        for part in (getattr(node, field, None) for field in ("body", "orelse")):
            for statement in part if isinstance(part, list) else ():
                match statement:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        yield statement.lineno, text


def modules() -> Iterator[tuple[str, str]]:
    """Path and text of each module of paramserve and of the distributions beside it."""
    for folder in (SOURCE, *REPOSITORY.glob("packages/*/src")):
        for path in sorted(folder.rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), path.read_text()


@functools.cache
def participles() -> dict[str, list[tuple[str, str]]]:
    """By folder, the place and the word of each name that is a bare participle."""
    places: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE)
        folder = file.parts[0] if len(file.parts) > 1 else ROOT
        for line, name in bound_names(ast.parse(path.read_text())):
            word = name.strip("_").lower()
            if word in PARTICIPLES:
                places.setdefault(folder, []).append((f"{file}:{line}", word))
    return places


def test_folder_has_no_more_participles_as_names_than_its_budget() -> None:
    places = participles()
    over = [
        f"{folder}: {len(words)} names, of a budget of {BUDGET.get(folder, 0)}: "
        + ", ".join(f"{place} {word}" for place, word in words)
        for folder, words in places.items()
        if len(words) > BUDGET.get(folder, 0)
    ]
    assert not over, "name what it is, or lower what was there before:\n" + "\n".join(over)


def test_first_line_of_a_docstring_stands_alone() -> None:
    places = [
        f"{path}:{line} {doc.strip().splitlines()[0]}"
        for path, text in modules()
        for line, doc in docstrings(ast.parse(text))
        if doc.lstrip().startswith(LEANING)
    ]
    assert not places, "say what it is or does:\n" + "\n".join(places)


def test_text_names_the_actor_and_the_standard_verb() -> None:
    places = [
        f"{path}:{number} {match[0]}"
        for path, text in modules()
        for number, line in enumerate(text.splitlines(), 1)
        for match in PERSONS.finditer(line)
    ]
    assert not places, "name the shard, the client, the rank: " + ", ".join(places)


def test_no_name_tells_a_story() -> None:
    places = [
        f"{place} {word}"
        for words in participles().values()
        for place, word in words
        if word in STORY and (place.partition(":")[0], word) not in FIXED
    ]
    assert not places, f"name what it is: {', '.join(places)}"

"""Write docs/reference.md from the docstrings of the public names.

It begins with an index: every public name with the summary of its docstring, but the errors, which
docs/troubleshooting.md lists. Then comes all of each docstring: signature, arguments, results,
errors, and the methods of the objects that users are given; and the tables of settings and of
events of the log. Run `python docs/write_api.py` after a change of a public docstring;
tests/api/test_docs.py compares the page with what this writes. A public name without a docstring,
and an error that docs/troubleshooting.md does not explain, are refused.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import paramserve
from paramserve import config, errors, observe, pytorch
from paramserve.cli.settings import meanings
from paramserve.logs import EVENTS
from paramserve.pytorch.loader import Loader

REFERENCE = Path(__file__).with_name("reference.md")
TROUBLES = Path(__file__).with_name("troubleshooting.md")
HEADINGS = {
    "launch": "Runs, clusters, servers",
    "worker": "In the training function",
    "observe": "What runs have recorded",
    "reporters": "Where runs are reported to",
    "client": "Clients and tables",
    "core": "Options of tables",
    "pytorch": "Tables as PyTorch modules",
    "consistency": "Consistency policies",
    "rules": "Update rules",
    "codecs": "Codecs",
    "engine": "Engines",
    "config": "Settings",
    "logs": "Logs",
    "errors": "Errors",
}
"""By the part of paramserve that defines a name."""
INTRODUCTIONS = {
    "errors": (
        "Cause and cure are those of [Troubleshooting](troubleshooting.md#by-error), one table.",
        "",
    ),
    "logs": (
        "Events of `paramserve serve --log json`:",
        "",
        "| event | says |",
        "|---|---|",
        *(f"| `{name}` | {told} |" for name, told in EVENTS.items()),
        "",
    ),
}
"""What stands below a heading of the reference."""
INDEXED_ELSEWHERE = "ps.errors."
"""Begins the names that are no rows of the index."""
SETTINGS = (config.Deadlines, config.Limits)
"""Classes whose fields the reference has as a table, in the place of a signature."""
WITH_MEMBERS = {"launch", "worker", "client", "pytorch", "observe"}
"""Parts whose classes are shown with their methods: users are given such objects."""
GIVEN = {
    "Job",
    "Result",
    "Snapshot",
    "Worker",
    "Loader",
    "Client",
    "Ticket",
    "Table",
    "Handle",
    "Progress",
}
"""Classes whose objects users are given and do not make: without the arguments of their making."""
OF_OTHER_PARTS = {
    "Worker": {
        "batches_per_step",
        "draws",
        "go_on_drawing",
        "new_loader_name",
        "step_samples",
        "tell_extra_state",
    },
    "Handle": {"of", "encode", "decode"},
    "Job": {"launch"},
    "Table": {"checked"},
}
"""Members that are for other parts of the package only."""
TO_DERIVE_FROM = {"Policy", "CustomRule", "Reporter"}
"""Classes of other parts that are, because users write the methods."""
INTRODUCTION = """\
# API reference

Written from the docstrings by `python docs/write_api.py`; `help(ps.run)` prints the same. The index
has every public name of `import paramserve as ps` with one line. The name leads to the whole:
signature, arguments, promises and errors. A name that begins with a module is imported from it:
`consistency.Admit` by `from paramserve.consistency import Admit`.

## Index
"""
ERRORS = """\
[Troubleshooting](troubleshooting.md#by-error) lists all of them, with cause and cure.
"""
"""The end of the index."""
SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Example", "Source")
LINE = 96
"""Characters of a signature on one line."""


class Name(NamedTuple):
    """A public name: as it is written, what it is, and the part that defines it."""

    written: str
    thing: Any
    part: str


def public_names() -> list[Name]:
    """All of them, by part."""
    found = []
    for module, prefix in ((paramserve, "ps"), (pytorch, "ps.pytorch"), (observe, "observe")):
        for name in module.__all__:
            thing = getattr(module, name)
            defined_in = thing.__name__ if inspect.ismodule(thing) else thing.__module__
            found.append(Name(f"{prefix}.{name}", thing, defined_in.split(".")[1]))
    for module, names in paramserve._BESIDE.items():
        for name in names.split():
            if module != "observe":  # whose names are above
                thing = getattr(import_module(f"paramserve.{module}"), name)
                found.append(Name(f"{module}.{name}", thing, module))
    found += [
        Name(f"ps.errors.{name}", kind, "errors")
        for name, kind in errors.KINDS.items()
        if name not in paramserve.__all__
    ]
    found.append(Name("Loader", Loader, "worker"))  # what `worker.loader` gives
    missing = sorted(undocumented(found))
    if missing:
        raise ValueError(f"public, and without a docstring: {', '.join(missing)}")
    order = list(HEADINGS)
    return sorted(found, key=lambda each: order.index(each.part))


def undocumented(names: list[Name]) -> Iterator[str]:
    """Those that have no docstring of their own, and methods that have none and inherit none, of
    classes that are shown with their methods."""
    for name in names:
        if not callable(name.thing):  # a type or a module: what it is made of has the text
            continue
        text = name.thing.__doc__ or ""
        if not text.strip() or text.startswith(f"{name.thing.__name__}("):  # made by dataclass
            yield name.written
        if not _with_members(name):
            continue
        for owner in name.thing.__mro__:
            if not owner.__module__.startswith("paramserve"):
                continue
            for member, thing in vars(owner).items():
                plain = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
                shown = inspect.isfunction(plain) or isinstance(plain, property)
                if shown and not member.startswith("_") and not inspect.getdoc(plain):
                    yield f"{name.written}.{member}"


def index() -> str:
    """A row for each public name, by part."""
    rows: dict[str, list[str]] = {part: [] for part in HEADINGS}
    for name in public_names():
        link = f"[`{name.written}`](#{anchor(name.written)})"
        if not name.written.startswith(INDEXED_ELSEWHERE):
            rows[name.part].append(f"| {link} | {_summary(name.thing)} |")
    lines = []
    for part, heading in HEADINGS.items():
        to = anchor(heading.replace(" ", "-"))
        lines += [f"**[{heading}](#{to})**", "", "| name | is |", "|---|---|", *rows[part], ""]
    return "\n".join([*lines, ERRORS])


def reference() -> str:
    """The text of docs/reference.md."""
    lines, part = [INTRODUCTION, index()], ""
    for name in public_names():
        if inspect.ismodule(name.thing):
            lines += [f"### `{name.written}`", "", _summary(name.thing), ""]
            continue
        if name.part != part:
            part = name.part
            lines += [f"## {HEADINGS[part]}", "", *INTRODUCTIONS.get(part, ())]
        lines += _entry("###", name.written, name.thing)
        if inspect.isclass(name.thing) and issubclass(name.thing, errors.ParamServeError):
            lines += _cause_and_cure(name.thing.__name__)
        if _with_members(name):
            owner = name.thing.__name__
            for member, thing in _members(name.thing):
                lines += _entry("####", f"{owner}.{member}", thing)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def anchor(heading: str) -> str:
    """How GitHub names a heading."""
    return re.sub(r"[^\w-]", "", heading.lower())


# --- one name ---------------------------------------------------------------------------------


def _entry(level: str, written: str, thing: Any) -> list[str]:
    lines = [f"{level} `{written}`", ""]
    signature = _signature(written.rpartition(".")[2], thing) if thing not in SETTINGS else ""
    if signature:
        lines += ["```python", signature, "```", ""]
    text = inspect.getdoc(thing) or ""
    if thing in SETTINGS:
        return [*lines, text, "", "| field | default | is |", "|---|---|---|", *_fields(thing), ""]
    return [*lines, *_readable_docstring(text), *_attributes(thing), ""]


def _attributes(thing: Any) -> list[str]:
    """The properties of a protocol, whose objects users are given and do not make, as a list."""
    if not _is_protocol(thing):
        return []
    told = [
        f"- `{name}`: {_summary(each)}"
        for name, each in _members(thing)
        if isinstance(each, property)
    ]
    return ["**Attributes**", "", *told, ""] if told else []


def _with_members(name: Name) -> bool:
    """Whether a name is a class that is shown with its methods."""
    return inspect.isclass(name.thing) and (
        name.part in WITH_MEMBERS or name.thing.__name__ in TO_DERIVE_FROM
    )


def _is_protocol(thing: Any) -> bool:
    return inspect.isclass(thing) and getattr(thing, "_is_protocol", False)


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Documented methods and properties, in the order of the source, those of a class before its
    bases'."""
    seen = set()
    for owner in kind.__mro__:
        if not owner.__module__.startswith("paramserve"):
            continue
        for name, thing in vars(owner).items():
            plain = thing.__func__ if isinstance(thing, classmethod | staticmethod) else thing
            shown = inspect.isfunction(plain) or isinstance(plain, property)
            hidden = name.startswith("_") or name in OF_OTHER_PARTS.get(kind.__name__, ())
            if not shown or hidden or name in seen or not inspect.getdoc(plain):
                continue
            seen.add(name)
            yield name, plain


def _signature(name: str, thing: Any) -> str:
    if isinstance(thing, property):
        return ""
    if inspect.isclass(thing) and (issubclass(thing, Exception) or thing.__name__ in GIVEN):
        return ""
    if _is_protocol(thing):
        return ""
    try:
        found = inspect.signature(thing)
    except (TypeError, ValueError):
        return ""
    given = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    parts, star = [], False
    for each in given:
        if each.kind is each.VAR_POSITIONAL:
            star = True
        elif each.kind is each.KEYWORD_ONLY and not star:
            star = True
            parts.append("*")
        parts.append(_parameter(each))
    result = (
        "" if found.return_annotation is found.empty else f" -> {_typed(found.return_annotation)}"
    )
    if inspect.isclass(thing):
        result = ""
    whole = f"{name}({', '.join(parts)}){result}"
    if len(whole) <= LINE:
        return whole
    inner = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{inner}){result}"


def _parameter(given: inspect.Parameter) -> str:
    stars = {given.VAR_POSITIONAL: "*", given.VAR_KEYWORD: "**"}.get(given.kind, "")
    text = stars + given.name
    typed = given.annotation is not given.empty
    if typed:
        text += f": {_typed(given.annotation)}"
    if given.default is not given.empty:
        default = repr(given.default)
        default = "..." if default.startswith("<") or " at 0x" in default else default
        text += f" = {default}" if typed else f"={default}"
    return text


def _typed(annotation: Any) -> str:
    annotation = getattr(annotation, "__forward_arg__", annotation)
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:paramserve|typing|collections\.abc)\.(?:\w+\.)*", "", text)


# --- errors -------------------------------------------------------------------------------------


def _cause_and_cure(kind: str) -> list[str]:
    """What docs/troubleshooting.md says of an error: the row that has its name, and other rows
    that are about it in one case.

    Raises:
        ValueError: no row explains it.
    """
    table = TROUBLES.read_text().partition("## By error\n")[2].partition("\n## ")[0]
    rows = [_cells(line) for line in table.splitlines() if line.startswith("|")][2:]
    own = [each for each in rows if kind in re.findall(r"`(\w+)`(?=,|$)", each[0])]
    if len(own) != 1:
        raise ValueError(f"{TROUBLES.name} has {len(own)} rows that explain {kind}, not 1")
    (_, cause, cure), *_ = own
    cases = [each for each in rows if each not in own and f"`{kind}`" in each[0]]
    return [
        f"**Cause**: {cause}",
        "",
        f"**Cure**: {cure}",
        "",
        *(f"- {case}: {cause} {cure}" for case, cause, cure in cases),
        "",
    ]


def _cells(row: str) -> list[str]:
    """The cells of a row of a table, with links that lead to where they led."""
    cells = [each.strip() for each in re.split(r"(?<!\\)\|", row.strip().strip("|"))]
    return [each.replace("](#", f"]({TROUBLES.name}#") for each in cells]


# --- docstrings -------------------------------------------------------------------------------


def _readable_docstring(text: str) -> list[str]:
    """A docstring as Markdown: its sections as lists."""
    lines, section = [], ""
    body: list[str] = []

    def end() -> None:
        lines.extend(_section(section, body))
        body.clear()

    for line in text.splitlines():
        head, colon, rest = line.partition(":")
        if colon and head in SECTIONS:
            end()
            section = head
            body.extend([rest.strip()] if rest.strip() else [])
        else:
            if section and line and not line.startswith(" "):  # prose behind a section
                end()
                section = ""
            body.append(line)
    end()
    return lines


def _section(name: str, body: list[str]) -> list[str]:
    inner = textwrap.dedent("\n".join(body)).strip("\n")
    if not inner:
        return []
    if not name:
        return [inner, ""]
    if name == "Example":
        code = "\n".join(re.sub(r"^(>>>|\.\.\.) ?", "", line) for line in inner.splitlines())
        return ["Example:", "", "```python", code, "```", ""]
    if name in ("Returns", "Source"):
        return [f"**{name}**: {' '.join(inner.split())}", ""]
    heading = {"Args": "Arguments"}.get(name, name)
    return [f"**{heading}**", "", *[f"- {item}" for item in _items(inner)], ""]


def _items(text: str) -> list[str]:
    """What is listed, each on one line with its names as code."""
    items: list[list[str]] = []
    for line in text.splitlines():
        begins = not line.startswith(" ") and (
            not items or re.match(r"[\w*., ]+:(\s|$)", line) is not None
        )
        if begins:
            items.append([line])
        else:
            items[-1].append(line.strip())
    return [_item(" ".join(item)) for item in items]


def _item(text: str) -> str:
    names, colon, rest = text.partition(":")
    if not colon or not re.fullmatch(r"\*{0,2}\w+(, \*{0,2}\w+)*", names):
        return text
    return ", ".join(f"`{name}`" for name in names.split(", ")) + f":{rest}"


def _fields(settings: type[config.Deadlines | config.Limits]) -> list[str]:
    """A row for each field of a class of settings, with the text that follows it."""
    return [
        f"| `{field}` | {_readable(settings, field)} | {words} |"
        for field, words in meanings(settings).items()
    ]


def _readable(settings: type, field: str) -> str:
    """A default, in the largest unit that leaves no rest."""
    value = getattr(settings(), field)
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)) if "_bytes_" in field else ():
        if value % size == 0:
            return f"{value // size} {unit}"
    return f"{value:g} s" if field.endswith("_s") else f"{value:,}"


def _summary(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def main(argv: list[str] | None = None) -> None:
    """Write the page, or look whether it is as it would be written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it differs")
    check = parser.parse_args(argv).check
    text = reference()
    if not check:
        REFERENCE.write_text(text)
    elif REFERENCE.read_text() != text:
        sys.exit(f"{REFERENCE.name} differs from the docstrings. Run: python docs/write_api.py")


if __name__ == "__main__":
    main()

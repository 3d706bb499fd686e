"""Modules of the package name each other in no circle, types included.

The import linter leaves imports for types out: with them it would count torch, which only types
name, and the lazy names of the package itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import paramserve

ROOT = Path(paramserve.__file__).parent
ALLOWED = {
    ("paramserve.rules.kernels", "paramserve.rules.built_in"),
    ("paramserve.rules.row_kernels", "paramserve.rules.built_in"),
}
"""A built-in rule finds its kernels when it is first used: their module imports the compiler."""


def modules() -> dict[str, Path]:
    """The package's own by name; without it itself, whose names are lazy."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path
    del found["paramserve"]
    return found


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Module and name of each import, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.level, "imports are absolute"
            yield from ((node.module, each.name) for each in node.names)
        elif isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names)


def circle(sources: dict[str, str]) -> list[str]:
    """Modules that name each other in a circle; empty: there is none."""
    graph = TopologicalSorter[str]()
    for name, source in sources.items():
        for module, each in imported(ast.parse(source)):
            found = f"{module}.{each}" if f"{module}.{each}" in sources else module
            if found in sources and found != name and (name, found) not in ALLOWED:
                graph.add(name, found)
    try:
        graph.prepare()
    except CycleError as error:
        found_circle: list[str] = error.args[1]
        return found_circle
    return []


def test_no_modules_name_each_other_in_a_circle() -> None:
    assert circle({name: path.read_text() for name, path in modules().items()}) == []


def test_circle_of_a_type_and_a_lazy_import_is_found() -> None:
    one = "if TYPE_CHECKING:\n    from two import Two\n"
    assert circle({"one": one, "two": "def use():\n    import one\n", "three": "import one\n"}) in (
        ["one", "two", "one"],
        ["two", "one", "two"],
    )
    assert circle({"one": "", "two": "import one\n"}) == []

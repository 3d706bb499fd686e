"""Write docs/api.md: every public name with the summary of its docstring, and all settings.

Run `python docs/write_api.py` after adding a name or changing a summary; tests/api/test_docs.py
compares the page with what this writes.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import paramserve
from paramserve import config, pytorch

PAGE = Path(__file__).with_name("api.md")
HEADINGS = {
    "launch": "Runs, clusters, servers",
    "worker": "In the training function",
    "observe": "What runs have recorded",
    "client": "Clients and tables",
    "core": "Options of tables",
    "pytorch": "Tables as PyTorch modules",
    "consistency": "Consistency policies",
    "rules": "Update rules",
    "engine": "Engines",
    "config": "Settings",
    "errors": "Errors",
}
"""By the part of paramserve that defines a name."""
INTRODUCTION = """\
# API reference

Every public name of `import paramserve as ps`, with the summary of its docstring. `help(ps.run)`
prints the rest: arguments, promises and errors. The main methods are in the
[user guide](guide.md#objects).
"""


def page() -> str:
    """The text of docs/api.md."""
    rows: dict[str, list[str]] = {part: [] for part in HEADINGS}
    for module, prefix in ((paramserve, "ps"), (pytorch, "ps.pytorch")):
        for name in module.__all__:
            thing = getattr(module, name)
            defined_in = thing.__name__ if inspect.ismodule(thing) else thing.__module__
            rows[defined_in.split(".")[1]].append(f"| `{prefix}.{name}` | {_summary(thing)} |")
    lines = [INTRODUCTION]
    for part, heading in HEADINGS.items():
        lines += [f"## {heading}", "", "| name | is |", "|---|---|", *rows[part], ""]
    for settings, heading in ((config.Deadlines, "Deadlines"), (config.Limits, "Limits")):
        lines += [f"## {heading}", "", f"{_summary(settings)} Fields of `ps.{heading}`.", ""]
        lines += ["| field | default | is |", "|---|---|---|", *_fields(settings), ""]
    return "\n".join(lines)


def _fields(settings: type) -> list[str]:
    """A row for each field of a class of settings, with the text that follows it."""
    (tree,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(tree, ast.ClassDef)
    rows = []
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text, ast.Expr), f"{field.target.id} has no text"
            words = " ".join(str(ast.literal_eval(text.value)).split())
            rows.append(
                f"| `{field.target.id}` | {_readable(settings, field.target.id)} | {words} |"
            )
    return rows


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


if __name__ == "__main__":
    PAGE.write_text(page())

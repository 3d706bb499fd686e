"""Write docs/api.md: every public name with the summary of its docstring.

Run `python docs/write_api.py` after adding a name or changing a summary; tests/api/test_docs.py
compares the page with what this writes.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import paramserve
from paramserve import pytorch

PAGE = Path(__file__).with_name("api.md")
HEADINGS = {
    "launch": "Runs, clusters, servers",
    "worker": "In the training function",
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
    return "\n".join(lines)


def _summary(thing: object) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page())

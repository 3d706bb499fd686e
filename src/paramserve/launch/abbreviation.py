"""Values in one short line, for errors and for `repr`: what is large is told by its shape."""

from __future__ import annotations

import reprlib
from typing import Any

ITEMS_MAX = 8
"""Most items shown of each list, tuple, set and dict."""
TEXT_MAX = 60
"""Characters of each string, and of what is none of these."""
LEVELS_MAX = 4
"""Most levels shown of containers in containers."""


class _Abbreviation(reprlib.Repr):
    """Abbreviate as `reprlib`, and show arrays, tensors and tables by their shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = LEVELS_MAX
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = ITEMS_MAX
        self.maxdict = self.maxdeque = self.maxarray = ITEMS_MAX
        self.maxstring = self.maxlong = self.maxother = TEXT_MAX

    def repr1(self, x: Any, level: int) -> str:
        shape = getattr(x, "shape", ())
        if isinstance(shape, tuple) and shape:
            return f"{type(x).__name__}(shape={tuple(shape)})"
        return super().repr1(x, level)


def abbreviated(value: object) -> str:
    """Representation of some hundred characters at most for each container in it."""
    return " ".join(_Abbreviation().repr(value).split())

"""How many seeds of a test the quick run takes; all others are in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def split(quick: int, total: int, first: int = 0) -> list[Any]:
    """Ranges of seeds: the `quick` first ones, and those up to `total`, marked slow."""
    rest = range(first + quick, first + total)
    return [
        pytest.param(range(first, first + quick), id="first"),
        pytest.param(rest, id="rest", marks=pytest.mark.slow),
    ]

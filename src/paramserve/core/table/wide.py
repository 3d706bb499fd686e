"""Arithmetic of rows whose numbers have 64 bits, float64 or int64: tables that count.

Everything that moves rows sees float32 words, two for a number (`rules.layout.WIDE`). Summing and
looking for NaN read them as they are, with numpy: tables that count are pushed to by few keys.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.table import routing
from paramserve.core.table.parts import RowGradient

Array = npt.NDArray[Any]


def largest(numbers: Array) -> float:
    """The largest size of an element; inf if one is NaN or Inf."""
    if not numbers.size:
        return 0.0
    size = float(np.abs(numbers, dtype=np.float64).max())
    return size if math.isfinite(size) else math.inf


def squared_norm(numbers: Array) -> float:
    """Sum of the squares of all elements."""
    return float(np.square(numbers, dtype=np.float64).sum())


def first_bad(numbers: Array) -> int:
    """The first row that holds NaN or Inf; -1: none does."""
    if numbers.dtype.kind == "i":
        return -1
    bad = np.flatnonzero(~np.isfinite(numbers).all(1))
    return int(bad[0]) if bad.size else -1


def summed(keys: Array, numbers: Array) -> RowGradient:
    """Each key once, with the sum of its rows in the order given, as words.

    Args:
        keys: int64 [n].
        numbers: of `WIDE`, [n, dim].
    """
    unique, places = routing.distinct(keys)
    total = np.zeros((unique.size, numbers.shape[1]), numbers.dtype)
    np.add.at(total, places, numbers)
    return RowGradient(unique, total.view(np.float32))

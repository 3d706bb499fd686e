"""Tells which finite gradients may have a sum that overflows; only such sums are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paramserve.core.block import ShardBlock
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import Gradient

LARGEST = {np.dtype(kind): float(np.finfo(kind).max) for kind in (np.float32, np.float64)}
"""Numbers by dtype."""
SUM_SHARE = 2.0**-20
"""Of the largest number: a million gradients with elements below it have a finite sum."""
WEIGHT_MIN, WEIGHT_MAX = 2.0**-60, 2.0**60
"""Weights in between, their sums and what these are divided by are numbers of each dtype."""


def addable(parts: Sequence[tuple[ShardBlock | KeyedBlock, Gradient, Any]], weight: float) -> bool:
    """Whether gradients are finite and, multiplied by `weight`, so small that their sum with others
    like them cannot overflow."""
    if not usual(weight):
        return not parts
    return all(
        block.below(gradient, header.active, LARGEST[block.dtype] * SUM_SHARE / weight)
        for block, header, gradient in parts
    )


def usual(weight: float) -> bool:
    """Whether a gradient may be multiplied by a weight before it is added."""
    return WEIGHT_MIN <= weight <= WEIGHT_MAX

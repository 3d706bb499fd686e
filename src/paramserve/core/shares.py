"""Work shared by speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def shares(speeds: Sequence[float]) -> list[float]:
    """Shares of the work, by speed; 0 is unknown and counts as the mean of the others."""
    positive = [speed for speed in speeds if speed]
    mean = sum(positive) / len(positive) if positive else 1.0
    weights = [speed or mean for speed in speeds]
    return [weight / sum(weights) for weight in weights]


def batch_sizes(total: int, speeds: Sequence[float], low: int, high: int) -> list[int]:
    """`total` samples shared by speed, each share from `low` to `high`: [len(speeds)].

    Their sum is `total` where the bounds let it be: what one cannot take goes to the others.

    Source: as CSS resolves flexible lengths (Flexible Box Layout, section 9.7): of the shares that
    break a bound, those on the side of the larger breach are fixed first.
    """
    fixed: dict[int, float] = {}
    part = shares(speeds)
    while len(fixed) < len(part):
        free = [i for i in range(len(part)) if i not in fixed]
        remaining = total - sum(fixed.values())
        whole = sum(part[i] for i in free)
        sizes = {i: remaining * part[i] / whole for i in free}
        clipped = {i: min(max(size, low), high) for i, size in sizes.items()}
        breach = sum(clipped.values()) - sum(sizes.values())
        broken = {i: size for i, size in clipped.items() if (size - sizes[i]) * breach > 0}
        fixed |= broken if abs(breach) > 1e-9 * total and broken else clipped
    ends = [math.floor(sum(fixed[k] for k in range(i)) + 0.5) for i in range(len(part) + 1)]
    return [min(max(b - a, low), high) for a, b in pairwise(ends)]

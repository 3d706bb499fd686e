"""The pieces of a block on one shard: which elements each is, and how often each was updated."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.messages import Piece
from paramserve.rules.base import Run, new_run

Range = tuple[int, int]
"""Elements [start, stop) of the shard's arrays."""

CHOICES_MAX = 16
"""Choices of pieces whose ranges and runs are kept: a model has one, or one for each part of it
that it trains in turn."""


class _Choice:
    """Some pieces, as a push names them."""

    __slots__ = ("index", "number", "pieces", "ranges", "runs")

    def __init__(self, pieces: Sequence[int], bounds: Sequence[Range]) -> None:
        self.pieces = sorted(set(pieces))
        self.index = np.array(self.pieces, np.intp)
        self.ranges: list[Range] = []
        """Elements of the chosen pieces, neighbours together."""
        for piece in self.pieces:
            start, stop = bounds[piece]
            if self.ranges and self.ranges[-1][1] == start:
                self.ranges[-1] = self.ranges[-1][0], stop
            elif stop > start:
                self.ranges += ((start, stop),)
        self.runs: list[Run] = []
        self.number = -1
        """Number of the updates up to which `runs` counts."""


class Pieces:
    """Where the pieces of a block lie on one shard, and the updates of each.

    Updates are counted as torch counts steps for each parameter: a piece that a push leaves out
    keeps its count. Pieces outside this shard's range are counted too, so that every shard can
    answer for all of them.

    Args:
        pieces: of the whole block.
        low, high: the elements of the block that this shard holds.
        separate: whether each piece is updated by itself.
        shaped: whether an update has to know the shape of each.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        low: int,
        high: int,
        *,
        separate: bool = False,
        shaped: bool = False,
    ) -> None:
        self._shapes = [piece.shape if shaped else None for piece in pieces]
        self._separate = separate
        self._size = high - low
        self._bounds: list[Range] = []
        offset = 0
        for piece in pieces:
            end = offset + prod(piece.shape)
            start, stop = min(max(offset, low), high), min(max(end, low), high)
            self._bounds.append((start - low, stop - low))
            offset = end
        self._counts: npt.NDArray[Any] = np.zeros(len(pieces), np.int64)
        self._even: int | None = 0
        """The count that all pieces share; None: they differ, and `_counts` has them."""
        self._number = 0
        """Changes of the counts so far."""
        self._choices: dict[tuple[int, ...] | None, _Choice] = {}
        self._last: tuple[object, _Choice] = (self._choices, _Choice((), ()))
        """What was asked for last, and its choice."""

    def __len__(self) -> int:
        return len(self._bounds)

    @property
    def counts(self) -> list[int]:
        """Updates that each piece has had."""
        if self._even is not None:
            return [self._even] * len(self._bounds)
        counts: list[int] = self._counts.tolist()
        return counts

    def set_counts(self, counts: Sequence[int]) -> None:
        """Replace the count of each."""
        self._number += 1
        self._counts[:] = counts
        self._even = counts[0] if len(set(counts)) == 1 else None

    def bounds(self, piece: int) -> Range:
        """The elements of a piece on this shard."""
        return self._bounds[piece]

    def are(self, active: Sequence[int]) -> bool:
        """Whether a push may name these: each at most once."""
        in_range = not active or (min(active) >= 0 and max(active) < len(self._bounds))
        return in_range and len(set(active)) == len(active)

    def ranges(self, active: Sequence[int]) -> list[Range]:
        """The elements of some pieces, neighbours together."""
        return self._choice(active).ranges

    def runs(self, active: Sequence[int] | None) -> list[Run]:
        """What an update of some pieces, or all, has to update alike."""
        if active is None and self._even is not None and not self._separate:
            return [new_run((0, self._size, self._even, None))]
        choice = self._choice(active)
        if choice.number != self._number:
            choice.runs, choice.number = self._runs(choice), self._number
        return choice.runs

    def _runs(self, choice: _Choice) -> list[Run]:
        """Join pieces that lie side by side and have one update count to runs, unless the rule is
        to get each one by itself."""
        runs: list[Run] = []
        counts, before = self.counts, (0, -1, -1)
        for piece in choice.pieces:
            start, stop = self._bounds[piece]
            if start == stop:
                continue
            count = counts[piece]
            if not self._separate and before[1:] == (start, count):
                runs.pop()
                start = before[0]
            runs.append(new_run((start, stop, count, self._shapes[piece])))
            before = start, stop, count
        return runs

    def count(self, active: Sequence[int] | None) -> None:
        """Some pieces, or all, were updated."""
        before = self._number
        self._number += 1
        if active is None and self._even is not None:
            self._even += 1
            if not self._separate:
                return
        choice = self._choice(active)
        if active is not None or self._even is None:
            if self._even is not None:
                self._counts.fill(self._even)
            self._counts[choice.index] += 1
            first = int(self._counts[0])
            self._even = first if (self._counts == first).all() else None
        if choice.number == before:
            choice.number = self._number
            choice.runs = [new_run((run[0], run[1], run[2] + 1, run[3])) for run in choice.runs]

    def _choice(self, active: Sequence[int] | None) -> _Choice:
        if active is self._last[0]:  # asked for again within one step
            return self._last[1]
        key = None if active is None else tuple(active)
        if key not in self._choices:
            if len(self._choices) >= CHOICES_MAX:
                self._choices.clear()
            pieces = range(len(self._bounds)) if key is None else key
            self._choices[key] = _Choice(pieces, self._bounds)
        if key is active:  # a tuple, which stays as it is
            self._last = key, self._choices[key]
        return self._choices[key]

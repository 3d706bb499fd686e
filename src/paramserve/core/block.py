"""One block on one shard: values, rule state and update counts, changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.partition import DTYPES, PLAIN_DTYPES, size_of
from paramserve.errors import DtypeMismatch, ParamServeError, ShapeMismatch
from paramserve.messages import VALUE, BlockSpec
from paramserve.rules.base import Hyper, PushInfo, Rule, Run

Array = npt.NDArray[Any]


def check_spec(spec: BlockSpec, shards: int) -> None:
    """Refuse a definition that no shard could hold; the coordinator has checked the same before.

    Raises:
        ShapeMismatch: the cuts do not fit the pieces or the shards.
        DtypeMismatch: values of this dtype cannot be held. In both cases nothing was applied.
    """
    whole = all(length >= 0 for piece in spec.pieces for length in piece.shape)
    rising = all(low <= high for low, high in pairwise(spec.cuts))
    ends = (spec.cuts[0], spec.cuts[-1]) if spec.cuts else ()
    fits = len(spec.cuts) == shards + 1 and ends == (0, size_of(spec.pieces))
    if not (spec.pieces and whole and rising and fits):
        raise ShapeMismatch(
            f"block {spec.block} is cut at {spec.cuts} for {shards} shards, its pieces are "
            f"{[piece.shape for piece in spec.pieces[:5]]}",
            fix="define with the cuts that the coordinator gave",
        )
    allowed = DTYPES if spec.rule is not None else PLAIN_DTYPES
    if spec.dtype not in allowed:
        raise DtypeMismatch(
            f"block {spec.block} has dtype {spec.dtype!r}, allowed are {', '.join(allowed)}",
            fix="convert the values first",
        )


class ShardBlock:
    """The part of a block that one shard holds.

    `counts` has the updates of each piece, as torch counts steps for each parameter: a piece that
    a push leaves out keeps its count. Pieces outside this shard's range are counted too, so that
    every shard can answer for all of them.
    """

    def __init__(self, spec: BlockSpec, shard: int, rule: Rule | None, attempt: int) -> None:
        self.spec = spec
        self.rule = rule
        self.attempt = attempt
        self.dtype = np.dtype(spec.dtype)
        self.low, self.high = spec.cuts[shard], spec.cuts[shard + 1]
        self.size = self.high - self.low
        self.nbytes = self.size * self.dtype.itemsize
        self.hyper: Hyper = rule.hyper() if rule is not None else ()
        self.value: Array = np.zeros(self.size, self.dtype)
        self.state: tuple[Array, ...] = ()
        if rule is not None:
            self.state = rule.init_state(self.size, self.dtype)
        self._counts = [0] * len(spec.pieces)
        self._bounds = self._local_bounds()
        self._checked: Hyper | None = None
        """Hyper-parameters that were found good last: most pushes bring the same."""
        self._even: int | None = 0
        """The count that all pieces share; None: they differ, and `_counts` has them."""

    @property
    def counts(self) -> list[int]:
        """Updates that each piece has had."""
        return self._counts if self._even is None else [self._even] * len(self._counts)

    def _local_bounds(self) -> list[tuple[int, int]]:
        bounds = []
        offset = 0
        for piece in self.spec.pieces:
            end = offset + prod(piece.shape)
            low = min(max(offset, self.low), self.high)
            high = min(max(end, self.low), self.high)
            bounds.append((low - self.low, high - self.low))
            offset = end
        return bounds

    def bounds(self, piece: int) -> tuple[int, int]:
        """Elements [start, stop) of a piece within this shard's arrays."""
        return self._bounds[piece]

    def field(self, number: int) -> Array:
        """Values (0) or a state array (1, 2, ...).

        Raises:
            ParamServeError: the rule has no such state. Nothing was applied.
        """
        if number == VALUE:
            return self.value
        if not 0 < number <= len(self.state):
            raise ParamServeError(
                f"block {self.spec.block} of group {self.spec.group_name!r} has "
                f"{len(self.state)} state arrays, number {number} was asked for",
                fix="ask only for the state that the rule keeps with its hyper-parameters",
            )
        return self.state[number - 1]

    def check(self, active: Sequence[int] | None, hyper: Hyper | None) -> None:
        """Refuse a push that cannot be applied, before anything is written.

        Raises:
            ParamServeError, ShapeMismatch, ValueError: see the text. Nothing was applied.
        """
        if self.rule is None:
            raise ParamServeError(
                f"{self._names()} has no rule: it cannot be pushed to",
                fix="define it with a rule, or use assign",
            )
        if active is not None:
            self._check_active(active)
        if hyper is None or hyper == self._checked:
            return
        self.rule.check(hyper)
        needed = self.rule.states(hyper)
        if len(needed) > len(self.state):
            given = dict(zip(self.rule.hyper_names, hyper, strict=True))
            raise ParamServeError(
                f"{type(self.rule).__name__} with {given} "
                f"needs the state {', '.join(needed)}, but {self._names()} was defined without it",
                fix="define the parameters with these hyper-parameters (momentum > 0) at the start",
            )
        self._checked = hyper

    def _check_active(self, active: Sequence[int]) -> None:
        inside = all(0 <= piece < len(self._counts) for piece in active)
        if not inside or len(set(active)) != len(active):
            raise ShapeMismatch(
                f"the pieces {list(active)} were named for {self._names()}, "
                f"which has pieces 0 to {len(self._counts) - 1}",
                fix="name each tensor of the block at most once",
            )

    def apply(
        self,
        gradient: Array,
        active: Sequence[int] | None,
        hyper: Hyper | None,
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Apply the rule to the active pieces; with `out`, leave all values there as well."""
        assert self.rule is not None, "check() comes first"
        if self.size:
            runs = self._runs(active)
            fused = out if active is None else None
            chosen = hyper if hyper is not None else self.hyper
            self.rule.apply(self.value, gradient, self.state, chosen, runs, push, fused)
            if out is not None and fused is None:
                np.copyto(out, self.value)
        self._count(active)

    def _runs(self, active: Sequence[int] | None) -> list[Run]:
        if active is None and self._even is not None:
            return [Run(0, self.size, self._even)]
        runs: list[Run] = []
        counts = self.counts
        for piece in range(len(self._counts)) if active is None else sorted(set(active)):
            start, stop = self._bounds[piece]
            count = counts[piece]
            if runs and runs[-1].stop == start and runs[-1].count == count:
                runs[-1] = Run(runs[-1].start, stop, count)
            elif stop > start:
                runs.append(Run(start, stop, count))
        return runs

    def _count(self, active: Sequence[int] | None) -> None:
        if active is None and self._even is not None:
            self._even += 1
            return
        counts = list(self.counts)
        for piece in range(len(counts)) if active is None else set(active):
            counts[piece] += 1
        self._set_counts(counts)

    def _set_counts(self, counts: list[int]) -> None:
        self._counts = counts
        self._even = counts[0] if len(set(counts)) == 1 else None

    def assign(
        self,
        number: int,
        source: Array,
        active: Sequence[int] | None,
        counts: Sequence[int] | None,
    ) -> None:
        """Overwrite a field, whole or only some pieces, and the update counts if given.

        Raises:
            ShapeMismatch: the counts or the pieces are wrong. Nothing was applied.
        """
        target = self.field(number)
        if counts is not None and len(counts) != len(self._counts):
            raise ShapeMismatch(
                f"{self._names()} has {len(self._counts)} pieces, {len(counts)} counts came",
                fix="send one count for each piece",
            )
        if active is None:
            np.copyto(target, source)
        else:
            self._check_active(active)
            for piece in active:
                start, stop = self._bounds[piece]
                target[start:stop] = source[start:stop]
        if counts is not None:
            self._set_counts(list(counts))

    def _names(self) -> str:
        names = ", ".join(repr(piece.name) for piece in self.spec.pieces[:3])
        more = len(self.spec.pieces) - 3
        return names + (f" and {more} more" if more > 0 else "")

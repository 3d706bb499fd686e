"""Gradients that are summed until there are enough of them for one update (`Buffer`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.errors import RuleFailed
from paramserve.messages import Gradient
from paramserve.rules.base import Hyper, PushInfo
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]
Part = tuple[ShardBlock, Gradient, Array]


@dataclass
class Sum:
    """One block's gradients so far."""

    array: Array
    """[elements on this shard]; 0 in pieces that nobody pushed."""
    active: set[int] | None = field(default_factory=set)
    """Pieces that somebody pushed; None: all."""
    hyper: Hyper | None = None
    """Of the last gradient."""
    count: int = 0
    """Gradients in it; 0: the array may hold anything."""

    def add(self, part: Part, weight: float) -> None:
        block, header, gradient = part
        if not self.count:
            self.array.fill(0.0)
            self.active = set()
        self.count += 1
        self.hyper = header.hyper
        if header.active is None:
            self.active = None
            compiled().add_scaled_into(self.array, weight, gradient)
            return
        for piece in header.active:
            start, stop = block.bounds(piece)
            self.array[start:stop] += self.array.dtype.type(weight) * gradient[start:stop]
        if self.active is not None:
            self.active.update(header.active)

    def pieces(self) -> tuple[int, ...] | None:
        """As a push names them."""
        return None if self.active is None else tuple(sorted(self.active))


@dataclass(eq=False)
class GradientBuffer:
    """A group's gradients that wait for an update."""

    sums: dict[int, Sum] = field(default_factory=dict)
    """By block."""
    count: int = 0

    def add(self, parts: Sequence[Part], weight: float) -> None:
        """One more gradient."""
        self.count += 1
        for part in parts:
            block = part[0]
            found = self.sums.get(block.spec.block)
            if found is None:
                found = self.sums[block.spec.block] = Sum(np.empty(block.size, block.dtype))
            found.add(part, weight)

    def draft(
        self, blocks: Mapping[int, ShardBlock], parts: Sequence[Part], weight: float, push: PushInfo
    ) -> None:
        """Compute what guarded rules make of the sums with these gradients, for `apply`.

        Raises:
            RuleFailed: nothing was applied, and the sums are as they were.
        """
        coming = {part[0].spec.block: part for part in parts}
        for number, block in sorted(blocks.items()):
            kept = self.sums.get(number)
            full = kept is not None and kept.count > 0
            if not block.guarded or not (full or number in coming):
                continue
            total = Sum(np.zeros(block.size, block.dtype))
            if kept is not None and full:
                active = None if kept.active is None else set(kept.active)
                total = Sum(kept.array.copy(), active, kept.hyper, kept.count)
            if number in coming:
                total.add(coming[number], weight)
            block.draft(total.array, total.pieces(), total.hyper, push, key=self)

    def apply(self, blocks: Mapping[int, ShardBlock], push: PushInfo) -> None:
        """Update the blocks with their sums times `push.scale`, and begin anew.

        Raises:
            RuleFailed: of a guarded rule without a draft. Its block's sum is lost.
        """
        self.count = 0
        failure = None
        for number, each in sorted(self.sums.items()):
            if not each.count:
                continue
            each.count = 0
            block = blocks[number]
            try:
                if block.has_draft(self):
                    block.keep_draft()
                else:
                    block.apply(each.array, each.pieces(), each.hyper, push)
            except RuleFailed as error:
                failure = error
        if failure is not None:
            raise failure

"""Sums of gradients: of the workers of a synchronous clock, and of a buffer (`Buffer`).

A sum of finite gradients may overflow. Only sums of gradients that are large enough are checked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.core.block import ShardBlock
from paramserve.core.commit import Contribution
from paramserve.core.shard_storage import Keep
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.parts import RowGradient
from paramserve.errors import NonFinite, RuleFailed, TableFull
from paramserve.messages import Gradient
from paramserve.rules.base import Hyper, PushInfo
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]
Part = tuple[ShardBlock | KeyedBlock, Gradient, Any]
NONE_PREPARED: Mapping[int, Keep] = MappingProxyType({})


LARGEST = {np.dtype(kind): float(np.finfo(kind).max) for kind in (np.float32, np.float64)}
"""Numbers by dtype."""
SUM_SHARE = 2.0**-20
"""Share of the largest number below which the elements of a million gradients have a finite sum."""
WEIGHT_MIN, WEIGHT_MAX = 2.0**-60, 2.0**60
"""Weights in between, their sums and what these are divided by are numbers of each dtype."""


def addable(parts: Sequence[Part], weight: float, largest: float) -> bool:
    """Whether gradients are finite and, multiplied by `weight`, so small that their sum with others
    like them cannot overflow.

    Args:
        largest: the size of their largest element.
    """
    good = usual(weight)
    for block, _, _ in parts:
        good = good and largest < LARGEST[block.dtype] * SUM_SHARE / weight
    return good or not parts


def usual(weight: float) -> bool:
    """Whether a gradient may be multiplied by a weight before it is added."""
    return WEIGHT_MIN <= weight <= WEIGHT_MAX


def reduced(
    contributions: Sequence[Contribution],
    block: ShardBlock | KeyedBlock,
    scale: float,
) -> tuple[Any, tuple[int, ...] | None, float]:
    """Sum of contributions as `total` makes it, and the factor still to apply: `scale` or 1.

    Where the sum itself overflows, each gradient is multiplied by `scale` before it is added, and
    1 is left: a mean is finite where its gradients are. The caller checks whether the result is.
    """
    large = False
    for each in contributions:
        large = large or each.large
    if not large:
        return *total(contributions, block), scale
    with np.errstate(over="ignore", invalid="ignore"):
        if all(usual(each.weight) for each in contributions):
            gradient, active = total(contributions, block)
            limit = LARGEST[block.dtype] / max(scale, 1.0)
            if block.largest(gradient, None) < limit:
                return gradient, active, scale
        return *total(contributions, block, scale), 1.0


def total(
    contributions: Sequence[Contribution],
    block: ShardBlock | KeyedBlock,
    scale: float = 1.0,
) -> tuple[Any, tuple[int, ...] | None]:
    """Weighted sum of one block's gradients in the order given (by rank).

    A piece that only some workers have a gradient for counts as zero for the others.

    Args:
        contributions: those that have the block, at least one.
        scale: multiplies each gradient, with its weight.
    Returns:
        The sum, [size of the shard's part] or of a table a `RowGradient`, and the pieces that it
        has (None: all). No gradient is written to: the sum is the only one there is, or lies in
        the block's `scratch`.
    """
    kernels = compiled()
    number = block.spec.block
    parts = [(each.weight * scale, *each.gradients[number]) for each in contributions]
    if type(block) is KeyedBlock:
        return block.total(parts), None
    actives = [header.active for _, header, _ in parts]
    if actives.count(None) == len(actives):
        (weight, _, first), rest = parts[0], parts[1:]
        if not rest and weight == 1.0:
            return first, None
        target = block.scratch
        if block.half is None and rest and weight == rest[0][0] == 1.0:  # both in one pass
            with np.errstate(over="ignore", invalid="ignore"):
                np.add(first, rest.pop(0)[2], out=target)
        elif first.dtype == target.dtype:
            np.multiply(first, target.dtype.type(weight), out=target)
        else:
            kernels.scaled_into(target, weight, first)
        for weight, _, gradient in rest:
            kernels.add_scaled_into(target, weight, gradient)
        return target, None
    target = block.scratch
    target.fill(0.0)
    for weight, header, gradient in parts:
        for start, stop in block.ranges(header.active):
            kernels.add_scaled_into(target[start:stop], weight, gradient[start:stop])
    if None in actives:
        return target, tuple(range(len(block.spec.pieces)))
    return target, tuple(sorted(set[int]().union(*(active or () for active in actives))))


@dataclass
class Sum:
    """One block's gradients so far."""

    array: Array
    """[elements on this shard]; 0 in pieces without a gradient."""
    active: set[int] | None = field(default_factory=set)
    """Pieces that have a gradient; None: all."""
    hyper: Hyper | None = None
    """Hyper-parameters of the last gradient."""
    count: int = 0
    """Gradients in it; 0: the array may hold anything."""
    shared: bool = False
    """Whether a cut has this array, too: the next gradient goes to a new one."""

    def add(self, part: Part, weight: float) -> None:
        block, header, gradient = part
        if self.shared:
            self.array, self.shared = self.array.copy(), False
        if not self.count:
            self.array.fill(0.0)
            self.active = set()
        self.count += 1
        self.hyper = header.hyper
        assert isinstance(block, ShardBlock), "of a table, the sum is a `RowSum`"
        if header.active is None:
            self.active = None
            compiled().add_scaled_into(self.array, weight, gradient)
            return
        for start, stop in block.ranges(header.active):
            compiled().add_scaled_into(self.array[start:stop], weight, gradient[start:stop])
        if self.active is not None:
            self.active.update(header.active)

    def copy(self) -> Sum:
        """Copy of the sum, to try what one more gradient makes of it."""
        active = None if self.active is None else set(self.active)
        return Sum(self.array.copy(), active, self.hyper, self.count)

    def pieces(self) -> tuple[int, ...] | None:
        """Numbers of the pieces, as a push names them."""
        return None if self.active is None else tuple(sorted(self.active))

    def share(self) -> Sum:
        """Copy of the sum as it is now; neither changes with the other."""
        self.shared = True
        active = None if self.active is None else set(self.active)
        return Sum(self.array, active, self.hyper, self.count, shared=True)


@dataclass
class RowSum:
    """One table's gradients so far."""

    block: KeyedBlock
    pushes: list[tuple[float, Gradient, RowGradient]] = field(default_factory=list)
    """Weight and a copy of each: what was pushed lies in the worker's own memory."""
    hyper: Hyper | None = None
    """Hyper-parameters of the last gradient."""
    count: int = 0
    """Gradients in it; 0: those that are kept are over."""

    def add(self, part: Part, weight: float) -> None:
        _, header, (keys, values) = part
        if not self.count:
            self.pushes.clear()
        self.count += 1
        self.hyper = header.hyper
        self.pushes.append((weight, header, RowGradient(keys.copy(), values.copy())))

    @property
    def array(self) -> RowGradient:
        """Sum of the rows, key by key."""
        return self.block.total(self.pushes)

    def copy(self) -> RowSum:
        """Copy of the sum, to try what one more gradient makes of it."""
        return RowSum(self.block, [*self.pushes], self.hyper, self.count)

    def share(self) -> RowSum:
        """Copy of the sum as it is now; see `Sum.share`."""
        return self.copy()

    def pieces(self) -> None:
        """None: a push of rows names no pieces."""


class BufferRecord(Struct, frozen=True):
    """A group's buffer on one shard, without its sums.

    Attributes:
        count: gradients in it.
        large: whether they may be large.
    """

    count: int
    large: bool


@dataclass(eq=False)
class GradientBuffer:
    """A group's gradients that wait for an update."""

    sums: dict[int, Any] = field(default_factory=dict)
    """Sums by block: a `Sum` or a `RowSum`, as the block is."""
    count: int = 0
    large: bool = False
    """Whether it may hold gradients so large that any other one may make the sum overflow."""

    def record(self) -> BufferRecord:
        """The buffer as it is now; `share` gives the sums."""
        return BufferRecord(self.count, self.large)

    def restore(self, record: BufferRecord) -> None:
        """Have as many gradients as before; the sums come with the blocks."""
        self.count, self.large = record.count, record.large

    def fits(self, parts: Sequence[Part], weight: float) -> bool:
        """Whether the sums stay finite with these gradients, each of which is."""
        self.large = True
        with np.errstate(over="ignore", invalid="ignore"):
            for part in parts:
                block = part[0]
                total = self.sums.get(block.spec.block)
                coming: Any = _empty_sum(block) if total is None else total.copy()
                coming.add(part, weight)
                if block.largest(coming.array, None) == math.inf:
                    return False
        return True

    def add(self, parts: Sequence[Part], weight: float) -> None:
        """One more gradient."""
        self.count += 1
        for part in parts:
            block = part[0]
            total = self.sums.get(block.spec.block)
            if total is None:
                total = self.sums[block.spec.block] = _empty_sum(block)
            total.add(part, weight)

    def finite(self, blocks: Mapping[int, ShardBlock | KeyedBlock]) -> bool:
        """Whether no sum holds NaN or Inf."""
        sums = [(blocks[number], each) for number, each in self.sums.items() if each.count]
        return all(block.largest(each.array, None) < math.inf for block, each in sums)

    def clear(self) -> None:
        """Begin anew, without the gradients that are in it."""
        self.count = 0
        self.large = False
        for each in self.sums.values():
            each.count = 0

    def share(self) -> dict[int, Any]:
        """The sums as they are now, by block: each a `Sum` or a `RowSum`."""
        return {number: each.share() for number, each in self.sums.items() if each.count}

    def prepare(
        self,
        blocks: Mapping[int, ShardBlock | KeyedBlock],
        parts: Sequence[Part],
        weight: float,
        push: PushInfo,
    ) -> dict[int, Keep]:
        """Compute what users' rules make of the sums with these gradients, by block.

        Raises:
            RuleFailed, NonFinite: nothing was applied, and the sums are as they were.
        """
        coming = {part[0].spec.block: part for part in parts}
        keep: dict[int, Keep] = {}
        for number, block in sorted(blocks.items()):
            own_sum = self.sums.get(number)
            full = own_sum is not None and own_sum.count > 0
            if (
                not isinstance(block, ShardBlock)
                or not block.may_fail
                or not (full or number in coming)
            ):
                continue
            total = Sum(np.zeros(block.size, block.dtype))
            if isinstance(own_sum, Sum) and full:
                total = own_sum.copy()
            if number in coming:
                total.add(coming[number], weight)
            keep[number] = block.prepare(total.array, total.pieces(), total.hyper, push)
        return keep

    def apply(
        self,
        blocks: Mapping[int, ShardBlock | KeyedBlock],
        push: PushInfo,
        prepared: Mapping[int, Keep] = NONE_PREPARED,
    ) -> None:
        """Update the blocks with their sums times `push.scale`, and begin anew.

        Raises:
            RuleFailed, TableFull, NonFinite: of a rule that was not prepared, or of a table. Its
                block's sum is lost.
        """
        self.count = 0
        self.large = False
        failure: RuleFailed | TableFull | NonFinite | None = None
        for number, each in sorted(self.sums.items()):
            if not each.count:
                continue
            each.count = 0
            block = blocks[number]
            try:
                if number in prepared:
                    prepared[number]()
                else:
                    block.apply(each.array, each.pieces(), each.hyper, push)
            except (RuleFailed, TableFull, NonFinite) as error:
                failure = error
        if failure is not None:
            raise failure


def _empty_sum(block: ShardBlock | KeyedBlock) -> Sum | RowSum:
    if isinstance(block, KeyedBlock):
        return RowSum(block)
    return Sum(np.empty(block.size, block.dtype))

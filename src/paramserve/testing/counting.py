"""Pushes that can be told apart in the sum: what the simulated workers push, and how it is read.

Each writer has two elements: each of its pushes adds 1 to the first and 2 to the power of the
push's number to the second. Tiles of these pairs fill every block, so that each shard's part holds
the same information many times over, and bytes that were overwritten show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.block import ShardBlock
from paramserve.core.partition import SPLIT_BYTES_MIN, Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import Piece
from paramserve.rules import Add, Hyper, PushInfo, Rule, Run
from paramserve.rules.built_in import FRACTION, Allowed
from paramserve.rules.compiled import compiled
from paramserve.testing.history import Applied, Row

Array = npt.NDArray[Any]

PUSHES_MAX = 52
"""Of one writer: sums of their powers of two are exact in float64."""


class Pushed(NamedTuple):
    """Which push of which client a gradient belongs to."""

    writer: int
    rank: int
    number: int
    clock: int


@dataclass(frozen=True)
class AddWhole(Add):
    """value += gradient, whatever the policy makes of a gradient: pushes stay whole. What it makes
    of one worker's is told.

    A gradient's elements are powers of two. So the correction of `DelayCompensated` can be taken
    out again, as long as it is small, and the element that is 1 shows how large it was.

    Attributes:
        momentum: has no effect, but for a policy that lowers it.
        told: of the shard whose rule it is.
    """

    name: ClassVar[str] = "AddWhole"
    allowed: ClassVar[Mapping[str, Allowed]] = {"momentum": FRACTION}
    told: ClassVar[list[Applied] | None] = None
    momentum: float = 0.9

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        if push.worker >= 0:
            whole = np.zeros_like(gradient)
            there = gradient > 0.0
            whole[there] = np.exp2(np.rint(np.log2(gradient[there])))
            off = float(np.max(gradient - whole, where=whole == 1.0, initial=0.0))
            if self.told is not None:
                worker, clock, version = push.worker, push.clock, push.version
                momentum, given = hyper[0], self.momentum
                told = Applied(worker, clock, version, push.scale, momentum, given, off)
                self.told.append(told)
            gradient = whole
        super().apply(value, gradient, state, hyper, runs, push._replace(scale=1.0), out)


def leaves_whole(policy: Policy) -> bool:
    """Whether a policy multiplies no gradient by anything, so that `Add` leaves pushes whole."""
    if type(policy) is Sync:
        return policy.reduce == "sum"
    if type(policy) is Async:
        return policy.damping is None and policy.momentum == "given"
    return type(policy) is BoundedStaleness


class Counting:
    """What the simulated clients push and read. Subclass it for pushes of another kind.

    Attributes:
        group: of all blocks that are in no second one.
        blocks: by name, the pieces of each: two small blocks that stay whole, on different shards,
            and one that is split over all shards.
    """

    group = "default"
    second_group = "second"
    dtype: np.dtype[Any] = np.dtype(np.float64)
    rule: Rule = Add()
    """A cluster whose policies multiply gradients takes `AddWhole` instead of `Add`."""

    def __init__(self, writers: int) -> None:
        self.writers = writers
        self.tile = 2 * writers
        tiles = -(-SPLIT_BYTES_MIN // (self.tile * self.dtype.itemsize))
        self.blocks: dict[str, tuple[Piece, ...]] = {
            "left": (Piece("left.a", (self.tile,)), Piece("left.b", (2, self.tile))),
            "right": (Piece("right", (self.tile,)),),
            "wide": (Piece("wide", (tiles, self.tile)),),
        }
        self.second: dict[str, tuple[Piece, ...]] = {
            "up": (Piece("up", (2, self.tile)),),
            "tall": (Piece("tall", (tiles, self.tile)),),
        }
        """The blocks of a second group, where there is one."""
        self._columns: dict[tuple[int, int], Array] = {}

    @property
    def in_order(self) -> tuple[str, ...]:
        """The groups, in the order of their parts in a call."""
        return self.group, self.second_group

    def start(self, slot: Array, block: Block) -> None:
        """Write a block's first values: [size], a whole block."""
        slot.fill(0.0)

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        """Write the gradient of one push for one block: [size], a whole block."""
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        slot.fill(0.0)
        tiles = slot.reshape(-1, self.tile)
        tiles[:, 2 * push.writer] = 1.0
        tiles[:, 2 * push.writer + 1] = 2.0**push.number

    def read(self, values: Array, low: int) -> Row:
        """What values say: [elements of a part], which begins at element `low` of its block."""
        columns = self._columns_of(low, values.size)
        start = -low % self.tile
        tile = values[start : start + self.tile]
        numbers = tile.tolist()
        sound = bool((values == tile[columns]).all()) and all(
            number.is_integer() and number >= 0 for number in numbers
        )
        if not sound:
            numbers = [number if np.isfinite(number) and number >= 0 else 0 for number in numbers]
        return Row(
            tuple(int(number) for number in numbers[::2]),
            tuple(int(number) for number in numbers[1::2]),
            sound,
        )

    def glance(self, values: Array, low: int) -> tuple[int, ...]:
        """Which pushes a part's first whole tile says are in it: masks by writer."""
        start = -low % self.tile
        numbers = values[start + 1 : start + self.tile : 2].tolist()
        return tuple(int(each) if 0 <= each < 2.0**PUSHES_MAX else 0 for each in numbers)

    def parts(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        """What the part of a block on one of so many shards says, with the number by which calls
        name the block."""
        if not isinstance(block, ShardBlock) or not block.size:
            return []
        return [(block.spec.block, self.read(block.value, block.low))]

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        """As `parts`, at a glance: masks by writer."""
        if not isinstance(block, ShardBlock) or not block.size:
            return []
        return [(block.spec.block, self.glance(block.value, block.low))]

    def bytes_of(self, block: ShardBlock | KeyedBlock) -> bytes:
        """All values of a shard's part of a block."""
        assert isinstance(block, ShardBlock)
        return block.value.tobytes()

    def _columns_of(self, low: int, size: int) -> Array:
        """Where in its tile each element stands."""
        key = (low % self.tile, size)
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = (key[0] + np.arange(size)) % self.tile
        return found

    def prepare(self) -> None:
        """Load the kernels; after the first time this costs next to nothing."""
        compiled().prepare(self.dtype)
        self.rule.prepare(self.dtype)

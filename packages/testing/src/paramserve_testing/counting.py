"""Pushes that can be told apart in the sum: what the simulated workers push, and how it is read.

Each writer has two elements: each of its pushes adds 1 to the first and 2 to the power of the
push's number to the second. Tiles of these pairs fill every block, so that each shard's part holds
the same information many times over, and bytes that were overwritten show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client.links import Slot
from paramserve.client.step_parts import BlockPush, StepParts
from paramserve.client.ticket import Outcome
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.block import ShardBlock
from paramserve.core.partition import PIECE_BYTES_MIN, Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import Piece
from paramserve.rules import Add, Hyper, PushInfo, Rule, Run
from paramserve.rules.built_in import FRACTION, Allowed
from paramserve.rules.compiled import compiled
from paramserve_testing.history import Applied, Call, Part, Row
from paramserve_testing.workload import GroupStep, Parameters, Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels
    from paramserve.rules.layout import RowView
    from paramserve_testing.client import SimulatedClient

Array = npt.NDArray[Any]

PUSHES_MAX = 52
"""Most pushes of one writer: sums of their powers of two are exact in float64."""
SERVERS_MAX = 3
"""In clusters whose wide tensors are split over all shards."""
SPLIT_BYTES = SERVERS_MAX * PIECE_BYTES_MIN
"""Bytes of a tensor that each of `SERVERS_MAX` shards holds a part of."""
ADD = Add()


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
        ADD.apply(value, gradient, state, (), runs, push._replace(scale=1.0), out)

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        ADD.apply_rows(view, gradients, (), push)

    # Each shard of a run has a class of its own, and kernels are kept by class.

    def block_kernels(self, dtype: np.dtype[Any], pushed: np.dtype[Any] | None = None) -> Kernels:
        return ADD.block_kernels(dtype, pushed)

    def row_kernels(self) -> Kernels:
        return ADD.row_kernels()


def leaves_whole(policy: Policy) -> bool:
    """Whether a policy multiplies no gradient by anything, so that `Add` leaves pushes whole."""
    if type(policy) is Sync:
        return policy.reduce == "sum"
    if type(policy) is Async:
        return policy.damping is None and policy.momentum == "given"
    return type(policy) is BoundedStaleness


def counting_rule(policies: Iterable[Policy]) -> Add:
    """`Add`, or a rule of its effect where one of the policies multiplies gradients."""
    return Add() if all(map(leaves_whole, policies)) else AddWhole()


class Counting(Parameters):
    """Tensors whose values tell which pushes are in them.

    Args:
        writers: that there may be.
        rule: of the blocks.
        group: of the blocks.
        blocks: in place of two small ones that stay whole, on different shards, and one that is
            split over all shards; each has whole tiles.
    """

    dtype: np.dtype[Any] = np.dtype(np.float64)

    def __init__(
        self,
        writers: int,
        rule: Rule = Parameters.rule,
        group: str = Parameters.group,
        blocks: Mapping[str, tuple[Piece, ...]] | None = None,
    ) -> None:
        self.writers = writers
        self.tile = 2 * writers
        self.rule = rule
        self.group = group
        self.blocks = {
            "left": (Piece("left.a", (self.tile,)), Piece("left.b", (2, self.tile))),
            "right": (Piece("right", (self.tile,)),),
            "wide": (Piece("wide", wide_shape(writers)),),
        }
        if blocks is not None:
            self.blocks = dict(blocks)
        self._columns: dict[tuple[int, int], Array] = {}

    def prepare(self) -> None:
        compiled().prepare(self.dtype)
        self.rule.prepare(self.dtype)

    def every(self, client: SimulatedClient) -> list[Any]:
        return [each for name, each in client.blocks.items() if name in self.blocks]

    def fill(self, slot: Array, block: Block, push: Pushed) -> None:
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        slot.fill(0.0)
        tiles = slot.reshape(-1, self.tile)
        tiles[:, 2 * push.writer] = 1.0
        tiles[:, 2 * push.writer + 1] = 2.0**push.number

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        pushes = list[tuple[BlockPush, Slot]]()
        if step.which is not None:
            pushes = [self.capture(client, block, step.which) for block in step.push]
        if step.spoiled:
            last = pushes[-1][0]
            last.gradient[-1] = np.nan
            if client.each_shard_judges():
                for shard in range(len(client.exchange.shards)):
                    low, high = last.block.range(shard)
                    last.gradient[low:high][-1:] = np.nan
        return structs.replace(parts, pushes=pushes, pull=step.pull)

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        for block in pull:
            for shard in range(len(client.exchange.shards)):
                low, high = block.range(shard)
                if high > low:
                    row = self.read(outcome.values[block.id][low:high], low)
                    call.reads[Part(block.id, shard)] = row

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        if not isinstance(block, ShardBlock) or not block.size:
            return []
        return [(block.spec.block, self.read(block.value, block.low))]

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        if not isinstance(block, ShardBlock) or not block.size:
            return []
        return [(block.spec.block, self.glance(block.value, block.low))]

    # --- what values say ----------------------------------------------------------------

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

    def _columns_of(self, low: int, size: int) -> Array:
        """Where in its tile each element stands."""
        key = (low % self.tile, size)
        found = self._columns.get(key)
        if found is None:
            found = self._columns[key] = (key[0] + np.arange(size)) % self.tile
        return found


def wide_shape(writers: int, dtype: np.dtype[Any] = Counting.dtype) -> tuple[int, int]:
    """The shape of a tensor of whole tiles that is split over all shards."""
    tile = 2 * writers
    return -(-SPLIT_BYTES // (tile * dtype.itemsize)), tile


def counting(setting: Setting) -> Workload:
    """Tensors that count; with `Scenario.second`, two groups of them."""
    rule = counting_rule(setting.scenario.policies)
    first = Counting(setting.writers, rule)
    if setting.scenario.second is None:
        return Workload(first)
    shape = wide_shape(setting.writers)
    blocks = {"up": (Piece("up", (2, shape[1])),), "tall": (Piece("tall", shape),)}
    return Workload(first, Counting(setting.writers, rule, "second", blocks))

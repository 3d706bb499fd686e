"""Blocks beside those of `Counting` in a simulated cluster: of other dtypes, with other rules.

Their values do not say which pushes are in them. But a shard applies all gradients of a step or
none, and reads all values of one at the same moment: so the counting block that a block goes with
says which of its gradients are there, and which are in what was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from msgspec import structs

from paramserve.client.step_parts import BlockPush, StepParts
from paramserve.client.ticket import Outcome
from paramserve.core.block import ShardBlock
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import Piece, PlaceBlock
from paramserve.testing.counting import Counting
from paramserve.testing.history import Call, Part, Row
from paramserve.testing.scripts import ScriptedClient
from paramserve.testing.workload import GroupStep, Pushed

Array = npt.NDArray[Any]


class BesideCounting(Counting):
    """Counting blocks, and others beside them. Subclass it for blocks of one kind.

    Attributes:
        beside: by name of a block, the counting block that it goes with.
    """

    beside: Mapping[str, str]

    def stand_beside(
        self, blocks: Mapping[str, tuple[Piece, ...]], beside: Mapping[str, str]
    ) -> None:
        """Have these blocks, too."""
        self.beside = beside
        self.blocks = {**self.blocks, **blocks}

    def place(self, name: str, placing: PlaceBlock) -> PlaceBlock:
        """How a block beside a counting one is defined, from how that would be."""
        raise NotImplementedError

    def gradient(self, block: Block, push: Pushed) -> Array:
        """The gradient of one push for a block beside a counting one: [size], of its dtype."""
        raise NotImplementedError

    def was_read(self, block: Block, shard: int, values: Array, row: Row) -> list[str]:
        """What is wrong with values that were read, [elements on the shard], where its counting
        block had the pushes of `row`."""
        return []

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        return [] if self.is_beside(block.spec.pieces) else super().rows(block, shard, shards)

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        return [] if self.is_beside(block.spec.pieces) else super().masks(block, shard, shards)

    def is_beside(self, pieces: Sequence[Piece]) -> bool:
        """Whether a block of these pieces is beside a counting one."""
        return pieces[0].name.partition(".")[0] in self.beside


class BesideClient(ScriptedClient):
    """A client that pushes to and reads the blocks beside a counting one whenever it does so of
    that one.

    Attributes:
        wrong: what was wrong with values that it has read.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.wrong: list[str] = []

    @property
    def every(self) -> list[Any]:
        """All counting blocks."""
        return [each for name, each in self.blocks.items() if name not in self._workload.beside]

    @property
    def _workload(self) -> BesideCounting:
        (found,) = self.cluster.workload.parameters
        assert isinstance(found, BesideCounting)
        return found

    def _placing(self, name: str) -> PlaceBlock:
        placing = super()._placing(name)
        return self._workload.place(name, placing) if name in self._workload.beside else placing

    def _with(self, chosen: Sequence[Block]) -> list[Block]:
        """The blocks that go with some counting ones."""
        pairs = self._workload.beside.items()
        return [self.blocks[name] for name, other in pairs if self.blocks[other] in chosen]

    def _parts(self, step: GroupStep) -> StepParts:
        parts = super()._parts(step)
        reads = [*parts.pull, *self._with(step.pull)]
        if step.which is None:
            return structs.replace(parts, pull=reads)
        pushes = []
        for block in self._with(step.push):
            slot = self.exchange.take(block.nbytes)
            values = slot.array(block)
            values[:] = self._workload.gradient(block, step.which)
            pushes.append((BlockPush(block, values), slot))
        return structs.replace(parts, pushes=[*pushes, *parts.pushes], pull=reads)

    def _read(self, call: Call, outcome: Outcome, pull: Sequence[Any], parts: StepParts) -> None:
        super()._read(call, outcome, pull, parts)
        names = {block.id: name for name, block in self.blocks.items()}
        for block in self._with(pull):
            companion = self.blocks[self._workload.beside[names[block.id]]]
            for shard in range(len(self.exchange.shards)):
                low, high = block.range(shard)
                row = call.reads.get(Part(companion.id, shard))
                if high > low and row is not None:
                    values = outcome.values[block.id][low:high]
                    self.wrong += self._workload.was_read(block, shard, values, row)

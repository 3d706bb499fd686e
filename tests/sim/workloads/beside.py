"""Blocks beside those of `Counting` in a simulated cluster: of other dtypes, with other rules.

Their values do not say which pushes are in them. But a shard applies all gradients of a step or
none, and reads all values of one at the same moment: so the counting block that a block goes with
says which of its gradients are there, and which are in what was read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
from msgspec import structs

from paramserve.client.step_parts import StepParts
from paramserve.client.ticket import Outcome
from paramserve.core.block import ShardBlock
from paramserve.core.partition import Block
from paramserve.messages import Piece
from paramserve_testing.history import Call, Part, Row
from paramserve_testing.workload import GroupStep, Parameters

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]


class Beside(Parameters, ABC):
    """Blocks that clients push to and read whenever they do so of the counting block beside.

    Args:
        blocks: by name.
        beside: by name, the counting block that each goes with.

    Attributes:
        wrong: what was wrong with values that clients have read.
    """

    def __init__(self, blocks: Mapping[str, tuple[Piece, ...]], beside: Mapping[str, str]) -> None:
        self.blocks = blocks
        self.beside = beside
        self.wrong: list[str] = []

    @abstractmethod
    def was_read(self, block: Block, shard: int, values: Array, row: Row) -> list[str]:
        """What is wrong with values that were read, [elements on the shard], where the counting
        block had the pushes of `row`."""

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        reads = [*parts.pull, *(block for block, _ in self._with(client, step.pull))]
        pushes = [*parts.pushes]
        if step.which is not None:
            own = self._with(client, step.push)
            pushes = [self.capture(client, block, step.which) for block, _ in own] + pushes
        return structs.replace(parts, pushes=pushes, pull=reads)

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        for block, companion in self._with(client, pull):
            for shard in range(len(client.exchange.shards)):
                low, high = block.range(shard)
                row = call.reads.get(Part(companion.id, shard))
                if high > low and row is not None:
                    values = outcome.values[block.id][low:high]
                    texts = self.was_read(block, shard, values, row)
                    self.wrong += [f"writer {client.writer}: {text}" for text in texts]

    def _with(self, client: SimulatedClient, chosen: Sequence[Any]) -> list[tuple[Block, Block]]:
        """The blocks that go with some counting ones, and these."""
        pairs = [(client.blocks[n], client.blocks[other]) for n, other in self.beside.items()]
        return [(block, companion) for block, companion in pairs if companion in chosen]

    def held(self, cluster: SimulatedCluster) -> Iterator[tuple[str, Block, Block, int, Array]]:
        """What shards hold of each: its name, the block and the counting one, shard and values."""
        named = {each.pieces[0].name: each for each in cluster.blocks.values()}
        for name, other in self.beside.items():
            block = named[self.blocks[name][0].name]
            for server in cluster.servers:
                part = server.shard.blocks.get(block.id)
                if isinstance(part, ShardBlock) and part.size:
                    yield name, block, named[other], server.number, part.value

"""Tables beside tensors in a simulated cluster: one call pushes to both, as of `worker.optimizer`.

The tensors are the first group, with the cluster's policy; the table is the second one, with its
own. A call's parts for both travel in one frame to each shard, the table's first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paramserve.client.links import Slot
from paramserve.client.step_parts import StepParts
from paramserve.client.ticket import Outcome
from paramserve.consistency import registry as policies
from paramserve.core.block import ShardBlock
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import PlaceBlock
from paramserve.testing.client import GroupStep
from paramserve.testing.counting import Counting
from paramserve.testing.history import Call, Row
from paramserve.testing.row_counting import NAME, RowCounting, RowsClient
from paramserve.testing.scripts import GroupsWorker, ScriptedClient, SimulatedReader
from paramserve.testing.simulated import SimulatedCluster, rerun


class MixedCounting(Counting):
    """Blocks of tensors, and a table as the second group."""

    second_group = NAME

    def __init__(self, writers: int) -> None:
        super().__init__(writers)
        self.rows = RowCounting(writers)
        self.second = self.rows.blocks

    @property
    def in_order(self) -> tuple[str, ...]:
        return self.second_group, self.group

    def prepare(self) -> None:
        super().prepare()
        self.rows.prepare()

    def parts(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        if isinstance(block, KeyedBlock):
            return self.rows.parts(block, shard, shards)
        return super().parts(block, shard, shards)

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        if isinstance(block, KeyedBlock):
            return self.rows.masks(block, shard, shards)
        return super().masks(block, shard, shards)

    def bytes_of(self, block: ShardBlock | KeyedBlock) -> bytes:
        if isinstance(block, KeyedBlock):
            return self.rows.bytes_of(block)
        return super().bytes_of(block)


class MixedClient(RowsClient):
    """A client that pushes to tensors and to rows, and reads them."""

    @property
    def rows(self) -> RowCounting:
        assert isinstance(self.cluster.workload, MixedCounting)
        return self.cluster.workload.rows

    @property
    def every(self) -> list[Any]:
        """All blocks, and all keys or some."""
        return [*(each for each in self.blocks.values() if each.table is None), *super().every]

    def _placing(self, name: str) -> PlaceBlock:
        if name != NAME:
            return ScriptedClient._placing(self, name)
        second = self.cluster.scenario.second
        assert second is not None, "the table is the second group"
        return self._placing_table(policies.spec(second))

    def _first_values(self, block: Block) -> Sequence[Slot]:
        return ScriptedClient._first_values(self, block) if block.table is None else []

    def _parts(self, step: GroupStep) -> StepParts:
        kind = RowsClient if step.group == NAME else ScriptedClient
        return kind._parts(self, step)

    def _read(self, call: Call, outcome: Outcome, pull: Sequence[Any], parts: StepParts) -> None:
        kind = RowsClient if parts.block.table is not None else ScriptedClient
        kind._read(self, call, outcome, pull, parts)


class MixedWorker(MixedClient, GroupsWorker):
    """Steps tensors and a table, in one call or one after the other."""


class MixedReader(MixedClient, SimulatedReader):
    """Belongs to no rank, and reads and pushes to both."""


class SimulatedMixed(SimulatedCluster):
    """A simulated cluster whose clients train tensors and a table beside them.

    `Scenario.second` is the table's policy, which may not multiply gradients by anything:
    `Sync(reduce="sum")`, `Async()` or `BoundedStaleness`.
    """

    groups_type = MixedWorker
    reader_type = MixedReader
    workload_type = MixedCounting
    replayed_by = "paramserve.testing.mixed.replay"


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed of tensors and a table again; else as `paramserve.testing.replay`."""
    return rerun(SimulatedMixed, seed, log, **options)

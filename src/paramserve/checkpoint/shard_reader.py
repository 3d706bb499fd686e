"""A shard of a checkpoint, for a server that goes on from it: one of any number.

Of a checkpoint with as many servers as there are now, each takes over its own records; else the
records of the lead shard hold for all. Sessions are written and not taken over: of a run
that goes on, every client is a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.checkpoint.manifest import state_path, sums_path, values_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.rows import KEY
from paramserve.checkpoint.shard_records import (
    COUNT,
    LAST_USE,
    OLD,
    USE_ORDER,
    VALUE,
    BlockRecord,
    ShardRecord,
    SumRecord,
    shard_records,
)
from paramserve.config import ConsistencySpec
from paramserve.core.block import ShardBlock
from paramserve.core.decisions import LEAD
from paramserve.core.group_members import JoinedBy
from paramserve.core.group_state import GroupRecord
from paramserve.core.membership import DEAD, LEFT
from paramserve.core.shard_sessions import SessionsRecord
from paramserve.core.sums import BufferRecord, RowSum, Sum
from paramserve.core.table.admission import Waiting
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.cut import CutRows
from paramserve.core.table.hashing import Keys, shard_of
from paramserve.core.table.parts import RowGradient
from paramserve.messages import BlockSpec, Gradient, Member
from paramserve.rules.layout import RowLayout

Array = npt.NDArray[Any]
Sums = dict[int, Sum | RowSum]


class LoadedBlock:
    """A dense block of a checkpoint, on one shard of any number; a `core.block.SavedBlock`."""

    def __init__(self, saved: Checkpoint, spec: BlockSpec, record: BlockRecord, shard: int) -> None:
        self.spec = spec
        self.attempt = record.attempt
        self.counts = list(record.counts)
        self.states = record.states
        self._saved = saved
        self._shard = shard
        group = spec.group_name
        self._paths = [values_path(group), *(state_path(each, group) for each in record.states)]

    def read(self, number: int, into: Array) -> None:
        """Values (0) or a state array (1, 2, ...), [elements on this shard].

        Raises:
            CheckpointError: as `Checkpoint.dense`.
        """
        if into.size:
            self._saved.dense(self._paths[number], self.spec, self._shard, into)


class LoadedTable:
    """A table of a checkpoint, on one shard of any number; a `core.table.block.SavedTable`.

    What shards count of it the first one of another number goes on from.
    """

    def __init__(
        self,
        saved: Checkpoint,
        records: Sequence[ShardRecord],
        spec: BlockSpec,
        shard: int,
        shards: int,
    ) -> None:
        self.spec = spec
        self._saved = saved
        self._place = shard, shards
        self._uses = list[tuple[Array, Array, Array]]()
        every = [next(t for t in one.tables if t.spec == spec) for one in records]
        counted = [every[shard]] if len(every) == shards else every if shard == 0 else []
        self.attempt, self.states = every[0].attempt, every[0].states
        self.used_at = max(each.used_at for each in every)
        self.unadmitted = sum(each.unadmitted for each in counted)
        self.clock = max(each.clock for each in every)
        self.created = sum(each.created for each in counted)
        self.evicted = sum(each.evicted for each in counted)
        self.deleted = sum(each.deleted for each in counted)
        self._waits = every[0].waits

    @property
    def candidates(self) -> Waiting | None:
        """Keys that wait for admission."""
        if not self._waits:
            return None
        rows = self._saved.admission(self.spec.group_name, *self._place)
        keys = rows[KEY]
        counts = rows.get(COUNT, np.zeros(0, np.uint32))
        old = rows.get(OLD, np.zeros(0, np.uint8)) != 0
        return (keys[~old], counts[~old]), (keys[old], counts[old])

    def batches(self, layout: RowLayout) -> Iterator[CutRows]:
        """All rows, some at a time."""
        for columns in self._saved.rows(self.spec.group_name, *self._place):
            keys = columns[KEY]
            raw = np.zeros((keys.size, layout.words), np.float32)
            for name, into in layout.parts(raw).items():
                into[...] = columns[name]
            if LAST_USE in columns:
                self._uses.append((keys, columns[LAST_USE], columns[USE_ORDER]))
            yield CutRows(keys, raw)

    def uses(self) -> tuple[Keys, Keys] | None:
        """All keys with the clocks of their last use, the one first whose use is longest ago."""
        if not self._uses:
            return None
        keys, clocks, order = (np.concatenate(each) for each in zip(*self._uses, strict=True))
        oldest = np.lexsort((order, clocks))
        return keys[oldest], clocks[oldest]


class LoadedShard:
    """A shard that a checkpoint has; a `core.restoring.SavedShard`.

    Args:
        specs: of all blocks, as they are cut now.
        shard, shards: of any number.
        workers: ranks that come, and are waited for.
    Raises:
        CheckpointDamaged: (all methods) a file is.
    """

    sessions = SessionsRecord()

    def __init__(
        self,
        saved: Checkpoint,
        specs: Sequence[BlockSpec],
        shard: int,
        shards: int,
        workers: int,
    ) -> None:
        self.shard, self.shards = shard, shards
        records = shard_records(saved)
        self.number = records[0].cut
        self.groups = tuple(
            _group(records, each.id, shard, shards, workers) for each in records[0].groups
        )
        saved_blocks = {each.spec.block: each for each in records[0].blocks}
        self.blocks = {
            spec.block: LoadedBlock(saved, spec, saved_blocks[spec.block], shard)
            for spec in specs
            if spec.table is None
        }
        self.tables = {
            spec.block: LoadedTable(saved, records, spec, shard, shards)
            for spec in specs
            if spec.table is not None
        }
        self._saved = saved
        self._records = records

    def frontiers(self, policy: ConsistencySpec, workers: int) -> dict[int, int]:
        """First clock, per group, of which no resumed worker has executed a step.

        Groups that stepped under the cluster's policy on all shards, of which this was one. All
        shards that resume compute the same."""
        own = {spec.group for one in self._records for spec in one.specs() if spec.consistency}
        by_group = dict[int, list[GroupRecord]]()
        for group in (each for one in self._records for each in one.groups if each.id not in own):
            by_group.setdefault(group.id, []).append(group)
        return {
            number: max(_frontier(each, workers) for each in every)
            for number, every in by_group.items()
            if all(each.changes.policies[-1][1] == policy and not each.undecided for each in every)
        }

    def sums_of(self, group: int, blocks: Mapping[int, ShardBlock | KeyedBlock]) -> Sums:
        """What the buffer of a group has, by block."""
        sums = Sums()
        for record in self._records:
            for each in (one for one in record.sums if one.group == group):
                block = blocks[each.block]
                if isinstance(block, KeyedBlock):
                    self._add_rows(sums, record, each, block)
                else:
                    self._add_range(sums, record, each, block)
        return sums

    def _add_range(
        self, sums: Sums, record: ShardRecord, saved: SumRecord, block: ShardBlock
    ) -> None:
        """Add what a shard had of a dense block's sum, as far as it lies on this one."""
        same = len(self._records) == self.shards
        (old,) = (each.spec for each in record.blocks if each.spec.block == saved.block)
        at, end = old.cuts[record.shard], old.cuts[record.shard + 1]
        low, high = max(block.low, at), min(block.high, end)
        if record.shard != self.shard if same else low >= high:
            return
        own = sums.setdefault(saved.block, Sum(np.zeros(block.size, block.dtype)))
        assert isinstance(own, Sum)
        path = sums_path(block.spec.group_name, record.shard)
        values = self._saved.tensor(path, str(saved.block))
        own.array[low - block.low : high - block.low] = values[low - at : high - at]
        none = saved.active is None or own.active is None
        own.active = None if none else {*(own.active or ()), *(saved.active or ())}
        own.hyper, own.count = saved.hyper, max(own.count, saved.count)

    def _add_rows(
        self, sums: Sums, record: ShardRecord, saved: SumRecord, block: KeyedBlock
    ) -> None:
        """Add what a shard had of a table's sum, as far as it lies on this one."""
        path = sums_path(block.spec.group_name, record.shard)
        keys = self._saved.tensor(path, f"{saved.block}.{KEY}")
        values = self._saved.tensor(path, f"{saved.block}.{VALUE}")
        here = shard_of(keys, self.shards) == self.shard
        own = sums.setdefault(saved.block, RowSum(block))
        assert isinstance(own, RowSum)
        header = Gradient(saved.block, 0, 0, hyper=saved.hyper, rows=int(here.sum()))
        own.pushes.append((1.0, header, RowGradient(keys[here], values[here])))
        own.hyper, own.count = saved.hyper, max(own.count, saved.count)


def _frontier(group: GroupRecord, workers: int) -> int:
    clocks = group.members.clocks
    return max(group.committed, *(clocks[rank] for rank in clocks if rank < workers), 0)


def _group(
    records: Sequence[ShardRecord], number: int, shard: int, shards: int, workers: int
) -> GroupRecord:
    """The record of a group that a shard goes on from.

    Who is a member is the lead's decision, which other shards may not have known at the cut. Of a
    rank that ended while it was sending, other numbers of shards take the highest clock: nothing of
    it is applied twice. Where such a rank's gradients wait in the buffers of some shards only, the
    mean is by the highest number, and none is lost.
    """
    every = [next(each for each in one.groups if each.id == number) for one in records]
    lead = every[LEAD]
    joined = _joined(lead, records[LEAD].sessions.members, workers)
    if len(records) == shards:
        own = every[shard]
        return structs.replace(own, members=structs.replace(own.members, joined=joined))
    clocks, applied = dict[int, int](), dict[int, int]()
    for each in every:
        for rank, clock in each.members.clocks.items():
            clocks[rank] = max(clocks.get(rank, 0), clock)
        applied |= each.already_applied
    return structs.replace(
        lead,
        members=structs.replace(lead.members, joined=joined, clocks=clocks),
        already_applied=applied,
        buffer=BufferRecord(
            max(each.buffer.count for each in every), any(each.buffer.large for each in every)
        ),
        unapplied=next((each.unapplied for each in every if each.unapplied is not None), None),
    )


def _joined(lead: GroupRecord, decided: Sequence[Member], workers: int) -> dict[int, JoinedBy]:
    """The members as of a run that begins: besides those of the cut, the ranks that had ended then
    or were not there."""
    slowest = lead.members.slowest
    present = [policy for clock, policy in lead.changes.policies if clock <= slowest][-1]
    start = max(slowest, lead.committed) if present.collects else slowest
    going = {each.rank for each in decided if each.state not in (LEFT, DEAD)}
    begin = {rank: JoinedBy(0, 0, start) for rank in range(workers) if rank not in going}
    return begin | lead.members.joined

"""Tables in a simulated cluster: rows of several keys, each of which says which pushes it holds.

What the blocks of tensors are to the other workload, single keys are here: a call pushes to some of
them and reads some, and the checkers judge each key by itself, on the shard that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client.links import Slot
from paramserve.client.row_slots import RowPull, RowPush, lay_named, lay_pull, lay_push
from paramserve.client.step_parts import StepParts
from paramserve.client.ticket import Outcome
from paramserve.compiling import load_table
from paramserve.config import ConsistencySpec
from paramserve.core.block import ShardBlock
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.core.table.store import Purpose
from paramserve.messages import Delete, Piece, PlaceBlock, ShardRequest, TableSpec
from paramserve.rules import Rule
from paramserve.rules.add import Add
from paramserve.rules.registry import described_by
from paramserve.rules.rows import row_layout
from paramserve.testing.client import GroupStep
from paramserve.testing.counting import Counting, Pushed
from paramserve.testing.history import Call, Deletion, Part, Row
from paramserve.testing.scripts import (
    WAIT_S,
    LeasingWorker,
    ScriptedClient,
    SimulatedReader,
    SimulatedWorker,
)
from paramserve.testing.simulated import SimulatedCluster, rerun

Array = npt.NDArray[Any]

NAME = "users"
KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 3, 4, 5, 6, 7], np.int64)
"""Each of up to three shards holds some."""
PUSHES_MAX = 24
"""Of one writer: sums of their powers of two are exact in float32."""
SOME = 0.4
"""Of the calls take only some keys."""
DELETES = 0.2
"""Before so many of a client's calls it deletes rows, where it does."""


class RowKey(NamedTuple):
    """One key, as calls name it."""

    id: int
    """Its number in `KEYS`."""
    group_name: str = NAME


class RowCounting(Counting):
    """Gradients of rows whose sum tells which pushes are in it.

    A row is one tile, and an element that tells whose it is: each push adds the key's number + 1.
    """

    group = NAME
    dtype = np.dtype(np.float32)
    rule: Rule = Add()

    def __init__(self, writers: int) -> None:
        self.writers = writers
        self.tile = 2 * writers
        self.dim = self.tile + 1
        self.blocks = {NAME: (Piece(NAME, (self.dim,)),)}
        self.table = TableSpec(self.dim, "float32", 0, TableOptions(Zeros()).to_spec())
        self._columns = {}

    def prepare(self) -> None:
        load_table(self.rule, row_layout(self.rule, self.dim, "float32"))

    def gradients(self, chosen: Sequence[RowKey], push: Pushed) -> tuple[Array, Array]:
        """Keys [2 n] and gradients [2 n, dim] of one push: each key comes twice, with a half."""
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        numbers = [key.id for key in chosen] * 2
        values = np.zeros((len(numbers), self.dim), np.float32)
        values[:, 2 * push.writer] = 0.5
        values[:, 2 * push.writer + 1] = 2.0 ** (push.number - 1)
        values[:, -1] = 0.5 * (np.array(numbers) + 1)
        return KEYS[numbers], values

    def parts(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        """All keys that this shard is to hold, with a row or not; and others, which are unsound."""
        assert isinstance(block, KeyedBlock)
        strays = set(_keys_in(block)) - {int(KEYS[number]) for number in _own(shard, shards)}
        found = [(n, self.row(n, row)) for n, row in self._rows(block, shard, shards)]
        return [(n, row._replace(sound=row.sound and not strays)) for n, row in found]

    def row(self, number: int, values: Array) -> Row:
        """What the row of a key says."""
        row = self.read(values[:-1], 0)
        own = float(values[-1]) == (number + 1) * sum(row.counts)
        return row._replace(sound=row.sound and own)

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        return [(n, self.glance(row[:-1], 0)) for n, row in self._rows(block, shard, shards)]

    def bytes_of(self, block: ShardBlock | KeyedBlock) -> bytes:
        assert isinstance(block, KeyedBlock)
        out = np.empty((KEYS.size, self.dim), np.float32)
        _look(block, KEYS, out)
        return out.tobytes()

    def _rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Array]]:
        assert isinstance(block, KeyedBlock)
        own = _own(shard, shards)
        out = np.empty((own.size, self.dim), np.float32)
        _look(block, KEYS[own], out)
        return list(zip(own.tolist(), out, strict=True))


def _own(shard: int, shards: int) -> Array:
    """Numbers of the keys that a shard holds."""
    return np.flatnonzero(shard_of(KEYS, shards) == shard)


def _look(block: KeyedBlock, keys: Array, out: Array) -> None:
    """Read rows and leave no trace."""
    taken = block.store.take(keys, block.clock, Purpose.READ)
    block.store.read(taken.rows, keys, out)


def _keys_in(block: KeyedBlock) -> list[int]:
    """All keys that have a row."""
    found, cursor = list[int](), 0
    while cursor >= 0:
        keys, _, cursor = block.store.scan(cursor, 1024)
        found += keys.tolist()
    return found


class RowsClient(ScriptedClient):
    """A client that pushes to rows of a table, and reads them."""

    def __init__(self, cluster: SimulatedCluster, writer: int, rank: int) -> None:
        super().__init__(cluster, writer, rank)
        self._chance = Random(f"deletes {cluster.seed} {writer}")
        self._deleting = frozenset[int]()
        """Numbers of the keys that it is about to delete."""

    def _go_on(self) -> None:
        if self.cluster.scenario.deletes and self.left > 0 and self._chance.random() < DELETES:
            self._deleting = frozenset(self._chance.sample(range(KEYS.size), 3))
            self.make(self._delete)
        if self.alive:
            super()._go_on()

    def _delete(self) -> None:
        keys = KEYS[sorted(self._deleting)]
        named = lay_named(self.exchange, Delete, self.block, keys)
        self.steps.finish("assign", named.requests, None, [named.slot])

    def sending(
        self, requests: Sequence[ShardRequest], operation: Operation
    ) -> Sequence[ShardRequest]:
        if isinstance(requests[0], Delete):
            history = self.cluster.history
            deletion = Deletion(self.writer, history.next(), self._deleting)
            history.deletions.append(deletion)
            for shard in self.exchange.shards:
                key = (self.writer, shard.number, shard.session.last + 1)
                self.cluster.deletion_of[key] = deletion
        return super().sending(requests, operation)

    @property
    def rows(self) -> RowCounting:
        """What it pushes to the table."""
        assert isinstance(self.cluster.workload, RowCounting)
        return self.cluster.workload

    @property
    def every(self) -> list[Any]:
        """All keys, or some."""
        draw = self.cluster.random.random
        keys = [RowKey(number) for number in range(KEYS.size)]
        if draw() >= SOME:
            return keys
        return [key for key in keys if draw() < 0.5] or keys

    def _placing(self, name: str) -> PlaceBlock:
        return self._placing_table(self.cluster.described)

    def _placing_table(self, policy: ConsistencySpec) -> PlaceBlock:
        return PlaceBlock(
            0,
            NAME,
            "float32",
            described_by(self.rows.rule, rows=True),
            self.rows.blocks[NAME],
            True,
            WAIT_S,
            False,
            policy,
            self.rows.table,
        )

    def _first_values(self, block: Block) -> Sequence[Slot]:
        return []

    def _parts(self, step: GroupStep) -> StepParts:
        block = self.block_of(step.group)
        row_pushes, row_pulls = list[RowPush](), list[RowPull]()
        if step.which is not None:
            keys, values = self.rows.gradients(step.push, step.which)
            if step.spoiled:
                values[slice(None) if self._each_shard_judges() else -1, -1] = np.nan
            row_pushes.append(lay_push(self.exchange, block, keys, values, None))
        if step.pull:
            create = self.cluster.random.random() < 0.7
            keys = KEYS[[key.id for key in step.pull]]
            row_pulls.append(lay_pull(self.exchange, block, keys, create=create))
        return StepParts(step.what, block, (), (), step.options, row_pushes, row_pulls, leased=True)

    def _read(self, call: Call, outcome: Outcome, pull: Sequence[Any], parts: StepParts) -> None:
        owners = shard_of(KEYS, len(self.exchange.shards))
        for read in parts.row_pulls:
            rows = np.frombuffer(read.slot.bytes, np.float32, math.prod(read.shape), read.start)
            for key, row in zip(pull, rows.reshape(read.shape), strict=True):
                part = Part(key.id, int(owners[key.id]))
                call.reads[part] = self.rows.row(key.id, row)


class RowsWorker(RowsClient, SimulatedWorker):
    """Steps through its clocks, with rows."""


class RowsLeaser(RowsClient, LeasingWorker):
    """Steps through samples that it draws by lease, with rows."""


class RowsReader(RowsClient, SimulatedReader):
    """Belongs to no rank, and reads and pushes rows."""


class SimulatedTables(SimulatedCluster):
    """A simulated cluster whose clients train a table.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.
    """

    worker_type = RowsWorker
    reader_type = RowsReader
    leaser_type = RowsLeaser
    workload_type = RowCounting
    replayed_by = "paramserve.testing.row_counting.replay"


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed of a table again; else as `paramserve.testing.replay`."""
    return rerun(SimulatedTables, seed, log, **options)

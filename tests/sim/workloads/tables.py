"""Tables in a simulated cluster: rows of several keys, each of which says which pushes it holds.

What the blocks of tensors are to the other workload, single keys are here: a call pushes to some of
them and reads some, and the checkers judge each key by itself, on the shard that holds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client.links import Slot
from paramserve.client.row_slots import by_shard, decode_rows, lay_named, lay_pull, lay_push
from paramserve.client.step_parts import StepParts
from paramserve.client.ticket import Outcome
from paramserve.codecs.base import Codec
from paramserve.codecs.registry import spec as codec_spec
from paramserve.compiling import load_table
from paramserve.core.block import ShardBlock
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.core.table.store import Purpose
from paramserve.messages import Delete, Piece, PlaceBlock, ShardRequest, TableSpec
from paramserve.rules.registry import described_by
from paramserve.rules.rows import row_layout
from paramserve_testing.counting import Counting, counting_rule
from paramserve_testing.history import Call, Deletion, Part, Row
from paramserve_testing.workload import GroupStep, Parameters, Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient

Array = npt.NDArray[Any]

NAME = "users"
KEYS = np.array([0, -1, 2**63 - 1, -(2**63), 3, 4, 5, 6, 7], np.int64)
"""Each of up to three shards holds some."""
PUSHES_MAX = 24
"""Most pushes of one writer: sums of their powers of two are exact in float32."""
SOME = 0.4
"""Share of the calls that take only some keys."""
DELETES = 0.2
"""Before so many of a client's calls it deletes rows, where it does."""


class RowKey(NamedTuple):
    """One key, as calls name it."""

    id: int
    """Its number in `KEYS`."""
    group_name: str = NAME


class RowForm(Protocol):
    """How a row tells which pushes are in it.

    Attributes:
        dim: elements of a row.
        push, pull: codecs of the table.
    """

    dim: int
    push: Codec | None
    pull: Codec | None

    def gradients(self, numbers: Sequence[int], push: Pushed) -> Array:
        """What one push adds to the rows of these keys, by halves: [n, dim]."""
        ...

    def row(self, number: int, values: Array) -> Row:
        """What the row of a key says."""
        ...

    def mask(self, values: Array) -> tuple[int, ...]:
        """Which pushes a row says are in it, at a glance: masks by writer."""
        ...


class CountingRows:
    """A row is one tile of `Counting`, and an element that tells whose it is: each push adds the
    key's number + 1.

    Args:
        writers: that there may be.
    """

    push: Codec | None = None
    pull: Codec | None = None

    def __init__(self, writers: int) -> None:
        self._tiles = Counting(writers)
        self.dim = self._tiles.tile + 1

    def gradients(self, numbers: Sequence[int], push: Pushed) -> Array:
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        values = np.zeros((len(numbers), self.dim), np.float32)
        values[:, 2 * push.writer] = 0.5
        values[:, 2 * push.writer + 1] = 2.0 ** (push.number - 1)
        values[:, -1] = 0.5 * (np.array(numbers) + 1)
        return values

    def row(self, number: int, values: Array) -> Row:
        row = self._tiles.read(values[:-1], 0)
        own = float(values[-1]) == (number + 1) * sum(row.counts)
        return row._replace(sound=row.sound and own)

    def mask(self, values: Array) -> tuple[int, ...]:
        return self._tiles.glance(values[:-1], 0)


class Rows(Parameters):
    """A table whose rows tell which pushes are in them.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.

    Args:
        form: what its rows hold.
        options: of the table.
    """

    group = NAME
    keyed = True

    def __init__(self, form: RowForm, options: TableOptions | None = None) -> None:
        self.form = form
        self.blocks = {NAME: (Piece(NAME, (form.dim,)),)}
        options = TableOptions(Zeros()) if options is None else options
        self.table = TableSpec(form.dim, "float32", 0, options.to_spec())
        self._chances: dict[int, Random] = {}
        """Draws by writer: whether it deletes rows, and which."""
        self._deleted: dict[int, frozenset[int]] = {}
        """Numbers, by writer, of the keys that it is about to delete."""

    def prepare(self) -> None:
        load_table(self.rule, row_layout(self.rule, self.form.dim, "float32"))

    # --- clients ------------------------------------------------------------------------

    def placing(self, client: SimulatedClient, name: str, placing: PlaceBlock) -> PlaceBlock:
        own, push, pull = placing.consistency, self.form.push, self.form.pull
        return structs.replace(
            placing,
            rule=described_by(self.rule, rows=True),
            consistency=client.cluster.described if own is None else own,
            table=self.table,
            push=None if push is None else codec_spec(push),
            pull=None if pull is None else codec_spec(pull),
        )

    def first_values(self, client: SimulatedClient, block: Block) -> Sequence[Slot]:
        return []

    def prepare_calls(self, client: SimulatedClient) -> None:
        """Let it delete rows, where clients do."""
        if not client.cluster.scenario.deletes or client.left <= 0:
            return
        seed, writer = client.cluster.seed, client.writer
        chance = self._chances.setdefault(writer, Random(f"deletes {seed} {writer}"))
        if chance.random() < DELETES:
            self._deleted[writer] = frozenset(chance.sample(range(KEYS.size), 3))
            client.make(lambda: self._delete(client))

    def _delete(self, client: SimulatedClient) -> None:
        keys = KEYS[sorted(self._deleted[client.writer])]
        named = lay_named(client.exchange, Delete, client.block_of(NAME), keys)
        client.steps.finish("assign", named.requests, None, [named.slot])

    def record_requests(
        self, client: SimulatedClient, requests: Sequence[ShardRequest | None]
    ) -> None:
        if isinstance(requests[0], Delete):
            history = client.cluster.histories[NAME]
            keys = self._deleted[client.writer]
            deletion = Deletion(client.writer, history.next(), keys)
            history.deletions.append(deletion)
            for shard in client.exchange.shards:
                key = (client.writer, shard.number, shard.session.last + 1)
                client.cluster.deletion_of[key] = deletion

    def every(self, client: SimulatedClient) -> list[Any]:
        """All keys, or some."""
        draw = client.cluster.random.random
        keys = [RowKey(number) for number in range(KEYS.size)]
        if draw() >= SOME:
            return keys
        return [key for key in keys if draw() < 0.5] or keys

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        """Each key comes twice, with a half."""
        pushes, pulls = [], []
        if step.which is not None:
            numbers = [key.id for key in step.push] * 2
            values = self.form.gradients(numbers, step.which)
            if step.spoiled:
                values[slice(None) if client.each_shard_judges() else -1, -1] = np.nan
            pushes.append(lay_push(client.exchange, parts.block, KEYS[numbers], values, None))
        if step.pull:
            links, (keys, _) = client.exchange, asked_for(client, step.pull)
            pulls.append(lay_pull(links, parts.block, keys, grouped=not links.shared))
        return structs.replace(parts, row_pushes=pushes, row_pulls=pulls, leased=True)

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        owners = shard_of(KEYS, len(client.exchange.shards))
        for read in parts.row_pulls:
            if read.block.row_codecs is not None:
                decode_rows(client.exchange, read, exact=True)
            rows = np.frombuffer(read.slot.bytes, np.float32, math.prod(read.shape), read.start)
            numbers = asked_for(client, pull)[1]
            for key, row in zip(pull, rows.reshape(read.shape)[numbers], strict=True):
                part = Part(key.id, int(owners[key.id]))
                call.reads[part] = self.form.row(key.id, row)

    # --- shards -------------------------------------------------------------------------

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        """All keys that this shard is to hold, with a row or not; and others, which are unsound."""
        assert isinstance(block, KeyedBlock)
        strays = set(_keys_in(block)) - {int(KEYS[number]) for number in _own(shard, shards)}
        found = [(n, self.form.row(n, row)) for n, row in self.values(block, shard, shards)]
        return [(n, row._replace(sound=row.sound and not strays)) for n, row in found]

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        return [(n, self.form.mask(row)) for n, row in self.values(block, shard, shards)]

    def bytes_of(self, block: ShardBlock | KeyedBlock) -> bytes:
        out = np.empty((KEYS.size, self.form.dim), np.float32)
        _look(block, KEYS, out)
        return out.tobytes()

    def values(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Array]]:
        """The rows of the keys that a shard holds, with the keys' numbers."""
        own = _own(shard, shards)
        out = np.empty((own.size, self.form.dim), np.float32)
        _look(block, KEYS[own], out)
        return list(zip(own.tolist(), out, strict=True))


def asked_for(client: SimulatedClient, pull: Sequence[Any]) -> tuple[Array, Array]:
    """The keys of a read as `lay_pull` takes them, and the number of each row among them."""
    keys = KEYS[[key.id for key in pull]]
    return by_shard(keys, np.arange(keys.size), len(client.exchange.shards))


def _own(shard: int, shards: int) -> Array:
    """Numbers of the keys that a shard holds."""
    return np.flatnonzero(shard_of(KEYS, shards) == shard)


def _look(block: ShardBlock | KeyedBlock, keys: Array, out: Array) -> None:
    """Read rows and leave no trace."""
    assert isinstance(block, KeyedBlock)
    taken = block.store.take(keys, block.clock, Purpose.READ)
    block.store.read(taken.rows, keys, out)


def _keys_in(block: KeyedBlock) -> list[int]:
    """All keys that have a row."""
    found, cursor = list[int](), 0
    while cursor >= 0:
        keys, _, cursor = block.store.scan(cursor, 1024)
        found += keys.tolist()
    return found


def table(setting: Setting) -> Workload:
    """A table."""
    return Workload(Rows(CountingRows(setting.writers)))


def table_beside_tensors(setting: Setting) -> Workload:
    """Tensors, and a table as the second group: one call pushes to both, as of
    `worker.optimizer`. `Scenario.second` is the policy of the table."""
    rule = counting_rule(setting.scenario.policies)
    return Workload(Counting(setting.writers, rule), Rows(CountingRows(setting.writers)))

"""Rows that codecs encode, in a simulated cluster: what was pushed to each is there, once.

As in `row_counting` a row tells which pushes it holds, in a form that codecs of rows leave whole:
each number stands alone in `BLOCK` elements, which a codec encodes together, and is their sum. The
last elements have gradients that codecs round. What a client's encoder has made of these is known
here; so a row has to be the sum of that over the pushes that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client.row_encoding import RowEncoder
from paramserve.client.row_slots import RowPull, RowPush, lay_pull
from paramserve.client.step_parts import StepParts
from paramserve.codecs.base import Codec
from paramserve.codecs.built_in import BFloat16, Float16, Int4, Int8, Sign
from paramserve.codecs.registry import spec
from paramserve.compiling import load_codecs
from paramserve.config import ConsistencySpec
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.core.table.parts import gradient_at
from paramserve.messages import Joined, Piece, PlaceBlock, TableSpec
from paramserve.testing.checkers import Violation
from paramserve.testing.client import GroupStep
from paramserve.testing.counting import Counting, Pushed
from paramserve.testing.history import Row
from paramserve.testing.row_counting import (
    KEYS,
    NAME,
    RowCounting,
    RowKey,
    RowsClient,
)
from paramserve.testing.scripts import SimulatedReader, SimulatedWorker
from paramserve.testing.simulated import SimulatedCluster, rerun

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BLOCK = 8
"""Elements that a codec encodes together."""
ROUNDED = 3 * BLOCK
"""Elements of a row whose gradients codecs round."""
PUSHES: tuple[Codec, ...] = (BFloat16(), Float16(), Int8(BLOCK), Int4(BLOCK), Sign(BLOCK))
PULLS: tuple[Codec, ...] = PUSHES
PUSHES_MAX = 10
"""Of one writer: float16 holds sums of their powers of two."""
OFF_MAX = 1e-3
"""How far a number that was encoded may be off, in parts of itself and of 1."""


class EncodedRowCounting(RowCounting):
    """Rows that are encoded.

    Attributes:
        push, pull: the codecs of a run.
        made: by writer, push and key, what the client's encoder has made of the gradient, [dim].
    """

    def __init__(self, writers: int) -> None:
        self.writers = writers
        self.numbers = 2 * writers + 1
        self.dim = self.numbers * BLOCK + ROUNDED
        self.blocks = {NAME: (Piece(NAME, (self.dim,)),)}
        self.table = TableSpec(self.dim, "float32", 0, TableOptions(Zeros()).to_spec())
        self.push: Codec = PUSHES[0]
        self.pull: Codec = PULLS[0]
        self.made: dict[tuple[int, int, int], Floats] = {}

    def prepare(self) -> None:
        super().prepare()
        load_codecs()

    def draw(self, seed: int) -> None:
        """Choose the codecs of a run."""
        random = Random(f"codecs of rows {seed}")
        self.push = replace(PUSHES[seed % len(PUSHES)], even_local=random.random() < 0.5)
        self.pull = random.choice(PULLS)

    def gradients(self, chosen: Sequence[RowKey], push: Pushed) -> tuple[Array, Array]:
        """Keys [2 n] and gradients [2 n, dim] of one push: each key comes twice, with a half."""
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        numbers = [key.id for key in chosen]
        values = np.zeros((len(numbers), self.dim), np.float32)
        values[:, 2 * push.writer * BLOCK] = 0.5
        values[:, (2 * push.writer + 1) * BLOCK] = 2.0 ** (push.number - 1)
        values[:, 2 * self.writers * BLOCK] = 0.5 * (np.array(numbers) + 1)
        drawn = np.random.default_rng((push.writer, push.number))
        values[:, -ROUNDED:] = drawn.normal(size=(KEYS.size, ROUNDED))[numbers]
        return KEYS[numbers * 2], np.concatenate([values, values])

    def row(self, number: int, values: Array) -> Row:
        """What the row of a key says."""
        sums = values[: self.numbers * BLOCK].astype(np.float64).reshape(-1, BLOCK).sum(1)
        whole = np.rint(sums)
        sound = bool((np.abs(sums - whole) <= OFF_MAX * np.maximum(whole, 1.0)).all())
        found = [int(each) if 0 <= each < 2.0**31 else 0 for each in whole.tolist()]
        counts, pushes = tuple(found[:-1:2]), tuple(found[1::2])
        own = found[-1] == (number + 1) * sum(counts)
        return Row(counts, pushes, sound and own)

    def glance(self, values: Array, low: int) -> tuple[int, ...]:
        return self.row(0, values).pushes

    def masks(self, block: Any, shard: int, shards: int) -> list[tuple[int, tuple[int, ...]]]:
        return [(n, self.row(n, row).pushes) for n, row in self._rows(block, shard, shards)]

    def rows_of(self, block: KeyedBlock, shard: int, shards: int) -> list[tuple[int, Array]]:
        """The rows of the keys that a shard holds, with the keys' numbers."""
        return self._rows(block, shard, shards)

    @property
    def reads_tell(self) -> bool:
        """Whether rows that the codec of pulls has rounded say which pushes they hold."""
        return not isinstance(self.pull, BFloat16)


class EncodedRowsClient(RowsClient):
    """A client that pushes to and reads encoded rows of a table."""

    row_encoder: RowEncoder

    @property
    def rows(self) -> EncodedRowCounting:
        assert isinstance(self.cluster.workload, EncodedRowCounting)
        return self.cluster.workload

    def _begin_steps(self, joined: Joined) -> None:
        super()._begin_steps(joined)
        self.row_encoder = RowEncoder(self.rank, self.exchange)

    def _placing_table(self, policy: ConsistencySpec) -> PlaceBlock:
        placing = super()._placing_table(policy)
        return structs.replace(placing, push=spec(self.rows.push), pull=spec(self.rows.pull))

    def _parts(self, step: GroupStep) -> StepParts:
        parts = super()._parts(step)
        pushes = [self._captured(push, step) for push in parts.row_pushes]
        pulls = [self._asked(pull, step) for pull in parts.row_pulls]
        return structs.replace(parts, row_pushes=pushes, row_pulls=pulls)

    def _captured(self, push: RowPush, step: GroupStep) -> RowPush:
        """As `client.keyed.Keyed` does; what comes of it is noted."""
        codecs = push.block.row_codecs
        assert codecs is not None
        encodes = push.bad < 0 and not (self.exchange.shared and not codecs.push_even_local)
        made = self.row_encoder.encoded(push) if encodes else push
        assert step.which is not None
        for header in made.headers:
            offset = header.offset - made.slot.offset
            if header.extent < 0:
                data = made.slot.bytes[offset : offset - header.extent]
                keys, values = codecs.read_gradient(data.copy())
            else:
                keys, values = gradient_at(made.slot.bytes, offset, header.extent, codecs.dim)
            for key, row in zip(keys.tolist(), values, strict=True):
                self.rows.made[self.writer, step.which.number, key] = row.copy()
        return made

    def _asked(self, pull: RowPull, step: GroupStep) -> RowPull:
        """The same read, of rows as they are where rounded ones would not tell, and sometimes."""
        exact = not self.rows.reads_tell or self.cluster.random.random() < 0.3
        if not exact:
            return pull
        keys = KEYS[[key.id for key in step.pull]]
        create = any(place.keys.create for place in pull.places if place.keys is not None)
        self.exchange.give_back([pull.slot])
        return lay_pull(self.exchange, pull.block, keys, create=create, exact=True)


class EncodedRowsWorker(EncodedRowsClient, SimulatedWorker):
    """Steps through its clocks, with encoded rows."""


class EncodedRowsReader(EncodedRowsClient, SimulatedReader):
    """Belongs to no rank, and reads and pushes encoded rows."""


class SimulatedEncodedTables(SimulatedCluster):
    """A simulated cluster whose clients train a table with codecs, by the seed.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.
    """

    worker_type = EncodedRowsWorker
    reader_type = EncodedRowsReader
    workload_type = EncodedRowCounting
    replayed_by = "paramserve.testing.encoded_rows.replay"

    def _new_workload(self) -> Counting:
        workload = super()._new_workload()
        assert isinstance(workload, EncodedRowCounting)
        workload.draw(self.seed)
        return workload

    def check(self) -> None:
        super().check()
        wrong = rows_are_what_was_encoded(self)
        if wrong:
            assert isinstance(self.workload, EncodedRowCounting)
            codecs = f"{self.workload.push!r} and {self.workload.pull!r}"
            found = [f"rows_are_what_was_encoded: {text}" for text in wrong[:8]]
            raise Violation("\n  ".join([f"{self.again}, with {codecs}", *found]))


def rows_are_what_was_encoded(cluster: SimulatedEncodedTables) -> list[str]:
    """Each row is the sum of what clients' encoders have made of the gradients that it holds."""
    wrong = []
    workload, shards = cluster.workload, len(cluster.servers)
    assert isinstance(workload, EncodedRowCounting)
    for server in cluster.servers:
        for block in server.shard.blocks.values():
            assert isinstance(block, KeyedBlock)
            for number, held in workload.rows_of(block, server.number, shards):
                row = workload.row(number, held)
                wanted, sizes = np.zeros(held.size), np.ones(held.size)
                for writer, mask in enumerate(row.pushes):
                    for push in range(mask.bit_length()):
                        if mask >> push & 1:
                            made = workload.made[writer, push, int(KEYS[number])].astype(float)
                            wanted, sizes = wanted + made, sizes + np.abs(made)
                off = np.abs(held - wanted)
                if (off > 1e-6 * sizes).any():
                    at = int((off / sizes).argmax())
                    wrong.append(
                        f"key {KEYS[number]} on shard {server.number}: element {at} is {held[at]}, "
                        f"and what was encoded of its {sum(row.counts)} pushes differs by {off[at]}"
                    )
    return wrong


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed of a table with codecs again; else as `paramserve.testing.replay`."""
    return rerun(SimulatedEncodedTables, seed, log, **options)

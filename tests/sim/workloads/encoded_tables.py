"""Rows that codecs encode, in a simulated cluster: what was pushed to each is there, once.

As in `tables` a row tells which pushes it holds, in a form that codecs of rows leave whole:
each number stands alone in `BLOCK` elements, which a codec encodes together, and is their sum. The
last elements have gradients that codecs round. What a client's encoder has made of these is known
here; so a row has to be the sum of that over the pushes that it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import structs
from tests.sim.workloads.tables import KEYS, NAME, Rows, asked_for

from paramserve.client.row_encoding import RowEncoder
from paramserve.client.row_slots import RowPull, RowPush, lay_pull
from paramserve.client.step_parts import StepParts
from paramserve.codecs.base import Codec
from paramserve.codecs.built_in import BFloat16, Float16, Int4, Int8, Sign
from paramserve.compiling import load_codecs
from paramserve.core.table.parts import gradient_at
from paramserve_testing.history import Row
from paramserve_testing.workload import GroupStep, Parameters, Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

BLOCK = 8
"""Elements that a codec encodes together."""
ROUNDED = 3 * BLOCK
"""Elements of a row whose gradients codecs round."""
PUSHES: tuple[Codec, ...] = (BFloat16(), Float16(), Int8(BLOCK), Int4(BLOCK), Sign(BLOCK))
PULLS: tuple[Codec, ...] = PUSHES
PUSHES_MAX = 10
"""Most pushes of one writer: float16 holds sums of their powers of two."""
OFF_MAX = 1e-3
"""How far a number that was encoded may be off, in parts of itself and of 1."""


class EncodedForm:
    """Rows that are encoded, by codecs that the seed chooses."""

    def __init__(self, writers: int, seed: int) -> None:
        self._writers = writers
        self._numbers = 2 * writers + 1
        self.dim = self._numbers * BLOCK + ROUNDED
        random = Random(f"codecs of rows {seed}")
        even_local = random.random() < 0.5
        self.push: Codec | None = replace(PUSHES[seed % len(PUSHES)], even_local=even_local)
        self.pull: Codec | None = random.choice(PULLS)

    def gradients(self, numbers: Sequence[int], push: Pushed) -> Array:
        assert push.number < PUSHES_MAX, "the mask would lose exactness"
        values = np.zeros((len(numbers), self.dim), np.float32)
        values[:, 2 * push.writer * BLOCK] = 0.5
        values[:, (2 * push.writer + 1) * BLOCK] = 2.0 ** (push.number - 1)
        values[:, 2 * self._writers * BLOCK] = 0.5 * (np.array(numbers) + 1)
        drawn = np.random.default_rng((push.writer, push.number))
        values[:, -ROUNDED:] = drawn.normal(size=(KEYS.size, ROUNDED))[numbers]
        return values

    def row(self, number: int, values: Array) -> Row:
        sums = values[: self._numbers * BLOCK].astype(np.float64).reshape(-1, BLOCK).sum(1)
        whole = np.rint(sums)
        sound = bool((np.abs(sums - whole) <= OFF_MAX * np.maximum(whole, 1.0)).all())
        found = [int(each) if 0 <= each < 2.0**31 else 0 for each in whole.tolist()]
        counts, pushes = tuple(found[:-1:2]), tuple(found[1::2])
        own = found[-1] == (number + 1) * sum(counts)
        return Row(counts, pushes, sound and own)

    def mask(self, values: Array) -> tuple[int, ...]:
        return self.row(0, values).pushes

    @property
    def reads_tell(self) -> bool:
        """Whether rows that the codec of pulls has rounded say which pushes they hold."""
        return not isinstance(self.pull, BFloat16)


class EncodedRows(Parameters):
    """What clients encode of the rows of a table, which they push and read besides.

    Attributes:
        encoded: by writer, push and key, what the client's encoder has made of the gradient, [dim].
    """

    group = NAME

    def __init__(self, rows: Rows, form: EncodedForm) -> None:
        self._rows, self._form = rows, form
        self.encoded: dict[tuple[int, int, int], Floats] = {}
        self._encoders: dict[int, RowEncoder] = {}
        """Encoder of each writer."""

    def prepare(self) -> None:
        load_codecs()

    def enter(self, client: SimulatedClient) -> None:
        self._encoders[client.writer] = RowEncoder(client.rank, client.exchange)

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        pushes = [self._captured(client, push, step.which) for push in parts.row_pushes]
        pulls = [self._asked(client, pull, step) for pull in parts.row_pulls]
        return structs.replace(parts, row_pushes=pushes, row_pulls=pulls)

    def _captured(self, client: SimulatedClient, push: RowPush, which: Pushed | None) -> RowPush:
        """Capture rows as `client.keyed.Keyed` does, and note the result."""
        codecs = push.block.row_codecs
        assert codecs is not None
        assert which is not None
        encodes = push.bad < 0 and not (client.exchange.shared and not codecs.push_even_local)
        made = self._encoders[client.writer].encoded(push) if encodes else push
        for header in made.headers:
            offset = header.offset - made.slot.offset
            if header.encoded_bytes:
                data = made.slot.bytes[offset : offset + header.encoded_bytes]
                keys, values = codecs.read_gradient(data.copy())
            else:
                keys, values = gradient_at(made.slot.bytes, offset, header.rows, codecs.dim)
            for key, row in zip(keys.tolist(), values, strict=True):
                self.encoded[client.writer, which.number, key] = row.copy()
        return made

    def _asked(self, client: SimulatedClient, pull: RowPull, step: GroupStep) -> RowPull:
        """Ask for rows as they are where rounded ones would not tell, and sometimes."""
        exact = not self._form.reads_tell or client.cluster.random.random() < 0.3
        if not exact:
            return pull
        keys = asked_for(client, step.pull)[0]
        client.exchange.give_back([pull.slot])
        return lay_pull(client.exchange, pull.block, keys, grouped=True, exact=True)

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        codecs = f"with {self._form.push!r} and {self._form.pull!r}"
        wrong = [f"{text}, {codecs}" for text in self.rows_are_what_was_encoded(cluster)]
        return {"rows_are_what_was_encoded": wrong}

    def rows_are_what_was_encoded(self, cluster: SimulatedCluster) -> list[str]:
        """Each row is the sum of what clients' encoders have made of the gradients that it
        holds."""
        wrong = []
        for server in cluster.servers:
            for block in server.shard.blocks.values():
                for number, held in self._rows.values(block, server.number, len(cluster.servers)):
                    row = self._form.row(number, held)
                    wanted, sizes = np.zeros(held.size), np.ones(held.size)
                    for writer, push in row.each():
                        made = self.encoded[writer, push, int(KEYS[number])].astype(float)
                        wanted, sizes = wanted + made, sizes + np.abs(made)
                    off = np.abs(held - wanted)
                    if (off > 1e-6 * sizes).any():
                        at = int((off / sizes).argmax())
                        wrong.append(
                            f"key {KEYS[number]} on shard {server.number}: element {at} is "
                            f"{held[at]}, and what was encoded of its {sum(row.counts)} pushes "
                            f"differs by {off[at]}"
                        )
        return wrong


def encoded_table(setting: Setting) -> Workload:
    """A table with codecs, which the seed chooses."""
    form = EncodedForm(setting.writers, setting.seed)
    rows = Rows(form)
    return Workload(rows, EncodedRows(rows, form))

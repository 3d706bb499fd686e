"""Gradients that codecs encode, in a simulated cluster: nothing of them is lost or counts twice.

Beside the blocks of `Counting`, whose values tell which pushes are in them, each push has gradients
for blocks with a codec. A shard applies all gradients of a step or none. So the counting blocks say
which gradients a shard has applied, and what the blocks with a codec hold there must be the sum of
these less what each client has left out, its residual.

These blocks are pulled as what has changed: what a client has read of them must be, bit by bit,
what their server has told, and the newest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import structs

from paramserve.client.encoding import Encoded, Encoder
from paramserve.client.links import Slot
from paramserve.client.step_parts import BlockPush, StepParts
from paramserve.client.ticket import Outcome
from paramserve.codecs.base import Codec
from paramserve.codecs.built_in import Int2, Int4, Int8, Sign
from paramserve.codecs.delta import Delta
from paramserve.codecs.registry import spec
from paramserve.codecs.sparse import TopK
from paramserve.compiling import load_codecs
from paramserve.core.block import ShardBlock
from paramserve.core.client_session import Operation
from paramserve.core.partition import SPLIT_BYTES_MIN, Block
from paramserve.core.shard import Shard
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import BlockSpec, Done, Joined, Piece, PlaceBlock
from paramserve.rules import Add
from paramserve.rules.compiled import compiled
from paramserve.testing import delta_pulls
from paramserve.testing.checkers import Violation
from paramserve.testing.counting import Counting
from paramserve.testing.delta_pulls import Told, WatchedStream, digest, judge_readers
from paramserve.testing.history import Call, Part, Row
from paramserve.testing.scripts import ScriptedClient, SimulatedReader, SimulatedWorker
from paramserve.testing.simulated import SimulatedCluster, rerun
from paramserve.testing.workload import GroupStep, Pushed, Setting, Workload

Floats = npt.NDArray[np.float32]
Exact = npt.NDArray[np.float64]

CODECS: tuple[Callable[..., Codec], ...] = (
    lambda **options: Int8(16, **options),
    lambda **options: Int8(rounding="stochastic", **options),
    lambda **options: Int4(8, **options),
    lambda **options: Int2(16, **options),
    lambda **options: Sign(32, **options),
    lambda **options: TopK(0.02, **options),
    lambda **options: TopK(0.3, index="plain", **options),
)
STREAMS = 1 << 20
"""Ids of delta streams of one attempt to define a block."""
LARGEST = 8
"""Of a gradient's elements, which are whole numbers."""
ROUNDING = 1e-6
"""How far a sum may be off for each gradient in it, in parts of `LARGEST`: ten times what float32
rounds. A residual that is lost or counted twice is off by far more: the finest codec leaves out up
to 1/254 of the largest.
"""


class EncodedCounting(Counting):
    """Counting blocks, and blocks with a codec beside them.

    Attributes:
        codecs, pulls: of gradients and of values, by name of the block.
    """

    rule = Add()

    def __init__(self, writers: int) -> None:
        super().__init__(writers)
        self.codecs: dict[str, Codec] = {}
        self.pulls: dict[str, Codec] = {}
        elements = SPLIT_BYTES_MIN // 4
        self.encoded: dict[str, tuple[Piece, ...]] = {
            "small": (Piece("small.a", (5, 7)), Piece("small.b", (40,))),
            "split": (Piece("split.a", (3, 100)), Piece("split.b", (elements,))),
        }
        self.blocks = {**self.blocks, **self.encoded}

    def prepare(self) -> None:
        super().prepare()
        load_codecs()
        compiled().prepare(np.dtype(np.float32))
        self.rule.prepare(np.dtype(np.float32))

    def draw(self, seed: int) -> None:
        """Choose the codecs of a run."""
        random = Random(f"codecs {seed}")
        even_local = random.random() < 0.7
        for name in self.encoded:
            self.codecs[name] = random.choice(CODECS)(even_local=even_local)
            self.pulls[name] = delta_pulls.drawn(random)

    def gradient(self, block: Block, push: Pushed) -> tuple[Floats, tuple[int, ...] | None]:
        """The gradient of one push for a block with a codec: [size], and its active pieces."""
        drawn = np.random.default_rng((block.id, push.writer, push.number))
        values = drawn.integers(-LARGEST, LARGEST, block.size, endpoint=True).astype(np.float32)
        active = ((0,), (1,), None, None, None)[drawn.integers(5)]
        if active is not None:
            (gone,) = {0, 1} - set(active)
            values[block.starts[gone] : block.starts[gone + 1]] = 0.0
        return values, active

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        return [] if _is_encoded(block) else super().rows(block, shard, shards)

    def masks(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, tuple[int, ...]]]:
        return [] if _is_encoded(block) else super().masks(block, shard, shards)


def _is_encoded(block: ShardBlock | KeyedBlock) -> bool:
    return isinstance(block, ShardBlock) and block.spec.push is not None


class WatchedEncoder(Encoder):
    """The shipping encoder, which remembers what it cannot know the end of.

    Attributes:
        open: gradients that are on their way, and the changes of the residual that they made.
        unsure: those whose client was told that it is not known what was applied, with the shards
            that have not said so.
        pushes: by gradient, the number of its push.
    """

    def __init__(self, rank: int, take: Callable[[Sequence[int]], list[Slot]]) -> None:
        super().__init__(rank, take)
        self.open: dict[Encoded, Floats] = {}
        self.unsure: list[tuple[Encoded, Floats, frozenset[int]]] = []
        self.pushes: dict[Encoded, int] = {}
        self.planned: dict[BlockPush, int] = {}

    def encode(self, push: BlockPush, slot: Slot, taken: list[Slot], clock: int = 0) -> Encoded:
        encoded = super().encode(push, slot, taken, clock)
        self.pushes[encoded] = self.planned.pop(push)
        return encoded

    def whole(self, push: BlockPush, taken: list[Slot]) -> Encoded | None:
        number, encoded = self.planned.pop(push), super().whole(push, taken)
        if encoded is not None:
            self.pushes[encoded] = number
        return encoded

    def sent(self, encoded: Sequence[Encoded], seq: int = 0) -> None:
        for each in encoded:
            if each.change is not None:
                self.open[each] = each.change.copy()
        super().sent(encoded, seq)

    def answered(self, encoded: Sequence[Encoded], operation: Operation) -> None:
        for each in encoded:
            change = self.open.pop(each, None)
            if change is not None and operation.error is not None:
                told = {s for s, r in operation.replies.items() if isinstance(r, Done)}
                untold = frozenset(set(range(len(each.block.spec.cuts) - 1)) - told)
                self.unsure.append((each, change, untold))
        super().answered(encoded, operation)


class EncodedClient(ScriptedClient):
    """A client that pushes to blocks with a codec whenever it pushes to the widest counting one."""

    @property
    def every(self) -> list[Any]:
        """All counting blocks: of the others each push is beside one of these."""
        return [each for each in self.blocks.values() if each.push_codec is None]

    @property
    def encoded(self) -> EncodedCounting:
        """What it pushes."""
        (found,) = self.cluster.workload.parameters
        assert isinstance(found, EncodedCounting)
        return found

    @property
    def encoder(self) -> WatchedEncoder | None:
        """None: it has never come as far as to have one."""
        steps = getattr(self, "steps", None)
        encoder = None if steps is None else steps.encoder
        assert encoder is None or isinstance(encoder, WatchedEncoder)
        return encoder

    def _begin_steps(self, joined: Joined) -> None:
        super()._begin_steps(joined)
        self.steps.encoder = WatchedEncoder(self.rank, self.exchange.take_each)

    def _placing(self, name: str) -> PlaceBlock:
        placing = super()._placing(name)
        if name not in self.encoded.encoded:
            return placing
        push, pull = spec(self.encoded.codecs[name]), spec(self.encoded.pulls[name])
        return structs.replace(placing, dtype="float32", push=push, pull=pull)

    def _parts(self, step: GroupStep) -> StepParts:
        parts = super()._parts(step)
        if step.pull:
            read = [self.blocks[name] for name in self.encoded.encoded]
            parts = structs.replace(parts, pull=[*parts.pull, *read])
        widest = self.blocks["wide"]
        if step.which is None or widest not in step.push:
            return parts
        assert self.encoder is not None
        more: list[tuple[BlockPush, Slot]] = []
        for name in self.encoded.encoded:
            block = self.blocks[name]
            slot = self.exchange.take(block.nbytes)
            values = slot.array(block)
            values[:], active = self.encoded.gradient(block, step.which)
            push = BlockPush(block, values, active)
            self.encoder.planned[push] = step.which.number
            more.append((push, slot))
        return structs.replace(parts, pushes=[*more, *parts.pushes])

    def _read(self, call: Call, outcome: Outcome, pull: Sequence[Any], parts: StepParts) -> None:
        super()._read(call, outcome, pull, parts)
        assert isinstance(self.cluster, SimulatedEncoded)
        for (number, shard), told in self.cluster.told.items():
            low, high = self.cluster.blocks[number].range(shard)
            if number in outcome.values and high > low:
                found = digest(outcome.values[number][low:high])
                if found not in told.by_position.values():
                    told.wrong.append(f"writer {self.writer} has read values that were not told")


class EncodedShard(Shard):
    """Remembers what it tells."""

    cluster: SimulatedEncoded

    def new_block(self, spec: BlockSpec, attempt: int) -> ShardBlock | KeyedBlock:
        block = super().new_block(spec, attempt)
        if isinstance(block, ShardBlock) and block.stream is not None:
            block.stream = self.cluster.watched(self.number, block)
        return block


class EncodedWorker(EncodedClient, SimulatedWorker):
    """Steps through its clocks, with gradients that are encoded."""


class EncodedReader(EncodedClient, SimulatedReader):
    """Belongs to no rank, and pushes gradients that are encoded."""


class SimulatedEncoded(SimulatedCluster):
    """A simulated cluster whose clients push gradients that codecs encode, by the seed.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.
    """

    worker_type = EncodedWorker
    reader_type = EncodedReader
    shard_type = EncodedShard
    replayed_by = "paramserve.testing.encoded.replay"

    def _new_workload(self, setting: Setting) -> Workload:
        self.told: dict[tuple[int, int], Told] = {}
        """By block and shard."""
        workload = EncodedCounting(setting.writers)
        workload.draw(setting.seed)
        return Workload(workload)

    def check(self) -> None:
        super().check()
        for invariant in (sums_are_those_of_the_gradients, readers_have_what_was_told):
            wrong = invariant(self)
            if wrong:
                used = (*self._encoding.codecs.values(), *self._encoding.pulls.values())
                found = [f"{invariant.__name__}: {text}" for text in wrong]
                raise Violation("\n  ".join([f"{self.again}, with {[*used]}", *found]))

    def new_shard(self, number: int) -> Shard:
        shard = super().new_shard(number)
        assert isinstance(shard, EncodedShard)
        shard.cluster = self
        return shard

    def watched(self, shard: int, block: ShardBlock) -> WatchedStream:
        """The stream of a block that a shard makes."""
        assert isinstance(block.pull_codec, Delta)
        told = self.told.setdefault((block.spec.block, shard), Told())
        random = Random(f"streams {self.seed} {shard} {block.spec.block} {block.attempt}")
        streams = count(STREAMS * (1 + block.attempt))
        return WatchedStream(block.pull_codec, block.size, streams, told, random)

    @property
    def _encoding(self) -> EncodedCounting:
        (found,) = self.workload.parameters
        assert isinstance(found, EncodedCounting)
        return found


def sums_are_those_of_the_gradients(cluster: SimulatedEncoded) -> list[str]:
    """What a shard holds is the sum of the gradients that it has applied, less the residuals of all
    clients, of those that have died, too.

    The residual of a client that died has what it had sent, which may not have been applied; of one
    that was fenced not what may have been. Here it is known which gradients these were.
    """
    wrong = []
    widest = [each for each in cluster.blocks.values() if each.pieces[0].name == "wide"]
    for block in cluster.blocks.values():
        for server in cluster.servers if block.push_codec is not None else ():
            found = server.shard.blocks.get(block.id)
            if isinstance(found, ShardBlock) and found.size:
                wrong += _judge(cluster, block, widest[0], server.number, found)
    return wrong


def readers_have_what_was_told(cluster: SimulatedEncoded) -> list[str]:
    """What clients have read, and the copies that they have, are bit by bit what a shard has told
    them at that position of its stream."""
    wrong = [
        f"block {block} on shard {shard}: {text}"
        for (block, shard), told in cluster.told.items()
        for text in told.wrong
    ]
    for client in cluster.clients:
        exchange = getattr(client, "exchange", None)
        if exchange is not None:
            wrong += judge_readers(exchange.payloads, cluster.told, f"writer {client.writer}")
    return wrong


def _judge(
    cluster: SimulatedEncoded, block: Block, widest: Block, shard: int, held: ShardBlock
) -> list[str]:
    """What is wrong with the values of one block on one shard."""
    low, high = block.range(shard)
    pushes = cluster.history.final[Part(widest.id, shard)].pushes
    wanted, applied = np.zeros(high - low, np.float64), 0
    for call in cluster.history.calls:
        there = call.push is not None and pushes[call.writer] >> call.push & 1
        if there and widest.id in call.blocks and call.push is not None:
            push = Pushed(call.writer, call.rank, call.push, call.clock)
            wanted += cluster._encoding.gradient(block, push)[0][low:high]
            applied += 1
    for client in cluster.clients:
        assert isinstance(client, EncodedClient)
        if client.encoder is not None:
            wanted -= _residual(client, client.encoder, block, shard, pushes[client.writer])
    off = np.abs(held.value - wanted)
    allowed = ROUNDING * LARGEST * max(applied, 1)
    if not (off > allowed).any():
        return []
    at = int(off.argmax())
    return [
        f"block {block.id} on shard {shard}: element {low + at} is {held.value[at]}, and {applied} "
        f"gradients less the residuals are {wanted[at]}"
    ]


def _residual(
    client: EncodedClient, encoder: WatchedEncoder, block: Block, shard: int, applied: int
) -> Exact:
    """What a client has left out of the gradients that a shard has applied."""
    low, high = block.range(shard)
    left = np.zeros(high - low, np.float64)
    residual = encoder.residual(block)
    if residual is not None:
        left += residual[low:high]
    for each, change in encoder.open.items():
        if each.block.id == block.id and not applied >> encoder.pushes[each] & 1:
            left -= change[low:high]
    if client.writer in client.cluster.history.ended:
        for each, change, untold in encoder.unsure:
            there = applied >> encoder.pushes[each] & 1
            if each.block.id == block.id and shard in untold and there:
                left += change[low:high]
    return left


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed with gradients that are encoded again; else as `paramserve.testing.replay`."""
    return rerun(SimulatedEncoded, seed, log, **options)

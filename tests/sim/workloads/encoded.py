"""Gradients that codecs encode, in a simulated cluster: nothing of them is lost or counts twice.

Beside the blocks of `Counting`, whose values tell which pushes are in them, each push has gradients
for blocks with a codec. A shard applies all gradients of a step or none. So the counting blocks say
which gradients a shard has applied, and what the blocks with a codec hold there must be the sum of
these less what each client has left out, its residual.

These blocks are pulled as what has changed: what a client has read of them must be, bit by bit,
what their server has told, and the newest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from msgspec import structs
from tests.sim.workloads import delta_pulls
from tests.sim.workloads.delta_pulls import Told, WatchedStream, digest, judge_readers

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
from paramserve.core.partition import Block
from paramserve.core.table.block import KeyedBlock
from paramserve.messages import Done, Piece, PlaceBlock
from paramserve.rules.compiled import compiled
from paramserve_testing.counting import SPLIT_BYTES, Counting
from paramserve_testing.history import Call, Part
from paramserve_testing.workload import GroupStep, Parameters, Pushed, Setting, Workload

if TYPE_CHECKING:
    from paramserve_testing.client import SimulatedClient
    from paramserve_testing.process import ClientProcess
    from paramserve_testing.simulated import SimulatedCluster

Array = npt.NDArray[Any]
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
"""Largest of a gradient's elements, which are whole numbers."""
ROUNDING = 1e-6
"""How far a sum may be off for each gradient in it, in parts of `LARGEST`: ten times what float32
rounds. A residual that is lost or counted twice is off by far more: the finest codec leaves out up
to 1/254 of the largest.
"""


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

    def mark_sent(self, encoded: Sequence[Encoded], flush: int = 0) -> None:
        for each in encoded:
            if each.change is not None:
                self.open[each] = each.change.copy()
        super().mark_sent(encoded, flush)

    def answered(self, encoded: Sequence[Encoded], operation: Operation) -> None:
        for each in encoded:
            change = self.open.pop(each, None)
            if change is not None and operation.error is not None:
                known = operation.replies | operation.refused
                told = {
                    shard
                    for shard, reply in known.items()
                    if isinstance(reply, Done) or reply.applied == "yes"
                }
                untold = frozenset(set(range(len(each.block.spec.cuts) - 1)) - told)
                self.unsure.append((each, change, untold))
        super().answered(encoded, operation)


def encoder_of(client: ClientProcess) -> WatchedEncoder | None:
    """A client's encoder; None: it has never come as far as to have one."""
    steps = getattr(client, "steps", None)
    encoder = None if steps is None else steps.encoder
    assert encoder is None or isinstance(encoder, WatchedEncoder)
    return encoder


class EncodedTensors(Parameters):
    """Tensors with a codec, to which clients push whenever they push to the widest counting one.

    Its policies may not multiply gradients by anything: `Sync(reduce="sum")`, `Async()` and
    `BoundedStaleness`.

    Attributes:
        codecs, pulls: of gradients and of values, by name of the block, chosen by the seed.
        told: by block and shard, what a shard has told of the values.
    """

    def __init__(self, seed: int) -> None:
        elements = SPLIT_BYTES // 4
        self.blocks = {
            "small": (Piece("small.a", (5, 7)), Piece("small.b", (40,))),
            "split": (Piece("split.a", (3, 100)), Piece("split.b", (elements,))),
        }
        self._seed = seed
        random = Random(f"codecs {seed}")
        even_local = random.random() < 0.7
        self.codecs: dict[str, Codec] = {}
        self.pulls: dict[str, Codec] = {}
        for name in self.blocks:
            self.codecs[name] = random.choice(CODECS)(even_local=even_local)
            self.pulls[name] = delta_pulls.drawn(random)
        self.told: dict[tuple[int, int], Told] = {}

    def prepare(self) -> None:
        load_codecs()
        compiled().prepare(self.dtype)
        self.rule.prepare(self.dtype)

    # --- clients ------------------------------------------------------------------------

    def enter(self, client: SimulatedClient) -> None:
        client.steps.encoder = WatchedEncoder(client.rank, client.exchange.take_each)

    def placing(self, client: SimulatedClient, name: str, placing: PlaceBlock) -> PlaceBlock:
        push, pull = spec(self.codecs[name]), spec(self.pulls[name])
        return structs.replace(placing, push=push, pull=pull)

    def gradient(self, block: Block, push: Pushed) -> tuple[Floats, tuple[int, ...] | None]:
        """The gradient of one push, [size], and its active pieces."""
        drawn = np.random.default_rng((block.id, push.writer, push.number))
        values = drawn.integers(-LARGEST, LARGEST, block.size, endpoint=True).astype(np.float32)
        active = ((0,), (1,), None, None, None)[drawn.integers(5)]
        if active is not None:
            (gone,) = {0, 1} - set(active)
            values[block.starts[gone] : block.starts[gone + 1]] = 0.0
        return values, active

    def fill(self, slot: Array, block: Block, push: Pushed) -> tuple[int, ...] | None:
        slot[:], active = self.gradient(block, push)
        return active

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        own = [client.blocks[name] for name in self.blocks]
        pulls, pushes = [*parts.pull, *(own if step.pull else ())], [*parts.pushes]
        if step.which is not None and client.blocks["wide"] in step.push:
            encoder = encoder_of(client)
            assert encoder is not None
            more = [self.capture(client, block, step.which) for block in own]
            encoder.planned.update((push, step.which.number) for push, _ in more)
            pushes = more + pushes
        return structs.replace(parts, pushes=pushes, pull=pulls)

    def record(
        self,
        client: SimulatedClient,
        call: Call,
        outcome: Outcome,
        pull: Sequence[Any],
        parts: StepParts,
    ) -> None:
        for (number, shard), told in self.told.items():
            low, high = client.cluster.blocks[number].range(shard)
            if number in outcome.values and high > low:
                found = digest(outcome.values[number][low:high])
                if found not in told.by_position.values():
                    told.wrong.append(f"writer {client.writer} has read values that were not told")

    # --- shards -------------------------------------------------------------------------

    def watch(self, shard: int, block: ShardBlock | KeyedBlock) -> None:
        """Watch the stream of its values."""
        if not isinstance(block, ShardBlock) or block.stream is None:
            return
        assert isinstance(block.pull_codec, Delta)
        told = self.told.setdefault((block.spec.block, shard), Told())
        random = Random(f"streams {self._seed} {shard} {block.spec.block} {block.attempt}")
        streams = count(STREAMS * (1 + block.attempt))
        block.stream = WatchedStream(block.pull_codec, block.size, streams, told, random)

    # --- the end ------------------------------------------------------------------------

    def judge(self, cluster: SimulatedCluster) -> Mapping[str, Sequence[str]]:
        sums = self.sums_are_those_of_the_gradients(cluster)
        return {
            "sums_are_those_of_the_gradients": sums,
            "readers_have_what_was_told": self.readers_have_what_was_told(cluster),
        }

    def sums_are_those_of_the_gradients(self, cluster: SimulatedCluster) -> list[str]:
        """What a shard holds is the sum of the gradients that it has applied, less the residuals of
        all clients, of those that have died, too.

        The residual of a client that died has what it had sent, which may not have been applied; of
        one that was fenced not what may have been. Here it is known which gradients these were.
        """
        wrong = []
        for name, block, shard, values in self.held(cluster):
            pushes = cluster.history.final[Part(_widest(cluster).id, shard)].pushes
            wanted, applied = self.applied(cluster, block, shard, pushes)
            for client in cluster.clients:
                encoder = encoder_of(client)
                if encoder is not None:
                    ended = client.writer in cluster.history.ended
                    wanted -= _residual(encoder, block, shard, pushes[client.writer], ended)
            text = off_by(values, wanted, applied)
            if text:
                with_ = f"with {self.codecs[name]} and {self.pulls[name]}"
                wrong.append(f"block {block.id} on shard {shard}, {with_}: {text}")
        return wrong

    def held(self, cluster: SimulatedCluster) -> Iterator[tuple[str, Block, int, Floats]]:
        """What shards hold of each block: its name, the block, shard and values."""
        names = {pieces[0].name: name for name, pieces in self.blocks.items()}
        for block in cluster.blocks.values():
            for server in cluster.servers if block.pieces[0].name in names else ():
                part = server.shard.blocks.get(block.id)
                if isinstance(part, ShardBlock) and part.size:
                    yield names[block.pieces[0].name], block, server.number, part.value

    def applied(
        self, cluster: SimulatedCluster, block: Block, shard: int, pushes: Sequence[int]
    ) -> tuple[Exact, int]:
        """The sum of the gradients of some pushes on a shard, and how many these are.

        Args:
            pushes: masks by writer.
        """
        low, high = block.range(shard)
        widest, total, applied = _widest(cluster), np.zeros(high - low, np.float64), 0
        for call in cluster.history.calls:
            if call.push is None or widest.id not in call.blocks:
                continue
            if pushes[call.writer] >> call.push & 1:
                push = Pushed(call.writer, call.rank, call.push, call.clock)
                total += self.gradient(block, push)[0][low:high]
                applied += 1
        return total, applied

    def readers_have_what_was_told(self, cluster: SimulatedCluster) -> list[str]:
        """What clients have read, and the copies that they have, are bit by bit what a shard has
        told them at that position of its stream."""
        wrong = [
            f"block {block} on shard {shard}: {text}"
            for (block, shard), told in self.told.items()
            for text in told.wrong
        ]
        for client in cluster.clients:
            exchange = getattr(client, "exchange", None)
            if exchange is not None:
                wrong += judge_readers(exchange.decoder, self.told, f"writer {client.writer}")
        return wrong


def off_by(held: Floats, wanted: Exact, applied: int) -> str:
    """What is wrong with the values of a block; empty: nothing is."""
    off = np.abs(held - wanted)
    if not (off > ROUNDING * LARGEST * max(applied, 1)).any():
        return ""
    at = int(off.argmax())
    return (
        f"element {at} of the part is {held[at]}, and {applied} gradients less the residuals are "
        f"{wanted[at]}"
    )


def _widest(cluster: SimulatedCluster) -> Block:
    return next(each for each in cluster.blocks.values() if each.pieces[0].name == "wide")


def _residual(
    encoder: WatchedEncoder, block: Block, shard: int, applied: int, ended: bool
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
    if ended:
        for each, change, untold in encoder.unsure:
            there = applied >> encoder.pushes[each] & 1
            if each.block.id == block.id and shard in untold and there:
                left += change[low:high]
    return left


def encoded_tensors(setting: Setting) -> Workload:
    """Tensors that count, and tensors with codecs beside them, which the seed chooses."""
    return Workload(Counting(setting.writers), EncodedTensors(setting.seed))

"""Clusters whose gradients are encoded, that are lost and go on with the residuals of a checkpoint.

The clients send residuals as the shipping thread does, piece by piece, on connections of the
harness to the shipping servers; what comes between two pieces is up to the clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
from tests.sim.resumes import FAULTS, SimulatedResumes
from tests.sim.workloads.encoded import (
    LARGEST,
    ROUNDING,
    EncodedTensors,
    WatchedEncoder,
    encoder_of,
    off_by,
)

from paramserve.checkpoint.manifest import residual_path
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.shard_records import shard_records
from paramserve.client.encoding import Captured, Encoded
from paramserve.client.residuals import Piece, pieces
from paramserve.client.step_parts import StepParts
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError
from paramserve.messages import (
    Hello,
    Refused,
    ResidualKept,
    ResidualsWanted,
    decoder,
    encode,
)
from paramserve_testing import Counting, Scenario, Setting, Violation, Workload
from paramserve_testing.client import SimulatedClient
from paramserve_testing.history import Part
from paramserve_testing.network import Frame, Stream
from paramserve_testing.server import SimulatedServer
from paramserve_testing.workload import GroupStep

Floats = npt.NDArray[np.float32]

AFTERWARDS_S = 0.2
"""Between two checkpoints of a run that goes on."""

_decode_reply = decoder(ResidualKept | Refused).decode
_decode_wanted = decoder(ResidualsWanted).decode


class RemembersChanges(WatchedEncoder):
    """An encoder that remembers what each push left out.

    Attributes:
        changes: (block, number of the push, change), of all that were sent.
        begun: by block, what it began with.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.changes: list[tuple[int, int, Floats]] = []
        self.begun: dict[int, Floats] = {}

    def begin(self, block: Block, left: Floats) -> None:
        super().begin(block, left)
        self.begun[block.id] = left

    def sent(self, encoded: Sequence[Encoded], seq: int = 0) -> None:
        for each in encoded:
            if each.change is not None:
                self.changes.append((each.block.id, self.pushes[each], each.change.copy()))
        super().sent(encoded, seq)


class _Sending:
    """One client sends its residual to one server; a `transport.listener.Connection`."""

    kind = "unix"
    arenas: ClassVar[dict[int, Any]] = {}

    def __init__(self, client: SimulatedClient, server: SimulatedServer, left: Iterator[Piece]):
        self.hello = Hello("residuals", client.id, client.incarnation, client.rank)
        self._client, self._server, self._left = client, server, left
        self._open = False
        self._after(self._begin)

    def _after(self, action: Any) -> None:
        cluster = self._client.cluster
        cluster.clock.after(cluster.network.delay_s(), self._while_both_live, action)

    def _while_both_live(self, action: Any) -> None:
        if self._server not in self._client.cluster.servers:
            return
        if self._client.alive:
            action()
        else:
            self.close()

    def _begin(self) -> None:
        with suppress(ParamServeError):  # it is fenced
            hello = msgspec.structs.replace(self.hello, cluster=self._server.role.config.cluster)
            self._server.role.opened(self, hello)
            self._open = True
            self._next()

    def _next(self) -> None:
        message, part = next(self._left, (None, None))
        if message is None:
            self.close()
            return
        payload = None
        if part is not None:
            payload = np.zeros(-(-part.nbytes // 64) * 64, np.uint8)
            payload[: part.nbytes] = part.view(np.uint8)
        try:
            self._server.role.frame(self, encode(message), payload)
        except ParamServeError:
            self.close()

    def send(self, header: bytes, payload: Sequence[Any] = ()) -> None:
        """The server answers."""
        reply = _decode_reply(header)
        if isinstance(reply, ResidualKept) and reply.wanted:
            self._after(self._next)
        else:
            self._after(self.close)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._server.role.closed(self)


class SavedTensors(EncodedTensors):
    """Tensors with a codec, whose residuals are in checkpoints.

    Attributes:
        captures: by cut and rank, the writer whose residual was copied for it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.captures: dict[tuple[int, int], int] = {}
        self._fetched: set[tuple[int, int]] = set()
        """Writers and blocks whose residual was asked for."""

    def enter(self, client: SimulatedClient) -> None:
        encoder = RemembersChanges(client.rank, client.exchange.take_each)
        encoder.captured = partial(self._captured, client)
        client.steps.encoder = encoder

    def _feeding(self, client: SimulatedClient) -> list[Block]:
        return [client.blocks[name] for name in self.blocks if name in client.blocks]

    def _captured(self, client: SimulatedClient, captured: Captured) -> None:
        if client.rank >= 0:
            self.captures[captured.cut, client.rank] = client.writer
            for server in client.cluster.servers:
                _Sending(client, server, pieces(captured, self._feeding(client), server.number))

    def add(self, client: SimulatedClient, step: GroupStep, parts: StepParts) -> StepParts:
        for block in self._feeding(client) if client.rank >= 0 else ():
            if (client.writer, block.id) not in self._fetched:
                self._fetched.add((client.writer, block.id))
                self._fetch(client, block)
        return super().add(client, step, parts)

    def _fetch(self, client: SimulatedClient, block: Block) -> None:
        """Begin with what the servers have of the checkpoint."""
        found: Floats | None = None
        for server in client.cluster.servers:
            low, high = block.range(server.number)
            saved = server.role._residuals._saved
            if saved is None or high == low:
                continue
            if (block.group, client.rank) in server.shard.unclaimed:
                part = saved.read(block.id, client.rank, low, high - low).values
                server.shard.sessions.by_client[client.id].feeds_back = True
                if part is not None:
                    found = np.zeros(block.size, np.float32) if found is None else found
                    found[low:high] = part
        if found is not None:
            assert client.steps.encoder is not None
            client.steps.encoder.begin(block, found)


def saved_tensors(setting: Setting) -> Workload:
    return Workload(Counting(setting.writers), SavedTensors(setting.seed))


class HearsOfCuts(SimulatedClient):
    """A client that a server asks for its residuals."""

    def received(self, stream: Stream, frame: Frame) -> None:
        try:
            wanted = _decode_wanted(frame.header)
        except msgspec.MsgspecError:
            super().received(stream, frame)
            return
        encoder = encoder_of(self)
        if self.alive and encoder is not None:
            for client, last in wanted.clients:
                assert client == self.id
                encoder.cut_at(wanted.cut, last)


class SimulatedResidualResumes(SimulatedResumes):
    """Writes checkpoints all the time, is lost once, and goes on.

    Attributes:
        seen: how often what is judged has happened.
    """

    client_type = HearsOfCuts
    crash_s = 0.3

    def __init__(self, *arguments: Any, **options: Any) -> None:
        scenario: Scenario = arguments[1]
        # Else a part would have pushes that one of the shards before had dropped, and one not.
        self.same_servers = getattr(scenario.consistency, "drop_after", None) is not None
        self.seen: Counter[str] = Counter()
        self._cut = 0
        super().__init__(*arguments, **options)

    @property
    def tensors(self) -> SavedTensors:
        _, tensors = self.workload.parameters
        assert isinstance(tensors, SavedTensors)
        return tensors

    def _crash(self) -> None:
        plan = self.checkpoint_plan  # of what is written since, nothing is read
        self.checkpoint_plan = msgspec.structs.replace(plan, every_s=AFTERWARDS_S)
        if not self.done:
            self.tensors.told.clear()  # of the shards that end now
        super()._crash()
        if self.fell_to is not None:
            with Checkpoint(self.disk, self.fell_to) as saved:
                self._cut = shard_records(saved)[0].cut

    def check(self) -> None:
        """As `SimulatedResumes.check`; and what shards hold is the sum of the gradients that they
        have applied, less what those left out who push now, or who were lost with it."""
        super().check()
        held = self.tensors.held(self)
        wrong = [text for _, *part in held for text in self._wrong_sums(*part)]
        if wrong:
            codecs = ", ".join(map(repr, self.tensors.codecs.values()))
            raise Violation("\n  ".join([f"{self.again}, with {codecs}", *wrong]))

    def _wrong_sums(self, block: Block, shard: int, values: Floats) -> list[str]:
        (widest,) = (b for b in self.blocks.values() if b.pieces[0].name == "wide")
        place = Part(widest.id, shard)
        if place not in self.history.final:
            return []
        low, high = block.range(shard)
        row = self.history.final[place]
        pushes = row.pushes
        if not row.sound or row.counts != tuple(each.bit_count() for each in pushes):
            self.seen["torn, on other servers"] += 1  # elements of a part have different pushes
            return []
        wanted, applied = self.tensors.applied(self, block, shard, pushes)
        taken = self._taken_over(block)
        begun = self._went_on(block, low, high, pushes)
        for client in self.clients:
            encoder = encoder_of(client)
            if encoder is None:
                continue
            assert isinstance(encoder, RemembersChanges)
            left = np.zeros(high - low, np.float64)
            if client.writer not in taken:
                if client.writer in begun:
                    left += encoder.begun[block.id][low:high]
                for number, which, change in encoder.changes:
                    if number == block.id and pushes[client.writer] >> which & 1:
                        left += change[low:high]
            wanted -= left
            if client.alive:
                self._compare_own(encoder, block, low, high, left)
        text = off_by(values, wanted, applied)
        return [f"block {block.id} on shard {shard}: {text}"] if text else []

    def _went_on(self, block: Block, low: int, high: int, pushes: Sequence[int]) -> set[int]:
        """Writers that have gone on with a residual of the checkpoint on a shard: not one that
        ended before the shard had a push of it, if the next one of its rank has."""
        found, last = set[int](), dict[int, int]()
        for client in self.clients:
            encoder: Any = encoder_of(client)
            began = None if encoder is None else encoder.begun.get(block.id)
            if began is not None and began[low:high].any():
                last[client.rank] = client.writer
                if pushes[client.writer]:
                    found.add(client.writer)
        return found | set(last.values())

    def _compare_own(
        self, encoder: RemembersChanges, block: Block, low: int, high: int, left: Any
    ) -> None:
        """A client's residual is what its pushes left out that were applied."""
        own = encoder.residual(block)
        if own is None or any(each.block.id == block.id for each in encoder.open):
            return
        if np.abs(own[low:high] - left).max() > ROUNDING * LARGEST * max(len(encoder.changes), 1):
            raise Violation(f"block {block.id}: a residual is not what was left out\n{self.again}")

    def _taken_over(self, block: Block) -> set[int]:
        """Writers of before whose residual is in that of a client of now."""
        taken = set[int]()
        paths = {each.path for each in self.fell_to.files} if self.fell_to is not None else set()
        for (cut, rank), writer in self.tensors.captures.items():
            path = residual_path(block.spec.group_name, block.id, rank)
            there = any(each.endswith(f"/{path}") for each in paths)
            if cut == self._cut and writer in self.lost and there:
                heir = rank if rank < self.scenario.workers else 0
                heirs = [
                    client
                    for client in self.clients
                    if client.writer not in self.lost
                    and client.rank == heir
                    and block.id in getattr(encoder_of(client), "begun", ())
                ]
                if heirs:
                    taken.add(writer)
                    self.seen["taken over"] += 1
                    self.seen["by rank 0"] += heir != rank
        return taken


def resumed_with_residuals(seed: int, **options: Any) -> SimulatedResidualResumes:
    """Run one seed and check it."""
    plain: dict[str, Any] = {"workers": 2, "steps": 24, "restarts": True, "others": ()}
    plain["workload"] = saved_tensors
    options = {**plain, "faults": FAULTS, "links": "tcp", **options}
    cluster = SimulatedResidualResumes(seed, Scenario(**options))
    cluster.run()
    cluster.check()
    return cluster

"""A simulated client's process: its life, its streams that break, and what is sent again on them.

It does what the real client does, with timers in place of threads: number a request, send it to
every shard, send it again when its caller has lost patience, and send all that is unanswered in
order on a new stream.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from paramserve.client.payloads import Payloads
from paramserve.consistency.registry import PolicyTraits
from paramserve.core.answering import gathered
from paramserve.core.group import outside, resume, undecided
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.session import Operation
from paramserve.core.table.parts import padded
from paramserve.errors import ParamServeError, rebuild
from paramserve.messages import (
    AskReport,
    Bye,
    CoordinatorReply,
    CoordinatorRequest,
    Done,
    Failed,
    GroupPolicy,
    GroupReport,
    Hello,
    Join,
    Joined,
    Refused,
    ServerBeat,
    ShardReply,
    ShardRequest,
    Welcome,
    WorkerBeat,
    decoder,
    encode,
)
from paramserve.testing.nemesis import worker_place
from paramserve.testing.network import NEAR, Bytes, Frame, Stream
from paramserve.transport.arena import Arena

if TYPE_CHECKING:
    from paramserve.testing.simulated import SimulatedCluster

ARENA = 1
TIMEOUT_S = 0.04
"""A call that is not answered in this time is tried again, with the same numbers."""
RECONNECT_S = 0.004
REJOIN_S = 0.01
"""A rank that still counts as live is asked for again after this."""
BEAT_S = 0.05

_decode_reply = decoder(ShardReply | Welcome).decode
_decode_call = decoder(CoordinatorReply).decode

Then = Callable[[Any], None]


class Received:
    """A payload that has come, as what is read from a link."""

    def __init__(self, payload: Bytes) -> None:
        self._payload = payload

    def read_payload(self, into: Sequence[Bytes]) -> None:
        """Copy its parts, each padded, to where they belong."""
        cursor = 0
        for part in into:
            part[:] = self._payload[cursor : cursor + part.size]
            cursor += padded(part.size)


class Connection:
    """One shard as a client reaches it."""

    def __init__(self, cluster: SimulatedCluster, shard: int, window: int, shared: bool) -> None:
        self.shard = shard
        self.shared = shared
        """Whether requests speak of the client's arena; otherwise their bytes are copied."""
        self.session = cluster.session_type(shard, window)
        self.stream: Stream | None = None
        self.welcome = False


class ClientProcess(ABC):
    """One process, without what it is there for.

    Args:
        writer: its number in the history, never used again.
        rank: of the worker, or -1.
    """

    def __init__(self, cluster: SimulatedCluster, writer: int, rank: int) -> None:
        self.cluster = cluster
        self.writer = writer
        self.rank = rank
        self.id = 0
        self.incarnation = 0
        self.dead = False
        """Killed."""
        self.fenced = False
        """Told that it does not belong to the cluster any more."""
        self.finished = False
        self.clock = 0
        self.stepping: int | None = None
        """Clock of the step that is being sent, for faults in the middle of it."""
        self.retiring = False
        """Told that the run will do without it."""
        self.versions = [0] * cluster.scenario.servers
        """Read last from each shard."""
        self.terms = GroupTraits(cluster.described)
        scenario, random = cluster.scenario, cluster.random
        self.window = scenario.outstanding
        self.connections = [
            Connection(cluster, shard, self.window, scenario.is_shared(random))
            for shard in range(scenario.servers)
        ]
        arena = Arena(ARENA, None, mmap.mmap(-1, cluster.arena_bytes))
        self.arena: Bytes = arena.memory
        self._payloads = Payloads(cluster.blocks, {ARENA: arena})
        self._frozen_until = 0.0
        self._then: Then | None = None
        self._reports: dict[int, tuple[GroupReport, ...]] | None = {}
        """By shard, until all have told where it goes on, if it may find the others under way."""
        self.late = False
        """Whether it may."""
        self._returned = False
        """Whether its rank had ended for good."""
        self.asks = False
        """Whether the shards say at which clock its next step is."""
        self._coordinator = cluster.call_coordinator(self)

    @property
    def place(self) -> str:
        """For ways that are cut or slow."""
        return worker_place(self.rank)

    def traits_at(self, clock: int) -> PolicyTraits:
        """What this client takes to hold for its step of a clock."""
        return self.terms.at(0, clock)

    @property
    def alive(self) -> bool:
        """Whether it still takes part."""
        return not (self.dead or self.fenced or self.finished)

    @property
    def full(self) -> bool:
        """Whether the next call must wait for an answer."""
        return any(connection.session.full for connection in self.connections)

    # --- life ---------------------------------------------------------------------------

    def start(self) -> None:
        """Join the cluster and go on from there."""
        self._beat()
        self.call(Join(0, self.rank, 0), self._joined)

    @abstractmethod
    def script(self) -> None:
        """Do the next thing; called at the start and whenever something was answered."""

    def going_on(self, outside: bool) -> None:  # noqa: B027 - a hook, rightly empty
        """The shards have told where it goes on.

        Args:
            outside: whether it has to enter first: no shard waits for its rank.
        """

    def kill(self) -> None:
        """The process ends at once; what it has sent may still arrive, or not."""
        self.dead = True
        self._coordinator.close(NEAR)
        for connection in self.connections:
            if connection.stream is not None:
                if self.cluster.random.random() < 0.5:
                    connection.stream.cut()
                connection.stream.close(NEAR)

    def freeze(self, seconds: float) -> None:
        """The process stands still: it neither hears nor says anything."""
        self._frozen_until = max(self._frozen_until, self.cluster.clock.now + seconds)

    def _awake(self, action: Callable[..., None], *args: Any) -> bool:
        """Whether the process runs; if it stands still, `action` comes when it goes on."""
        if self.cluster.clock.now < self._frozen_until:
            self.cluster.clock.at(self._frozen_until, action, *args)
            return False
        return self.alive

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something after a while, if the process still runs then."""
        self.cluster.clock.after(delay_s, self._due, action, args)

    def _due(self, action: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._awake(self._due, action, args):
            action(*args)

    def end(self) -> None:
        """End by its own wish, after its last reply: goodbye to everybody."""
        for connection in self.connections:
            if connection.stream is not None:
                connection.stream.send(NEAR, Frame(encode(Bye())))
                connection.stream.close(NEAR)
        self._coordinator.close(NEAR)
        self.finished = True
        self.cluster.ended(self)

    def _fence(self, error: ParamServeError) -> None:
        """The cluster goes on without this process."""
        self.fenced = True
        self.cluster.network.note(f"writer {self.writer} is fenced: {error.failed}")
        for connection in self.connections:
            connection.session.abandon(error)
            if connection.stream is not None:
                connection.stream.close(NEAR)
        self._coordinator.close(NEAR)
        self.cluster.ended(self)

    # --- the coordinator ----------------------------------------------------------------

    @property
    def calling(self) -> bool:
        """Whether it waits for the coordinator's answer."""
        return self._then is not None

    def call(self, message: CoordinatorRequest, then: Then) -> None:
        """Ask the coordinator; one call at a time."""
        self._then = then
        self._coordinator.send(NEAR, Frame(encode(message)))

    def _beat(self) -> None:
        self._coordinator.send(NEAR, Frame(encode(WorkerBeat(self.clock))))
        self.later(BEAT_S, self._beat)

    def _joined(self, reply: Joined | Failed) -> None:
        if isinstance(reply, Failed):
            if self.rank >= self.cluster.wanted:
                self._fence(rebuild(reply.kind, reply.failed, "no", reply.fix))
            else:
                self.later(REJOIN_S, self.call, Join(0, self.rank, 0), self._joined)
            return
        self.id, self.incarnation = reply.client, reply.incarnation
        self.late, self._returned = reply.late, reply.returned
        self.cluster.joined(self)
        for connection in self.connections:
            self._connect(connection)
        if self.late:
            self._ask()
        else:
            self.script()

    def _ask(self) -> None:
        """A later incarnation asks all shards how far its rank was, and one that comes later than
        the others how far these are, until all have answered."""
        if self._reports is None:
            return
        for connection in self.connections:
            known = connection.shard in self._reports
            if connection.stream is not None and connection.welcome and not known:
                connection.stream.send(NEAR, Frame(encode(AskReport())))
        self.later(TIMEOUT_S, self._ask)

    def _told(self, shard: int, beat: ServerBeat) -> None:
        if self._reports is None:
            return
        self._reports[shard] = beat.groups
        if len(self._reports) == len(self.connections):
            reports, self._reports = list(self._reports.values()), None
            for report in (each for groups in reports for each in groups):
                for change in report.changes:
                    self.learn(change)
            found = resume(reports, self.rank)
            self.clock = max((each.clock for each in found.values()), default=0)
            policy = self.traits_at(self.clock).policy
            waits_for_all = policy is not None and policy.collects and not policy.partial
            self.asks = self._returned and waits_for_all and bool(undecided(reports, self.rank))
            self.going_on(bool(outside(reports, self.rank)))
            self.script()

    def learn(self, news: GroupPolicy | None) -> None:
        """A shard has told of a change of policy."""
        if news is not None:
            self.terms.changed(news)

    # --- streams ------------------------------------------------------------------------

    def _connect(self, connection: Connection) -> None:
        if connection.stream is not None:
            return
        stream = connection.stream = self.cluster.connect(self, connection.shard)
        hello = Hello("client", self.id, self.incarnation, self.rank, self.window)
        stream.send(NEAR, Frame(encode(hello)))

    def lost(self, stream: Stream) -> None:
        """A stream has ended: try again soon."""
        if stream is self._coordinator or not self._awake(self.lost, stream):
            return
        for connection in self.connections:
            if connection.stream is stream:
                connection.stream, connection.welcome = None, False
                self.later(RECONNECT_S, self._connect, connection)

    def received(self, stream: Stream, frame: Frame) -> None:
        """A reply."""
        if not self._awake(self.received, stream, frame):
            return
        if stream is self._coordinator:
            then, self._then = self._then, None
            if then is not None:
                then(_decode_call(frame.header))
            return
        for connection in self.connections:
            if connection.stream is stream:
                self._reply(connection, frame)

    def _reply(self, connection: Connection, frame: Frame) -> None:
        reply = _decode_reply(frame.header)
        if isinstance(reply, Welcome):
            connection.welcome = True
            if self.late and self._reports is not None:
                assert connection.stream is not None
                connection.stream.send(NEAR, Frame(encode(AskReport())))
            for message in connection.session.to_resend():
                self._transmit(connection, message)
        elif isinstance(reply, ServerBeat):
            self._told(connection.shard, reply)
        elif isinstance(reply, Refused) and reply.seq == 0:
            self._fence(rebuild(reply.kind, reply.failed, "unknown", reply.fix))
        elif isinstance(reply, Done | Refused):
            sent = connection.session.sent(reply.seq)
            if sent is not None and frame.payload is not None:
                self._payloads.read(connection.shard, Received(frame.payload), sent)
            connection.session.on_reply(reply)

    # --- requests -----------------------------------------------------------------------

    def submit(self, requests: Sequence[ShardRequest], operation: Operation) -> list[int]:
        """Number one request for each shard and send it; a fault may end the process in between.

        Returns:
            The numbers, in shard order.
        """
        numbered = [
            connection.session.submit(message, operation)
            for connection, message in zip(self.connections, requests, strict=True)
        ]
        for connection, message in zip(self.connections, numbered, strict=True):
            self._transmit(connection, message)
            self.cluster.maybe_fail(self)
        numbers = [each.seq for each in numbered]
        self.later(TIMEOUT_S, self._timeout, operation, numbers)
        return numbers

    def _transmit(self, connection: Connection, message: ShardRequest) -> None:
        if self.dead or connection.stream is None or not connection.welcome:
            return
        if connection.shared:
            connection.stream.send(NEAR, Frame(encode(message)))
            return
        message, parts = self._payloads.inline(connection.shard, message)
        payload = gathered(list(parts)) if parts else None
        connection.stream.send(NEAR, Frame(encode(message), payload))

    def _timeout(self, operation: Operation, numbers: Sequence[int]) -> None:
        """The caller's patience has ended, and it tries again: same numbers, same slots."""
        if operation.complete:
            return
        self.timed_out(operation)
        for connection, number in zip(self.connections, numbers, strict=True):
            sent = connection.session.sent(number)
            if sent is not None:
                self._transmit(connection, sent.message)
        self.later(TIMEOUT_S, self._timeout, operation, numbers)

    def timed_out(self, operation: Operation) -> None:  # noqa: B027 - a hook, rightly empty
        """A call has timed out. Nothing is freed: its shards may still read and write its slots."""

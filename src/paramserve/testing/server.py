"""Simulated servers and the coordinator: the real `Shard` and `Coordination` on simulated streams.

They move messages as the real roles do, and decide nothing.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from paramserve.core.coordination import (
    Called,
    ConnectionLost,
    CoordinatorEvent,
    Noticed,
    TimePassed,
)
from paramserve.core.events import (
    AnswersRead,
    ClientBye,
    ClientGone,
    ClientHere,
    DeadlineReached,
    Effects,
    Event,
    FromShard,
    Inquired,
    MembersChanged,
    Requested,
)
from paramserve.core.group import Group
from paramserve.core.shard import refusal
from paramserve.messages import (
    AskReport,
    Bye,
    CoordinatorNotice,
    CoordinatorReply,
    CoordinatorRequest,
    Done,
    HaveRead,
    Hello,
    Inquire,
    Members,
    PeerMessage,
    Register,
    Scale,
    ServerBeat,
    ShardRequest,
    Welcome,
    WorkerBeat,
    decoder,
    encode,
)
from paramserve.testing.history import Answered, Applied, Entered, Update
from paramserve.testing.nemesis import COORDINATOR, shard_place
from paramserve.testing.network import FAR, NEAR, Frame, Stream
from paramserve.testing.process import ClientProcess

if TYPE_CHECKING:
    from paramserve.testing.simulated import SimulatedCluster

BEAT_S = 0.1

_decode_client = decoder(Hello | ShardRequest | Inquire | AskReport | HaveRead | Bye).decode
_decode_peer = decoder(PeerMessage).decode
_decode_coordinator = decoder(Members | CoordinatorReply).decode
_decode_called = decoder(CoordinatorRequest | CoordinatorNotice).decode


class SimulatedServer:
    """One server process."""

    def __init__(self, cluster: SimulatedCluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.shard = cluster.new_shard(number)
        self._callers: dict[int, ClientProcess] = {}
        """By number of the stream, before its `Hello`."""
        self._streams: dict[int, Stream] = {}
        """The one stream of each client."""
        self._timer: float | None = None
        self._decided: dict[int, int] = {}
        """By group, the last clock that the history knows of."""
        self._steps_s: dict[int, float] = {}
        """By group: the median time of a step, as it was last."""
        self._clocks: dict[tuple[int, int], int] = {}
        """By group and rank, as they were last."""
        self._counting: dict[int, dict[int, int]] = {}
        """By group: the clocks of those who count, as they were last."""
        self._versions: dict[int, int] = {}
        """By group, as they were last."""
        self._pushes: dict[int, tuple[int, ...]] = {}
        """By block: the masks of all writers, as they were last."""
        self._coordinator = cluster.call_coordinator(self)
        self._coordinator.send(NEAR, Frame(encode(Register(0, number, 0, (f"shard {number}",)))))
        self._beat()

    @property
    def place(self) -> str:
        """For ways that are cut or slow."""
        return shard_place(self.number)

    def accept(self, stream: Stream, client: ClientProcess) -> None:
        """A client opens a stream; who it is, it says in its first frame."""
        self._callers[stream.number] = client

    def lost(self, stream: Stream) -> None:
        """A stream has ended."""
        client = self._callers.pop(stream.number, None)
        if client is not None and self._streams.get(client.id) is stream:
            del self._streams[client.id]
            self._happen(ClientGone(client.id))

    def received(self, stream: Stream, frame: Frame) -> None:
        """A message of a client or of the coordinator."""
        if stream is self._coordinator:
            message = _decode_coordinator(frame.header)
            if isinstance(message, Members):
                self._happen(MembersChanged(message))
                self.cluster.recorder.members_told(self.number, message)
            return
        client = self._callers.get(stream.number)
        if client is None:
            return
        request = _decode_client(frame.header)
        if isinstance(request, Hello):
            self._hello(stream, request, client)
        elif self._streams.get(client.id) is not stream:
            return
        elif isinstance(request, Bye):
            self._happen(ClientBye(client.id))
        elif isinstance(request, Inquire):
            self._happen(Inquired(client.id, request))
        elif isinstance(request, HaveRead):
            self._happen(AnswersRead(client.id, request.oldest))
        elif isinstance(request, AskReport):
            report = self.shard.report(notes=request.notes)
            stream.send(FAR, Frame(encode(ServerBeat(self.number, report))))
        else:
            self.cluster.recorder.arrived(self.number, client, request)
            memory = dict(client.memory(stream))
            if frame.payload is not None:
                memory[0] = frame.payload
            self._happen(Requested(client.id, request, memory))

    def _hello(self, stream: Stream, hello: Hello, client: ClientProcess) -> None:
        if self._streams.get(hello.client) is stream:
            return  # The frame came twice.
        event = ClientHere(
            hello.client, hello.incarnation, hello.rank, hello.window, requests=hello.requests
        )
        effects = self.shard.step(event, self.cluster.clock.now)
        if effects.refused is not None:
            stream.send(FAR, Frame(encode(refusal(0, effects.refused))))
            stream.close(FAR)
            return
        older = self._streams.get(hello.client)
        if older is not None:
            self._callers.pop(older.number, None)
            older.close(FAR)
        self._streams[hello.client] = stream
        stream.send(FAR, Frame(encode(Welcome())))
        self.cluster.recorder.admitted(self.number, client)
        self._act(effects)

    def _told(self, header: bytes) -> None:
        self._happen(FromShard(_decode_peer(header)))

    def _happen(self, event: Event) -> None:
        self._act(self.shard.step(event, self.cluster.clock.now))

    def _look(self, effects: Effects) -> None:
        """Tell the history what has changed here: values, clocks, who counts, who is answered."""
        order = self.cluster.history.next()
        versions = dict(self._versions)
        applied = self.cluster.recorder.applied(self.number)
        for group in self.shard.groups.values():
            if group.version != self._versions.get(group.id, 0):
                self._updated(group, order, applied)
            if group.clocks.keys() != self._counting.get(group.id, {}).keys():
                self._who_counts(group, order)
            self._counting[group.id] = dict(group.clocks)
            last = None if group.lead is None else group.lead.last
            if last is not None and last.clock != self._decided.get(group.id):
                one = last.clock == self._decided.get(group.id, -1) + 1
                self._decided[group.id] = last.clock
                step_s = self._steps_s.get(group.id, 0.0) if one else None
                self.cluster.recorder.decided(last, group, step_s)
            self._steps_s[group.id] = group.step_s
            for rank, clock in group.clocks.items():
                before = self._clocks.get((group.id, rank), 0)
                if clock < before:
                    self.cluster.history.backwards.append(
                        f"shard {self.number}: the clock of rank {rank} went from {before} "
                        f"back to {clock}"
                    )
                self._clocks[group.id, rank] = clock

        for client, answer in effects.replies:
            if isinstance(answer.message, Done):
                self._answered(client, answer.message, order, versions)

    def _updated(self, group: Group, order: int, applied: tuple[Applied, ...]) -> None:
        """Values have changed: which pushes are in them that were not."""
        new: dict[tuple[int, int], None] = {}
        workload = self.cluster.workload
        blocks, shards = sorted(group.blocks.items()), self.cluster.scenario.servers
        seen = [workload.masks(block, self.number, shards) for _, block in blocks]
        for number, masks in chain.from_iterable(seen):
            old = self._pushes.get(number, (0,) * len(masks))
            self._pushes[number] = masks
            for writer, (was, is_now) in enumerate(zip(old, masks, strict=True)):
                more = is_now & ~was
                while more:
                    low = more & -more
                    new[writer, low.bit_length() - 1] = None
                    more ^= low
        version = self._versions.get(group.id, 0)
        self._versions[group.id] = group.version
        self.cluster.history.updates.append(
            Update(
                self.number, order, version, group.version, tuple(new), not group.clocks, applied
            )
        )

    def _who_counts(self, group: Group, order: int) -> None:
        history = self.cluster.history
        before = self._counting.get(group.id, {})
        slowest = min(before.values(), default=None)
        for rank in sorted({*before, *group.clocks}):
            here = rank in group.clocks
            if here is (rank in before):
                continue
            changes = history.counted.setdefault((self.number, rank), [])
            changes.append((order, here))
            if here:
                joins = len(changes) == 1 and rank not in history.ranks
                others = [clock for each, clock in group.clocks.items() if each != rank]
                then = min(others, default=None)
                clock = group.clocks[rank]
                entered = Entered(self.number, rank, order, clock, slowest, joins, then)
                history.entered.append(entered)

    def _answered(self, client: int, done: Done, order: int, before: dict[int, int]) -> None:
        """A shard's answer to a step, for the first time."""
        for news in done.news:
            self.cluster.recorder.learned(self.number, news)
        writer = self.cluster.writers.get(client, -1)
        call = self.cluster.call_of.get((writer, self.number, done.seq))
        if call is not None:
            group = self.cluster.group
            versions = (before.get(group, 0), self._versions.get(group, 0))
            self.cluster.history.answers.setdefault(
                (self.number, writer, call.number), Answered(order, done.skipped, *versions)
            )

    def _act(self, effects: Effects) -> None:
        self._look(effects)
        for client, answer in effects.replies:
            stream = self._streams.get(client)
            if stream is not None:
                stream.send(FAR, Frame(encode(answer.message), answer.payload))
        for shard, message in effects.peers:
            way = (self.place, shard_place(shard))
            self.cluster.network.tell(way, encode(message), self.cluster.servers[shard]._told)
        for client in effects.drops:
            stream = self._streams.get(client)
            if stream is not None:
                stream.close(FAR)
                self.lost(stream)
        if effects.deadline is not None and (self._timer is None or effects.deadline < self._timer):
            self._timer = effects.deadline
            self.cluster.clock.at(effects.deadline, self._deadline, effects.deadline)

    def _deadline(self, planned: float) -> None:
        if planned != self._timer:
            return  # It was moved to an earlier time.
        self._timer = None
        self._happen(DeadlineReached())

    def _beat(self) -> None:
        self._happen(DeadlineReached())
        reports = self.shard.report()
        for report in reports:
            self.cluster.recorder.learned(self.number, report.change)
        members = self.shard.members_number
        beat = ServerBeat(self.number, reports, members=members)
        self._coordinator.send(NEAR, Frame(encode(beat)))
        self.cluster.clock.after(BEAT_S, self._beat)


class SimulatedDriver:
    """Who runs the job: it tells the coordinator how many workers there are to be."""

    place = "driver"

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._coordinator = cluster.call_coordinator(self)

    def scale(self, workers: int) -> None:
        """From now on there are to be this many."""
        self._coordinator.send(NEAR, Frame(encode(Scale(0, workers))))

    def lost(self, stream: Stream) -> None:
        """Never: the coordinator's streams do not break."""

    def received(self, stream: Stream, frame: Frame) -> None:
        """The coordinator has done it."""


class SimulatedCoordinator:
    """The coordinator process."""

    place = COORDINATOR

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.coordination = cluster.new_coordination()
        self._streams: dict[int, Stream] = {}
        self._servers: list[Stream] = []
        cluster.clock.after(BEAT_S, self._tick)

    def accept(
        self, stream: Stream, caller: ClientProcess | SimulatedServer | SimulatedDriver
    ) -> None:
        """Somebody opens a stream."""
        self._streams[stream.number] = stream
        if isinstance(caller, SimulatedServer):
            self._servers.append(stream)

    def lost(self, stream: Stream) -> None:
        """A process has ended."""
        self._streams.pop(stream.number, None)
        self._happen(ConnectionLost(stream.number))

    def received(self, stream: Stream, frame: Frame) -> None:
        """A call or a heartbeat."""
        message = _decode_called(frame.header)
        if isinstance(message, WorkerBeat | ServerBeat):
            self._happen(Noticed(stream.number, message))
        else:
            self._happen(Called(stream.number, message))

    def _tick(self) -> None:
        self._happen(TimePassed())
        self.cluster.clock.after(BEAT_S, self._tick)

    def _happen(self, event: CoordinatorEvent) -> None:
        decided = self.coordination.step(event, self.cluster.clock.now)
        for number, reply in decided.replies:
            stream = self._streams.get(number)
            if stream is not None:
                stream.send(FAR, Frame(encode(reply)))
        if decided.members is not None:
            self.cluster.recorder.belonging(decided.members)
            frame = Frame(encode(decided.members))
            for stream in self._servers:
                stream.send(FAR, frame)

"""A simulated client's process: its life, and the shipping client on simulated connections.

The process is a fiber. It does one thing after the other: what its script has planned, and in
between it waits in `Exchange.read_until`, as a thread of a real client does.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from paramserve.client.exchange import Exchange
from paramserve.client.steps import Steps
from paramserve.client.waits import Waits
from paramserve.config import Credentials, Deadlines, Limits
from paramserve.core.client_session import Operation
from paramserve.core.policy_traits import GroupTraits
from paramserve.errors import ConnectTimeout, ParamServeError, ServerGone
from paramserve.messages import (
    CoordinatorReply,
    CoordinatorRequest,
    Failed,
    Hello,
    Join,
    Joined,
    ShardRequest,
    WorkerBeat,
    decoder,
    encode,
)
from paramserve.transport.arena import Arena
from paramserve_testing.fiber import Fiber, VirtualTiming
from paramserve_testing.link import VirtualLink
from paramserve_testing.nemesis import worker_place
from paramserve_testing.network import NEAR, Frame, Stream

if TYPE_CHECKING:
    from paramserve_testing.simulated import SimulatedCluster

OTHER_LINK_RATE = 0.3
"""Share of new links that are of the other kind than the one before, where links are mixed."""
RETRY_S = 0.004
"""Seconds before a shard that does not answer is dialled again."""
REJOIN_S = 0.01
"""A rank that still counts as live is asked for again after this."""
BEAT_S = 0.05
LOOK_S = 10.0
"""How often an idle process looks whether there is anything to do."""
DEADLINES = Deadlines(start_s=60.0, reconnect_s=0.05, stall_s=600.0, heartbeat_s=BEAT_S)
"""A shard that cannot be reached is tried until the network has healed, and longer."""
LIMITS = Limits()

_decode_call = decoder(CoordinatorReply).decode

Then = Callable[[Any], None]


class SimulatedExchange(Exchange):
    """An exchange that tells its process what it sends, and lets faults happen meanwhile."""

    process: ClientProcess

    def submit_together(
        self,
        calls: Sequence[tuple[Sequence[ShardRequest | None], Operation]],
        numbered: Callable[[], None] | None = None,
    ) -> None:
        told = [
            (self.process.sending(requests, operation), operation) for requests, operation in calls
        ]
        self.process.submitting = True
        try:
            super().submit_together(told, numbered)
        finally:
            self.process.submitting = False
            self.process.stepping = None


class ClientProcess(ABC):
    """One process, without what it is there for.

    Args:
        writer: its number in the history, never used again.
        rank: of the worker, or -1.
    """

    exchange: SimulatedExchange
    steps: Steps

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
        self.clocks: dict[str, int] = {}
        """Ended steps by group; those of `steps`, once there are any."""
        self.follows: dict[str, int] = {}
        """Groups that it joins behind another one, and where it was not told yet: behind which."""
        self.submitting = False
        """Whether it sends requests that a fault may interrupt."""
        self.stepping: int | None = None
        """Clock of the step that is being sent, for faults in the middle of it."""
        self.retiring = False
        """Told that the run will do without it."""
        self.terms = GroupTraits(cluster.described)
        scenario, random = cluster.scenario, cluster.random
        self.window = scenario.outstanding
        self._deadlines = cluster.client_deadlines
        self._shared = [scenario.is_shared(random) for _ in range(scenario.servers)]
        """True by shard: requests speak of this client's memory; else bytes are copied."""
        self._dials = Random(f"dials {cluster.seed} {writer}")
        self._dialled: set[int] = set()
        self.late = False
        """Whether it may find the others under way."""
        self._fiber = Fiber(cluster.clock, self._run)
        self._due: deque[Callable[[], None]] = deque()
        """What it does next."""
        self._awaited: dict[Operation, Callable[[], None]] = {}
        """What it does when all shards have answered."""
        self._links: dict[int, VirtualLink] = {}
        """Links by number of their stream."""
        self._interrupted = False
        self._then: Then | None = None
        self._coordinator = cluster.call_coordinator(self)

    @property
    def place(self) -> str:
        """Place for ways that are cut or slow."""
        return worker_place(self.rank)

    @property
    def clock(self) -> int:
        """Ended steps of the one group that there is."""
        return self.clocks.get(self.cluster.workload.group, 0)

    @property
    def alive(self) -> bool:
        """Whether it still takes part."""
        return not (self.dead or self.fenced or self.finished)

    @property
    def full(self) -> bool:
        """Whether the next call must wait for an answer."""
        sessions = [shard.session for shard in self.exchange.shards]
        return any(each.full or not each.has_room_to_read() for each in sessions)

    @property
    def computes(self) -> bool:
        """Whether it reads nothing that comes until it has something to do."""
        return False

    # --- life ---------------------------------------------------------------------------

    def start(self) -> None:
        """Join the cluster and go on from there."""
        self._fiber.start()

    def _run(self) -> None:
        try:
            if self._come():
                self._work()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            self.cluster.history.raised.append(
                f"writer {self.writer}: {type(error).__name__} in {last.name}: {error}"
            )
            self.fence(type(error).__name__)

    def _come(self) -> bool:
        """Join, connect, and take over where to go on; whether the cluster wants this process."""
        self._beat()
        joined = self._join()
        if joined is None:
            return False
        try:
            self.exchange = self.cluster.exchange_type(
                joined,
                self.rank,
                Credentials(),
                LIMITS,
                self._deadlines,
                self._dial,
                VirtualTiming(self.cluster.clock, self._fiber, self._readable),
                self.window,
                self.cluster.session_type,
                Arena.private,
            )
            self.exchange.process = self
            self._begin_steps(joined)
        except ParamServeError as error:
            self.fence(error.failed)
            return False
        return True

    def _begin_steps(self, joined: Joined) -> None:
        """Begin to step, as `Connection` and `Client` do."""
        waits = Waits(self.exchange, self.rank, self._deadlines.request_s)
        self.steps = Steps(self.exchange, self.rank, waits, self.terms)
        self.steps.first = self.rank < joined.first
        goes_on = joined.incarnation > 1 or joined.late
        told = self.exchange.reports(self._deadlines.start_s) if goes_on else []
        self.steps.resume(told, excluded=joined.excluded)
        self.clocks = self.steps.clocks
        for history in self.cluster.histories.values():
            history.incarnations[self.writer] = joined.incarnation
        self.member_told()

    def _work(self) -> None:
        self.go_on()
        while self.alive:
            self._do_due()
            lost = self.exchange.failure
            if isinstance(lost, ServerGone):  # here no server ever ends
                raise lost
            if lost is not None:
                self.fence(lost.failed)
            elif self.alive and self.computes:
                self._fiber.wait(LOOK_S)
            elif self.alive:
                self.exchange.read_until(self._has_something_to_do, self.cluster.clock.now + LOOK_S)

    def _has_something_to_do(self) -> bool:
        answered = any(operation.complete for operation in self._awaited)
        return bool(self._due) or answered or self.exchange.failure is not None

    def take_answers(self) -> None:
        """Do what waits for operations that are complete by now."""
        for operation in [each for each in self._awaited if each.complete]:
            if self.alive and self.exchange.failure is None:  # else it is fenced
                self._awaited.pop(operation)()

    def _do_due(self) -> None:
        self.take_answers()
        while self._due and self.alive:
            self._due.popleft()()

    def when_answered(self, operation: Operation, action: Callable[[], None]) -> None:
        """Do something when all shards have answered, and the process is at nothing else."""
        self._awaited[operation] = action

    @property
    def in_flight(self) -> int:
        """What it still awaits the answers to."""
        return len(self._awaited)

    @abstractmethod
    def go_on(self) -> None:
        """Do the next thing; called at the start and whenever something was answered."""

    def member_told(self) -> None:
        """Tell the history where its rank is a member, as far as it knows."""
        for group, history in self.cluster.histories.items():
            membership = self.steps.membership
            if not (membership.pending(group) or membership.follows(group)):
                self.follows.pop(group, None)
                history.rests(self.rank, False)

    @abstractmethod
    def sending(
        self, requests: Sequence[ShardRequest | None], operation: Operation
    ) -> Sequence[ShardRequest | None]:
        """A request goes to all shards, or a read to some; what is sent instead."""

    def kill(self) -> None:
        """The process ends at once; what it has sent may still arrive, or not."""
        self.dead = True
        self._coordinator.close(NEAR)
        for link in self._links.values():
            if self.cluster.random.random() < 0.5:
                link.stream.cut()
            link.stream.close(NEAR)
        if not self._fiber.running:
            self._fiber.kill()

    def end_fiber(self) -> None:
        """Free what a process holds that has ended, or that the run has left behind."""
        self._fiber.end()

    def freeze(self, seconds: float) -> None:
        """The process stands still: it neither hears nor says anything."""
        self._fiber.freeze(seconds)

    def later(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something after a while, if the process still runs then."""
        self.cluster.clock.after(delay_s, self.soon, partial(action, *args))

    def soon(self, action: Callable[[], None]) -> None:
        """Do something as soon as the process is not at anything else."""
        if self.alive:
            self._due.append(action)
            self._fiber.wake()

    def end(self) -> None:
        """End in order, after its last reply: goodbye to all."""
        self.exchange.close()
        self._coordinator.close(NEAR)
        self.finished = True
        self.cluster.ended(self)

    def fence(self, why: str) -> None:
        """The cluster goes on without this process."""
        if not self.alive:
            return
        self.fenced = True
        self.cluster.network.note(f"writer {self.writer} is fenced: {why}")
        for link in self._links.values():
            link.close()
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
        """Send a beat as a real client's thread does, whatever else the process does."""
        clock, frozen_until = self.cluster.clock, self._fiber.frozen_until
        if clock.now < frozen_until:
            clock.at(frozen_until, self._beat)
        elif self.alive:
            self._coordinator.send(NEAR, Frame(encode(WorkerBeat(self.clock))))
            clock.after(self._deadlines.heartbeat_s, self._beat)

    def _join(self) -> Joined | None:
        """Join, and again while the rank counts as live; None: it is not wanted."""
        reply = self._ask_to_join()
        while isinstance(reply, Failed):
            if self.rank >= self.cluster.wanted:
                self.fence(reply.failed)
                return None
            again_at = self.cluster.clock.now + REJOIN_S
            while self.cluster.clock.now < again_at:
                self._fiber.wait_until(again_at)
            reply = self._ask_to_join()
        self.id, self.incarnation = reply.client, reply.incarnation
        self.late = reply.late
        self.cluster.joined(self)
        return reply

    def _ask_to_join(self) -> Joined | Failed:
        replies: list[Joined | Failed] = []
        self.call(Join(0, self.rank, 0), replies.append)
        while not replies:
            self._do_due()
            if not replies:
                self._fiber.wait_until(self.cluster.clock.now + LOOK_S)
        return replies[0]

    # --- connections --------------------------------------------------------------------

    def _dial(
        self,
        addresses: Sequence[str],
        hello: Hello,
        *,
        credentials: Credentials,
        arenas: Sequence[Arena],
        timeout_s: float,
        limits: Limits,
    ) -> Any:
        """Connect as `Link.connect` does."""
        clock = self.cluster.clock
        until = clock.now + timeout_s
        shard = int(addresses[0].removeprefix("shard "))
        while True:
            shares = self._shares(shard)
            memory = {each.number: each.memory for each in arenas if shares}
            stream = self.cluster.connect(self, shard, memory)
            link = self._links[stream.number] = VirtualLink(
                addresses[0], stream, self._fiber, memory, self._sent
            )
            try:
                link.greet(hello, until, lambda: clock.now)
                return link
            except (ConnectionError, TimeoutError) as error:
                link.close()
                if clock.now + RETRY_S >= until:
                    raise ConnectTimeout(
                        f"connect timed out: shard {shard} did not answer", fix="none"
                    ) from error
            except BaseException:
                link.close()
                raise
            VirtualTiming(clock, self._fiber, self._readable).sleep(RETRY_S)

    def _shares(self, shard: int) -> bool:
        """Whether the next link to a shard shares memory: a client tries that first each time, and
        connects otherwise where it fails."""
        mixed = self.cluster.scenario.links == "mixed" and shard in self._dialled
        self._dialled.add(shard)
        self._shared[shard] ^= mixed and self._dials.random() < OTHER_LINK_RATE
        return self._shared[shard]

    def _readable(self, number: int) -> bool:
        return self._links[number].readable

    def lost(self, stream: Stream) -> None:
        """A stream has ended."""
        link = self._links.get(stream.number)
        if link is not None:
            link.lost()

    def received(self, stream: Stream, frame: Frame) -> None:
        """Something has come; it is read when the process runs."""
        if not self.alive:
            return
        if stream is self._coordinator:
            self.soon(partial(self._called, frame))
        elif stream.number in self._links:
            self._links[stream.number].received(frame)

    def _called(self, frame: Frame) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(_decode_call(frame.header))

    # --- faults -------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` in the call that is sending; within a frame or behind it."""
        self.cluster.network.note(f"writer {self.writer} is interrupted")
        self._interrupted = True

    def _sent(self, link: VirtualLink) -> None:
        if self.submitting and self.alive:
            self.cluster.maybe_fail(self)
            if self.dead:
                self._fiber.kill()
            if self._interrupted:
                self._interrupted = False
                if self.cluster.random.random() < 0.5:
                    link.break_off()
                raise KeyboardInterrupt

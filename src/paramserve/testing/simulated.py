"""A whole cluster in one thread: real sessions, shards and coordinator on a virtual network.

Everything that happens follows from the seed and the scenario, so a run that broke an invariant
can be run again, event by event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any, Literal

from paramserve.config import CoordinatorConfig, Deadlines, Limits, PolicySpec
from paramserve.core.consistency import Consistency, Decision, Sync
from paramserve.core.coordination import Coordination
from paramserve.core.partition import Block
from paramserve.core.session import ClientSession
from paramserve.core.shard import ENDED, Shard
from paramserve.messages import Commit, Members, ShardRequest
from paramserve.testing.checkers import check
from paramserve.testing.clock import VirtualClock
from paramserve.testing.counting import Counting
from paramserve.testing.history import Decided, History, Part
from paramserve.testing.network import Faults, Network, Stream
from paramserve.testing.process import ClientProcess
from paramserve.testing.scripts import SimulatedReader, SimulatedWorker
from paramserve.testing.server import SimulatedCoordinator, SimulatedServer

SAFETY_S = 0.8
"""Virtual seconds with faults; most runs end before."""
LIVENESS_S = 30.0
"""Virtual seconds after healing within which every client must end."""
MOVE_S = 5.0
"""After healing a live client has a call answered at least this often."""
REST_S = 0.2
"""After the last client's end, for what is still on its way."""
STALL_S = 0.25
"""A worker that is not heard of for this long counts as dead."""
RESEND_S = 0.01
RESTART_S = 0.05
"""A process that is started again is up within this time."""
AWAITED_S = 0.3
"""A worker that is to be started again is waited for this long."""
RESTARTS_MAX = 4
"""New incarnations in one run."""
RESTART_RATE = 0.7


@dataclass(frozen=True)
class Scenario:
    """What is simulated, besides the seed.

    Attributes:
        outstanding: calls that a client leaves unanswered at most.
        steps: calls of each client.
        links: where payloads lie. "shared": in the client's memory, by reference, so that a slot
            that is used again too early shows; "tcp": copied when sent; "mixed": drawn for each
            client and shard.
        restarts: whether the clocks of Sync wait for a worker that died until it is started again,
            or not at all. None: drawn from the seed.
        faults: None: drawn from the seed.
    """

    servers: int = 2
    workers: int = 3
    outstanding: int = 2
    steps: int = 10
    consistency: Consistency = field(default_factory=lambda: Sync(reduce="sum"))
    links: Literal["mixed", "shared", "tcp"] = "mixed"
    restarts: bool | None = None
    faults: Faults | None = None

    def is_shared(self, random: Random) -> bool:
        """Whether a client that is made now reaches a shard through shared memory."""
        return self.links == "shared" or (self.links == "mixed" and random.random() < 0.5)

    def __repr__(self) -> str:
        """Only what differs from the defaults."""
        plain = Scenario()
        given = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(plain, each.name)
        ]
        return ", ".join(given)


class SimulatedCluster:
    """One run: a phase with faults, then healing, then everyone must come to an end.

    Subclass it and set `shard_type` and its neighbours to try other parts, or `workload_type` for
    other parameters, gradients and rules.

    Args:
        seed: of everything that is drawn.
        scenario: what is simulated.
        log: is told of every message that arrives.

    Example:
        >>> cluster = SimulatedCluster(seed=7, scenario=Scenario(workers=4))
        >>> cluster.run()
        >>> cluster.check()
    """

    shard_type: type[Shard] = Shard
    session_type: type[ClientSession] = ClientSession
    coordination_type: type[Coordination] = Coordination
    worker_type: type[SimulatedWorker] = SimulatedWorker
    reader_type: type[SimulatedReader] = SimulatedReader
    workload_type: type[Counting] = Counting

    def __init__(
        self,
        seed: int,
        scenario: Scenario | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.seed = seed
        self.scenario = scenario if scenario is not None else Scenario()
        self.random = Random(seed)
        self.clock = VirtualClock()
        self.restarts = self.scenario.restarts
        if self.restarts is None:
            self.restarts = Random(f"restarts {seed}").random() < 0.5
        faults = self.scenario.faults
        if faults is None:
            faults = Faults.drawn(self.random)
        self.network = Network(self.clock, self.random, faults)
        self.network.log = log
        self.collects = self.scenario.consistency.on_push(0) is Decision.COLLECT
        self.history = History(self.collects, tuple(range(self.scenario.workers)))
        self.workload = self.workload_type(self.scenario.workers + 1 + RESTARTS_MAX)
        self.workload.prepare()
        self.blocks: dict[int, Block] = {}
        self.push_of: dict[tuple[int, int, int], int] = {}
        """Which push of a writer has a number on a shard."""
        self.clients: list[ClientProcess] = []
        self.coordinator = SimulatedCoordinator(self)
        self.servers = [SimulatedServer(self, k) for k in range(self.scenario.servers)]
        self._restarts = 0
        self._starting = 0
        """Clients whose process is still coming up."""
        self._healed_at: float | None = None
        self._moved_at: dict[int, float] = {}
        for rank in range(self.scenario.workers):
            self._start_after(self.network.delay_s(), self.worker_type, rank)
        self._start_after(self.network.delay_s(), self.reader_type, -1)

    # --- a run --------------------------------------------------------------------------

    def run(self) -> History:
        """Run to the end and record what happened."""
        self.clock.run(SAFETY_S)
        self.heal()
        if not self.done:
            self.clock.run(self.clock.now + LIVENESS_S)
        self.clock.run(self.clock.now + REST_S)
        self._record()
        return self.history

    def check(self) -> None:
        """Require every invariant of the run.

        Raises:
            Violation: the text says how to run it again.
        """
        options = repr(self.scenario)
        again = f"seed={self.seed}" + (f", {options}" if options else "")
        check(self.history, f"paramserve.testing.replay({again})")

    def heal(self) -> None:
        """End all faults; what is broken is mended as clients find out."""
        self.network.faults = self.network.faults.healed()
        self._healed_at = self.clock.now

    def trace(self) -> str:
        """A hash over all that has arrived and over the values of all shards."""
        values = b"".join(
            block.value.tobytes()
            for server in self.servers
            for _, block in sorted(server.shard.blocks.items())
        )
        return self.network.trace(values)

    def _record(self) -> None:
        for server in self.servers:
            for number, block in sorted(server.shard.blocks.items()):
                if block.size:
                    row = self.workload.read(block.value, block.low)
                    self.history.final[Part(number, server.number)] = row
        for client in self.clients:
            if client.alive:
                waiting = [
                    f"shard {c.shard}: {[each.message.seq for each in c.session.unanswered]}"
                    for c in client.connections
                ]
                self.history.unfinished.append(
                    f"writer {client.writer} (rank {client.rank}, clock {client.clock}) has not "
                    f"finished, unanswered: {'; '.join(waiting)}"
                )

    # --- processes ----------------------------------------------------------------------

    def _start(self, kind: Callable[..., ClientProcess], rank: int) -> None:
        self._starting -= 1
        client = kind(self, len(self.clients), rank)
        self.clients.append(client)
        client.start()

    def _start_after(self, delay_s: float, kind: Callable[..., ClientProcess], rank: int) -> None:
        self._starting += 1
        self.clock.after(delay_s, self._start, kind, rank)

    def maybe_fail(self, client: ClientProcess) -> None:
        """A worker has sent a request: the moment for a fault of its process."""
        faults, draw = self.network.faults, self.random.random
        if client.rank < 0 or not client.alive:
            return
        if faults.kill and draw() < faults.kill:
            self.kill(client)
        elif faults.freeze and draw() < faults.freeze:
            self.network.note(f"writer {client.writer} stands still")
            client.freeze(draw() * faults.freeze_s)

    def kill(self, client: ClientProcess) -> None:
        """End a client's process without a word."""
        self.network.note(f"writer {client.writer} is killed")
        client.kill()
        self.ended(client)

    def ended(self, client: ClientProcess) -> None:
        """A client's process has ended; a worker that died may be started again."""
        if not client.finished:
            self.history.ended.add(client.writer)
            if self._restarts < RESTARTS_MAX and self.random.random() < RESTART_RATE:
                self._restarts += 1
                delay_s = self.random.random() * RESTART_S
                self._start_after(delay_s, self.worker_type, client.rank)
        if self.done:
            self.clock.stop()

    @property
    def done(self) -> bool:
        """Whether every client has ended."""
        return not self._starting and not any(client.alive for client in self.clients)

    def moved(self, client: ClientProcess) -> None:
        """A client has had a call answered."""
        now = self.clock.now
        if self._healed_at is not None:
            since = max(self._healed_at, self._moved_at.get(client.writer, 0.0))
            if now - since > MOVE_S:
                self.history.slow.append(f"writer {client.writer} waited {now - since:.1f} s")
        self._moved_at[client.writer] = now

    # --- who reaches whom ---------------------------------------------------------------

    @property
    def arena_bytes(self) -> int:
        """Of each client: gradients and values of all blocks for all calls, and one to spare."""
        sizes = self.workload.sizes()
        return 2 * (self.scenario.outstanding + 1) * sum(-(-size // 64) * 64 for size in sizes)

    def connect(self, client: ClientProcess, shard: int) -> Stream:
        """A stream from a client to a shard."""
        server = self.servers[shard]
        stream = self.network.open(client, server, f"writer {client.writer} - shard {shard}")
        server.accept(stream, client)
        return stream

    def call_coordinator(self, caller: ClientProcess | SimulatedServer) -> Stream:
        """A stream to the coordinator. It breaks only with the process that opened it."""
        name = f"{type(caller).__name__} - coordinator"
        stream = self.network.open(caller, self.coordinator, name, faulty=False)
        self.coordinator.accept(stream, caller)
        return stream

    def new_shard(self, number: int) -> Shard:
        """The decisions of one server."""
        return self.shard_type(
            number,
            self.scenario.servers,
            self.scenario.workers,
            self.scenario.consistency,
            limits=Limits(),
            resend_s=RESEND_S,
        )

    def new_coordination(self) -> Coordination:
        """The decisions of the coordinator."""
        config = CoordinatorConfig(
            self.scenario.servers,
            self.scenario.workers,
            "",
            PolicySpec(type(self.scenario.consistency).__name__),
            restarts=bool(self.restarts),
            deadlines=Deadlines(stall_s=STALL_S, restart_s=AWAITED_S),
        )
        return self.coordination_type(config)

    # --- what the history is told -------------------------------------------------------

    def arrived(self, shard: int, client: ClientProcess, request: ShardRequest) -> None:
        """A numbered request has reached a shard."""
        push = self.push_of.get((client.writer, shard, request.seq))
        if push is not None:
            self.history.arrived(shard, client.writer, push)

    def members_told(self, shard: int, message: Members) -> None:
        """A shard has been told who belongs to the cluster."""
        for member in message.members:
            ended = member.state in ENDED
            for client in self.clients:
                if (
                    client.rank == member.rank
                    and 0 < client.incarnation < member.incarnation + ended
                ):
                    self.history.fenced(shard, client.writer)

    def decided(self, commit: Commit) -> None:
        """The lead has decided about a synchronous clock."""
        known = {client.id: (client.rank, client.writer) for client in self.clients}
        contributors = tuple(known[each] for each in commit.contributors)
        order = self.history.next()
        self.history.decided.append(Decided(commit.clock, order, contributors, not contributors))

    def belonging(self, message: Members) -> None:
        """The coordinator has changed the membership."""
        for member in message.members:
            self.history.belongs(member.rank, member.state in ("left", "dead"))

    def admitted(self, shard: int, newer: ClientProcess) -> None:
        """A shard has admitted a client: older incarnations of its rank have ended there."""
        for client in self.clients:
            same = client.rank == newer.rank and client.rank >= 0
            if same and 0 < client.incarnation < newer.incarnation:
                self.history.fenced(shard, client.writer)


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed again, as the text of a `Violation` says, and check it.

    Args:
        log: `print` shows every message in the order of arrival.
        options: fields of `Scenario`.
    Raises:
        Violation: an invariant did not hold.
    """
    cluster = SimulatedCluster(seed, Scenario(**options), log)
    cluster.run()
    cluster.check()
    return cluster

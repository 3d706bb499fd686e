"""A whole cluster in one thread: real sessions, shards and coordinator on a virtual network.

Everything that happens follows from the seed and the scenario, so a run that broke an invariant
can be run again, event by event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from random import Random
from typing import Any, Literal

from paramserve.config import CoordinatorConfig, Deadlines, Limits
from paramserve.core import policies
from paramserve.core.consistency import Async, BoundedStaleness, Sync
from paramserve.core.coordination import Coordination
from paramserve.core.decisions import Policy
from paramserve.core.group import Group
from paramserve.core.membership import RETIRING
from paramserve.core.partition import Block
from paramserve.core.session import ClientSession
from paramserve.core.shard import ENDED, Shard
from paramserve.messages import (
    Commit,
    GroupPolicy,
    LeasePlan,
    Members,
    ShardRequest,
    Step,
)
from paramserve.rules import Add
from paramserve.testing.checkers import check
from paramserve.testing.counting import AddWhole, Counting, leaves_whole
from paramserve.testing.history import Call, Decided, History, Part, Shared, Switched
from paramserve.testing.nemesis import ALWAYS_S, Nemesis, ScriptedFault, _SetPolicy, _Slow
from paramserve.testing.network import Faults, Network, Stream
from paramserve.testing.process import ClientProcess
from paramserve.testing.scripts import (
    LeasingWorker,
    ScriptedClient,
    SimulatedReader,
    SimulatedWorker,
)
from paramserve.testing.server import SimulatedCoordinator, SimulatedDriver, SimulatedServer
from paramserve.virtual import VirtualClock

SAFETY_S = 0.8
"""Virtual seconds with faults; most runs end before."""
LIVENESS_S = 30.0
"""Virtual seconds after healing within which every client must end."""
MOVE_S = 5.0
"""After healing a live client has a call answered at least this often."""
REST_S = 0.8
"""After the last client's end, for what is still on its way, and until nobody is waited for any
more: what is in a buffer then is applied."""
STALL_S = 0.25
"""A worker that is not heard of for this long counts as dead."""
EVENTS_MAX = 200_000
"""In one run; most have some hundreds."""
RESEND_S = 0.01
RESTART_S = 0.05
"""A process that is started again is up within this time."""
AWAITED_S = 0.3
"""A worker that is to be started again is waited for this long."""
BATCH = 2
"""Samples of one step, if they are shared."""
RESTARTS_MAX = 4
"""New incarnations in one run."""
RESTART_RATE = 0.7
JOINS_MAX = 3
"""Workers that come because a run is to have more, in one run."""
CHANGES_MAX = 6
"""Changes of policy that are asked for in one run."""
PROMPT_DELAYS = 6
"""In this many times the longest delay a clock is decided that can be: the decision before may
still be on its way to another shard, whose `Ready` then comes back."""
OTHERS: tuple[Policy, ...] = (Sync(reduce="sum"), Async(), BoundedStaleness(bound=1))


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
        script: faults that happen besides, as `kill(worker=1, clock=7)`.
        others: what the policy may be changed to while running, if the faults have changes.
        samples: that the workers share by lease; 0: each takes `steps` steps. Not more than 90.
    """

    servers: int = 2
    workers: int = 3
    outstanding: int = 2
    steps: int = 10
    consistency: Policy = field(default_factory=lambda: Sync(reduce="sum"))
    links: Literal["mixed", "shared", "tcp"] = "mixed"
    restarts: bool | None = None
    faults: Faults | None = None
    script: tuple[ScriptedFault, ...] = ()
    others: tuple[Policy, ...] = OTHERS
    samples: int = 0

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All that may come to hold."""
        scripted = (each.policy for each in self.script if isinstance(each, _SetPolicy))
        return (self.consistency, *self.others, *scripted)

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
    leaser_type: type[SimulatedWorker] = LeasingWorker
    """Workers of a scenario with `samples`."""
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
        self.clock.events_max = EVENTS_MAX
        self.restarts = self.scenario.restarts
        if self.restarts is None:
            self.restarts = Random(f"restarts {seed}").random() < 0.5
        faults = self.scenario.faults
        if faults is None:
            faults = Faults.drawn(self.random)
        self.network = Network(self.clock, self.random, faults)
        self.network.log = log
        policy, ranks = self.scenario.consistency, tuple(range(self.scenario.workers))
        self.described = policies.spec(policy)
        self.registered = self._registered()
        self.history = History(policy.collects, ranks, [(0, policy)])
        self.plan = LeasePlan(self.scenario.samples, 1, 0, BATCH, BATCH, BATCH, 1, -1)
        if self.scenario.samples:
            self.worker_type = self.leaser_type
            self.history.shared = Shared(self.scenario.samples)
        lossless = faults == faults.healed()
        if lossless and all(isinstance(each, _Slow) for each in self.scenario.script):
            self.history.prompt_s = PROMPT_DELAYS * 2 * faults.delay_s
        own = set(map(type, self.scenario.policies)) <= {Sync, Async, BoundedStaleness}
        self.counts_updates = not own or any(
            isinstance(each, Async) and each.drop_after is not None
            for each in self.scenario.policies
        )
        """Whether each update must show on each shard."""
        self.workload = self.workload_type(self.scenario.workers + 1 + RESTARTS_MAX + JOINS_MAX)
        if isinstance(self.workload.rule, Add) and not all(
            leaves_whole(each) for each in self.scenario.policies
        ):
            self.workload.rule = AddWhole()
        self.workload.prepare()
        self.blocks: dict[int, Block] = {}
        self.group = 0
        """Number of the one group that there is."""
        self.call_of: dict[tuple[int, int, int], Call] = {}
        """Which call of a writer has a number on a shard."""
        self.writers: dict[int, int] = {}
        """By the id that the coordinator gave."""
        self.wanted = self.scenario.workers
        """Workers that the run is to have."""
        self.nemesis = Nemesis(self)
        self._slow: dict[int, tuple[float, float]] = {}
        """By rank: by how much a worker is slowed down, and until when."""
        self._changes = 0
        self._joins = 0
        self._told: dict[int, GroupPolicy] = {}
        """Changes of policy by number, as the first shard told of them."""
        self._came: dict[int, dict[int, dict[int, float]]] = {}
        """By clock, shard and rank: when the step came."""
        self._decided_at = 0.0
        self.clients: list[ClientProcess] = []
        self.coordinator = SimulatedCoordinator(self)
        self.servers = [SimulatedServer(self, k) for k in range(self.scenario.servers)]
        self.driver = SimulatedDriver(self)
        self._restarts = 0
        self._starting = 0
        """Clients whose process is still coming up."""
        self._healed_at: float | None = None
        self._moved_at: dict[int, float] = {}
        for rank in range(self.scenario.workers):
            self._start_after(self.network.delay_s(), self.worker_type, rank)
        self._start_after(self.network.delay_s(), self.reader_type, -1)
        self.nemesis.begin()

    def _registered(self) -> policies.Registered:
        """Classes and functions of all policies that are not built in, as a run registers them."""
        found: dict[str, Any] = {}
        for policy in self.scenario.policies:
            found |= policies.check_registered((), policy)
        return found

    # --- a run --------------------------------------------------------------------------

    def run(self) -> History:
        """Run to the end and record what happened."""
        self.clock.run(SAFETY_S + self.nemesis.lasts_s)
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
        self.network.heal()
        self._slow = {rank: each for rank, each in self._slow.items() if each[1] >= ALWAYS_S}
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
            for report in server.shard.report():
                self.learned(server.number, report.change)
        for _, change in sorted(self._told.items()):
            policy = policies.build(change.policy, self.registered)
            self.history.policies.append((change.clock, policy))
        if self.history.shared is not None:
            reports = self.coordinator.coordination.leases.reports()
            self.history.shared.counted = sum(report.repeated for report in reports)
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
        """A worker has sent a request: the moment for a fault."""
        self.nemesis.sent(client)

    def joined(self, client: ClientProcess) -> None:
        """The coordinator has given a client its id."""
        self.writers[client.id] = client.writer

    def samples_over(self, client: ClientProcess) -> None:
        """A worker was told that no samples are left, and not only because it is to end."""
        member = self.coordinator.coordination.membership.members[client.rank]
        if self.history.shared is not None and member.state != RETIRING:
            self.history.shared.over = True

    def stop(self, client: ClientProcess, seconds: float) -> None:
        """Let a client's process stand still for a time."""
        self.network.note(f"writer {client.writer} stands still for {seconds:.3f} s")
        client.freeze(seconds)

    def leave(self, client: ClientProcess) -> None:
        """Let a worker end by its own wish, after what it has sent."""
        self.network.note(f"writer {client.writer} is to leave")
        if isinstance(client, ScriptedClient):
            client.left = min(client.left, 0)

    def slow_worker(self, rank: int, factor: float, seconds: float) -> None:
        """Let a worker's own computing take longer, for a time."""
        self.network.note(f"worker {rank} is slow by {factor:.1f} for {seconds:.3f} s")
        self._slow[rank] = (factor, self.clock.now + seconds)

    def slowness(self, rank: int) -> float:
        """By how much a worker's own computing takes longer now."""
        factor, until = self._slow.get(rank, (1.0, 0.0))
        return factor if self.clock.now < until else 1.0

    def change_policy(self, client: ClientProcess | None, policy: Policy) -> None:
        """Let a client, or the first one that lives, give the group another policy."""
        found = [each for each in self.clients if each.alive] if client is None else [client]
        if self._changes < CHANGES_MAX and found and isinstance(found[0], ScriptedClient):
            self._changes += 1
            self.network.note(f"writer {found[0].writer} is to change the policy to {policy!r}")
            found[0].changes.append(policy)

    def scale_by(self, more: int) -> None:
        """From now on the run has this many workers more (or less)."""
        if self.wanted + more < 1 or (more > 0 and self._joins >= JOINS_MAX):
            return
        self.wanted += more
        self.network.note(f"there are to be {self.wanted} workers")
        self.driver.scale(self.wanted)
        if more > 0:
            self._joins += 1
            delay_s = self.network.delay_s() + self.random.random() * RESTART_S
            self._start_after(delay_s, self.worker_type, self.wanted - 1)

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

    def call_coordinator(self, caller: ClientProcess | SimulatedServer | SimulatedDriver) -> Stream:
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
            rules={AddWhole.name: AddWhole},
            policies=self.registered,
        )

    def new_coordination(self) -> Coordination:
        """The decisions of the coordinator."""
        config = CoordinatorConfig(
            self.scenario.servers,
            self.scenario.workers,
            "",
            self.described,
            restarts=bool(self.restarts),
            deadlines=Deadlines(stall_s=STALL_S, restart_s=AWAITED_S),
        )
        return self.coordination_type(config)

    # --- what the history is told -------------------------------------------------------

    def arrived(self, shard: int, client: ClientProcess, request: ShardRequest) -> None:
        """A numbered request has reached a shard."""
        call = self.call_of.get((client.writer, shard, request.seq))
        if call is None:
            return
        key = (shard, client.writer, call.number)
        if key not in self.history.reached:
            self.history.reached[key] = self.history.next()
        if call.push is not None:
            self.history.arrived(shard, client.writer, call.push)
        if call.tick and isinstance(request, Step):
            came = self._came.setdefault(call.clock, {}).setdefault(shard, {})
            came.setdefault(client.rank, self.clock.now)

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

    def decided(self, commit: Commit, group: Group) -> None:
        """The lead has decided about a synchronous clock."""
        known = {client.id: (client.rank, client.writer) for client in self.clients}
        contributors = tuple(known[each] for each in commit.contributors)
        order, now = self.history.next(), self.clock.now
        came = self._came.get(commit.clock, {})
        first = min((min(each.values()) for each in came.values()), default=now)
        due = self._due(commit.clock, len(group.clocks))
        self.history.decided.append(
            Decided(
                commit.clock,
                order,
                contributors,
                not contributors,
                now - max(first, self._decided_at),
                0.0 if due is None else now - max(due, self._decided_at),
            )
        )
        self._decided_at = now

    def _due(self, clock: int, counting: int) -> float | None:
        """When as many steps as the policy asks for had come to every shard; None: not known."""
        policy = self.scenario.consistency
        everybody = counting == self.scenario.workers  # else somebody has just left, or rests
        if self._told or not isinstance(policy, Sync) or not everybody:
            return None
        needed = max(1, counting - policy.backup)
        due = 0.0
        for shard in range(self.scenario.servers):
            times = sorted(self._came.get(clock, {}).get(shard, {}).values())
            if len(times) < needed:
                return None
            due = max(due, times[needed - 1])
        return due

    def learned(self, shard: int, change: GroupPolicy | None) -> None:
        """A shard has told of a change of policy."""
        if change is not None:
            self._told.setdefault(change.number, change)
            told = Switched(shard, change.number, change.clock, repr(change.policy))
            self.history.switched.setdefault(told)

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

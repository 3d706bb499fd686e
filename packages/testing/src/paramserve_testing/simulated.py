"""A whole cluster in one thread: real sessions, shards and coordinator on a virtual network.

Everything that happens follows from the seed and the scenario, so a run that broke an invariant
can be run again, event by event.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from paramserve.checkpoint.storage import Storage
from paramserve.config import CheckpointPlan, CoordinatorConfig, Deadlines, Limits, ServerConfig
from paramserve.consistency import registry as policies
from paramserve.consistency.base import Policy
from paramserve.core.client_session import ClientSession
from paramserve.core.cluster_state import ClusterRecord
from paramserve.core.coordination import Coordination
from paramserve.core.partition import Block
from paramserve.core.shard import Shard
from paramserve.messages import Hello, LeasePlan
from paramserve.virtual import VirtualClock
from paramserve_testing.checkers import SHOWN_MAX, Violation, check
from paramserve_testing.client import SimulatedClient
from paramserve_testing.counting import AddWhole
from paramserve_testing.history import Call, Deletion, History
from paramserve_testing.nemesis import ALWAYS_S, COORDINATOR, Nemesis, shard_place
from paramserve_testing.network import Bytes, End, Faults, Network, Stream
from paramserve_testing.process import DEADLINES, ClientProcess, SimulatedExchange
from paramserve_testing.rank_checkers import calls_count_whole
from paramserve_testing.recorder import RecordedShard, Recorder, ShardRecorder, new_history
from paramserve_testing.scenario import Scenario
from paramserve_testing.scripts import ReaderScript, Script, script_of
from paramserve_testing.server import SimulatedCoordinator, SimulatedDriver, SimulatedServer
from paramserve_testing.workload import Setting

SAFETY_S = 0.8
"""Virtual seconds with faults; most runs end before."""
LIVENESS_S = 30.0
"""Virtual seconds after healing within which every client must end."""
REST_S = 0.8
"""Seconds after the last client's end for what is still on its way, and until no worker is waited
for any more: what is in a buffer then is applied."""
STALL_S = 0.25
"""A worker that is not heard of for this long counts as dead."""
EVENTS_MAX = 200_000
"""Most events in one run; most have some hundreds."""
LOOKED_FOR_S = 0.002
"""A server that has not come again so long after a reset is looked for."""
RESEND_S = 0.01
BEAT_S = 0.1
RESTART_S = 0.05
"""A process that is started again is up within this time."""
AWAITED_S = 0.3
"""A worker that is to be started again is waited for this long."""
BATCH = 2
"""Samples of one step, if they are shared."""
RESTARTS_MAX = 4
"""New incarnations in one run."""
RESTART_RATE = 0.7
EVALUATES_RATE = 0.1
"""Share of runs in which workers that rest evaluate."""
JOINS_MAX = 3
"""Workers that come because a run is to have more, in one run."""
CHANGES_MAX = 6
"""Changes of policy that are asked for in one run."""


class SimulatedCluster:
    """One run: a phase with faults, then healing, then every client must end.

    Subclass it and set `shard_type` and its neighbours to try other parts; `Scenario.workload` says
    what the clients train.

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
    exchange_type: type[SimulatedExchange] = SimulatedExchange
    coordination_type: type[Coordination] = Coordination
    client_type: type[SimulatedClient] = SimulatedClient
    worker_script: type[Script] | None = None
    """Script of each worker; None: that of the workload, or the one that goes with the scenario."""
    reader_script: type[Script] = ReaderScript
    """Script of the client that belongs to no rank."""
    replayed_by = "paramserve_testing.replay"
    """The function that repeats a run."""
    writers_more = 0
    """Processes of clients besides those that each run may have."""
    checkpoint_plan = CheckpointPlan()
    """Plan of the cluster's checkpoints."""
    client_deadlines = DEADLINES
    server_deadlines = Deadlines(heartbeat_s=BEAT_S, resend_s=RESEND_S)
    coordinator_deadlines = Deadlines(
        stall_s=STALL_S, restart_s=AWAITED_S, reconnect_s=LOOKED_FOR_S
    )
    disk: Storage | None = None
    """Storage of the checkpoints; None: nowhere."""

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
        self.evaluates = self.scenario.evaluates
        if self.evaluates is None:
            self.evaluates = Random(f"evaluates {seed}").random() < EVALUATES_RATE
        faults = self.scenario.faults
        if faults is None:
            faults = Faults.drawn(self.random)
        self.network = Network(self.clock, self.random, faults)
        self.network.log = log
        self.described = policies.spec(self.scenario.consistency)
        self.registered = self.scenario.registered
        self.history = new_history(self.scenario, faults)
        self.recorder = Recorder(self)
        self.plan = LeasePlan(self.scenario.samples, 1, 0, BATCH, BATCH, BATCH, 1, -1)
        self.counts_updates = self.scenario.counts_updates
        writers = self.scenario.workers + 1 + RESTARTS_MAX + JOINS_MAX + self.writers_more
        self.workload = self.scenario.workload(Setting(seed, self.scenario, writers))
        own = self.worker_script or self.workload.script
        self.worker_script = own or script_of(self.scenario)
        self.blocks: dict[int, Block] = {}
        self.histories = {self.workload.group: self.history}
        """Histories by group."""
        if self.scenario.second is not None:
            second = self.history.of_another_group(self.scenario.second)
            self.histories[self.workload.groups[1]] = second
        self.call_of: dict[tuple[int, int, int], tuple[str, Call]] = {}
        """Which call of a writer has a number on a shard, and its group."""
        self.deletion_of: dict[tuple[int, int, int], Deletion] = {}
        """Deletion of rows that has a number on a shard, by writer."""
        self.writers: dict[int, int] = {}
        """Writers by the id that the coordinator gave."""
        self.wanted = self.least_wanted = self.scenario.workers
        """Workers that the run is to have, and the least that it was to have."""
        self.clients: list[SimulatedClient] = []
        self.nemesis = Nemesis(self)
        self._slow: dict[int, tuple[float, float]] = {}
        """Slowness of workers by rank, and until when."""
        self._changes = self._joins = self._restarts = 0
        self._starting = 0
        """Clients whose process is still coming up."""
        self.coordinator = SimulatedCoordinator(self)
        self.servers = [SimulatedServer(self, k) for k in range(self.scenario.servers)]
        self.driver = SimulatedDriver(self)
        self._start_clients()
        self.nemesis.begin()

    def _start_clients(self) -> None:
        for rank in range(self.scenario.workers):
            self.start_worker(self.network.delay_s(), rank)
        self.start(self.network.delay_s(), self.reader_script, -1)

    # --- a run --------------------------------------------------------------------------

    def run(self) -> History:
        """Run to the end and record what happened. What the drivers log of faults is not shown."""
        with _quiet():
            return self._run()

    def _run(self) -> History:
        self.clock.run(SAFETY_S + self.nemesis.lasts_s)
        self.heal()
        if not self.done:
            self.clock.run(self.clock.now + LIVENESS_S)
        self.clock.run(self.clock.now + REST_S)
        self.recorder.finish()
        for client in self.clients:
            client.end_fiber()
        return self.history

    def check(self) -> None:
        """Require every invariant of the run.

        Raises:
            Violation: the text says how to run it again.
        """
        for history in self.histories.values():
            check(history, self.again)
        wrong = self.workload.judge(self)
        if halves := calls_count_whole(self.histories.values()):
            wrong = {**wrong, calls_count_whole.__name__: halves}
        if wrong:
            each = SHOWN_MAX // len(wrong)
            lines = [f"{name}: {text}" for name, texts in wrong.items() for text in texts[:each]]
            raise Violation("\n  ".join([self.again, *lines]))

    @property
    def again(self) -> str:
        """How to repeat the run, as code."""
        options = repr(self.scenario)
        seed = f"seed={self.seed}" + (f", {options}" if options else "")
        return f"{self.replayed_by}({seed})"

    def heal(self) -> None:
        """End all faults; clients repair what is broken as they find out."""
        self.network.heal()
        self._slow = {rank: each for rank, each in self._slow.items() if each[1] >= ALWAYS_S}
        self.recorder.healed()

    def trace(self) -> str:
        """A hash over all that has arrived and over the values of all shards."""
        values = b"".join(
            self.workload.owner(block.spec).bytes_of(block)
            for server in self.servers
            for _, block in sorted(server.shard.blocks.items())
        )
        return self.network.trace(values)

    # --- processes ----------------------------------------------------------------------

    def _start(self, script: type[Script], rank: int) -> None:
        self._starting -= 1
        client = self.client_type(self, len(self.clients), rank, script)
        self.clients.append(client)
        client.start()

    def start(self, delay_s: float, script: type[Script], rank: int) -> None:
        """Start a client's process after a while; rank -1: it belongs to none."""
        self._starting += 1
        self.clock.after(delay_s, self._start, script, rank)

    def start_worker(self, delay_s: float, rank: int) -> None:
        """Start a worker after a while."""
        assert self.worker_script is not None
        self.start(delay_s, self.worker_script, rank)

    def maybe_fail(self, client: ClientProcess) -> None:
        """A worker has sent a request: the moment for a fault."""
        self.nemesis.sent(self.clients[client.writer])

    def joined(self, client: ClientProcess) -> None:
        """The coordinator has given a client its id."""
        self.writers[client.id] = client.writer

    def stop(self, client: SimulatedClient, seconds: float) -> None:
        """Let a client's process stand still for a time."""
        self.network.note(f"writer {client.writer} stands still for {seconds:.3f} s")
        client.freeze(seconds)

    def stall(self, shard: int | None, seconds: float) -> None:
        """Let a shard's server, or (None) the coordinator, stand still for a time."""
        place = COORDINATOR if shard is None else shard_place(shard)
        self.network.note(f"{place} stands still for {seconds:.3f} s")
        process = self.coordinator if shard is None else self.servers[shard]
        process.loop.freeze(seconds)

    def reset(self, shard: int) -> None:
        """Break the connection of a shard's server to the coordinator."""
        self.network.note(f"{shard_place(shard)} loses its connection to the coordinator")
        self.servers[shard].control.stream.cut()

    def leave(self, client: SimulatedClient) -> None:
        """Let a worker end in order, after what it has sent."""
        self.network.note(f"writer {client.writer} is to leave")
        client.left = min(client.left, 0)

    def slow_worker(self, rank: int, factor: float, seconds: float) -> None:
        """Let a worker's own computing take longer, for a time."""
        self.network.note(f"worker {rank} is slow by {factor:.1f} for {seconds:.3f} s")
        self._slow[rank] = (factor, self.clock.now + seconds)

    def slowness(self, rank: int) -> float:
        """Factor by which a worker's own computing takes longer now."""
        factor, until = self._slow.get(rank, (1.0, 0.0))
        return factor if self.clock.now < until else 1.0

    def change_policy(self, client: SimulatedClient | None, policy: Policy) -> None:
        """Let a client, or the first one that lives, give the group another policy."""
        found = [each for each in self.clients if each.alive] if client is None else [client]
        if self._changes < CHANGES_MAX and found:
            self._changes += 1
            self.network.note(f"writer {found[0].writer} is to change the policy to {policy!r}")
            found[0].changes.append(policy)

    def scale_by(self, more: int) -> None:
        """Change the number of workers by this many more (or less)."""
        if self.wanted + more < 1 or (more > 0 and self._joins >= JOINS_MAX):
            return
        self.wanted += more
        self.least_wanted = min(self.least_wanted, self.wanted)
        self.network.note(f"there are to be {self.wanted} workers")
        self.driver.scale(self.wanted)
        if more > 0:
            self._joins += 1
            delay_s = self.network.delay_s() + self.random.random() * RESTART_S
            self.start_worker(delay_s, self.wanted - 1)

    def kill(self, client: SimulatedClient) -> None:
        """End a client's process without a word."""
        self.network.note(f"writer {client.writer} is killed")
        client.kill()
        self.ended(client)

    def ended(self, client: ClientProcess) -> None:
        """A client's process has ended; a worker that died may be started again."""
        self.recorder.ended(client)
        if not client.finished:
            self.history.ended.add(client.writer)
            if self._restarts < RESTARTS_MAX and self.random.random() < RESTART_RATE:
                self._restarts += 1
                delay_s = self.random.random() * RESTART_S
                self.start_worker(delay_s, client.rank)
        if self.done:
            self.clock.stop()

    @property
    def done(self) -> bool:
        """Whether every client has ended."""
        return not self._starting and not any(client.alive for client in self.clients)

    # --- who reaches whom ---------------------------------------------------------------

    def connect(self, client: ClientProcess, shard: int, arenas: dict[int, Bytes]) -> Stream:
        """A stream from a client to a shard; as `SimulatedServer.accept`."""
        return self.servers[shard].accept(client, arenas)

    def call_coordinator(self, caller: End, role: str = "join") -> Stream:
        """A stream to the coordinator, with the role of its hello. Its frames are not lost."""
        listener = self.coordinator.listener
        stream = self.network.open(caller, listener, f"{caller.place} - coordinator", None)
        listener.accept(stream, Hello(role))
        return stream

    def server_config(self, number: int) -> ServerConfig:
        """What a server is told."""
        scenario = self.scenario
        return ServerConfig(
            number,
            scenario.servers,
            scenario.workers,
            (),
            "",
            self.described,
            deadlines=self.server_deadlines,
            checkpoints=self.checkpoint_plan,
        )

    def new_shard(self, number: int) -> Shard:
        """The decisions of one server, which are recorded."""
        kind: type[RecordedShard] = type("Recorded", (RecordedShard, self.shard_type), {})
        shard = kind(
            number,
            self.scenario.servers,
            self.scenario.workers,
            self.scenario.consistency,
            limits=Limits(),
            resend_s=self.server_deadlines.resend_s,
            rules={**self.workload.rules, AddWhole.name: self.recorder.rule(number)},
            policies={} if number in self.scenario.unregistered else self.registered,
        )
        shard.recorder = ShardRecorder(self, shard)
        return shard

    def new_coordination(self, record: ClusterRecord | None = None) -> Coordination:
        """The decisions of the coordinator, which goes on from this record if there is one."""
        config = CoordinatorConfig(
            self.scenario.servers,
            self.scenario.workers,
            "",
            self.described,
            restarts=bool(self.restarts),
            deadlines=self.coordinator_deadlines,
            checkpoints=self.checkpoint_plan,
        )
        return self.coordination_type(config, record)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("paramserve")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


def replay(seed: int, log: Callable[[str], None] | None = None, **options: Any) -> SimulatedCluster:
    """Run one seed again, as the text of a `Violation` says, and check it.

    Args:
        log: `print` shows every message in the order of arrival.
        options: fields of `Scenario`.
    Raises:
        Violation: an invariant did not hold.
    """
    return rerun(SimulatedCluster, seed, log, **options)


def rerun(
    kind: type[SimulatedCluster], seed: int, log: Callable[[str], None] | None, **options: Any
) -> SimulatedCluster:
    """Replay a seed with a cluster of some kind; see `replay`."""
    cluster = kind(seed, Scenario(**options), log)
    cluster.run()
    cluster.check()
    return cluster

"""An interrupt (Ctrl-C, an alarm, a cancelled task) at any moment of a client's call.

Afterwards the client works, or says that it was closed; and what was acknowledged was applied once.
"""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster, wait_until
from tests.interrupter import SOURCES, Interrupter
from tests.suites import each_case

from paramserve.client import Client
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import AsyncLocalSteps, ElasticAverage, LocalSteps, Sync
from paramserve.core.table.options import Zeros
from paramserve.errors import ClientClosed
from paramserve.messages import WorkerBeat
from paramserve.pytorch import Embedding
from paramserve.rules import SGD, Add
from paramserve.worker import Worker

Array = np.ndarray[Any, Any]

SIZE = 40_000
KEYS = np.arange(64)
ROW = 208
"""Values of a model."""
SLOT = 4 * ROW
"""Bytes of them."""
ALPHA = 0.25


class Trial:
    """One call that is interrupted again and again, and what the servers must hold meanwhile.

    Attributes:
        pushes: whether the call itself adds 1.
        sample: moments that the quick test tries.
        closed_part_max: of the moments, those after which the client may have closed itself.
        closed: how often the client closed itself.
    """

    pushes = True
    sample = 32
    closed_part_max = 1 / 2
    closed = 0

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.client = self.connect()
        self.prepare()
        self.known = self.read()
        """What an acknowledged read has seen."""

    def connect(self) -> Client:
        return self.cluster.client()

    def prepare(self) -> None:
        self.client.define("w", np.zeros(SIZE), rule=Add())

    def begin(self) -> None:
        """Before each call that is tried."""

    def act(self) -> None:
        """What is interrupted."""
        raise NotImplementedError

    def push(self) -> None:
        self.client.push("w", np.ones(SIZE)).result()

    def read(self) -> Array:
        return np.asarray(self.client.pull("w"))

    def allowed(self) -> Sequence[int]:
        """What the interrupted call may have added."""
        return (0, 1) if self.pushes else (0,)

    def check(self, where: str) -> None:
        """What else must be true afterwards.

        Args:
            where: the interrupt came.
        """

    def moments(self) -> int:
        """How many there are in one call."""
        self.act()  # What is found out once only was found out before.
        self.begin()
        counting = Interrupter()
        counting.run(self.act)
        self.known = self.read()
        return counting.passed

    def interrupt(self, at: int) -> None:
        """Interrupt the call at a moment, and see that all is well."""
        self.begin()
        interrupter = Interrupter(at)
        interrupter.run(self.act)
        more, closed, allowed = 1, "", self.allowed()
        try:
            self.push()
            now = self.read()
        except ClientClosed as error:
            closed = str(error)
        if closed:
            assert "interrupted" in closed, f"{interrupter.where}: {closed}"
            self.closed += 1
            more = 0
            self._begin_anew()
            now = self.read()
        gained = now - self.known - more
        if closed:
            allowed = (0, *allowed)
        assert np.isin(gained, allowed).all(), f"{interrupter.where}: {np.unique(gained)}"
        self.known = now
        self.check(interrupter.where)

    def _begin_anew(self) -> None:
        number = self.client.connection.id
        self.client.close()
        roles = [server.role for server in self.cluster.servers]
        wait_until(lambda: all(number not in role._clients for role in roles))
        self.client = self.connect()


class PushPull(Trial):
    def act(self) -> None:
        self.client.push_pull({"w": np.ones(SIZE)})


class Pull(Trial):
    pushes = False

    def act(self) -> None:
        self.client.pull("w")


class AwaitedPush(Trial):
    def act(self) -> None:
        asyncio.run(self._await())

    async def _await(self) -> None:
        await self.client.push("w", np.ones(SIZE))


class SyncStep(Trial):
    """Of the only worker: its push is kept here until the step ends."""

    def connect(self) -> Client:
        return self.cluster.client(0)

    def prepare(self) -> None:
        policy = Sync(reduce="sum")
        self.client.define("w", np.zeros(SIZE), rule=Add(), consistency=policy)

    def act(self) -> None:
        self.client.push_pull({"w": np.ones(SIZE)}, tick=True)

    def push(self) -> None:
        self.client.push("w", np.ones(SIZE))
        self.client.tick().result()


class Define(Trial):
    """Of a new name each time; the same define, once more, finds it or completes it."""

    pushes = False

    def prepare(self) -> None:
        super().prepare()
        self.count = 0

    def _define(self) -> None:
        self.client.define(f"d{self.count}", np.full(8, 2.0), rule=Add())

    def act(self) -> None:
        self.count += 1
        self._define()

    def push(self) -> None:
        self._define()
        assert self.client.pull(f"d{self.count}").tolist() == [2.0] * 8
        super().push()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._define()
        assert self.client.pull(f"d{self.count}").tolist() == [2.0] * 8


class TablePush(Trial):
    def prepare(self) -> None:
        self.client.table("t", dim=4, rule=Add(), init=Zeros())

    def act(self) -> None:
        self.push()

    def push(self) -> None:
        ones = np.ones((KEYS.size, 4), np.float32)
        self.client.table("t").push(KEYS, ones).result()

    def read(self) -> Array:
        return self.client.table("t").pull(KEYS)


class Adds(torch.optim.SGD):
    """Each step adds 1, since all gradients are -1, and is counted."""

    made = 0

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.made += 1


class OptimizerStep(Trial):
    """`optimizer.step()` of the only worker, with the servers making the step."""

    policy: ClassVar[Policy] = Sync()
    sample = 12
    closed_part_max = 2 / 3
    """Over TCP a step of a small model is little but numbering and sending."""
    overlap = False
    own_steps = False

    def connect(self) -> Client:
        client = self.cluster.client(0)
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(ROW))
        model.w.grad = -torch.ones(ROW)
        self.param = model.w
        kind = Adds if self.own_steps else torch.optim.SGD  # servers run no step of ours
        self.optimizer: Any = kind(model.parameters(), lr=1.0)
        options = {"consistency": self.policy, "overlap": self.overlap}
        worker = Worker(client, 1)
        worker.optimizer(model, self.optimizer, **options)
        assert worker.clock >= 0  # Else it says that its loop does not begin there.
        self.used = self.in_use(client)
        return client

    def prepare(self) -> None:
        pass

    def act(self) -> None:
        self.optimizer.step()

    def push(self) -> None:
        self.optimizer.step()

    def read(self) -> Array:
        self.client.connection.exchange.settle(WAIT_S)
        return np.asarray(self.client.pull("w"))

    def interrupt(self, at: int) -> None:
        self.made = getattr(self.optimizer, "made", 0)
        super().interrupt(at)

    def allowed(self) -> Sequence[int]:
        return [self.optimizer.made - self.made] if self.own_steps else (0, 1)

    def in_use(self, client: Client) -> int:
        """Bytes of shared memory, when all that was sent is answered; the next call frees what was
        lost."""
        exchange = client.connection.exchange
        exchange.settle(WAIT_S)
        client.steps.begin()
        exchange.give_back([exchange.take(1)])
        return exchange._pool.in_use

    def check(self, where: str) -> None:
        now = self.in_use(self.client)
        assert now <= self.used + SLOT * self.overlap, where


class OverlappingStep(OptimizerStep):
    overlap = True


class EmbeddingStep(OptimizerStep):
    """A step of a dense layer and a table; the next one makes up for all that was not applied."""

    options: ClassVar[dict[str, Any]] = {"consistency": Sync()}

    def connect(self) -> Client:
        client = self.cluster.client(0)
        table = client.table("t", dim=4, rule=Add(), init=Zeros(), consistency=Sync(reduce="sum"))
        self.model = torch.nn.Module()
        self.model.w = torch.nn.Parameter(torch.zeros(ROW))
        self.model.w.grad = -torch.ones(ROW)
        self.model.embedding = Embedding(table)
        kind = Adds if self.own_steps else torch.optim.SGD
        self.optimizer = kind(self.model.parameters(), lr=1.0)
        worker = Worker(client, 1)
        worker.optimizer(self.model, self.optimizer, **self.options)
        assert worker.clock >= 0  # Else it says that its loop does not begin there.
        self.begin()
        return client

    def begin(self) -> None:
        self.model.embedding.rows.drop()
        self.model.embedding(torch.from_numpy(KEYS)).sum().backward()

    def rows(self) -> Array:
        return self.client.table("t").pull(KEYS)

    def interrupt(self, at: int) -> None:
        self.rows_before, closed = self.rows(), self.closed
        super().interrupt(at)
        gained = np.unique(self.rows() - self.rows_before).tolist()
        assert gained == [1.0] or (self.closed > closed and gained == [0.0]), (at, gained)

    def check(self, where: str) -> None:
        """What memory is in use depends on what was read of the rows."""


class HybridStep(EmbeddingStep):
    """An own step of the dense layer, and a push of the table's rows: whichever of them was not
    made yet, the next step makes. The servers have the dense layer's values of the beginning."""

    options: ClassVar[dict[str, Any]] = {"dense": "local"}
    own_steps = True

    def read(self) -> Array:
        return self.model.w.detach().numpy().copy()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        with torch.no_grad():
            self.model.w.copy_(torch.from_numpy(self.known))


class LocalStep(OptimizerStep):
    """An own step and an exchange."""

    policy = LocalSteps(1, outer=SGD(lr=1.0))
    own_steps = True


class AsyncLocalStep(LocalStep):
    policy = AsyncLocalSteps(1, SGD(lr=1.0))


class ElasticStep(OptimizerStep):
    """An own step and an exchange, by which both sides come nearer to each other by `ALPHA`.

    An interrupt leaves out what the worker has not done yet: its step, the exchange, or its own
    side of that.
    """

    policy = ElasticAverage(every=1, rho=ALPHA)
    own_steps = True

    def interrupt(self, at: int) -> None:
        center, own = float(self.read()[0]), float(self.param.detach()[0])
        made = self.optimizer.made
        interrupter = Interrupter(at)
        interrupter.run(self.act)
        try:
            self.push()
        except ClientClosed:
            self.closed += 1
            self._begin_anew()
            return
        own += self.optimizer.made - made - 1
        moved = center + ALPHA * (own - center)
        befores = [(center, own), (moved, own), (moved, own + ALPHA * (center - own))]
        wanted = [c + ALPHA * (x + 1 - c) for c, x in befores]
        assert min(abs(each - self.read()[0]) for each in wanted) < 1e-3, interrupter.where
        self.check(interrupter.where)


ONE_SHARD = [pytest.param((kind, 1), marks=pytest.mark.slow) for kind in ("unix", "tcp")]


@pytest.fixture(
    params=[("unix", 2), ("tcp", 2), *ONE_SHARD], ids=lambda layout: f"{layout[0]}-{layout[1]}"
)
def workers_cluster(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> RoleCluster:
    kind, shards = request.param
    return make_cluster(kind, servers=shards, workers=1)


CALLS = (PushPull, Pull, AwaitedPush, SyncStep, Define, TablePush)
STEPS = (
    OptimizerStep,
    OverlappingStep,
    EmbeddingStep,
    HybridStep,
    LocalStep,
    AsyncLocalStep,
    ElasticStep,
)


@pytest.fixture(params=[*CALLS, *STEPS], ids=lambda kind: kind.__name__)
def trial(
    request: pytest.FixtureRequest, workers_cluster: RoleCluster, tables_ready: None
) -> Iterator[Trial]:
    yield request.param(workers_cluster)
    gc.collect()  # Sockets that an interrupt left to the collector, while their warning is ignored.


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # A socket that nothing owned yet.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_some_moments_leaves_the_client_whole_or_closed(trial: Trial) -> None:
    moments = trial.moments()
    for at in sorted(random.Random(moments).sample(range(1, moments + 1), trial.sample)):
        trial.interrupt(at)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_at_every_moment_leaves_the_client_whole_or_closed(trial: Trial) -> None:
    moments = trial.moments()
    for at in range(1, moments + 1):
        trial.interrupt(at)
    assert (
        trial.closed < moments * trial.closed_part_max
    )  # Closing is for where nothing else is safe.


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@each_case("again", [False, True], ids=["call", "reconnect"])
def test_interrupt_of_a_call_of_the_coordinator_ends_no_worker(
    make_cluster: MakeCluster, again: bool
) -> None:
    client = make_cluster(workers=1).client(0)
    ask, control = client.connection.members, client.connection.control

    def begin() -> None:
        if again:
            control._link._break_off()

    begin()
    counting = Interrupter()
    counting.run(ask)
    for at in range(1, counting.passed + 1):
        begin()
        interrupter = Interrupter(at)
        interrupter.run(ask)
        found = [(each.state, each.client) for each in ask()]
        assert found == [("live", client.connection.id)], interrupter.where
    control._link._break_off()
    assert ask()
    assert not control._others  # What was kept open is closed.
    with ThreadPoolExecutor(1) as other:  # As the heartbeat's thread.
        assert other.submit(control.notify, WorkerBeat(0)).result()


LOOK_S = 0.01
LOOKS = 5
"""So often in a row the thread has to stand at the same instruction: then it waits there."""


@pytest.fixture
def interrupt_wait() -> Iterator[Callable[[], None]]:
    """Interrupts this thread, by a signal from another one, as soon as it waits in the package."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    main, ended = threading.get_ident(), threading.Event()
    threads: list[threading.Thread] = []

    def look() -> None:
        before, same = None, 0
        while same < LOOKS and not ended.wait(LOOK_S):
            frame = sys._current_frames()[main]
            here = (id(frame), frame.f_lasti, frame.f_code.co_filename.startswith(SOURCES))
            same = same + 1 if here == before and here[-1] else 0
            before = here
        if same == LOOKS:
            signal.pthread_kill(main, signal.SIGUSR1)

    def begin() -> None:
        threads.append(threading.Thread(target=look))
        threads[-1].start()

    handler = signal.signal(signal.SIGUSR1, raise_it)
    yield begin
    ended.set()
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGUSR1, handler)


@pytest.mark.parametrize("servers", [1, 2])
def test_push_that_is_interrupted_within_its_frame_over_tcp_is_applied_once_or_not_at_all(
    make_cluster: MakeCluster, interrupt_wait: Callable[[], None], servers: int
) -> None:
    size = 4_000_000  # More than the sockets' buffers hold.
    cluster = make_cluster("tcp", servers=servers)
    client = cluster.client()
    client.define("w", np.zeros(size), rule=Add())
    with cluster.frozen():
        interrupt_wait()
        with pytest.raises(KeyboardInterrupt):
            client.push("w", np.full(size, 1.0)).result()
    client.push("w", np.full(size, 1.0)).result()
    assert np.unique(client.pull("w")).tolist() in ([1.0], [2.0])


def test_wait_that_is_interrupted_leaves_the_client_usable(
    remote: RoleCluster, interrupt_wait: Callable[[], None]
) -> None:
    client = remote.client()
    client.define("w", np.zeros(3), rule=Add())
    connects = remote.connects
    with remote.frozen():
        interrupt_wait()
        with pytest.raises(KeyboardInterrupt):
            client.push("w", np.ones(3)).result()
    assert client.push("w", np.ones(3)).result().version == 2
    assert client.pull("w").tolist() == [2.0] * 3
    assert remote.connects == connects  # Nothing was torn, so nothing was broken off.

"""Own steps: exchanges without waiting and exchanges of fragments, against plain programs, and
against torchft where that is installed."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from tests.suites import each_case

import paramserve as ps
from paramserve import Worker
from paramserve.errors import UnknownName
from paramserve.messages import AskStatus, Fastest, Status, TellSpeed

EVERY, LR, MOMENTUM = 3, 0.1, 0.9
ORDER = (0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1)
"""Whose turn it is to make `EVERY` own steps and to exchange."""


class Learner:
    """One worker with a small model, whose loss depends on its rank."""

    def __init__(self, worker: Worker, **options: Any) -> None:
        self.rank = worker.rank
        self.model = torch.nn.Linear(3, 2)
        own = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.optimizer = worker.optimizer(self.model, own, **options)
        self.inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(worker.rank))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.inputs).square().mean().backward()
        self.optimizer.step()

    def values(self) -> list[torch.Tensor]:
        return [param.detach().clone() for param in self.model.parameters()]


def plain(first: list[torch.Tensor], pushes: int) -> list[torch.Tensor]:
    """The servers' values after all turns: algorithm 3 with torch alone."""
    values = [each.clone() for each in first]
    inputs = [torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    mine = [[each.clone() for each in first] for _ in inputs]
    buffer, total = ([torch.zeros_like(each) for each in first] for _ in range(2))
    for turn, rank in enumerate(ORDER, 1):
        model = torch.nn.Linear(3, 2)
        params = list(model.parameters())
        with torch.no_grad():
            for param, value in zip(params, mine[rank], strict=True):
                param.copy_(value)
        own = torch.optim.SGD(params, lr=LR)
        for _ in range(EVERY):
            own.zero_grad()
            model(inputs[rank]).square().mean().backward()
            own.step()
        for i, param in enumerate(params):
            change = mine[rank][i] - param.detach()
            total[i] += change
            if turn % pushes == 0:
                buffer[i] = MOMENTUM * buffer[i] + total[i] / pushes
                total[i].zero_()
                values[i] -= 0.7 * MOMENTUM * buffer[i]
            values[i] -= 0.7 * change / pushes
        mine[rank] = [each.clone() for each in values]
    return values


@pytest.mark.parametrize("pushes", [1, 2, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_async_local_steps_are_those_of_a_plain_program(
    make_cluster: MakeCluster, servers: int, pushes: int
) -> None:
    outer = ps.DelayedNesterov(lr=0.7, momentum=MOMENTUM, pushes=pushes)
    policy = ps.AsyncLocalSteps(EVERY, outer)
    cluster = make_cluster(servers=servers, workers=2, policy=policy)
    torch.manual_seed(1)
    learners = [Learner(Worker(cluster.client(rank=rank), seed=1)) for rank in range(2)]
    first = learners[0].values()
    for rank in ORDER:
        for _ in range(EVERY):
            learners[rank].step()
    last = learners[ORDER[-1]].values()
    for value, wanted in zip(last, plain(first, pushes), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


@each_case(("pushes", "told"), [(1, 0), (2, 0), (3, 1)])
def test_outer_momentum_of_another_number_of_workers_is_told_once(
    make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str], pushes: int, told: int
) -> None:
    policy = ps.AsyncLocalSteps(EVERY, ps.DelayedNesterov(lr=0.7, pushes=pushes))
    cluster = make_cluster(workers=2, policy=policy)
    for rank in range(2):
        Learner(Worker(cluster.client(rank=rank), seed=1))
    text = "DelayedNesterov(pushes=3) renews its momentum after 3 pushes, and the run has 2 workers"
    assert capsys.readouterr().err.count(text) == told


def test_worker_of_async_local_steps_waits_for_no_other(make_cluster: MakeCluster) -> None:
    policy = ps.AsyncLocalSteps(2, ps.SGD(lr=1.0), drop_after=1)
    cluster = make_cluster(workers=2, policy=policy)
    learners = [Learner(Worker(cluster.client(rank=rank), seed=1)) for rank in range(2)]
    for _ in range(6):
        learners[0].step()
    learners[1].step()
    before = learners[1].values()
    learners[1].step()
    last: Any = learners[1].optimizer
    assert (last.last_step.staleness, last.last_step.dropped) == (3, True)
    assert any((a != b).any() for a, b in zip(before, learners[1].values(), strict=True))
    np.testing.assert_array_equal(learners[1].values()[0], learners[0].values()[0])


@each_case(
    ("options", "told"),
    [
        ({"overlap": True}, "overlap=True does not go with AsyncLocalSteps"),
        ({"dense": "local", "push": ps.Int8()}, "leave them out"),
    ],
)
def test_what_own_steps_cannot_do_is_refused(
    make_cluster: MakeCluster, options: dict[str, Any], told: str
) -> None:
    policy = ps.AsyncLocalSteps(2, ps.SGD(lr=1.0))
    worker = Worker(make_cluster(workers=1, policy=policy).client(rank=0), seed=1)
    with pytest.raises(ValueError, match=told):
        Learner(worker, **options)


# --- NaN ------------------------------------------------------------------------------------------


def test_nan_of_one_worker_leaves_out_its_exchange_alone(make_cluster: MakeCluster) -> None:
    policy = ps.LocalSteps(2, outer=ps.SGD(lr=1.0), on_nonfinite="skip")
    cluster = make_cluster(servers=2, workers=2, policy=policy)

    def train(worker: Worker) -> tuple[float, list[bool]]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        own = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer: Any = worker.optimizer(model, own)
        dropped = []
        for step in range(8):
            spoils = step == 2 and worker.rank == 0
            model.weight.grad = torch.full((1, 1), math.nan if spoils else -1.0)
            optimizer.step()
            if step % 2:
                dropped.append(optimizer.last_step.dropped)
        return float(model.weight.detach()), dropped

    returned = Ranks(cluster, train).start(0, 1).end()
    assert returned == {0: (8.0, [False, True, False, False]), 1: (8.0, [False] * 4)}


OWN: dict[str, Any] = {"outer": ps.SGD(lr=1.0), "on_nonfinite": "skip"}


@each_case(
    "policy",
    [
        ps.LocalSteps(2, merge=0.5, **OWN),
        ps.LocalSteps(4, fragments=2, **OWN),
        ps.LocalSteps(4, fragments=2, delay=1, merge=0.5, **OWN),
        ps.AsyncLocalSteps(2, merge=0.5, **OWN),
        ps.ElasticAverage(every=2, rho=0.5, on_nonfinite="skip"),
    ],
    ids=lambda policy: f"{type(policy).__name__}-{getattr(policy, 'fragments', '')}",
)
def test_nan_in_one_own_step_is_over_after_an_exchange(
    make_cluster: MakeCluster, policy: Any
) -> None:
    cluster = make_cluster(workers=1, policy=policy)
    worker = Worker(cluster.client(rank=0), seed=1)
    model = torch.nn.Linear(3, 2)
    own = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer: Any = worker.optimizer(model, own)
    dropped = 0
    for step in range(12):
        for param in model.parameters():
            param.grad = torch.full_like(param, math.nan if step == 2 else 1.0)
        before = optimizer.last_step
        optimizer.step()
        dropped += optimizer.last_step is not before and optimizer.last_step.dropped
        if step > 6:
            for param in model.parameters():
                assert torch.isfinite(param).all()
                assert torch.isfinite(optimizer.state[param]["exp_avg"]).all()
    assert dropped == 1


def test_own_steps_that_stay_nan_are_told_of_while_the_run_goes_on(
    make_cluster: MakeCluster,
) -> None:
    policy = ps.AsyncLocalSteps(1, **OWN)
    worker = Worker(make_cluster(workers=1, policy=policy).client(rank=0), seed=1)
    model = torch.nn.Linear(1, 1)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step() -> None:
        for param in model.parameters():
            param.grad = torch.full_like(param, math.nan)
        optimizer.step()

    for _ in range(9):
        step()
    with pytest.warns(UserWarning, match="last 10 steps of group 'model' were left out"):
        step()
    for _ in range(12):
        step()  # once is enough


# --- step counts by speed -------------------------------------------------------------------------


class Paced(Learner):
    """A learner whose steps take so many seconds each, by a clock of its own.

    Attributes:
        hears: whether the coordinator's answers come before its next step.
    """

    hears = True

    def __init__(self, worker: Worker, step_s: float) -> None:
        self.time, self.step_s, self.client = 0.0, step_s, worker.client
        worker.client.steps.now = lambda: self.time
        super().__init__(worker)

    def step(self) -> None:
        self.time += self.step_s
        super().step()

    def until_exchange(self) -> int:
        """Steps to the end of the next exchange; how many that were."""
        made, before = 0, self.clock
        while self.clock == before:
            self.step()
            made += 1
        if self.hears:
            speeds(self.client)  # its answer comes behind the one to the exchange
        return made

    @property
    def clock(self) -> int:
        adopted: Any = self.optimizer
        return int(adopted._adopted._client.steps.clocks.get("model", 0))


FAST_S, SLOW_S = 1_000.0, 5_000.0
"""So long that what a test waits for in truth is nothing beside them."""


def test_slow_worker_makes_fewer_steps_between_exchanges(make_cluster: MakeCluster) -> None:
    """Liu et al., 2024: H * v / max(v), rounded down: of 12 steps and a fifth of the speed 2."""
    policy = ps.AsyncLocalSteps(12, ps.SGD(lr=1.0), scale_steps=True)
    cluster = make_cluster(workers=3, policy=policy)
    clients = [cluster.client(rank=rank) for rank in range(3)]
    fast, slow = Paced(Worker(clients[0], seed=1), FAST_S), Paced(Worker(clients[1], 1), SLOW_S)
    assert [each.until_exchange() for each in (fast, slow)] == [12, 12], "no speed is known"
    assert [each.until_exchange() for each in (slow, fast)] == [12, 12], "it is answered by then"
    assert [each.until_exchange() for each in (slow, fast, slow)] == [2, 12, 2]

    slow.step_s = 500.0
    counts = [slow.until_exchange() for _ in range(15)]
    assert counts[0] == 2, "it changes at an exchange only"
    assert counts == sorted(counts), "the mean of the last ones counts"
    assert counts[-1] == 12
    assert [fast.until_exchange() for _ in range(3)] == [12, 12, 6], "now it is the slow one"
    told = dict(speeds(clients[0]))
    assert [each.steps for each in told.values()] == [6, 12]
    assert [each.steps_per_s for each in told.values()] == pytest.approx([1e-3, 2e-3], rel=0.1)

    joined = Paced(Worker(clients[2], seed=1), 100.0)
    joined.until_exchange()
    assert [slow.until_exchange() for _ in range(3)] == [12, 12, 2], "a faster one has joined"
    clients[2].connection.control.close()  # its process ends
    cluster.mark_dead(2)
    assert [slow.until_exchange() for _ in range(3)] == [2, 2, 12], "and died"


def test_coordinator_that_stands_still_holds_no_step_up(make_cluster: MakeCluster) -> None:
    policy = ps.AsyncLocalSteps(2, ps.SGD(lr=1.0), scale_steps=True)
    cluster = make_cluster(workers=2, policy=policy)
    fast, slow = (Paced(Worker(cluster.client(rank=k), 1), 10.0**k * 1e3) for k in range(2))
    for each in (fast, slow, slow):
        each.until_exchange()
    slow.hears, slow.step_s = False, 1e-3
    wakes, began = threading.Event(), time.monotonic()
    cluster.coordinating.loop.call_soon_threadsafe(wakes.wait, 60.0)
    try:
        counts = [slow.until_exchange() for _ in range(30)]
        assert time.monotonic() - began < 20.0, "each would have waited for a second"
    finally:
        wakes.set()
    assert counts[-1] == 2, "by its own new speed, and the last one that it knows of"


def test_scaled_steps_are_at_least_one_and_none_without_the_option(
    make_cluster: MakeCluster,
) -> None:
    for scaled in (False, True):
        policy = ps.AsyncLocalSteps(4, ps.SGD(lr=1.0), scale_steps=scaled)
        cluster = make_cluster(workers=2, policy=policy)
        workers = [Worker(cluster.client(rank=rank), seed=1) for rank in range(2)]
        fast, slow = Paced(workers[0], 1.0), Paced(workers[1], 1_000.0)
        counts = [each.until_exchange() for each in (fast, slow, slow, slow, fast)]
        assert counts == ([4, 4, 4, 1, 4] if scaled else [4] * 5)
        assert len(speeds(workers[0].client)) == (2 if scaled else 0)


def test_speeds_that_are_none_are_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(workers=1, policy=ps.AsyncLocalSteps(2, ps.SGD(lr=1.0)))
    client = cluster.client(rank=0)
    Learner(Worker(client, seed=1))
    for speed, steps in ((0.0, 1), (-1.0, 1), (math.inf, 1), (math.nan, 1), (1.0, 0)):
        with pytest.raises(ps.ParamServeError, match=r"rank 0 told of .* must be above 0"):
            tell(client, TellSpeed(0, "model", speed, steps))
    with pytest.raises(UnknownName, match="in group 'other', which is not defined"):
        tell(client, TellSpeed(0, "other", 1.0, 1))
    assert not speeds(client)
    assert tell(client, TellSpeed(0, "model", 3.0, 1)) == 3.0


def speeds(client: Any) -> Any:
    """By rank, what the coordinator knows."""
    return client.connection.control.call(AskStatus(0), Status, timeout_s=5.0).speeds


def tell(client: Any, message: TellSpeed) -> float:
    found: Fastest = client.connection.control.call(message, Fastest, timeout_s=5.0)
    return found.steps_per_s


# --- fragments ------------------------------------------------------------------------------------


class Network(torch.nn.Module):
    """Four layers of equal size: with two fragments, two each."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(6, 6, bias=False),
                torch.nn.Tanh(),
                torch.nn.Linear(6, 6, bias=False),
            )
            for _ in range(2)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for half in self.halves:
            inputs = half(inputs)
        return inputs


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def own_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank: int, at: int) -> None:
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    model(batch(rank, at).to(dtype)).square().mean().backward()
    optimizer.step()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def network() -> Network:
    """With the same values on each thread, whose random numbers torch draws from one generator."""
    model, generator = Network(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(6, 6, generator=generator) / 3.0)
    return model


def inner(model: torch.nn.Module) -> torch.optim.Optimizer:
    if next(model.parameters()).dtype == torch.float16:  # in which Adam's eps is 0
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.Adam(model.parameters(), lr=0.01)


def with_servers(
    make_cluster: MakeCluster,
    steps: int,
    policy: Any,
    workers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Each rank's values after each own step."""

    def work(worker: Worker) -> list[dict[str, torch.Tensor]]:
        model, found = network().to(dtype), []
        optimizer = worker.optimizer(model, inner(model))
        for at in range(steps):
            own_steps(model, optimizer, worker.rank, at)
            found.append(state_of(model))
        return found

    cluster = make_cluster(servers=2, workers=workers, policy=policy)
    ranks = Ranks(cluster, work)
    for rank in range(workers):
        ranks.start(rank)
    return [ranks.end()[rank] for rank in range(workers)]


def same(ours: Any, theirs: Any) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for at, (mine, wanted) in enumerate(zip(one, other, strict=True)):
            for name, value in wanted.items():
                told = f"{name} after step {at + 1}"
                torch.testing.assert_close(
                    mine[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, t=told: f"{t}: {m}"
                )


def streaming(
    steps: int,
    every: int,
    fragments: int,
    delay: int,
    merge: float,
    workers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> list[Any]:
    """Streaming DiLoCo of some workers as one program, whose center is float32."""
    models = [network().to(dtype) for _ in range(workers)]
    optimizers = [inner(model) for model in models]
    center = network().to(dtype).float()
    outers = [
        torch.optim.SGD(half.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        for half in (center.halves if fragments == 2 else [center])
    ]
    parts = [[m.halves[i] for m in (center, *models)] for i in range(2)]
    if fragments == 1:
        parts = [[center, *models]]
    starts = [[[p.detach().clone() for p in part.parameters()] for part in row] for row in parts]
    interval, coming = every // fragments, None
    found: list[Any] = [[] for _ in range(workers)]
    for at in range(steps):
        for rank, model in enumerate(models):
            own_steps(model, optimizers[rank], rank, at)
        done = at + 1
        if done % interval == 0:
            f = (done // interval - 1) % fragments
            for i, param in enumerate(parts[f][0].parameters()):
                ends = [list(parts[f][1 + r].parameters())[i].detach() for r in range(workers)]
                changes = [starts[f][1 + r][i] - ends[r] for r in range(workers)]
                param.grad = torch.stack([each.float() for each in changes]).mean(0)
            outers[f].step()
            coming = (done + delay, f)
        if coming is not None and coming[0] == done:
            f, coming = coming[1], None
            for i, param in enumerate(parts[f][0].parameters()):
                rounded = param.detach().to(dtype, copy=True)
                for r in range(workers):
                    starts[f][1 + r][i] = rounded
                    own = list(parts[f][1 + r].parameters())[i]
                    own.data = torch.lerp(rounded, own.detach(), merge)
        for rank, model in enumerate(models):
            found[rank].append(state_of(model))
    return found


@each_case(
    ("fragments", "delay", "merge"),
    [(1, 0, 0.0), (1, 2, 0.5), (2, 0, 0.0), (2, 0, 0.25), (2, 1, 0.0), (2, 1, 0.5)],
)
def test_fragments_are_exchanged_as_in_a_plain_program(
    make_cluster: MakeCluster, fragments: int, delay: int, merge: float
) -> None:
    options: dict[str, Any] = {"fragments": fragments, "delay": delay, "merge": merge}
    ours = with_servers(make_cluster, 14, ps.LocalSteps(4, **options))
    same(ours, streaming(14, 4, fragments, delay, merge))


@each_case(("fragments", "delay", "merge"), [(1, 2, 0.5), (2, 0, 0.0), (2, 1, 0.0), (2, 1, 0.5)])
def test_fragments_without_waiting_are_those_of_a_plain_program(
    make_cluster: MakeCluster, fragments: int, delay: int, merge: float
) -> None:
    """Of one worker, whose exchanges no other one's come between."""
    outer = ps.SGD(0.7, 0.9, nesterov=True)
    policy = ps.AsyncLocalSteps(4, outer, fragments=fragments, delay=delay, merge=merge)
    ours = with_servers(make_cluster, 14, policy, workers=1)
    same(ours, streaming(14, 4, fragments, delay, merge, workers=1))


@pytest.mark.filterwarnings("ignore:with .*LocalSteps the worker's own optimizer")
@each_case("dtype", [torch.bfloat16, torch.float16])
@each_case(("fragments", "delay", "merge"), [(1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.5)])
def test_values_of_16_bits_add_up_in_float32(
    make_cluster: MakeCluster, dtype: torch.dtype, fragments: int, delay: int, merge: float
) -> None:
    """As in the plain program, whose center is float32 and whose models are of 16 bits."""
    options: dict[str, Any] = {"fragments": fragments, "delay": delay, "merge": merge}
    ours = with_servers(make_cluster, 14, ps.LocalSteps(4, **options), dtype=dtype)
    same(ours, streaming(14, 4, fragments, delay, merge, dtype=dtype))
    alone = ps.AsyncLocalSteps(4, ps.SGD(0.7, 0.9, nesterov=True), **options)
    ours = with_servers(make_cluster, 14, alone, workers=1, dtype=dtype)
    same(ours, streaming(14, 4, fragments, delay, merge, workers=1, dtype=dtype))


def test_what_rounding_to_16_bits_leaves_out_stays_on_the_servers(
    make_cluster: MakeCluster,
) -> None:
    """Each exchange moves the center by a quarter of a step of 16 bits: were it kept in 16 bits, it
    would never move."""
    policy = ps.LocalSteps(1, ps.SGD(lr=0.25))
    worker = Worker(make_cluster(workers=1, policy=policy).client(rank=0), seed=1)
    model = torch.nn.Linear(2, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    own = torch.optim.SGD(model.parameters(), lr=2.0**-7)
    with pytest.warns(UserWarning, match=r"LocalSteps .* in torch.bfloat16, as with torch alone"):
        optimizer = worker.optimizer(model, own)
    found = []
    for _ in range(6):
        model.weight.grad = torch.full_like(model.weight, -1.0)
        optimizer.step()
        found.append((model.weight[0, 0].item() - 1.0) * 2**7)
    assert found == [0, 0, 1, 1, 1, 2], "quarters of a step, rounded to the nearest even"


def test_delay_stays_below_scaled_steps(make_cluster: MakeCluster) -> None:
    """Values that came behind the next exchange would undo the steps that it has to send."""
    options: dict[str, Any] = {"fragments": 2, "delay": 3, "scale_steps": True}
    policy = ps.AsyncLocalSteps(8, ps.SGD(lr=1.0), **options)
    cluster = make_cluster(workers=2, policy=policy)
    workers = [Worker(cluster.client(rank=rank), seed=1) for rank in range(2)]
    fast, slow = Paced(workers[0], 1.0), Paced(workers[1], 1_000.0)
    assert [each.until_exchange() for each in (fast, slow)] == [4, 4]
    assert [slow.until_exchange() for _ in range(4)] == [4, 1, 1, 1]
    for _ in range(4):
        fast.until_exchange()  # moves the center away
        before = slow.values()
        slow.step()
        center = center_of(workers[0])
        arrived = [any(np.array_equal(v.flatten(), c) for c in center) for v in slow.values()]
        assert any(arrived), "of the fragment that was exchanged, at once"
        assert all((a != b).any() for a, b in zip(before, slow.values(), strict=True))


def center_of(worker: Worker) -> list[Any]:
    client = worker.client
    return [client.dense.fetch(block, 0)[0] for block in client.blocks() if block.size]


class Meeting:
    """What `torchft` wants of a manager: the mean over two threads that make the same calls."""

    _use_async_quorum = False

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60.0)
        self.given: dict[int, torch.Tensor] = {}


class Manager:
    _use_async_quorum = False

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.commits = meeting, rank, 0

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        self.meeting.given[self.rank] = tensor.clone()
        self.meeting.barrier.wait()
        tensor.copy_(torch.stack([self.meeting.given[rank] for rank in range(2)]).mean(0))
        self.meeting.barrier.wait()
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        self.commits += 1
        return True

    def current_step(self) -> int:
        return self.commits

    def start_quorum(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def register_state_dict_fn(self, *arguments: Any) -> None: ...


@pytest.mark.parametrize(("fragments", "merge"), [(1, 0.0), (2, 0.0), (2, 0.25)])
def test_local_steps_are_those_of_torchfts_diloco(
    make_cluster: MakeCluster, fragments: int, merge: float
) -> None:
    """Values after each of 14 steps, with the outer optimizer of DiLoCo: Nesterov 0.9, lr 0.7."""
    local_sgd = pytest.importorskip("torchft.local_sgd", reason="pip install torchft, the oracle")
    meeting = Meeting()

    def train(rank: int) -> list[dict[str, torch.Tensor]]:
        model, found = models[rank], []
        own = inner(model)
        pieces = list(model.halves) if fragments == 2 else [model]
        outers = [
            torch.optim.SGD(piece.parameters(), lr=0.7, momentum=0.9, nesterov=True)
            for piece in pieces
        ]
        manager: Any = Manager(meeting, rank)
        options: dict[str, Any] = {"sync_every": 4, "fragment_update_alpha": merge}
        with local_sgd.DiLoCo(manager, pieces, own, outers, **options):
            for at in range(14):
                own_steps(model, own, rank, at)
                found.append(state_of(model))
        return found

    models = [network() for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        theirs = list(threads.map(train, range(2)))
    same(with_servers(make_cluster, 14, ps.LocalSteps(4, fragments=fragments, merge=merge)), theirs)


def test_what_no_fragment_has_sent_is_exchanged_at_the_end(make_cluster: MakeCluster) -> None:
    def work(worker: Worker) -> dict[str, torch.Tensor]:
        model = network()
        optimizer = worker.optimizer(model, inner(model))
        for at in range(5):
            own_steps(model, optimizer, worker.rank, at)
        ends.append([state_of(model), worker.client.clock("model")])
        worker.optimizers.own_steps[0].settle()
        client = worker.client
        whole = [client.dense.fetch(block, 0)[0] for block in client.blocks()]
        return {"whole": np.concatenate(whole), "clock": client.clock("model")}

    ends: list[Any] = []
    policy = ps.LocalSteps(every=4, fragments=2, delay=1, merge=0.5, outer=ps.SGD(lr=1.0))
    cluster = make_cluster(workers=1, policy=policy)
    (found,) = Ranks(cluster, work).start(0).end().values()
    assert (ends[0][1], found["clock"]) == (2, 3), "one clock for all that is left"
    own = np.concatenate([value.numpy().reshape(-1) for value in ends[0][0].values()])
    np.testing.assert_allclose(found["whole"], own, atol=1e-6)


@each_case(
    ("options", "told"),
    [
        ({"every": 4, "fragments": 3}, "must be a multiple of fragments=3"),
        ({"every": 2, "fragments": 4}, "must be a multiple of fragments=4"),
        ({"every": 4, "fragments": 2, "delay": 2}, "delay of LocalSteps must be below every"),
        ({"every": 4, "merge": 1.0}, "merge of LocalSteps must be below 1"),
        ({"every": 4, "fragments": 0}, "fragments of LocalSteps must be at least 1"),
    ],
)
def test_schedule_that_does_not_go_up_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ps.LocalSteps(**options)
    with pytest.raises(ValueError, match=told.replace("LocalSteps", "AsyncLocalSteps")):
        ps.AsyncLocalSteps(outer=ps.SGD(lr=1.0), **options)


def test_more_fragments_than_tensors_are_refused(make_cluster: MakeCluster) -> None:
    for policy in (
        ps.LocalSteps(every=8, fragments=4),
        ps.AsyncLocalSteps(8, ps.SGD(lr=1.0), fragments=4),
    ):
        worker = Worker(make_cluster(workers=1, policy=policy).client(rank=0), seed=1)
        told = f"fragments=4 of {type(policy).__name__}, and 'model' has only 2"
        with pytest.raises(ValueError, match=told):
            Learner(worker)

"""Learning rate schedules of workers that die and are started again, or are added to a run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import wait_until
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.consistency.base import Policy
from paramserve.errors import HyperMismatch, NonFinite

STEPS = 12
NEVER = -1

PER_STEP: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, STEPS),
    "one_cycle": lambda o: schedulers.OneCycleLR(o, 0.3, total_steps=STEPS + 1),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda n: 1.0 / (1 + n)),
    "sequential": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, 1.0, 4), schedulers.ExponentialLR(o, 0.8)], [4]
    ),
    "chained": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, 0.5, 3), schedulers.ExponentialLR(o, 0.9)]
    ),
}


@pytest.fixture(autouse=True)
def _no_warning_of_torch() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # SequentialLR steps its parts in its own constructor.
        warnings.filterwarnings(
            "ignore", ".*lr_scheduler.step.. before .optimizer.step", UserWarning
        )
        warnings.filterwarnings("ignore", ".*epoch parameter", UserWarning)
        yield


OTHERS = (
    "group 'model' goes on with this run's schedulers, which are others than the checkpoint's: "
    "learning rates"
)


def build(worker: ps.Worker, momentum: float = 0.9) -> tuple[torch.nn.Module, Optimizer]:
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.1)
    own = SGD(model.parameters(), lr=0.1, momentum=momentum)
    return model, worker.optimizer(model, own)


def step(worker: ps.Worker, model: torch.nn.Module, optimizer: Optimizer) -> float:
    """One step on inputs that depend on rank and clock only; the rate that it was made with."""
    generator = torch.Generator().manual_seed(100 * worker.rank + worker.clock)
    optimizer.zero_grad()
    model(torch.randn(4, 2, generator=generator)).square().mean().backward()
    optimizer.step()
    return float(optimizer.param_groups[0]["lr"])


def kill(worker: ps.Worker, rank: int, clock: int) -> None:
    """End a rank's first incarnation at this clock."""
    if worker.rank == rank and worker.incarnation == 1 and worker.clock == clock:
        worker.client.drain()
        raise Killed


def run(make: MakeCluster, train: Any, policy: Policy | None = None) -> tuple[Any, Any, int]:
    """What the ranks returned, the values at the end, and how often a rank was started again."""
    policy = policy if policy is not None else ps.Sync()
    cluster = make("unix", servers=2, workers=2, policy=policy, restarts=True)
    ranks = Ranks(cluster, train).start(0, 1)
    returned = ranks.end()
    return returned, cluster.client().pull(), len(ranks.restarts)


@pytest.mark.parametrize("kind", PER_STEP)
def test_schedule_per_step_goes_on_after_a_restart(make_cluster: MakeCluster, kind: str) -> None:
    def training(clock: int) -> Callable[[ps.Worker], list[float]]:
        def train(worker: ps.Worker) -> list[float]:
            model, optimizer = build(worker)
            scheduler = PER_STEP[kind](optimizer)
            worker.track("scheduler", scheduler)
            rates = []
            while worker.clock < STEPS:
                kill(worker, 1, clock)
                rates.append(step(worker, model, optimizer))
                scheduler.step()
            return rates

        return train

    whole, values, _ = run(make_cluster, training(NEVER))
    broken, found, restarts = run(make_cluster, training(7))
    assert restarts == 1
    assert broken[1] == whole[1][7:]
    assert all((found[name] == values[name]).all() for name in values)


FIRST, SECOND, END = 0, 1, -1


@pytest.mark.parametrize(
    ("shards", "policy", "rank", "epoch", "batch"),
    [
        ("static", ps.Sync(), 0, 3, SECOND),
        ("static", ps.Sync(), 1, 4, END),
        ("dynamic", ps.Sync(), 0, 3, END),
        pytest.param("static", ps.Sync(), 0, 4, FIRST, marks=pytest.mark.slow),
        pytest.param("static", ps.Async(), 0, 2, END, marks=pytest.mark.slow),
        pytest.param("dynamic", ps.Sync(), 0, 4, FIRST, marks=pytest.mark.slow),
    ],
)
def test_loop_over_the_loaders_epochs_goes_on_in_the_epoch_that_is_not_done(
    make_cluster: MakeCluster, shards: str, policy: Policy, rank: int, epoch: int, batch: int
) -> None:
    """Also of a rank that dies between the last step of an epoch and what follows the epoch."""
    took: list[tuple[int, int, float]] = []
    ended: list[tuple[int, int]] = []

    def train(worker: ps.Worker) -> None:
        def may_die(*place: int) -> None:
            if (worker.rank, *place) == (rank, epoch, batch):
                kill(worker, rank, worker.clock)

        model, optimizer = build(worker)
        scheduler = schedulers.ExponentialLR(optimizer, 0.5)
        worker.track("scheduler", scheduler)
        dataset = TensorDataset(torch.arange(8.0 * worker.workers))
        loader = worker.loader(dataset, batch_size=2, shards=shards)
        for number in loader.epochs(5, start=2):
            for place, (samples,) in enumerate(loader):
                may_die(number, place)
                rate = step(worker, model, optimizer)
                took.extend((number, int(sample), rate) for sample in samples)
            may_die(number, END)
            ended.append((worker.rank, number))
            scheduler.step()

    _, _, restarts = run(make_cluster, train, policy)
    assert restarts == 1
    rates = {2: 0.1, 3: 0.05, 4: 0.025}
    assert sorted(took) == [(e, sample, rate) for e, rate in rates.items() for sample in range(16)]
    left_out = [(rank, epoch)] if batch == END else []
    missing = {(each, number) for each in (0, 1) for number in rates} - {*ended, *left_out}
    late = {(rank, 4)} if shards == "dynamic" else set()  # the other one may have taken all of it
    assert len(ended) == len({*ended})
    assert missing <= late


def test_epochs_of_a_loader_are_those_of_range_where_nothing_is_done(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=1, workers=1)

    def train(worker: ps.Worker) -> list[list[int]]:
        loader = worker.loader(TensorDataset(torch.arange(4.0)), batch_size=2)
        for wrong in (-1, True, 2.0, None):
            with pytest.raises((TypeError, ValueError), match="epochs must be"):
                loader.epochs(wrong)
        return [[*loader.epochs(3)], [*loader.epochs(3, start=1)], [*loader.epochs(1, start=3)]]

    assert Ranks(cluster, train).start(0).end() == {0: [[0, 1, 2], [1, 2], []]}


def test_schedule_per_epoch_goes_on_after_two_restarts_around_the_epochs_end(
    make_cluster: MakeCluster,
) -> None:
    """The second incarnation makes two steps, one in each epoch: its schedule is not per step."""

    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        scheduler = schedulers.ExponentialLR(optimizer, 0.5)
        worker.track("scheduler", scheduler)
        loader = worker.loader(TensorDataset(torch.arange(8.0 * worker.workers)), batch_size=2)
        rates = []
        for _ in range(3):
            for _ in loader:
                if worker.rank == 1 and (worker.incarnation, worker.clock) in ((1, 3), (2, 5)):
                    worker.client.drain()
                    raise Killed
                rates.append(step(worker, model, optimizer))
            scheduler.step()
        return rates

    broken, _, restarts = run(make_cluster, train, ps.Async())
    rates = [0.1] * 4 + [0.05] * 4 + [0.025] * 4
    assert restarts == 2
    assert broken == {0: rates, 1: rates[5:]}


@pytest.mark.parametrize("policy", [ps.Sync(), ps.Async()], ids=["sync", "async"])
def test_rate_that_the_function_sets_goes_on_after_a_restart(
    make_cluster: MakeCluster, policy: Policy
) -> None:
    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        rates = []
        while worker.clock < STEPS:
            kill(worker, 1, 7)
            if worker.clock and worker.clock % 3 == 0:
                optimizer.param_groups[0]["lr"] *= 0.5
            rates.append(step(worker, model, optimizer))
        return rates

    broken, _, restarts = run(make_cluster, train, policy)
    rates = [0.1 * 0.5 ** (clock // 3) for clock in range(STEPS)]
    assert restarts == 1
    assert broken == {0: rates, 1: rates[7:]}


@pytest.mark.parametrize(
    ("policy", "every"),
    [(ps.Async(), 1), (ps.LocalSteps(every=2), 2), (ps.ElasticAverage(0.5, every=2), 2)],
    ids=["async", "local", "elastic"],
)
def test_schedule_goes_on_under_other_policies(
    make_cluster: MakeCluster, policy: Policy, every: int
) -> None:
    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        worker.track("scheduler", scheduler)
        rates = []
        while worker.clock < STEPS:
            kill(worker, 1, 7)
            for _ in range(every):
                rates.append(step(worker, model, optimizer))
                scheduler.step()
        return rates

    broken, _, restarts = run(make_cluster, train, policy)
    assert restarts == 1
    assert broken[1] == broken[0][7 * every :]


def test_schedule_that_wants_a_metric_goes_on_after_a_restart(make_cluster: MakeCluster) -> None:
    """Called before a step it is in the state that the step tells."""

    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.1, patience=1)
        worker.track("scheduler", scheduler)
        rates = []
        while worker.clock < STEPS:
            kill(worker, 1, 7)
            scheduler.step(1.0 if worker.clock < 5 else -worker.clock)
            rates.append(step(worker, model, optimizer))
        return rates

    broken, _, restarts = run(make_cluster, train)
    assert restarts == 1
    assert broken[0][2] < 0.1
    assert broken[1] == broken[0][7:]


def test_schedule_that_wants_a_metric_takes_the_state_of_the_last_step(
    make_cluster: MakeCluster,
) -> None:
    """The call behind it is the function's to make: only it has the metric."""
    counts: list[tuple[int, int]] = []

    def train(worker: ps.Worker) -> None:
        model, optimizer = build(worker)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=100)
        worker.track("scheduler", scheduler)
        while worker.clock < STEPS:
            kill(worker, 0, 7)
            step(worker, model, optimizer)
            counts.append((worker.clock, scheduler.num_bad_epochs))
            scheduler.step(float(worker.clock))

    cluster = make_cluster("unix", workers=1, policy=ps.Async(), restarts=True)
    with pytest.warns(UserWarning, match="goes on with ReduceLROnPlateau as of the last step"):
        Ranks(cluster, train).start(0).end()
    assert counts[:7] == [(1, 0), *((clock, clock - 2) for clock in range(2, 8))]
    assert counts[7:] == [(clock, clock - 3) for clock in range(8, STEPS + 1)]


def test_other_schedule_than_before_takes_the_groups_rate_and_warns(
    make_cluster: MakeCluster,
) -> None:
    shown: list[float] = []

    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        scheduler: Any = schedulers.ExponentialLR(optimizer, 0.9)
        worker.track("scheduler", scheduler)
        if worker.incarnation > 1:
            scheduler = schedulers.ConstantLR(optimizer, 1.0, STEPS)
            worker.track("scheduler", scheduler)
        rates = []
        while worker.clock < STEPS:
            kill(worker, 1, 7)
            rates.append(step(worker, model, optimizer))
            if worker.incarnation > 1 and not shown:
                shown.extend(scheduler.get_last_lr())
            scheduler.step()
        return rates

    with pytest.warns(
        UserWarning,
        match=r"ConstantLR .* here, and ExponentialLR .* there",
    ):
        broken, _, _ = run(make_cluster, train, ps.Async())
    assert broken[1][0] == broken[0][6], "of the last step of the incarnation before"
    assert shown == [broken[0][6]], "as the optimizer steps"


@pytest.mark.parametrize("same", [True, False], ids=["same_run", "other_run"])
def test_changed_schedule_holds_in_a_run_that_goes_on_and_not_after_a_restart(
    make_cluster: MakeCluster, capfd: pytest.CaptureFixture[str], same: bool
) -> None:
    """As where a run of twice the steps goes on from a checkpoint, whose cosine is longer, too."""

    def rates(steps: int) -> list[float]:
        optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = schedulers.CosineAnnealingLR(optimizer, steps)
        found = []
        for _ in range(STEPS):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    def train(worker: ps.Worker) -> list[float]:
        worker.client.steps.run = 1 if same else worker.incarnation
        model, optimizer = build(worker)
        scheduler = schedulers.CosineAnnealingLR(optimizer, STEPS * worker.incarnation)
        worker.track("scheduler", scheduler)
        found = []
        while worker.clock < STEPS:
            kill(worker, 0, 7)
            found.append(step(worker, model, optimizer))
            scheduler.step()
        return found

    broken, _, _ = run(make_cluster, train, ps.Async())
    assert broken[0] == pytest.approx(rates(STEPS if same else 2 * STEPS)[7:])
    told = [line for line in capfd.readouterr().err.splitlines() if OTHERS in line]
    assert told == [
        f"paramserve: {OTHERS} {rates(2 * STEPS)[6]:.4g}, where its last step had "
        f"{rates(STEPS)[6]:.4g}"
    ] * (not same)


@pytest.mark.parametrize("kind", ["options", "class", "none"])
def test_changed_schedule_is_told_also_where_the_function_has_stepped_it_itself(
    make_cluster: MakeCluster, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """As where the checkpoint is of an epoch's end: the loop steps it for the epochs left out."""

    def train(worker: ps.Worker) -> list[tuple[float, float]]:
        worker.client.steps.run = worker.incarnation
        model, optimizer = build(worker)
        anew = worker.incarnation > 1
        if anew and kind == "class":
            scheduler: Any = schedulers.ExponentialLR(optimizer, 0.9)
            worker.track("scheduler", scheduler)
        else:
            scheduler = schedulers.StepLR(optimizer, 1, 0.8 if anew and kind == "options" else 0.9)
            worker.track("scheduler", scheduler)
        found = []
        for epoch in range(4):
            while worker.clock < 3 * (epoch + 1):
                kill(worker, 0, 6)
                step(worker, model, optimizer)
                found.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]))
            scheduler.step()
        return found

    broken, _, _ = run(make_cluster, train, ps.Async())
    gamma = 0.8 if kind == "options" else 0.9
    assert broken[0][0] == pytest.approx((0.1 * gamma**2,) * 2)
    told = [line for line in capfd.readouterr().err.splitlines() if OTHERS in line]
    now = 0.1 * gamma**2
    assert told == (kind != "none") * [
        f"paramserve: {OTHERS} {now:.4g}, where its last step had 0.09"
    ]


def test_schedule_of_an_added_worker_is_that_of_the_others(make_cluster: MakeCluster) -> None:
    """In Sync another rate than the others' ends the run."""

    def train(worker: ps.Worker) -> list[float]:
        model, optimizer = build(worker)
        scheduler = schedulers.ExponentialLR(optimizer, 0.99)
        worker.track("scheduler", scheduler)
        client = worker.client
        client.define("enough", [0.0], rule=ps.Add(), group="control")
        rates = []
        while not client.pull("enough")[0] or worker.clock < STEPS:
            rates.append(step(worker, model, optimizer))
            scheduler.step()
            if worker.rank == 1 and len(rates) == 5:
                client.assign("enough", [1.0])
        return rates

    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True)
    ranks = Ranks(cluster, train).start(0)
    reader = cluster.client()
    ranks.until(
        lambda: reader.blocks() and cluster.servers[0].role.shard.groups[0].state.committed > 3
    )
    cluster.scale(2)
    found = ranks.start(1).end()
    first = found[0].index(found[1][0])
    assert first > 3
    assert found[0][first : first + 5] == found[1][:5]


@pytest.mark.parametrize(
    "policy",
    [ps.Async(), ps.LocalSteps(every=1), ps.ElasticAverage(0.5, every=1)],
    ids=["served", "local", "elastic"],
)
def test_rate_set_before_a_step_that_is_refused_reaches_an_added_worker(
    make_cluster: MakeCluster, policy: Policy
) -> None:
    """Nothing of the refused step was sent, so the next one tells of the rate."""

    def train(worker: ps.Worker) -> float:
        model, optimizer = build(worker, momentum=0.0)
        client = worker.client
        client.define("enough", [0.0], rule=ps.Add(), group="control", consistency=ps.Async())
        step(worker, model, optimizer)
        if worker.rank == 1:
            client.assign("enough", [1.0])
            return float(optimizer.param_groups[0]["lr"])
        optimizer.param_groups[0]["lr"] = 0.05
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for param in model.parameters():
            param.grad = torch.full_like(param, torch.nan)
        with pytest.raises(NonFinite):
            optimizer.step()
        if not isinstance(policy, ps.Async):  # the own step was made
            model.load_state_dict(before)
        while not client.pull("enough")[0]:
            step(worker, model, optimizer)
        return float(optimizer.param_groups[0]["lr"])

    cluster = make_cluster("unix", workers=1, policy=policy)
    ranks = Ranks(cluster, train).start(0)
    reader = cluster.client()
    ranks.until(
        lambda: reader.blocks() and cluster.servers[0].role.shard.groups[0].state.clocks[0] > 3
    )
    cluster.scale(2)
    assert ranks.start(1).end() == {0: 0.05, 1: 0.05}


BY_CLOCK: dict[str, Callable[[ps.Worker, Any], None]] = {
    "each step": lambda worker, scheduler: scheduler.step(),
    "its own count": lambda worker, scheduler: [
        scheduler.step() for _ in range(scheduler.last_epoch, worker.clock)
    ],
    "each epoch": lambda worker, scheduler: None,
}


@pytest.mark.parametrize("first", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", BY_CLOCK)
def test_schedule_goes_over_clocks_that_were_decided_without_a_rank(
    make_cluster: MakeCluster, how: str, first: int
) -> None:
    """Rank 2 is late at some of its steps: its rate is that of the others' clock, and all ranks end
    at one."""
    epochs, of_epoch = 4, 5
    clocks = {0: 0, 1: 0}

    def train(worker: ps.Worker) -> tuple[int, int, float]:
        model, optimizer = build(worker)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        worker.track("scheduler", scheduler)
        data = TensorDataset(torch.arange(3.0 * 2 * of_epoch))
        made = 0
        loader = worker.loader(data, batch_size=2)
        for _ in loader.epochs(epochs):
            for _ in loader:
                made += 1
                if worker.rank == 2 and made in (first, first + 2):
                    late = min(worker.clock + 3, epochs * of_epoch)
                    wait_until(lambda late=late: min(clocks[0], clocks[1]) >= late)
                step(worker, model, optimizer)
                clocks[worker.rank] = worker.clock
                BY_CLOCK[how](worker, scheduler)
            if how == "each epoch":
                scheduler.step()
        return worker.clock, worker.missed, float(optimizer.param_groups[0]["lr"])

    cluster = make_cluster("unix", servers=2, workers=3, policy=ps.Sync(backup=1))
    found = Ranks(cluster, train).start(0, 1, 2).end()
    assert {clock for clock, _, _ in found.values()} == {epochs * of_epoch}
    assert found[2][1] >= 4


def test_ranks_with_other_rates_are_still_refused_in_sync(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> None:
        model, optimizer = build(worker)
        optimizer.param_groups[0]["lr"] = 0.1 + worker.rank
        step(worker, model, optimizer)

    with pytest.raises(HyperMismatch):
        run(make_cluster, train)

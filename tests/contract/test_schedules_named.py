"""Schedulers that are named in several ways: each restart goes on at the rate of its clock, or says
why not."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.messages import NOTE_BYTES_MAX
from paramserve.pytorch import Embedding

STEPS, DIES = 8, 5
Name = Callable[[ps.Worker, nn.Module, Optimizer], tuple[Optimizer, list[Any]]]
"""Makes schedulers and names them: what steps, and the schedulers that are stepped behind it."""


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*lr_scheduler.step.* before .optimizer.step")
        warnings.filterwarnings("ignore", ".*epoch parameter", UserWarning)
        yield


def small(rate: float = 0.1) -> tuple[nn.Linear, SGD]:
    model = nn.Linear(2, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.1)
    return model, SGD(model.parameters(), lr=rate)


def step(model: nn.Module, optimizer: Any) -> float:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()
    return float(optimizer.param_groups[0]["lr"])


def die(worker: ps.Worker, clock: int = DIES, rank: int = 0) -> None:
    if (worker.rank, worker.clock, worker.incarnation) == (rank, clock, 1):
        worker.client.drain()
        raise Killed


def rates_of(make: MakeCluster, name: Name, *, dies: bool) -> list[float]:
    """Of all steps of one rank that names schedulers so, and may die."""
    rates: list[float] = []

    def train(worker: ps.Worker) -> None:
        model, own = small()
        optimizer, stepped = name(worker, model, own)
        while worker.clock < STEPS:
            if dies:
                die(worker)
            rates.append(step(model, optimizer))
            for each in stepped:
                each.step()

    cluster = make("unix", workers=1, policy=ps.Sync(), restarts=True)
    ranks = Ranks(cluster, train).start(0)
    ranks.end()
    assert len(ranks.restarts) == dies
    return rates


def named_twice(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
    decay = schedulers.ExponentialLR(own, 0.9)
    optimizer = worker.optimizer(model, own, schedulers=[decay, decay])
    worker.track("decay", decay)
    worker.track("again", decay)
    return optimizer, [decay]


def called_as_an_index(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
    first = schedulers.MultiplicativeLR(own, lambda epoch: 0.5)
    optimizer = worker.optimizer(model, own, schedulers=[first])
    second = schedulers.ExponentialLR(optimizer, 0.9)
    worker.track("0", second)
    return optimizer, [first, second]


def named_with_its_parts(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
    parts = [schedulers.LinearLR(own, 0.1, 1.0, 4), schedulers.ExponentialLR(own, 0.8)]
    whole = schedulers.SequentialLR(own, parts, [4])
    optimizer = worker.optimizer(model, own, schedulers=[parts[0], whole])
    worker.track("part", parts[1])
    return optimizer, [whole]


def named_otherwise_later(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
    decay = schedulers.ExponentialLR(own, 0.9)
    given = [decay] if worker.incarnation > 1 else []
    optimizer = worker.optimizer(model, own, schedulers=given)
    if not given:
        worker.track("decay", decay)
    return optimizer, [decay]


class Large(schedulers.ExponentialLR):
    """Too large to go with steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.seen = [0.0] * NOTE_BYTES_MAX
        super().__init__(optimizer, 0.9)


@pytest.mark.parametrize(
    "name", [named_twice, called_as_an_index, named_with_its_parts, named_otherwise_later]
)
def test_schedule_goes_on_however_its_schedulers_are_named(
    make_cluster: MakeCluster, name: Name
) -> None:
    whole = rates_of(make_cluster, name, dies=False)
    assert len(set(whole)) > STEPS // 2
    assert rates_of(make_cluster, name, dies=True) == pytest.approx(whole)


def test_state_that_is_too_large_is_said_and_the_schedule_goes_on(
    make_cluster: MakeCluster,
) -> None:
    def name(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
        large = Large(own)
        return worker.optimizer(model, own, schedulers=[large]), [large]

    with pytest.warns(UserWarning, match="states of the schedulers.*bytes, the most are 65536"):
        rates = rates_of(make_cluster, name, dies=True)
    assert rates == pytest.approx([0.1 * 0.9**number for number in range(STEPS)])


@pytest.mark.parametrize("dense", ["local", "tables"])
def test_schedule_of_an_optimizer_that_sends_no_dense_layers_goes_on(
    make_cluster: MakeCluster, dense: str
) -> None:
    def name(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
        rows = Embedding(worker.client.table("rows", dim=2, rule=ps.SGD(lr=0.1)))
        both = nn.ModuleList([model, rows])
        params = [*rows.parameters()] if dense == "tables" else [*both.parameters()]
        own = SGD(params, lr=0.1)
        decay = schedulers.ExponentialLR(own, 0.9)
        how: Any = {"dense": "local"} if dense == "local" else {}
        optimizer = worker.optimizer(both, own, schedulers=[decay], **how)
        hook = model.register_forward_pre_hook
        hook(lambda module, inputs: (inputs[0] + rows(torch.tensor([1])),))
        return optimizer, [decay]

    rates = rates_of(make_cluster, name, dies=True)
    assert rates == pytest.approx([0.1 * 0.9**number for number in range(STEPS)])


def test_scheduler_of_an_optimizer_that_is_not_stepped_yet_is_refused(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> None:
        model, own = small()
        decay = schedulers.ExponentialLR(own, 0.9)
        with pytest.raises(ValueError, match=r"schedulers=\[scheduler\].*behind that line"):
            worker.track("decay", decay)
        optimizer = worker.optimizer(model, own)
        worker.track("decay", decay)
        step(model, optimizer)

    Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end()


def test_state_that_cannot_be_stored_is_refused_where_it_is_named(
    make_cluster: MakeCluster,
) -> None:
    class Halve:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __call__(self, epoch: int) -> float:
            return 0.5

    def train(worker: ps.Worker) -> None:
        model, own = small()
        halved = schedulers.LambdaLR(own, Halve())
        with pytest.raises(TypeError, match=r"state of LambdaLR.*lock"):
            worker.optimizer(model, own, schedulers=[halved])
        assert type(own) is SGD, "nothing was adopted"
        optimizer = worker.optimizer(model, own)
        with pytest.raises(TypeError, match=r"state of LambdaLR.*lock"):
            worker.track("halved", halved)
        with pytest.warns(UserWarning, match="was not named"):
            step(model, optimizer)

    Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end()


def test_scheduler_that_is_named_behind_the_first_step_has_its_state(
    make_cluster: MakeCluster,
) -> None:
    """A warning says so before: until then the worker goes on with the group's rate."""
    rates: list[float] = []

    def train(worker: ps.Worker) -> None:
        model, own = small()
        optimizer = worker.optimizer(model, own)
        decay: Any = None
        while worker.clock < STEPS:
            die(worker)
            rates.append(step(model, optimizer))
            if decay is None:
                decay = schedulers.ExponentialLR(optimizer, 0.9)
                worker.track("decay", decay)
            decay.step()

    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True)
    with pytest.warns(UserWarning, match=r"named are no others here, and ExponentialLR"):
        Ranks(cluster, train).start(0).end()
    assert rates[:DIES] == pytest.approx([0.1 * 0.9**number for number in range(DIES)])
    assert rates[DIES] == pytest.approx(rates[DIES - 1])
    assert rates[DIES + 1 :] == pytest.approx([0.1 * 0.9**6, 0.1 * 0.9**7])


def test_one_scheduler_that_the_function_has_stepped_further_leaves_the_others_their_state(
    make_cluster: MakeCluster,
) -> None:
    """It dies at an epoch's end, and its loop makes the calls of the epochs that are left out."""
    rates: list[float] = []

    def train(worker: ps.Worker) -> tuple[int, int]:
        model, own = small()
        decay = schedulers.ExponentialLR(own, 0.9)
        cut = schedulers.MultiStepLR(own, [2, 5], gamma=0.1)
        optimizer = worker.optimizer(model, own, schedulers=[decay, cut])
        loader = worker.loader(TensorDataset(torch.ones(8, 1)), batch_size=2)
        for _ in range(2):
            for _ in loader:
                die(worker, 4)
                rates.append(step(model, optimizer))
                cut.step()
            decay.step()
        return decay.last_epoch, cut.last_epoch

    cluster = make_cluster("unix", workers=1, policy=ps.Async(), restarts=True)
    assert Ranks(cluster, train).start(0).end() == {0: (2, 8)}
    cuts = [1, 1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]
    expected = [0.1 * each * 0.9 ** (number // 4) for number, each in enumerate(cuts)]
    assert rates == pytest.approx(expected)


def test_rate_that_is_set_by_hand_beside_a_scheduler_stays(make_cluster: MakeCluster) -> None:
    """As a warm-up before the schedule begins."""
    rates: list[float] = []

    def train(worker: ps.Worker) -> None:
        model, own = small()
        decay = schedulers.ExponentialLR(own, 0.9)
        optimizer = worker.optimizer(model, own, schedulers=[decay])
        while worker.clock < STEPS:
            die(worker)
            optimizer.param_groups[0]["lr"] = 0.1 * (worker.clock + 1) / STEPS
            rates.append(step(model, optimizer))

    Ranks(make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True), train).start(0).end()
    assert rates == pytest.approx([0.1 * (clock + 1) / STEPS for clock in range(STEPS)])


@pytest.mark.parametrize("what", ["rate", "patience"])
def test_resumed_run_may_change_the_rate_and_what_its_plateau_waits_for(
    make_cluster: MakeCluster, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    """The second incarnation is one of another run, as where that goes on from a checkpoint."""
    rates: dict[int, list[float]] = {1: [], 2: []}

    def train(worker: ps.Worker) -> None:
        worker.client.steps.run = worker.incarnation
        model, own = small()
        again = worker.incarnation > 1
        if what == "rate":
            scheduler: Any = schedulers.ExponentialLR(own, 0.9)
        else:
            scheduler = schedulers.ReduceLROnPlateau(own, patience=3 if again else 0)
        optimizer = worker.optimizer(model, own, schedulers=[scheduler])
        if what == "rate" and again:
            optimizer.param_groups[0]["lr"] = 0.01
        while worker.clock < STEPS:
            die(worker)
            rates[worker.incarnation].append(step(model, optimizer))
            scheduler.step(*((1.0,) if what == "patience" else ()))

    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True)
    Ranks(cluster, train).start(0).end()
    if what == "rate":
        assert rates[2] == pytest.approx([0.01 * 0.9**number for number in range(3)])
    else:
        assert rates[2][0] == pytest.approx(rates[1][-1])
        assert "others than the checkpoint's" in capfd.readouterr().err


def test_added_worker_has_the_rate_of_a_plateau_that_is_further(make_cluster: MakeCluster) -> None:
    """It steps at another clock than the note that it goes by."""
    enough = threading.Event()

    def train(worker: ps.Worker) -> float:
        model, own = small()
        plateau = schedulers.ReduceLROnPlateau(own, patience=0, factor=0.5)
        optimizer = worker.optimizer(model, own, schedulers=[plateau])
        if worker.rank == 1:
            first.wait(10.0)
            rate = step(model, optimizer)
            enough.set()
            return rate
        for _ in range(6):
            rate = step(model, optimizer)
            plateau.step(1.0)
        started.set()
        enough.wait(10.0)
        return rate

    started, first = threading.Event(), threading.Event()
    cluster = make_cluster("unix", workers=1, policy=ps.Async())
    ranks = Ranks(cluster, train).start(0)
    ranks.until(started.is_set)
    cluster.scale(2)
    first.set()
    with pytest.warns(UserWarning, match="as of the last step") as warned:
        found = ranks.start(1).end()
    assert found[1] == pytest.approx(found[0])
    assert len(warned) == 1


class Counts(schedulers.LRScheduler):
    """Keeps no `last_epoch`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.count = optimizer, 0

    def step(self, epoch: int | None = None) -> None:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + self.count)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def test_scheduler_that_tells_no_position_has_the_state_of_the_last_step_and_warns(
    make_cluster: MakeCluster,
) -> None:
    def name(worker: ps.Worker, model: nn.Module, own: Optimizer) -> Any:
        counts = Counts(own)
        return worker.optimizer(model, own, schedulers=[counts]), [counts]

    with pytest.warns(UserWarning, match="goes on with Counts as of the last step"):
        rates = rates_of(make_cluster, name, dies=True)
    assert rates[:DIES] == pytest.approx([0.1 / (1 + number) for number in range(DIES)])
    assert rates[DIES:] == pytest.approx([0.1 / (1 + number) for number in range(4, 7)])

"""What a training function names comes back with its state after a restart."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import paramserve as ps
from paramserve.client.saving import BYTES_MAX
from paramserve.errors import Overloaded

STEPS = 8
UNNAMED = "scheduler is attached to this optimizer and was not named"


class Counter:
    """Counts, and has the two methods."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).square().mean().backward()
    optimizer.step()


def die(worker: ps.Worker, clock: int, incarnation: int = 1) -> None:
    if (worker.rank, worker.clock, worker.incarnation) == (0, clock, incarnation):
        worker.client.drain()
        raise Killed


@pytest.mark.parametrize("policy", [ps.Sync(), ps.Async(), ps.LocalSteps(every=1)], ids=str)
def test_objects_have_the_state_of_the_last_step_after_each_restart(
    make_cluster: MakeCluster, policy: Any
) -> None:
    """Also an average of the weights, which is moved before the step, and one of the other rank."""

    def train(worker: ps.Worker) -> tuple[int, list[float]]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.1)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        counter = Counter()
        worker.track("average", average)
        worker.track("counter", counter)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        while worker.clock < STEPS:
            die(worker, 3)
            die(worker, 5, incarnation=2)
            counter.count += 1 + worker.rank
            average.update_parameters(model)
            step(model, optimizer)
        return counter.count, average.module.weight.flatten().tolist()

    def run(restarts: bool) -> dict[int, Any]:
        made = make_cluster("unix", servers=2, workers=2, policy=policy, restarts=restarts)
        ranks = Ranks(made, train).start(0, 1)
        found = ranks.end()
        assert ranks.restarts == [0, 0] * restarts
        return found

    broken = run(restarts=True)
    assert [broken[rank][0] for rank in (0, 1)] == [STEPS, 2 * STEPS]
    if isinstance(policy, ps.Sync):
        whole: dict[int, Any] = {}

        def unbroken(worker: ps.Worker) -> None:
            worker.client.connection.incarnation = 9  # `die` passes it by
            whole[worker.rank] = train(worker)

        Ranks(make_cluster("unix", servers=2, workers=2, policy=policy), unbroken).start(0, 1).end()
        assert broken == whole


def test_schedulers_are_named_before_the_adoption_or_where_they_are_made(
    make_cluster: MakeCluster,
) -> None:
    """Two on one optimizer, each stepped with each step."""
    rates: dict[int, list[float]] = {1: [], 2: []}

    def train(worker: ps.Worker) -> int:
        model = nn.Linear(2, 1)
        own = SGD(model.parameters(), lr=0.1)
        halve = lr_scheduler.MultiplicativeLR(own, lambda epoch: 0.5 if epoch % 2 == 0 else 1.0)
        optimizer = worker.optimizer(model, own, schedulers=[halve])
        decay = lr_scheduler.ExponentialLR(optimizer, 0.9)
        worker.track("decay", decay)
        while worker.clock < STEPS:
            die(worker, 5)
            step(model, optimizer)
            rates[worker.incarnation].append(own.param_groups[0]["lr"])
            decay.step()
            halve.step()
        return decay.last_epoch

    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Ranks(cluster, train).start(0).end() == {0: STEPS}
    halvings = [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [0.1 * 0.9**number * 0.5**each for number, each in enumerate(halvings)]
    assert rates[1] + rates[2] == pytest.approx(expected)
    assert (len(rates[1]), len(rates[2])) == (5, 3)


@pytest.mark.parametrize("restarts", [True, False])
def test_scheduler_that_is_not_named_warns_where_another_incarnation_may_follow(
    make_cluster: MakeCluster, restarts: bool
) -> None:
    """Once, at the user's line, with what to write; one of another optimizer is none of this."""

    def train(worker: ps.Worker) -> None:
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        lr_scheduler.ExponentialLR(optimizer, 0.9)
        lr_scheduler.ExponentialLR(SGD(nn.Linear(1, 1).parameters(), lr=0.1), 0.9)
        step(model, optimizer)
        step(model, optimizer)

    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=restarts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Ranks(cluster, train).start(0).end()
    found = [each for each in caught if UNNAMED in str(each.message)]
    assert len(found) == restarts
    assert all(each.filename == __file__ for each in found)
    assert all("schedulers=[scheduler]" in str(each.message) for each in found)


def test_optimizer_without_a_scheduler_does_not_warn(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> None:
        model = nn.Linear(2, 1)
        step(model, worker.optimizer(model, SGD(model.parameters(), lr=0.1)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end()


def test_what_cannot_be_named_is_refused(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> None:
        model = nn.Linear(2, 1)
        own, other = (SGD(model.parameters(), lr=0.1) for _ in range(2))
        decay = lr_scheduler.ExponentialLR(other, 0.9)
        wrong: list[tuple[Any, type[Exception], str]] = [
            (decay, TypeError, "schedulers is a list"),
            ([Counter()], TypeError, "this is a Counter.*worker.track"),
            ([decay], ValueError, "ExponentialLR.*of another optimizer"),
        ]
        for schedulers, kind, words in wrong:
            with pytest.raises(kind, match=words):
                worker.optimizer(model, own, schedulers=schedulers)
        with pytest.raises(TypeError, match=r"dict, which has no state_dict.*worker\.save"):
            worker.track("values", {})
        with pytest.raises(TypeError, match="a text that is not empty"):
            worker.track("", Counter())
        with pytest.raises(Overloaded, match="worker saves at most"):
            worker.track("large", nn.Linear(BYTES_MAX // 4 + 1, 1, bias=False))
        with pytest.raises(ValueError, match="the library's own"):
            worker.save("tracked counter", 1)
        with pytest.raises(TypeError, match=r"worker.track\('counter', ...\) sends"):
            worker.save("counter", Counter())
        optimizer = worker.optimizer(model, own)
        step(model, optimizer)
        assert worker.clock == 1

    Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end()


def test_state_that_cannot_be_stored_any_more_raises_in_the_step(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> None:
        model, counter = nn.Linear(2, 1), Counter()
        worker.track("counter", counter)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        step(model, optimizer)
        counter.count = object()  # type: ignore[assignment]
        with pytest.raises(TypeError, match=r"worker.track\('counter'\): state\['count'\].*object"):
            step(model, optimizer)
        assert worker.clock == 1
        counter.count = 3
        step(model, optimizer)
        assert worker.clock == 2

    Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end()


def test_another_object_takes_the_place_of_one_that_had_its_name(make_cluster: MakeCluster) -> None:
    """It does not get the state of that one, in the same incarnation."""

    def train(worker: ps.Worker) -> int:
        model, counter = nn.Linear(2, 1), Counter()
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        worker.track("counter", counter)
        if worker.incarnation > 1:
            return counter.count
        counter.count = 5
        step(model, optimizer)
        other = Counter()
        worker.track("counter", other)
        assert other.count == 0
        other.count, counter.count = 7, 9
        step(model, optimizer)
        die(worker, 2)
        return 0

    assert Ranks(make_cluster("unix", workers=1, restarts=True), train).start(0).end() == {0: 7}

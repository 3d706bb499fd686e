"""What a worker is told of its steps: `optimizer.last_step`, and `Result.steps`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from torch import nn

import paramserve as ps
from paramserve.pytorch import Embedding


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def test_last_step_tells_version_staleness_and_wait(make_cluster: MakeCluster) -> None:
    def work(worker: ps.Worker) -> Any:
        model = nn.Linear(3, 1)
        optimizer: Any = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
        assert optimizer.last_step is None
        for number in range(1, 4):
            step(model, optimizer)
            last = optimizer.last_step
            assert (last.clock, last.version, last.staleness) == (number, number, 0)
            assert 0.0 <= last.waited_s < 10.0
            assert not last.dropped
        worker.client.push({"weight": torch.ones(1, 3).numpy()}).result()
        step(model, optimizer)
        assert (optimizer.last_step.version, optimizer.last_step.staleness) == (5, 1)

    Ranks(make_cluster(workers=1), work).start(0).end()


def test_last_step_that_is_skipped_is_told_as_dropped(make_cluster: MakeCluster) -> None:
    def work(worker: ps.Worker) -> None:
        model = nn.Linear(3, 1)
        optimizer: Any = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
        model(torch.full((2, 3), torch.inf)).sum().backward()
        optimizer.step()
        assert optimizer.last_step.dropped
        step(model, optimizer)
        assert not optimizer.last_step.dropped

    policy = ps.Async(on_nonfinite="skip")
    Ranks(make_cluster(workers=1, policy=policy), work).start(0).end()


@pytest.mark.parametrize(
    ("options", "clocks"),
    [
        ({"overlap": True}, [None, 1, 2, 3]),
        ({"consistency": ps.LocalSteps(every=2)}, [None, 1, 1, 2]),
        ({"dense": "local"}, [None, 1, 2, 3]),
    ],
    ids=["overlap", "own steps", "tables"],
)
def test_last_step_is_the_last_one_that_was_answered(
    make_cluster: MakeCluster, options: dict[str, Any], clocks: list[int | None]
) -> None:
    def work(worker: ps.Worker) -> Any:
        model: nn.Module = nn.Linear(3, 1)
        if "dense" in options:
            table = worker.client.table("users", 3, rule=ps.SGD(lr=0.1))
            rows, head = Embedding(table), nn.Linear(3, 1)
            model = nn.Sequential(nn.ModuleList([rows, head]))
            model.forward = lambda x: head(rows(torch.arange(2)))  # type: ignore[method-assign]
        optimizer: Any = worker.optimizer(
            model, torch.optim.SGD(model.parameters(), lr=0.01), **options
        )
        found = []
        for _ in range(4):
            step(model, optimizer)
            found.append(optimizer.last_step and optimizer.last_step.clock)
        return found, worker.optimizers.histories["model"]

    found, history = Ranks(make_cluster(workers=1), work).start(0).end()[0]
    assert found == clocks
    kept = [each.clock for each in history.records()]
    assert kept == list(range(1, kept[-1] + 1))
    assert kept[-1] == (2 if "consistency" in options else 4)


def train(worker: ps.Worker) -> None:
    model = nn.Linear(3, 1)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(20):
        step(model, optimizer)


def test_result_has_the_steps_of_each_worker() -> None:
    result = ps.run(train, workers=2, consistency=ps.Async(), engine=ps.Local(threads_per_worker=1))
    steps = result.steps["model"]
    assert sorted(steps) == [0, 1]
    for rank, records in steps.items():
        assert [each.clock for each in records] == list(range(1, 21))
        told = result.staleness[rank]
        assert sum(each.staleness for each in records) == round(told.mean * told.pushes)
        assert max(each.staleness for each in records) == told.max

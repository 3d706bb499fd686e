"""Own steps and exchanges without waiting: `ps.AsyncLocalSteps`, against a plain program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster

import paramserve as ps
from paramserve import Worker

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


def test_worker_of_async_local_steps_waits_for_nobody(make_cluster: MakeCluster) -> None:
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


@pytest.mark.parametrize(
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

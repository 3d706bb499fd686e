"""A function that trains with one optimizer after another, and dies in the second phase."""

from __future__ import annotations

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paramserve as ps


@pytest.mark.parametrize("at", [3, 4, 6, 8])
def test_worker_that_dies_in_a_later_phase_repeats_no_batch(
    make_cluster: MakeCluster, at: int
) -> None:
    """Two phases of five batches each; it dies before its batch number `at`, counted over both."""
    used: list[tuple[str, list[float]]] = []

    def train(worker: ps.Worker) -> None:
        data = TensorDataset(torch.arange(20.0))
        for name in ("warmup", "main"):
            model = nn.Linear(1, 1)
            own = SGD(model.parameters(), lr=0.001)
            optimizer = worker.optimizer(model, own, name=name)
            for (batch,) in worker.loader(data, batch_size=4):
                if worker.incarnation == 1 and len(used) == at:
                    raise Killed
                optimizer.zero_grad()
                model(batch.view(-1, 1)).square().mean().backward()
                optimizer.step()
                used.append((name, batch.tolist()))

    ranks = Ranks(make_cluster(workers=1, restarts=True), train).start(0)
    ranks.end()
    assert ranks.restarts == [0]
    assert [name for name, _ in used] == ["warmup"] * 5 + ["main"] * 5
    for phase in (used[:5], used[5:]):
        assert sorted(i for _, batch in phase for i in batch) == list(range(20))


@pytest.mark.parametrize("exchanges", [0, 1, 2])
def test_worker_that_dies_in_a_later_phase_repeats_no_exchange(
    make_cluster: MakeCluster, exchanges: int
) -> None:
    """Six own steps of the first phase are two exchanges of up to four: the second phase's count
    from its own beginning."""
    used: list[tuple[str, float]] = []

    def train(worker: ps.Worker) -> None:
        data, model = TensorDataset(torch.arange(16.0)), nn.Linear(1, 1)
        for name, steps in (("warmup", 6), ("main", 16)):
            own = SGD(model.parameters(), lr=0.001)
            optimizer = worker.optimizer(model, own, name=name)
            for (batch,) in worker.loader(data, batch_size=1, steps=steps, shuffle=False):
                if worker.incarnation == 1 and len(used) == 6 + 4 * exchanges:
                    worker.client.drain()
                    raise Killed
                optimizer.zero_grad()
                model(batch.view(-1, 1)).square().mean().backward()
                optimizer.step()
                used.append((name, batch.item()))

    policy = ps.LocalSteps(every=4)
    ranks = Ranks(make_cluster(workers=1, restarts=True, policy=policy), train).start(0)
    ranks.end()
    assert ranks.restarts == [0]
    assert used[:6] == [("warmup", float(i)) for i in range(6)]
    assert used[6:] == [("main", float(i)) for i in range(16)]

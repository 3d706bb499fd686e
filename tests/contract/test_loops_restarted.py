"""Loops over loaders with several optimizers: a rank that dies takes the batches that were left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.training import company

EPOCHS, SAMPLES, BATCH = 4, 24, 2
BATCHES = EPOCHS * SAMPLES // (2 * BATCH)
STEPPING: dict[str, Callable[[int], tuple[str, ...]]] = {
    "with each batch": lambda number: ("body", "head"),
    "in turn": lambda number: ("body",) if number % 2 else ("head",),
    "the first now and then": lambda number: ("body", "head") if number % 3 == 1 else ("head",),
    "in phases": lambda number: ("body",) if number < BATCHES // 2 else ("head",),
}
"""Which optimizers step with a batch of the run."""
Seen = list[tuple[int, ...]]


def training(
    stepping: str, dies_at: int, *, reduces: bool = False, by_epoch: bool = False
) -> Callable[[ps.Worker], Any]:
    """Rank 1 dies before this batch of the run. Returned: what the last incarnation has seen and
    reduced, and the model's values."""

    def train(worker: ps.Worker) -> tuple[Seen, list[float], list[float]]:
        layers = {name: nn.Linear(1, 1) for name in ("body", "head")}
        for each in layers.values():
            nn.init.constant_(each.weight, 1.0)
            nn.init.constant_(each.bias, 0.0)
        optimizers = {
            name: worker.optimizer(each, SGD(each.parameters(), lr=0.01), name=name)
            for name, each in layers.items()
        }
        loader: Any = worker.loader(TensorDataset(torch.arange(SAMPLES)), batch_size=BATCH)
        number = worker.saved("number", 0)
        worker.save("number", lambda: number)
        seen, reduced = Seen(), []
        for epoch in loader.epochs(EPOCHS) if by_epoch else range(EPOCHS):
            for (batch,) in loader:
                if (worker.rank, worker.incarnation, number) == (1, 1, dies_at):
                    worker.client.drain()
                    raise Killed
                seen.append(tuple(batch.tolist()))
                of_batch = STEPPING[stepping](number)
                number += 1  # what the last step of the batch saves
                inputs = batch[:, None].float() / SAMPLES
                for name in of_batch:
                    optimizers[name].zero_grad()
                    (layers[name](inputs) - 2.0).square().mean().backward()
                    optimizers[name].step()
            if reduces:
                reduced.append(worker.all_reduce(float(epoch + worker.rank)))
        return seen, reduced, [each.weight.item() for each in layers.values()]

    return train


@pytest.mark.parametrize(
    "reduces",
    [pytest.param(False, id="", marks=pytest.mark.slow), pytest.param(True, id="reduces")],
)
@pytest.mark.parametrize("stepping", STEPPING)
def test_rank_with_two_optimizers_goes_on_behind_its_batches(
    make_cluster: MakeCluster, stepping: str, reduces: bool
) -> None:
    def run(dies_at: int) -> Ranks:
        cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync())
        ranks = Ranks(cluster, training(stepping, dies_at, reduces=reduces)).start(0, 1)
        ranks.end()
        return ranks

    whole = run(-1).returned
    assert len(whole[1][0]) == BATCHES
    for number in (1, 2, 5, 13, 20):
        ranks = run(number)
        assert ranks.restarts == [1]
        seen, reduced, values = ranks.returned[1]
        assert seen == whole[1][0][number:], number
        assert values == whole[1][2] == ranks.returned[0][2]
        assert reduced == whole[1][1]


def test_rank_finds_by_any_optimizer_that_the_others_go_on(make_cluster: MakeCluster) -> None:
    """The first one steps with none of the batches that the others wait in."""
    began = time.monotonic()
    cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync())
    dies_at = BATCHES // EPOCHS
    train = training("the first now and then", dies_at, by_epoch=True)
    ranks = Ranks(cluster, train).start(0, 1)
    seen, _, _ = ranks.end()[1]
    assert (ranks.restarts, len(seen)) == ([1], BATCHES - dies_at)
    assert time.monotonic() - began < company.WAIT_S / 2

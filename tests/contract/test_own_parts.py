"""Loaders over datasets that are each rank's own part, and what is said where they are not."""

from __future__ import annotations

import itertools
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import in_threads
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve import seeding

SIZES = [7, 10]  # in batches of 2: 3 and 5


@pytest.fixture(autouse=True)
def _restores_generators() -> Any:
    before = seeding.state()
    yield
    seeding.restore(before)


def parts() -> list[TensorDataset]:
    """One for each rank; its samples are 100 * rank + 0, 1, ..."""
    return [TensorDataset(100.0 * r + torch.arange(n)[:, None]) for r, n in enumerate(SIZES)]


def seen(batch: torch.Tensor) -> list[int]:
    return [int(each) for each in batch[:, 0]]


def training(at: int = -1, **options: Any) -> Any:
    """Two epochs over the rank's own part, whose rank 0 dies once after `at` steps; returns what
    each epoch gave, and each loader's length."""
    told: dict[int, dict[int, list[list[int]]]] = {0: {}, 1: {}}

    def train(worker: ps.Worker) -> tuple[int, dict[int, list[list[int]]]]:
        model = nn.Linear(1, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=1e-6))
        loader = worker.loader(parts()[worker.rank], batch_size=2, shards="own", **options)
        for epoch in loader.epochs(2):
            for (batch,) in loader:
                optimizer.zero_grad()
                model(batch).sum().backward()
                optimizer.step()
                told[worker.rank].setdefault(epoch, []).append(seen(batch))
                if (worker.rank, worker.clock, worker.incarnation) == (0, at, 1):
                    raise Killed
        return len(loader), told[worker.rank]

    return train


def test_own_part_gives_every_rank_as_many_batches_as_the_smallest_has(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", workers=2, policy=ps.Sync())
    returned = Ranks(cluster, training()).start(0, 1).end()
    for rank, (length, epochs) in returned.items():
        assert length == 3
        own = set(range(100 * rank, 100 * rank + SIZES[rank]))
        for batches in epochs.values():
            assert [len(batch) for batch in batches] == [2] * 3
            assert len({*itertools.chain(*batches)} & own) == 6
    first, second = returned[1][1].values()
    assert {*itertools.chain(*first)} != {*itertools.chain(*second)}  # the end of the order differs


def test_own_part_goes_on_after_a_restart_where_it_was(make_cluster: MakeCluster) -> None:
    whole, broken = (make_cluster("unix", workers=2, policy=ps.Sync(), restarts=True) for _ in "ab")
    expected = Ranks(whole, training()).start(0, 1).end()
    ranks = Ranks(broken, training(at=4)).start(0, 1)
    assert ranks.end() == expected
    assert ranks.restarts == [0]


def test_own_part_without_a_batch_is_refused_on_every_rank(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> str:
        with pytest.raises(ValueError, match="less than one batch") as refused:
            worker.loader(parts()[worker.rank], batch_size=8, shards="own")
        return str(refused.value)

    cluster = make_cluster("unix", workers=2, policy=ps.Sync())
    returned = Ranks(cluster, train).start(0, 1).end()
    assert "rank 0 has 7 samples: 0 batches of 8" in returned[0]
    assert "rank 1 has 10 samples: 1 batches of 8" in returned[1]


def test_added_rank_keeps_to_what_the_others_agreed_on(make_cluster: MakeCluster) -> None:
    def comes_late(worker: ps.Worker, size: int) -> int:
        model = nn.Linear(1, 1)
        worker.optimizer(model, SGD(model.parameters(), lr=1e-6))
        assert worker.clock > 0, "the others have left the place where they agreed"
        part = TensorDataset(torch.ones(size, 1))
        return len(worker.loader(part, batch_size=2, shards="own"))

    cluster = make_cluster("unix", workers=2, policy=ps.Async())
    first = [ps.Worker(cluster.client(rank), 3) for rank in (0, 1)]
    cluster.scale(4)
    large, small = (ps.Worker(cluster.client(rank), 3) for rank in (2, 3))
    in_threads(*(partial(training(), worker) for worker in first))
    assert comes_late(large, 20) == 3
    with pytest.raises(ValueError, match=r"agreed on 3 .*rank 3 has 5 samples: 2 batches"):
        comes_late(small, 5)


@pytest.mark.parametrize("kind", ["loader", "sampler"])
def test_datasets_of_two_lengths_that_are_to_be_shared_out_are_told(
    make_cluster: MakeCluster, kind: str
) -> None:
    cluster = make_cluster("unix", workers=2, policy=ps.Sync())
    first, second = (ps.Worker(cluster.client(rank), 0) for rank in (0, 1))
    batches = {"batch_size": 2} if kind == "loader" else {}
    short, long = parts()
    with warnings.catch_warnings(action="error"):
        getattr(first, kind)(short, **batches)
    words = r"rank 1 made .* over 10 samples, and rank 0 over 7: .*shards=\"own\""
    with pytest.warns(UserWarning, match=words):
        getattr(second, kind)(long, **batches)


def test_loaders_after_the_first_are_not_compared(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=2, policy=ps.Sync(), restarts=True)
    first, second = (ps.Worker(cluster.client(rank), 0) for rank in (0, 1))
    short, long = parts()
    with warnings.catch_warnings(action="error"):
        first.loader(short, batch_size=2)
        first.loader(long, batch_size=2)  # on this rank only, as for evaluation
        second.loader(parts()[0], batch_size=2)
        second.loader(parts()[0], batch_size=2)
        second.client.connection.control.close()
        again = ps.Worker(cluster.client(1), 0)  # in the middle, where its data may have grown
        assert again.incarnation == 2
        again.loader(long, batch_size=2)

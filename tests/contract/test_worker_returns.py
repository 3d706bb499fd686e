"""What a worker that dies and is started again goes on with: buffers and random numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import RoleCluster, wait_until
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset, TensorDataset

import paramserve as ps
from paramserve import seeding
from paramserve.pytorch import Embedding

NEVER = -1
STEPS = 13


@pytest.fixture(autouse=True)
def _restores_generators() -> Iterator[None]:
    before = seeding.state()
    yield
    seeding.restore(before)


class Normed(nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("count", torch.zeros(size))
        self.head = nn.Linear(2, 1)
        for param in self.parameters():
            nn.init.constant_(param, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.head(self.norm(x))


def normalizing(
    rank: int, clock: int, size: int = 1
) -> Callable[[ps.Worker], dict[str, torch.Tensor]]:
    """Training with BatchNorm whose rank `rank` dies at `clock`; returns the model's values."""

    def train(worker: ps.Worker) -> dict[str, torch.Tensor]:
        model = Normed(size)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        while worker.clock < STEPS:
            if (worker.rank, worker.clock, worker.incarnation) == (rank, clock, 1):
                raise Killed
            generator = torch.Generator().manual_seed(100 * worker.rank + worker.clock)
            optimizer.zero_grad()
            model(3 + torch.randn(8, 2, generator=generator)).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in model.state_dict().items()}

    return train


def result(cluster: RoleCluster) -> dict[str, np.ndarray]:
    """All values that the servers have at the end."""
    with cluster.client() as reader:
        return reader.pull()


def test_buffers_of_a_restarted_rank_are_those_of_an_unbroken_run(
    make_cluster: MakeCluster,
) -> None:
    """Each rank's own; rank 0's are the result."""

    def made() -> RoleCluster:
        return make_cluster("unix", servers=2, workers=2, policy=ps.Sync(), restarts=True)

    whole = made()
    own = Ranks(whole, normalizing(0, NEVER)).start(0, 1).end()
    expected = result(whole)
    assert expected["norm.num_batches_tracked"] == STEPS
    for rank, clock in ((0, 1), (0, 8), (1, 4)):
        broken = made()
        ranks = Ranks(broken, normalizing(rank, clock)).start(0, 1)
        for number, state in ranks.end().items():
            for name, value in state.items():
                assert torch.equal(value, own[number][name]), (rank, clock, number, name)
        assert ranks.restarts == [rank]
        found = result(broken)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert (found[name] == value).all(), (rank, clock, name)


def test_buffers_that_are_too_much_to_be_saved_are_rank_0s_of_the_last_step(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", workers=1, policy=ps.Sync(), restarts=True)
    ranks = Ranks(cluster, normalizing(0, 5, size=1_200_000)).start(0)
    (state,) = ranks.end().values()
    assert ranks.restarts == [0]
    assert state["norm.num_batches_tracked"] == STEPS
    assert state["count"].unique().tolist() == [STEPS]


def test_buffers_of_the_lowest_live_rank_count_where_rank_0_is_dead(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=3, policy=ps.Sync())
    ranks = Ranks(cluster, normalizing(0, 3), again=False).start(0, 1, 2)
    returned = ranks.end()
    assert returned.keys() == {1, 2}
    found = result(cluster)
    assert found["norm.num_batches_tracked"] == STEPS
    assert (found["norm.running_mean"] == returned[1]["norm.running_mean"].numpy()).all()
    assert (found["norm.running_mean"] != returned[2]["norm.running_mean"].numpy()).any()


# --- random numbers -------------------------------------------------------------------------------


class Noisy(Dataset[torch.Tensor]):
    """Draws when a sample is loaded, as transforms do."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), random.random()])


def drawing(clock: int, loader: str) -> Callable[[ps.Worker], list[Any]]:
    """Draws of every generator in each step; rank 0 dies at `clock`, in its first incarnation."""

    def batches(worker: ps.Worker) -> Iterator[Any]:
        if loader == "none":
            while worker.clock < 10:
                yield torch.zeros(4, 2)
        elif loader == "one":
            yield from worker.loader(Noisy(), batch_size=4, epochs=2)
        else:
            for _ in range(2):
                yield from worker.loader(TensorDataset(torch.zeros(20, 2)), batch_size=4)

    def train(worker: ps.Worker) -> list[Any]:
        seeding.seed_everything(seeding.rank_seed(worker.seed, worker.rank))  # as a run does
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        drawn = []
        for batch in batches(worker):
            if worker.clock == clock and worker.incarnation == 1:
                random.random()  # what is drawn after its last step is drawn again
                raise Killed
            inputs = batch[0] if isinstance(batch, list) else batch
            noise = torch.randn(2), np.random.rand(), random.random(), random.gauss(0.0, 1.0)
            drawn.append([inputs.tolist(), noise[0].tolist(), *noise[1:]])
            optimizer.zero_grad()
            model(inputs + noise[0]).square().mean().backward()
            optimizer.step()
        return drawn

    return train


@pytest.mark.parametrize("loader", ["none", "one", "each epoch"])
def test_restarted_worker_draws_what_it_would_have_drawn(
    make_cluster: MakeCluster, loader: str
) -> None:
    def drawn(clock: int) -> list[Any]:
        ranks = Ranks(make_cluster(workers=1, restarts=True), drawing(clock, loader)).start(0)
        return ranks.end()[0]

    whole = drawn(NEVER)
    assert len(whole) == 10
    for clock in (1, 3, 5, 7):
        assert drawn(clock) == whole[clock:], clock


def test_step_that_is_taken_again_draws_what_it_drew(make_cluster: MakeCluster) -> None:
    """Of its last step only one of two shards has had its part: the new incarnation repeats it."""
    cluster = make_cluster("unix", servers=2, workers=1, restarts=True)
    drawn: dict[int, list[float]] = {1: [], 2: []}

    def train(worker: ps.Worker) -> None:
        seeding.seed_everything(seeding.rank_seed(worker.seed, worker.rank))
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        while worker.clock < 6:
            if worker.clock == 3 and worker.incarnation == 1:
                worker.client.drain()
                only_the_first(worker)
            drawn[worker.incarnation].append(random.random())
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    def only_the_first(worker: ps.Worker) -> None:
        """What is sent from now on reaches shard 0, and the worker dies of it."""
        exchange = worker.client.connection.exchange
        transmit, group = exchange._transmit, cluster.servers[0].role.shard.groups[0].state

        def lossy(shard: Any, message: Any) -> None:
            if shard.number > 0:
                wait_until(lambda: group.clocks[0] == 4)
                raise Killed
            transmit(shard, message)

        exchange._transmit = lossy

    Ranks(cluster, train).start(0).end()
    assert len(drawn[1]) == 4
    assert drawn[1][3] == drawn[2][0], "the step is taken again"


@pytest.mark.parametrize("loader", [False, True], ids=["no loader", "loader"])
@pytest.mark.parametrize("order", ["gd", "dg"])
def test_restarted_worker_with_two_optimizers_goes_on_from_its_very_last_step(
    make_cluster: MakeCluster, order: str, loader: bool
) -> None:
    """The steps of "d" come first in each round: the generators are where "g" has left them."""

    def training(at: int) -> Callable[[ps.Worker], list[tuple[float, float]]]:
        def train(worker: ps.Worker) -> list[tuple[float, float]]:
            seeding.seed_everything(seeding.rank_seed(worker.seed, worker.rank))
            made = {}
            for name in order:
                model = nn.Linear(2, 1)
                own = SGD(model.parameters(), lr=0.1)
                made[name] = model, worker.optimizer(model, own, name=name)

            def step(name: str) -> float:
                model, optimizer = made[name]
                noise = torch.rand(1, 2)
                optimizer.zero_grad()
                model(noise).sum().backward()
                optimizer.step()
                return float(noise[0, 0])

            drawn = []
            batches = worker.loader(TensorDataset(torch.zeros(24, 2)), batch_size=4)
            for _ in batches if loader else range(6 - worker.clock):
                if worker.incarnation == 1 and worker.clock == at:
                    raise Killed
                drawn.append((step("d"), step("g")))
            return drawn

        return train

    whole = Ranks(make_cluster(workers=1, restarts=True), training(NEVER)).start(0).end()
    broken = Ranks(make_cluster(workers=1, restarts=True), training(3)).start(0).end()
    assert len(whole[0]) == 6
    assert broken[0] == whole[0][3:]


def test_restarted_worker_that_only_steps_a_table_draws_what_it_would_have_drawn(
    make_cluster: MakeCluster,
) -> None:
    def training(at: int) -> Callable[[ps.Worker], list[float]]:
        def train(worker: ps.Worker) -> list[float]:
            seeding.seed_everything(seeding.rank_seed(worker.seed, worker.rank))
            users = worker.client.table("users", dim=2, rule=ps.Adagrad(lr=0.1))
            model = Embedding(users)
            optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
            drawn = []
            for _ in worker.loader(TensorDataset(torch.zeros(24, 2)), batch_size=4):
                if (worker.incarnation, worker.clock) == (1, at):
                    raise Killed
                drawn.append(random.random())
                (drawn[-1] * model(torch.tensor([1, 2]))).sum().backward()
                optimizer.step()
            return drawn

        return train

    whole = Ranks(make_cluster(workers=1, restarts=True), training(NEVER)).start(0).end()
    broken = Ranks(make_cluster(workers=1, restarts=True), training(4)).start(0).end()
    assert len(whole[0]) == 6
    assert broken[0] == whole[0][4:]

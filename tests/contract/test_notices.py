"""What a worker tells of a run that goes otherwise than its function looks, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

import paramserve as ps

BATCHES = 4
"""Of an epoch."""
EPOCHS = 3


# --- steps that are made again --------------------------------------------------------------------


def plain(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    for _ in range(EPOCHS):
        yield from DataLoader(rows, batch_size=2)


def own_evaluation(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    """Only the evaluation goes by a loader of the worker's."""
    held_out = worker.loader(rows, batch_size=2, resume=False)
    with torch.no_grad():
        assert len(list(held_out)) == BATCHES
    yield from plain(worker, rows)


def sampled(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    for _ in range(EPOCHS):
        yield from DataLoader(rows, batch_size=2, sampler=worker.sampler(rows))


def by_loader(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    yield from worker.loader(rows, batch_size=2, epochs=EPOCHS)


def leased(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    yield from worker.loader(rows, batch_size=2, epochs=EPOCHS, shards="dynamic")


def by_clock(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    for _ in range(worker.clock, BATCHES * EPOCHS):
        yield rows[:2]


def by_clients_clock(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    for _ in range(worker.client.clock("model"), BATCHES * EPOCHS):
        yield rows[:2]


Batches = Callable[[ps.Worker, TensorDataset], Iterator[Any]]


def training(batches: Batches, dies_at: int) -> Callable[[ps.Worker], int]:
    """Training whose rank dies before the given step of its first incarnation; returns how many
    steps its last incarnation has made."""

    def train(worker: ps.Worker) -> int:
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        made = 0
        for (inputs,) in batches(worker, TensorDataset(torch.ones(2 * BATCHES, 2))):
            if worker.incarnation == 1 and made == dies_at:
                raise Killed
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            made += 1
        return made

    return train


@pytest.mark.parametrize("batches", [plain, own_evaluation, sampled])
@pytest.mark.parametrize("policy", [ps.Sync(), ps.LocalSteps(every=1)], ids=["served", "local"])
def test_restarted_rank_that_makes_its_steps_once_more_warns_once(
    make_cluster: MakeCluster, batches: Batches, policy: ps.Policy
) -> None:
    cluster = make_cluster(workers=1, restarts=True, policy=policy)
    with pytest.warns(UserWarning, match="was started again") as warned:
        made = Ranks(cluster, training(batches, 5)).start(0).end()
    assert made == {0: BATCHES * EPOCHS}
    (told,) = (str(each.message) for each in warned)
    assert "rank 0 was started again and goes on at clock 5, but its loop begins at" in told
    assert "worker.loader(dataset, batch_size=..., epochs=...)" in told
    assert "range(worker.clock, steps)" in told
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("batches", "dies_at"),
    [(plain, 0), (by_loader, 5), (leased, 5), (by_clock, 5), (by_clients_clock, 5)],
)
def test_restarted_rank_that_repeats_nothing_does_not_warn(
    make_cluster: MakeCluster, batches: Batches, dies_at: int
) -> None:
    cluster = make_cluster(workers=1, restarts=True)
    with warnings.catch_warnings(action="error"):
        made = Ranks(cluster, training(batches, dies_at)).start(0).end()
    assert made == {0: BATCHES * EPOCHS - dies_at}


@pytest.mark.parametrize("made", [0, 3])
def test_rank_that_the_others_have_left_behind_names_its_own_steps_alone(
    make_cluster: MakeCluster, made: int
) -> None:
    """It goes on at the clock of the others, and has not made as many steps."""
    cluster = make_cluster(workers=2)

    def steps(rank: int, number: int) -> ps.Client:
        client = cluster.client(rank=rank)
        worker, model = ps.Worker(client, seed=1), nn.Linear(2, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        for _ in range(number):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return client

    steps(0, 5)
    steps(1, made).connection.control.close()
    cluster.mark_dead(1)
    with warnings.catch_warnings(record=True, action="always") as warned:
        steps(1, 1)
    told = [str(each.message) for each in warned if "was started again" in str(each.message)]
    assert len(told) == bool(made)
    if made:
        assert "goes on at clock 5, but" in told[0]
        assert "all 3 steps that it had made are made once more" in told[0]


@pytest.mark.parametrize(("dies_at", "left"), [(BATCHES * EPOCHS, 0), (BATCHES, BATCHES * 2)])
def test_restarted_rank_says_in_one_line_that_nothing_was_left_to_do(
    make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str], dies_at: int, left: int
) -> None:
    """Its predecessor died after its last step, as in the evaluation; or earlier."""

    def batches(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
        yield from by_loader(worker, rows)
        if worker.incarnation == 1:
            raise Killed

    cluster = make_cluster(workers=1, restarts=True)
    assert Ranks(cluster, training(batches, dies_at)).start(0).end() == {0: left}
    told = "paramserve: rank 0, started again, had nothing left to do: all 12 steps were done\n"
    assert capsys.readouterr().err == told * (left == 0)


# --- training that no server knows of -------------------------------------------------------------


def forgets(worker: ps.Worker, form: str, gradients: bool = True) -> list[int]:
    """Train a model of this rank's own, or only look at the data; how many warnings there were
    after each batch."""
    rows = TensorDataset(torch.ones(2 * BATCHES * worker.workers, 2))
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    found = []
    with warnings.catch_warnings(record=True) as warned, torch.set_grad_enabled(gradients):
        warnings.simplefilter("always")
        for loader in loaders_of(worker, rows, form):
            for (inputs,) in loader:
                loss = model(inputs).sum()
                if gradients:
                    loss.backward()
                    optimizer.step()
                found.append(len(warned))
    for each in warned:
        warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return found


def loaders_of(worker: ps.Worker, rows: TensorDataset, form: str) -> Iterator[Any]:
    """Three epochs."""
    one = worker.loader(rows, batch_size=2)
    if form == "one":
        yield worker.loader(rows, batch_size=2, epochs=EPOCHS)
    elif form == "ahead":
        yield worker.loader(rows, batch_size=2, epochs=EPOCHS, prefetch=lambda batch: {})
    for _ in range(EPOCHS * (form in ("range", "each"))):
        yield one if form == "range" else worker.loader(rows, batch_size=2)
    for _ in one.epochs(EPOCHS) if form == "epochs" else ():
        yield one


@pytest.mark.parametrize("form", ["one", "ahead", "range", "each", "epochs"])
def test_rank_that_trains_a_copy_of_its_own_warns_when_the_second_epoch_begins(
    make_cluster: MakeCluster, form: str
) -> None:
    with (
        pytest.warns(UserWarning, match="rank 0 has gone through its batches once, and") as warned,
        ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker,
    ):
        assert forgets(worker, form) == [0] * BATCHES + [1] * BATCHES * (EPOCHS - 1)
    assert len(warned) == 1, "not again at the end"
    assert warned[0].filename == __file__


def leased_once(worker: ps.Worker, rows: TensorDataset) -> Iterator[Any]:
    yield from worker.loader(rows, batch_size=2, shards="dynamic")


def test_rank_that_trains_a_copy_on_leased_batches_warns_when_it_has_had_all(
    make_cluster: MakeCluster,
) -> None:
    rows = TensorDataset(torch.ones(2 * BATCHES, 2))
    with (
        pytest.warns(UserWarning, match="rank 0 has gone through its batches once, and") as warned,
        ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker,
    ):
        assert [len(warned) for _ in leased_once(worker, rows)] == [0] * BATCHES
    assert len(warned) == 1


def test_rank_that_only_looks_at_the_data_again_does_not_warn(make_cluster: MakeCluster) -> None:
    with ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker:
        assert forgets(worker, "range", gradients=False) == [0] * BATCHES * EPOCHS


def test_rank_that_looks_at_the_data_before_it_trains_does_not_warn(
    make_cluster: MakeCluster,
) -> None:
    rows = TensorDataset(torch.ones(2 * BATCHES, 2))
    with ps.Worker(make_cluster("unix", workers=1).client(0), 0) as worker:
        loader = worker.loader(rows, batch_size=2)
        assert torch.cat([inputs for (inputs,) in loader]).mean() == 1.0
        assert training(lambda worker, rows: iter(loader), -1)(worker) == BATCHES


def test_run_that_trains_copies_says_so_at_once_and_for_one_rank(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with warnings.catch_warnings(action="error"):
        returned = ps.run(forgets, args=("range",), workers=2).returns
    assert returned == {0: [0] * BATCHES * EPOCHS, 1: [0] * BATCHES * EPOCHS}
    told = [line for line in capfd.readouterr().err.splitlines() if "trained nothing" in line]
    (line,) = told
    assert line.startswith("paramserve: rank ")
    assert "has gone through its batches once, and trained nothing on the servers: it has" in line

"""`worker.barrier` and `worker.all_reduce` over a cluster: values, waits, deaths and restarts."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import DEADLINES
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.client import timeouts
from paramserve.config import Limits
from paramserve.errors import (
    DefineTimeout,
    HyperMismatch,
    Overloaded,
    ParamServeError,
    PushTimeout,
    Timeout,
)
from paramserve.training import collectives, irregular

EVERY_KIND: dict[str, tuple[Callable[[int], Any], str, Any]] = {
    "float": (lambda rank: rank + 0.5, "mean", 1.5),
    "int": (lambda rank: rank + 1, "sum", 6),
    "mean of ints": (lambda rank: rank, "mean", 1.0),
    "bool": (lambda rank: rank > 0, "sum", 2),
    "largest bool": (lambda rank: rank > 0, "max", 1),
    "int beside float": (lambda rank: rank / 2 if rank else 0, "sum", 1.5),
    "int beside bool": (lambda rank: rank if rank else True, "sum", 4),
    "large int": (lambda rank: (1 << 60) + rank, "max", (1 << 60) + 2),
    "scalar": (lambda rank: np.float32(rank), "min", np.float32(0.0)),
    "array": (lambda rank: np.full((2, 1), rank), "sum", np.full((2, 1), 3)),
    "tensor": (
        lambda rank: torch.full((2,), rank + 0.5).requires_grad_(),
        "mean",
        torch.full((2,), 1.5),
    ),
    "bfloat16": (
        lambda rank: torch.tensor(rank, dtype=torch.bfloat16),
        "max",
        torch.tensor(2.0, dtype=torch.bfloat16),
    ),
    "mean of an int tensor": (lambda rank: torch.tensor([rank]), "mean", torch.tensor([1.0])),
    "empty": (lambda rank: np.zeros((0, 3)), "sum", np.zeros((0, 3))),
}


def test_every_kind_of_value_is_reduced_to_its_kind(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> dict[str, Any]:
        found = {
            name: worker.all_reduce(value(worker.rank), op)
            for name, (value, op, _) in EVERY_KIND.items()
        }
        for wrong in ("text", [1.0], np.array(["a"]), 1j, torch.zeros(1, dtype=torch.complex64)):
            with pytest.raises(TypeError, match=r"worker\.all_reduce takes"):
                worker.all_reduce(wrong)
        with pytest.raises(
            ValueError, match="op must be one of sum, mean, max, min, rank0, not 'avg'"
        ):
            worker.all_reduce(1.0, "avg")
        with pytest.raises(ValueError, match="ints of 64 bits"):
            worker.all_reduce(1 << 64, "sum")
        mixed = worker.all_reduce(np.float32(0.5) if worker.rank else 2, "sum")
        assert (type(mixed), mixed) == (np.float64 if worker.rank else float, 3.0)
        with pytest.raises(Overloaded, match="reduce_bytes_max"):
            worker.all_reduce(np.zeros(65))
        worker.barrier()
        return found

    cluster = make_cluster(workers=3, limits=Limits(reduce_bytes_max=512))
    for found in Ranks(cluster, train).start(0, 1, 2).end().values():
        for name, (_, _, expected) in EVERY_KIND.items():
            result = found[name]
            assert type(result) is type(expected), name
            assert getattr(result, "dtype", None) == getattr(expected, "dtype", None), name
            assert np.array_equal(
                np.asarray(result.tolist() if name == "bfloat16" else result),
                np.asarray(expected.tolist() if name == "bfloat16" else expected),
            ), name


def test_what_was_sent_before_a_barrier_is_there_behind_it(make_cluster: MakeCluster) -> None:
    def train(worker: ps.Worker) -> float:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        if worker.rank == 1:
            worker.client.push("w", np.ones(3))
        worker.barrier()
        return float(worker.client.pull("w")[0])

    cluster = make_cluster(servers=2, workers=2, policy=ps.Async())
    assert Ranks(cluster, train).start(0, 1).end() == {0: 1.0, 1: 1.0}


@pytest.mark.filterwarnings("ignore:rank . has waited")
@pytest.mark.parametrize("request_s", [10.0, 0.4, 0.2])
def test_rank_that_steps_where_another_waits_in_a_collective_is_told_soon(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, request_s: float
) -> None:
    """Under Sync neither goes on: the step needs both, and so does the collective. It is found at
    two looks, of which a wait of `request_s` has time for both, for one, or for none."""
    for name, seconds in (("SAY_S", 0.1), ("LOOK_S", 0.3)):
        monkeypatch.setattr(timeouts, name, seconds)
    monkeypatch.setattr(collectives, "ASK_S", 0.1)
    deadlines = structs.replace(DEADLINES, request_s=request_s)
    cluster = make_cluster(servers=2, workers=2, policy=ps.Sync(), deadlines=deadlines)
    told: list[PushTimeout] = []

    def train(worker: ps.Worker) -> Any:
        worker.client.define("w", np.zeros(30), rule=ps.Add())
        try:
            for _ in range(2):
                if worker.rank == 1:
                    worker.client.push_pull({"w": np.ones(30)}, tick=True)
                else:
                    return worker.all_reduce(1)
        except PushTimeout as error:
            told.append(error)
            raise Killed from None

    assert Ranks(cluster, train, again=False).start(0, 1).end() == {0: 1.0}
    (error,) = told
    told = (
        r"rank 1 has waited \d\.\d s for rank 0, which waits in worker\.all_reduce\(\) for rank 1$"
    )
    assert re.search(told, error.failed)
    assert "after the same number of steps" in error.fix


@pytest.mark.filterwarnings("ignore:rank . has waited")
def test_rank_that_waits_for_a_define_of_one_in_a_barrier_is_told_soon(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "SAY_S", 0.2)
    monkeypatch.setattr(collectives, "ASK_S", 0.1)

    def train(worker: ps.Worker) -> None:
        if worker.rank == 0:
            worker.barrier()
            return
        told = r"define cannot end: rank 1 .* rank 0, which waits in worker\.barrier\(\) for rank 1"
        with pytest.raises(DefineTimeout, match=told):
            worker.client.directory.await_block({"w": (3,)}, dtype="float64", rule=ps.Add())
        worker.barrier()

    Ranks(make_cluster(workers=2), train).start(0, 1).end()


@pytest.mark.filterwarnings("ignore:rank . has waited")
def test_rank_that_evaluates_before_a_collective_is_not_taken_to_wait_in_it(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was interrupted in a barrier, computes for long, and steps then."""
    for name, seconds in (("SAY_S", 0.0), ("LOOK_S", 0.2)):
        monkeypatch.setattr(timeouts, name, seconds)
    monkeypatch.setattr(collectives, "ASK_S", 0.1)
    cluster = make_cluster(workers=2, policy=ps.Sync())

    def train(worker: ps.Worker) -> float:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        if worker.rank == 0:
            with pytest.raises(Timeout):
                worker.barrier(timeout_s=0.3)
            time.sleep(0.8)  # what the test is about: time without a step
        return float(worker.client.push_pull({"w": np.ones(3)}, tick=True)["w"][0])

    assert Ranks(cluster, train).start(0, 1).end() == {0: 1.0, 1: 1.0}


@pytest.mark.filterwarnings("ignore:rank 0 has waited .* all_reduce")
def test_wait_says_for_whom_it_is_and_ends_with_who_is_missing(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeouts, "SAY_S", 0.0)
    monkeypatch.setattr(collectives, "ASK_S", 0.1)
    deadlines = structs.replace(DEADLINES, request_s=1.0, busy_s=10.0)
    cluster = make_cluster(workers=3, deadlines=deadlines)
    waits, stepped, over = (threading.Event() for _ in range(3))

    def step(worker: ps.Worker) -> None:
        worker.client.push("w", np.ones(3))
        worker.client.tick().result()
        clocks = dict(worker.client.connection.reports()[0].groups[0].clocks)
        while cluster.coordination.membership.furthest(1)[1] < clocks[1]:
            time.sleep(0.01)

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        if worker.rank:
            step(worker)
            stepped.set()
            assert waits.wait(10.0)
            step(worker)
            assert over.wait(10.0)
            return
        assert stepped.wait(10.0)
        try:
            with pytest.raises(
                Timeout,
                match=r"rank 0 waited .* rank 1 \(at clock 2 of group 'default', 1 when the wait "
                r"began\), rank 2 \(expected\) of 3 workers.*request_s",
            ):
                worker.barrier()
            with pytest.raises(Timeout, match=r"of 3 workers.* or raise timeout_s"):
                worker.all_reduce(1.0, timeout_s=0.1)
        finally:
            over.set()

    def hear(text: str, *args: Any, **options: Any) -> None:
        if "barrier" in text:
            said.append(text)
            waits.set()

    said: list[str] = []
    monkeypatch.setattr(warnings, "warn", hear)
    Ranks(cluster, train).start(0, 1).end()
    assert re.search(
        r"in worker.barrier\(\) for rank 1 \(at clock 1 .*it waits up to .* s \(change", said[0]
    )
    assert len(said) == 1, "once"


EPOCHS, STEPS = 5, 4
LOSSES = [3.0, 2.0, 2.5, 2.5, 2.0]
"""Of each epoch; rank r sees it r higher, the mean decides."""


@pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again")
@pytest.mark.parametrize("died_at", [None, 9, 12], ids=["alive", "within", "between"])
def test_plateau_schedule_is_one_on_all_ranks_also_after_a_restart(
    make_cluster: MakeCluster, died_at: int | None
) -> None:
    """The function of a restarted rank gets the losses of the epochs that it does not repeat."""

    def train(worker: ps.Worker) -> tuple[list[float], list[float]]:
        model = nn.Linear(2, 1)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = worker.optimizer(model, own)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        worker.track("scheduler", scheduler)
        loader = worker.loader(TensorDataset(torch.ones(2 * STEPS, 2)), batch_size=1)
        losses, rates = [], []
        for epoch in range(EPOCHS):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
                if (worker.rank, worker.incarnation, worker.clock) == (1, 1, died_at):
                    worker.client.drain()
                    raise Killed
            losses.append(worker.all_reduce(LOSSES[epoch] + worker.rank))
            scheduler.step(losses[-1])
            rates.append(own.param_groups[0]["lr"])
        return losses, rates

    cluster = make_cluster(servers=2, workers=2, policy=ps.Sync(), restarts=True)
    found = Ranks(cluster, train).start(0, 1).end()
    losses, rates = found[0]
    assert found[1] == found[0]
    known = [loss + 0.5 for loss in LOSSES]
    if died_at == STEPS * 3 and losses != known:  # it came again behind the call of this epoch
        known[2] -= 0.5
    assert losses == known
    assert rates == [0.1, 0.1, 0.05, 0.025, 0.0125]


def test_metric_of_rank_0_is_waited_for_while_it_is_started_again(
    make_cluster: MakeCluster,
) -> None:
    """It dies in its evaluation, where the others wait for it."""

    def train(worker: ps.Worker) -> list[float]:
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = worker.loader(TensorDataset(torch.ones(2 * STEPS, 2)), batch_size=1)
        losses = []
        for epoch in range(EPOCHS):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            if (worker.rank, worker.incarnation, epoch) == (0, 1, 2):
                worker.client.drain()
                raise Killed
            losses.append(worker.all_reduce(LOSSES[epoch] + worker.rank, "rank0"))
        return losses

    cluster = make_cluster(servers=2, workers=2, policy=ps.Sync(), restarts=True)
    found = Ranks(cluster, train).start(0, 1).end()
    assert found == {0: LOSSES, 1: LOSSES}


@pytest.mark.filterwarnings("ignore:rank . has waited")
@pytest.mark.filterwarnings("ignore:.* ended without rank 0, which was started again")
@pytest.mark.parametrize("policy", [ps.Sync(), ps.Async()], ids=["sync", "async"])
def test_worker_that_leaves_an_evaluation_out_holds_up_no_other(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, policy: ps.Policy
) -> None:
    """It dies in it. Its next incarnation goes on behind that epoch, where the others wait in the
    call of it: they go on without its value, and the calls behind it are of the same epochs."""
    for name, seconds in (("SAY_S", 0.1), ("LOOK_S", 0.2)):
        monkeypatch.setattr(timeouts, name, seconds)
    monkeypatch.setattr(collectives, "ASK_S", 0.1)
    again = threading.Event()

    def train(worker: ps.Worker) -> dict[int, float]:
        model = nn.Linear(2, 1)
        optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loader = worker.loader(TensorDataset(torch.ones(2 * STEPS, 2)), batch_size=1)
        found = {}
        if worker.incarnation > 1:
            again.set()
        for epoch in loader.epochs(EPOCHS):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).sum().backward()
                optimizer.step()
            if (worker.incarnation, epoch) == (1, 2):
                worker.client.drain()
                if worker.rank == 0:
                    raise Killed
                assert again.wait(10.0)  # it evaluates for longer
            found[epoch] = worker.all_reduce(10.0 * epoch + worker.rank, "sum")
        return found

    cluster = make_cluster(servers=2, workers=2, policy=policy, restarts=True)
    found = Ranks(cluster, train).start(0, 1).end()
    assert found[1] == {0: 1.0, 1: 21.0, 2: 21.0, 3: 61.0, 4: 81.0}
    assert found[0] == {3: 61.0, 4: 81.0}


def test_schedule_by_local_losses_is_refused_with_the_rate_and_what_to_write(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> None:
        model = nn.Linear(2, 1)
        own = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = worker.optimizer(model, own)
        scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
        for loss in (1.0, 1.0 + worker.rank - 0.5, 1.0):
            scheduler.step(loss)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(HyperMismatch) as caught:
        Ranks(make_cluster(workers=2, policy=ps.Sync()), train).start(0, 1).end()
    assert "lr: rank 0 has 0.1, rank 1 has 0.01" in str(caught.value)
    assert "'weight', 'bias'" in str(caught.value)
    assert "worker.all_reduce(loss)" in caught.value.fix


def test_other_calls_on_another_rank_are_refused(make_cluster: MakeCluster) -> None:
    """The one that comes second is told, and may make the other's call."""

    def train(worker: ps.Worker) -> str:
        calls = [worker.barrier, lambda: worker.all_reduce(1.0)]
        try:
            calls[worker.rank]()
        except ParamServeError as error:
            calls[1 - worker.rank]()
            return error.failed
        return ""

    told = "".join(Ranks(make_cluster(workers=2), train).start(0, 1).end().values())
    assert "worker.barrier()" in told
    assert "worker.all_reduce(op='mean') with a number" in told


@pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again")
def test_restarted_rank_gets_its_results_behind_passes_that_are_known_by_their_sums(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At which of their steps it made its calls is not known: it gets them in order."""
    monkeypatch.setattr(irregular, "RUNS_MAX", 2)
    epochs = 12

    def training(clock: int) -> Callable[[ps.Worker], list[float]]:
        def train(worker: ps.Worker) -> list[float]:
            client = worker.client
            client.define("w", np.zeros(2), rule=ps.Add())
            worker.barrier()
            data = TensorDataset(torch.arange(16))
            loader = worker.loader(data, batch_size=2, shuffle=False)
            found = []
            for epoch in range(epochs):
                for (batch,) in loader:
                    if (int(batch[0]) // 4 + epoch) % 3 == 0:
                        continue
                    if (worker.rank, worker.incarnation, worker.clock) == (1, 1, clock):
                        client.drain()
                        raise Killed
                    client.push_pull({"w": np.ones(2)}, tick=True)
                found += [worker.all_reduce(float(epoch)), worker.all_reduce(epoch, "sum")]
            return found

        return train

    for clock in (9, 20, 28):
        ranks = Ranks(
            make_cluster(workers=2, restarts=True, policy=ps.Async()), training(clock)
        ).start(0, 1)
        found = ranks.end()
        assert found[1] == found[0]
        assert found[0][::2] == [float(epoch) for epoch in range(epochs)]
        assert ranks.restarts == [1]

"""A rank that comes back, where ranks are at other steps in the same collective, or make several at
one step: it gets the results of its own calls, or an error."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks

import paramserve as ps
from paramserve.consistency.base import Policy

EPOCHS, BATCHES = 3, 4
"""Batches of all ranks in an epoch."""

pytestmark = pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again")


class Case(NamedTuple):
    loop: str
    shards: str
    calls: tuple[str, ...]
    """Where in a round, or behind the loop."""
    dies: tuple[int, str] | None = None
    """Before which call of rank 1."""


class Program:
    """Each call has a number of its own, which all ranks give: another result is that of another
    call."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.wrong = list[str]()

    def __call__(self, worker: ps.Worker) -> int:
        data = np.arange(2.0 * BATCHES)
        worker.client.define("w", np.zeros(2), rule=ps.Add())
        shards: Any = self.case.shards
        loader: Any = worker.loader(data, batch_size=2, shards=shards)  # type: ignore[arg-type]
        self._call(worker, 0, "setup")
        rounds = loader.epochs(EPOCHS) if self.case.loop == "epochs" else range(EPOCHS)
        for epoch in rounds:
            self._call(worker, epoch, "before")
            for _ in loader:
                self._call(worker, epoch, "batch")
                worker.client.push_pull({"w": np.ones(2)}, tick=True)
                self._call(worker, epoch, "step")
            self._call(worker, epoch, "behind")
            self._call(worker, epoch, "again")
        self._call(worker, EPOCHS, "final")
        return worker.clock

    def _call(self, worker: ps.Worker, epoch: int, where: str) -> None:
        if (worker.rank, worker.incarnation, self.case.dies) == (1, 1, (epoch, where)):
            worker.client.drain()
            raise Killed
        if where in self.case.calls:
            number = 100 * epoch + CALLS.index(where)
            result = worker.all_reduce(number, "max")
            if result != number:
                self.wrong.append(f"{self.case}, rank {worker.rank}: {number} got {result}")


CALLS = ("setup", "before", "batch", "step", "behind", "again", "final")
POLICIES = {"sync": ps.Sync(reduce="sum"), "async": ps.Async()}


def check(make_cluster: MakeCluster, case: Case, policy: Policy) -> None:
    program = Program(case)
    cluster = make_cluster(servers=1, workers=2, policy=policy, restarts=True)
    Ranks(cluster, program).start(0, 1).end()
    assert program.wrong == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("loop", ["epochs", "range"])
@pytest.mark.parametrize("calls", ["behind again", "setup before behind", "behind final"])
def test_rank_that_comes_back_with_leased_samples_goes_on_with_the_calls_of_its_epoch(
    make_cluster: MakeCluster, loop: str, calls: str, policy: str
) -> None:
    for dies in ((1, "step"), (1, "behind"), (1, "again"), (2, "before"), (3, "final")):
        case = Case(loop, "dynamic", tuple(calls.split()), dies)
        check(make_cluster, case, POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("loop", "calls"),
    [("epochs", "behind final"), ("range", "step behind"), ("range", "batch behind")],
)
def test_calls_behind_a_loop_or_a_pass_are_told_from_the_last_ones_in_it(
    make_cluster: MakeCluster, loop: str, calls: str, policy: str
) -> None:
    """No step is between them."""
    for dies in ((1, "batch"), (1, "behind"), (2, "behind"), (3, "final")):
        case = Case(loop, "static", tuple(calls.split()), dies)
        check(make_cluster, case, POLICIES[policy])


def test_rank_that_makes_fewer_steps_gets_the_results_of_its_own(make_cluster: MakeCluster) -> None:
    """Rank 0 makes three steps in each round, in which there are two calls at one step."""
    wrong = []
    back = threading.Event()

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(2), rule=ps.Add())
        each = 3 if worker.rank == 0 else 1
        if worker.incarnation == 2:
            back.set()
        for number in range(worker.clock // each, 6):
            if (worker.rank, number) == (0, 5):  # its steps would say nothing of a call without it
                assert back.wait(30.0)
            for which in range(3):
                if (worker.rank, worker.incarnation, number, which) == (1, 1, 4, 1):
                    worker.client.drain()
                    raise Killed
                value = 10 * number + which
                if which < 2 and (result := worker.all_reduce(value, "max")) != value:
                    wrong.append((worker.rank, value, result))
            for _ in range(each):
                worker.client.push_pull({"w": np.ones(2)}, tick=True)

    cluster = make_cluster(workers=2, policy=ps.Async(), restarts=True)
    assert Ranks(cluster, train).start(0, 1).end().keys() == {0, 1}
    assert wrong == []

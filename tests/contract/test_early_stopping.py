"""Ranks that agree to stop early, and one that dies before it has returned."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks

import paramserve as ps
from paramserve.consistency.base import Policy
from paramserve.training import company

EPOCHS, STOPS_AT, STEPS = 6, 2, 2
"""The last epoch that is made is `STOPS_AT`; there are `STEPS` in each."""


class Program:
    """Trains until rank 0 says that it is enough.

    Args:
        dies: the rank that dies, once, and where.
        lingers_s: how long the others take from the decision to their return.
        agrees: whether the ranks ask each other; else they make all epochs.
    """

    def __init__(
        self,
        dies: int | None,
        where: str = "decided",
        lingers_s: float = 0.0,
        *,
        agrees: bool = True,
    ) -> None:
        self.dies, self.where, self.lingers_s, self.agrees = dies, where, lingers_s, agrees
        self.made: list[tuple[int, int]] = []
        """(rank, epoch) of each epoch that has ended."""

    def __call__(self, worker: ps.Worker) -> int:
        client, data = worker.client, np.arange(2.0 * 2 * STEPS)
        client.define("w", np.zeros(2), rule=ps.Add())
        loader: Any = worker.loader(data, batch_size=2)  # type: ignore[arg-type]
        for epoch in loader.epochs(EPOCHS):
            for _ in loader:
                client.push_pull({"w": np.ones(2)}, tick=True)
            self._may_die(worker, "evaluates", epoch)
            enough = self.agrees and worker.all_reduce(
                worker.rank == 0 and epoch >= STOPS_AT, "max"
            )
            self.made.append((worker.rank, epoch))
            if enough:
                self._may_die(worker, "decided", epoch)
                time.sleep(self.lingers_s)
                break
        return worker.clock

    def _may_die(self, worker: ps.Worker, where: str, epoch: int) -> None:
        first = worker.incarnation == 1
        if (worker.rank, where, epoch, first) == (self.dies, self.where, STOPS_AT, True):
            worker.client.drain()
            raise Killed


def played(make_cluster: MakeCluster, policy: Policy, program: Program) -> tuple[Any, list[int]]:
    cluster = make_cluster(servers=2, workers=2, policy=policy, restarts=True)
    ranks = Ranks(cluster, program).start(0, 1)
    ranks.end()
    return cluster.client().pull("w"), ranks.restarts


@pytest.mark.parametrize("policy", [ps.Sync(reduce="sum"), ps.Async()], ids=["sync", "async"])
@pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again")
def test_rank_that_dies_when_all_have_stopped_trains_nothing_more(
    make_cluster: MakeCluster, policy: Policy, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, _ = played(make_cluster, policy, Program(None))
    deaths = [(0, "decided"), (1, "decided"), (1, "evaluates")]
    for (dies, where), lingers_s in product(deaths, (0.0, 0.4)):
        case = str((dies, where, lingers_s))
        program = Program(dies, where, lingers_s)
        found, restarts = played(make_cluster, policy, program)
        assert restarts == [dies], case
        np.testing.assert_array_equal(found, whole, err_msg=case)
        assert max(epoch for _, epoch in program.made) == STOPS_AT, case
        told = f"rank {dies}, started again behind epoch {STOPS_AT}, ends its loop: all other ranks"
        assert told in capfd.readouterr().err, case


@pytest.mark.parametrize("policy", [ps.Sync(reduce="sum"), ps.Async()], ids=["sync", "async"])
def test_rank_that_dies_behind_an_epoch_goes_on_with_the_others(
    make_cluster: MakeCluster, policy: Policy
) -> None:
    """It finds that they go on, and does not wait for long."""
    began = time.monotonic()
    program = Program(1, "evaluates", agrees=False)
    found, restarts = played(make_cluster, policy, program)
    assert restarts == [1]
    assert found.tolist() == [2.0 * EPOCHS * STEPS] * 2
    assert time.monotonic() - began < company.WAIT_S / 2

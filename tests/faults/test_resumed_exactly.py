"""A run under Sync whose servers are killed ends bit by bit as one that nothing happened to."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults import resume_victims as victims

import paramserve as ps
from paramserve.launch.entries import Key

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SEED = 5
KINDS = [Key("server", 0), Key("server", 1), Key("coordinator", 0), Key("worker", 1)]


@functools.cache
def unbroken(epochs: int) -> ps.Result:
    """Sums are in rank order whatever the number of servers: one run is good for all."""
    return ps.run(victims.train, args=(epochs,), workers=2, servers=2, seed=SEED)


def check_equal(found: ps.Result, whole: ps.Result) -> None:
    for rank, expected in whole.returns.items():
        different = [name for name in expected if found.returns[rank][name] != expected[name]]
        assert not different, f"rank {rank}"
    assert victims.digest(found.state_dict()) == victims.digest(whole.state_dict())


class Killer:
    """Kills processes of a job at random clocks, each time a little after a checkpoint.

    Args:
        told: the file that rank 0 writes its clock to.
        clocks: at which.
    """

    def __init__(
        self, job: ps.Job, chance: random.Random, told: Path, clocks: Sequence[int]
    ) -> None:
        self.killed = 0
        self._job = job
        self._chance = chance
        self._told = told
        self._clocks = clocks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for clock in self._clocks:
            while int(self._told.read_text() or 0) < clock:
                if self._over.wait(0.001):
                    return
            self._job.checkpoint()
            time.sleep(0.05 * self._chance.random())
            processes = self._job._supervisor.attempt.processes
            pids = {key: each.pid for each, key in processes.items()}
            os.kill(pids[self._chance.choice(KINDS)], signal.SIGKILL)
            self._told.write_text("")
            self.killed += 1


def resumed(folder: Path, epochs: int, kills: int, seed: int) -> ps.Result:
    chance, told = random.Random(seed), folder / "clock"
    told.touch()
    clocks = sorted(chance.sample(range(1, epochs * victims.STEPS_OF_EPOCH - 20), kills))
    job = ps.start(
        victims.train,
        args=(epochs, str(told)),
        workers=2,
        servers=2,
        seed=SEED,
        checkpoint=ps.Checkpoint(folder / "saved", every_s=1000, keep=kills),
        on_worker_death=ps.Restart(kills),
    )
    killer = Killer(job, chance, told, clocks)
    result = job.wait()
    killer.end()
    assert len(result.rollbacks) + len(result.restarts) == killer.killed == kills
    return result


@pytest.mark.slow
def test_run_whose_processes_are_killed_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    """And so does one that another number of servers goes on with, from a checkpoint of it."""
    result, whole = resumed(tmp_path, 20, 4, seed=1), unbroken(20)
    check_equal(result, whole)
    path = result.rollbacks[-1].path
    other = ps.run(victims.train, args=(20,), workers=2, servers=3, seed=SEED, resume=path)
    check_equal(other, whole)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_run_that_is_killed_at_ten_points_ends_as_an_unbroken_one(
    tmp_path: Path, seed: int
) -> None:
    check_equal(resumed(tmp_path, 60, 10, seed), unbroken(60))

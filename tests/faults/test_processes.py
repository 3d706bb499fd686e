"""SIGKILL to each kind of process at random times during training.

The time of each kill comes from its seed: rank 0 tells when it has done a random number of steps,
and the kill comes a random part of a few milliseconds later, in the middle of some step. Each time
the run must end, or go on, as configured and with the right error, and leave nothing behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.faults import victims
from tests.faults.drivers import driver
from tests.faults.leftovers import all_end, folders, nothing_left

import paramserve as ps
from paramserve.errors import CoordinatorGone, ServerGone, WorkerFailed
from paramserve.launch.entries import Key

DETECTED_WITHIN_S = 2.0
STEPS_MAX = 200
LATER_S = 0.005
POLICIES = {"sync": ps.Sync(reduce="sum"), "async": ps.Async()}


def pids(job: ps.Job) -> dict[Key, int]:
    return {key: process.pid for process, key in job._supervisor._processes.items()}


def kill(job: ps.Job, victim: Key, pipe: str, chance: random.Random) -> float:
    """SIGKILL a process of a run a little after rank 0 has told; returns when."""
    assert Path(pipe).read_text() == "here\n"
    time.sleep(chance.random() * LATER_S)
    os.kill(pids(job)[victim], signal.SIGKILL)
    return time.monotonic()


def begin(
    pipe: str,
    seed: int,
    policy: str,
    train: Callable[..., Any] = victims.regress,
    on_worker_death: Literal["stop", "continue"] = "stop",
    deadlines: ps.Deadlines | None = None,
) -> tuple[ps.Job, random.Random]:
    chance = random.Random(seed)
    job = ps.start(
        train,
        args=(pipe, chance.randrange(STEPS_MAX)),
        workers=3,
        servers=2,
        consistency=POLICIES[policy],
        on_worker_death=on_worker_death,
        seed=seed,
        engine=ps.Local(deadlines=deadlines),
    )
    return job, chance


def check_end(job: ps.Job, killed_at: float, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        job.wait()
    assert time.monotonic() - killed_at < DETECTED_WITHIN_S


@pytest.mark.parametrize(
    ("seed", "policy"), [(1, "sync"), pytest.param(2, "async", marks=pytest.mark.slow)]
)
def test_killed_server_is_server_gone_everywhere(pipe: str, seed: int, policy: str) -> None:
    with nothing_left():
        job, chance = begin(pipe, seed, policy)
        shard = chance.randrange(2)
        with all_end(list(pids(job).values())):
            killed_at = kill(job, Key("server", shard), pipe, chance)
            check_end(job, killed_at, ServerGone, f"server {shard} was killed by SIGKILL")


@pytest.mark.parametrize(
    ("seed", "policy"), [(3, "async"), pytest.param(4, "sync", marks=pytest.mark.slow)]
)
def test_killed_coordinator_is_coordinator_gone(pipe: str, seed: int, policy: str) -> None:
    with nothing_left():
        job, chance = begin(pipe, seed, policy)
        with all_end(list(pids(job).values())):
            killed_at = kill(job, Key("coordinator", 0), pipe, chance)
            check_end(job, killed_at, CoordinatorGone, "coordinator was killed by SIGKILL")


@pytest.mark.parametrize(
    ("seed", "policy"), [(5, "sync"), pytest.param(6, "async", marks=pytest.mark.slow)]
)
def test_killed_worker_stops_the_run(pipe: str, seed: int, policy: str) -> None:
    with nothing_left():
        job, chance = begin(pipe, seed, policy)
        rank = chance.randrange(3)
        with all_end(list(pids(job).values())):
            killed_at = kill(job, Key("worker", rank), pipe, chance)
            check_end(job, killed_at, WorkerFailed, f"worker {rank} was killed by SIGKILL")


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("seed", [7, pytest.param(8, marks=pytest.mark.slow)])
def test_killed_worker_with_continue_the_others_go_on(pipe: str, seed: int, policy: str) -> None:
    with nothing_left():
        job, chance = begin(pipe, seed, policy, on_worker_death="continue")
        rank = chance.randrange(1, 3)
        with all_end(list(pids(job).values())):
            kill(job, Key("worker", rank), pipe, chance)
            snapshots = job.snapshots(every=1, name="default", keep=1)
            reached = next(snapshots).version
            while job.status().workers[rank] != "dead":
                reached = next(snapshots).version
            for _ in range(20):  # they go on: values change after the death was noticed
                version = next(snapshots).version
                assert version > reached
                reached = version
            job.stop()
            result = job.wait()
        assert f"worker {rank} was killed by SIGKILL" in str(result.failures[rank])
        assert np.isfinite(result.values["default"]["w"]).all()


@pytest.mark.parametrize("seed", [9, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_driver_leaves_nothing(pipe: str, seed: int) -> None:
    chance = random.Random(seed)
    with driver(pipe, "job.wait()", at=chance.randrange(STEPS_MAX)) as run, all_end(run.children):
        time.sleep(chance.random() * LATER_S)
        run.process.kill()
    assert folders() == set()


@pytest.mark.parametrize(
    ("victim", "error"),
    [(Key("server", 1), ServerGone), (Key("coordinator", 0), CoordinatorGone)],
    ids=["server", "coordinator"],
)
def test_hung_process_counts_as_gone(pipe: str, victim: Key, error: type[Exception]) -> None:
    stall_s = 1.5
    deadlines = ps.Deadlines(stall_s=stall_s, heartbeat_s=0.2)
    with nothing_left():
        job, _ = begin(pipe, 12, "sync", deadlines=deadlines)
        with all_end(list(pids(job).values())):
            assert Path(pipe).read_text() == "here\n"
            os.kill(pids(job)[victim], signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(error, match=f"{victim} gave no sign of life"):
                job.wait()
            assert time.monotonic() - began < stall_s + DETECTED_WITHIN_S

"""Training functions that die once, at a step that they choose. Imports no torch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import paramserve as ps

STEPS = 20
WAIT_S = 30.0


def gradient_of(worker: ps.Worker, step: int, flat: Any) -> Any:
    """Depends on seed, rank, step and values only: a repeated step gets the same gradient."""
    random = np.random.default_rng((worker.seed, worker.rank, step))
    return (flat - random.random(flat.shape)).astype(np.float32)


def die(how: str) -> None:
    """End this process at once, in one of the ways in which workers end."""
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(WAIT_S)
    raise ZeroDivisionError("on purpose")


def regress(worker: ps.Worker, how: str = "", at: int = 7, times: int = 1) -> tuple[int, int]:
    """Pull values towards random goals; rank 1 dies at clock `at` in its first incarnations."""
    client = worker.client
    client.define("w", np.zeros(40_000, np.float32), rule=ps.SGD(lr=0.1, momentum=0.9))
    flat = client.pull("w")
    while worker.clock < STEPS:
        if how and worker.rank == 1 and worker.incarnation <= times and worker.clock == at:
            die(how)
        gradient = gradient_of(worker, worker.clock, flat)
        flat = client.push_pull({"w": gradient}, tick=True)["w"]
    return worker.incarnation, worker.clock


def await_file(path: Path, why: str) -> None:
    """Wait for what another process tells by a file."""
    until = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(why)
        time.sleep(0.01)


def counts(worker: ps.Worker, folder: str) -> list[float]:
    """Add ones without waiting. Rank 1 dies, and its successor waits until rank 0 is done."""
    client, done, died = worker.client, Path(folder, "done"), Path(folder, "died")
    client.define("w", np.zeros(3), rule=ps.Add())
    if worker.rank == 1 and worker.incarnation == 2:
        await_file(done, "rank 0 waited for rank 1")
    while worker.clock < STEPS:
        if worker.rank == 1 and worker.incarnation == 1 and worker.clock == 5:
            client.drain()
            died.touch()
            die("kill")
        client.push_pull({"w": np.ones(3)}, tick=True)
    if worker.rank == 0:
        await_file(died, "rank 1 did not begin")
    found: list[float] = client.pull("w").tolist()
    done.touch()
    return found

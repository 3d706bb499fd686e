"""Training functions whose servers are killed, or that go on. Imports no torch by itself."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
from tests.faults.restart_victims import gradient_of

import paramserve as ps
from paramserve.core.partition import PIECE_BYTES_MIN

STEP_S = 0.005
SIZE = 3 * PIECE_BYTES_MIN // 4
"""Parameters in float32, of which three servers have some."""
COUNTED = (4, 3, PIECE_BYTES_MIN // 24 + 1)
"""Shape of what `counts` adds to: elements of each rank on all of four servers."""


def regress(worker: ps.Worker, steps: int) -> int:
    """Pull values towards random goals; the clock at which it began."""
    client = worker.client
    client.define("w", np.zeros(SIZE, np.float32), rule=ps.SGD(lr=0.1, momentum=0.9))
    flat, began = client.pull("w"), worker.clock
    while worker.clock < steps:
        time.sleep(STEP_S)
        gradient = gradient_of(worker, worker.clock, flat)
        flat = client.push_pull({"w": gradient}, tick=True)["w"]
    return began


def regress_late(worker: ps.Worker, steps: int) -> int:
    """The same; rank 1 comes when rank 0 would have made many steps, had it not to wait."""
    if worker.rank == 1:
        time.sleep(100 * STEP_S)
    return regress(worker, steps)


def counts(worker: ps.Worker, steps: int, log: str) -> int:
    """Add ones to an element of each rank's own on all servers; the clock at which it began.

    Each rank's log says where it began, with its clock and what it found of its own, and each push
    that was acknowledged; a line is on the disk before the next push.
    """
    client, began, rank = worker.client, worker.clock, worker.rank
    client.define("w", np.zeros(COUNTED), rule=ps.Add())
    own = np.zeros(COUNTED)
    own[:, rank] = 1.0
    with open(f"{log}-{rank}", "a") as file:

        def note(*line: object) -> None:
            print(*line, file=file, flush=True)
            os.fsync(file.fileno())

        found = np.unique(client.pull("w")[:, rank])
        note("begins", began, *found)
        while worker.clock < steps:
            time.sleep(STEP_S)
            client.push_pull({"w": own}, tick=True)
            note("pushed", worker.clock)
    return began


def lose_the_folder(worker: ps.Worker, folder: str) -> None:
    """Fill a table and a block; then the folder of checkpoints is gone."""
    table = worker.client.table("users", dim=2, rule=ps.SGD(lr=1.0))
    table.push(np.arange(10), np.ones((10, 2), np.float32))
    worker.client.define("w", np.ones(4), rule=ps.Add())
    shutil.rmtree(folder)
    Path(folder).write_text("no folder")


def epochs(
    worker: ps.Worker, last: int, batch_size: int, start: int | None = None, dies: int = -1
) -> list[int]:
    """The epochs that a loader's loop makes.

    Args:
        start: of a loader that leaves nothing out.
        dies: the rank that ends before its first step.
    """
    if worker.rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    client, data = worker.client, np.arange(32)
    client.define("w", np.zeros(2), rule=ps.Add())
    anew = start is not None
    loader = worker.loader(data, batch_size=batch_size, resume=not anew)  # type: ignore[arg-type]
    made = []
    for epoch in loader.epochs(last, start=start or 0):
        made.append(epoch)
        for _ in loader:
            client.push_pull({"w": np.ones(2)}, tick=True)
    return made


def agrees(worker: ps.Worker, steps: int, today: float, began: str = "") -> dict[str, list[float]]:
    """What `all_reduce` gives at the start, and after each step of a loop of its own.

    Args:
        began: a file that rank 0 makes after a while; the function then goes on for long.
    """
    client = worker.client
    first = [worker.all_reduce(today, "max"), worker.all_reduce(today + worker.rank, "max")]
    worker.barrier()
    client.define("w", np.zeros(2), rule=ps.Add())
    sums = []
    for step in range(worker.clock, steps):
        if began and step == 5:
            Path(began).touch()
        time.sleep(STEP_S)
        client.push_pull({"w": np.ones(2)}, tick=True)
        sums.append(worker.all_reduce(float(step), "sum"))
    return {"first": first, "sums": sums}

"""Training functions for runs on Ray. Imports no torch; workers import this module by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import ray

import paramserve as ps


def least_squares(worker: ps.Worker, steps: int = 8, codec: ps.Codec | None = None) -> float:
    """Fit a vector to noisy data; the data depend on the seed and the rank only.

    Args:
        codec: of gradients; values are sent as what has changed, in 8 bits.
    """
    random = np.random.default_rng((worker.seed, worker.rank))
    data = random.normal(size=(64, 16))
    aims = data @ np.arange(16.0)
    client = worker.client
    pull = ps.Delta(ps.Int8(16, even_local=True)) if codec is not None else None
    client.define("w", np.zeros(16, np.float32), rule=ps.SGD(lr=0.05), push=codec, pull=pull)
    flat = client.pull("w")
    for _ in range(steps):
        gradient = data.T @ (data @ flat - aims) / len(data)
        flat = client.push_pull({"w": gradient}, tick=True)["w"]
    return float(worker.all_reduce(np.square(flat - np.arange(16.0)).mean()))


def dies_once(worker: ps.Worker, folder: str, steps: int = 6) -> tuple[int, int]:
    """Count to `steps`; rank 1 kills its process at clock 3, unless it has done so before."""
    client = worker.client
    client.define("w", np.zeros(2), rule=ps.Add())
    began = worker.clock
    marker = Path(folder) / "died"
    while worker.clock < steps:
        if worker.rank == 1 and worker.clock == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        client.push_pull({"w": np.ones(2)}, tick=True)
    return began, worker.clock


def endless(worker: ps.Worker) -> None:
    """Until something ends it; tells by the values that it is at work."""
    client = worker.client
    client.define("w", np.zeros(2), rule=ps.Add())
    while True:
        client.push_pull({"w": np.ones(2)}, tick=True)


def where(worker: ps.Worker) -> tuple[str, str]:
    """The node that this runs on, and the number of threads that it was given."""
    worker.client.define("w", np.zeros(2), rule=ps.Add())
    worker.client.push_pull({"w": np.ones(2)}, tick=True)
    return ray.get_runtime_context().get_node_id(), os.environ["OMP_NUM_THREADS"]

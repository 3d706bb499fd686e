"""Short real runs on this machine: what a step of `push_pull` takes there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from paramserve.consistency.base import Policy
from paramserve.launch import run
from paramserve.rules.sgd import SGD
from paramserve.worker import Worker

ROUNDS_MIN, ROUNDS_MAX = 30, 1000
SECONDS = 2.0
"""About as long is measured for each size."""
BYTES_S = 1e9
"""A guess, for the number of rounds only."""


def measure(
    policy: Policy, workers: int, servers: int, sizes: Sequence[float], step_s: float = 0.0
) -> list[float]:
    """Seconds of a worker's step, by size: sleep for `step_s`, push and pull that many bytes.

    Returns:
        For each size the median over steps, averaged over the workers.
    """
    result = run(
        step_times,
        args=([max(1, int(each) // 4) for each in sizes], step_s),
        workers=workers,
        servers=servers,
        consistency=policy,
        threads_per_worker=1,
    )
    by_worker = [result.returns[rank] for rank in sorted(result.returns)]
    return [statistics.fmean(each) for each in zip(*by_worker, strict=True)]


def rounds_of(size: int, workers: int, step_s: float) -> int:
    """How many steps take about `SECONDS`."""
    guess_s = step_s + workers * (1e-4 + 4 * size / BYTES_S)
    return max(ROUNDS_MIN, min(ROUNDS_MAX, int(SECONDS / guess_s)))


def step_times(worker: Worker, sizes: Sequence[int], step_s: float) -> list[float]:
    """What each worker does: for each size (in float32) its median step."""
    client = worker.client
    for size in sizes:
        client.define(f"{size}", np.zeros(size, np.float32), rule=SGD(lr=0.01))
    found = []
    for size in sizes:
        name = f"{size}"
        rounds = rounds_of(size, worker.workers, step_s)
        taken = []
        end = time.perf_counter()
        for _ in range(rounds + max(3, rounds // 10)):
            if step_s:
                time.sleep(step_s)
            client.push_pull({name: client.gradient(name)}, tick=True, copy=False)
            start, end = end, time.perf_counter()
            taken.append(end - start)
        found.append(statistics.median(taken[-rounds:]))
    return found


def slept_s(step_s: float, rounds: int = 20) -> float:
    """What a sleep of `step_s` really takes."""
    if not step_s:
        return 0.0
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        time.sleep(step_s)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)

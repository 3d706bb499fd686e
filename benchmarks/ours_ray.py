"""Ours on the Ray engine: the same workloads as `ours.py`, on a Ray cluster of this machine."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import paramserve as ps
from benchmarks import ours
from benchmarks.rival_ray import session
from benchmarks.workloads import Mnist, Start, fresh, timed

ENGINE = ps.OnRay(server=ps.Needs(num_cpus=0), worker=ps.Needs(num_cpus=0), threads_per_worker=1)
"""Engine with no CPUs, as the plain Ray actors: a small machine has room for all of them."""


def mnist(load: Mnist, scratch: Path) -> dict[str, float]:
    """Train MNIST as `ours.mnist`; the workers are Ray actors."""
    with session(scratch):
        return ours.mnist(load, fresh(scratch, "ours"), ENGINE)


def start(load: Start, scratch: Path) -> dict[str, float]:
    """Only the run: the Ray cluster is there already, and the kernel cache is warm."""
    with session(scratch):

        def run() -> None:
            ps.run(ours.enter, workers=load.workers, servers=load.servers, engine=ENGINE)

        run()
        return {"seconds": median(timed(run) for _ in range(load.repeats))}

"""Ours on the Ray engine: the same workloads as `ours.py`, on a Ray cluster of this machine."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import paramserve as ps
from benchmarks import ours
from benchmarks.rival_ray import session
from benchmarks.workloads import Mnist, Start, fresh, timed


def mnist(load: Mnist, scratch: Path) -> dict[str, float]:
    """As `ours.mnist`; the workers are Ray actors."""
    with session(scratch):
        return ours.mnist(load, fresh(scratch, "ours"), ps.OnRay())


def start(load: Start, scratch: Path) -> dict[str, float]:
    """Only the run: the Ray cluster is there already, and the kernel cache is warm."""
    with session(scratch):

        def run() -> None:
            engine = ps.OnRay()
            ps.run(ours.nothing, workers=load.workers, servers=load.servers, engine=engine)

        run()
        return {"seconds": median(timed(run) for _ in range(load.repeats))}

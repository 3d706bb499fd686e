"""What does a parameter server cost when a small ConvNet trains on MNIST?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Mnist

TINY = Mnist(ways=("async_overlap", "sync"), steps=20, warm_steps=5, images=1_000)
CONTESTANTS = {
    "ours": "benchmarks.ours:mnist",
    "floor": "benchmarks.floor:mnist",
    "ray": "benchmarks.rival_ray:mnist",
    "rpc": "benchmarks.rival_rpc:mnist",
}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Steps a second over both workers; the floor trains two models without a server."""
    load = TINY if tiny else Mnist()
    found = contest.run("mnist", CONTESTANTS, load)
    rows = []
    for way, share, rpc in (("async", 0.92, 1.5), ("sync", 0.85, 1.8)):
        if way not in load.ways:
            continue
        figure = f"{way}_per_s"
        names = {"ours": figure, "ray": figure, "rpc": figure, "floor": "per_s"}
        bars = (Bar("share", share, "floor"), Bar("times", 2, "ray"), Bar("times", rpc, "rpc"))
        rows.append(
            Row(
                f"MNIST ConvNet, {load.workers} workers, {way}, steps over both",
                "a second",
                "more",
                found.samples(names),
                bars,
            )
        )
    names = {"ours": "async_overlap_per_s", "floor": "per_s"}
    workload = f"MNIST ConvNet, {load.workers} workers, async, overlap=True"
    rows.append(Row(workload, "a second", "more", found.samples(names)))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""How fast do 4 workers pull and push 100 MB of float64 on 2 servers?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Dense

TINY = Dense(total_bytes=800_000, workers=2, steps=2)
CONTESTANTS = {
    "ours": "benchmarks.ours:dense",
    "floor": "benchmarks.floor:dense",
    "ray": "benchmarks.rival_ray:dense",
    "rpc": "benchmarks.rival_rpc:dense",
    "ray fitted": "benchmarks.rival_ray:dense_fitted",
}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Push+pull of all values a second, over all workers, until all is applied."""
    load = TINY if tiny else Dense()
    contestants = dict(CONTESTANTS)
    if tiny:
        del contestants["ray fitted"]
    found = contest.run("dense", contestants, load)
    notes = "6n bytes of traffic in the floor: copy out 2n, fill n, add 3n."
    fitted = found.median("ray fitted", "per_s")
    if fitted is not None:
        notes += f" Ray with an object store of 1 GB, fitted to this workload: {fitted:.1f}."
    size = f"{load.total_bytes / 1e6:g} MB"
    return [
        Row(
            f"{size} float64, {load.servers} servers, {load.workers} workers, pull and push",
            "a second",
            "more",
            found.samples("per_s"),
            (Bar("times", 4, "ray"), Bar("times", 4, "rpc"), Bar("share", 0.8, "floor")),
            notes,
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""How long does ps.run of an empty function take?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Start

TINY = Start(repeats=1)
CONTESTANTS = {
    "ours": "benchmarks.ours:start",
    "floor": "benchmarks.floor:start",
    "ray": "benchmarks.rival_ray:start",
}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Seconds from the call until every process has ended."""
    load = TINY if tiny else Start()
    found = contest.run("start", CONTESTANTS, load)
    return [
        Row(
            f"empty function, {load.workers} workers without torch, {load.servers} server",
            "s",
            "less",
            found.samples("seconds"),
            (Bar("most", 2.0),),
            "Kernel cache warm. Floor: as many Python processes that import numpy.",
        )
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""How much private memory does a server need that holds 100 MB under SGD?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Memory

TINY = Memory(total_bytes=1_000_000, steps=2)
OVERHEAD_MB = 80


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """The server's private memory; the floor is the values alone."""
    load = TINY if tiny else Memory()
    found = contest.run("memory", {"ours": "benchmarks.ours:memory"}, load)
    values_mb = load.total_bytes / 1e6
    arenas = [found.median("ours", f"arena_mb_{rank}") for rank in range(load.workers)]
    shown = ", ".join(f"{arena:.0f} MB" for arena in arenas if arena is not None)
    row = Row(
        f"server memory, {values_mb:g} MB float32 with SGD, private",
        "MB",
        "less",
        found.samples("private_mb") | {"floor": [values_mb]},
        (Bar("most", values_mb + OVERHEAD_MB),),
        f"Private_Clean + Private_Dirty of smaps_rollup. Arenas by client: {shown}.",
    )
    return [row]


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

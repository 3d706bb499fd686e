"""How close does one push_pull of 100 MB come to memcpy?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import LargeStep

TINY = LargeStep(total_bytes=1_000_000, calls=5)


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Milliseconds for one step and for copying as many bytes each way, in turn."""
    load = TINY if tiny else LargeStep()
    found = contest.run("large step", {"ours": "benchmarks.ours:large_step"}, load)
    rows = []
    for rule in ("add", "sgd"):
        samples = {
            label: [seconds * 1e3 for seconds in values]
            for label, name in (("ours", rule), ("floor", f"{rule}_memcpy"))
            if (values := found.samples(name).get("ours"))
        }
        rows.append(
            Row(
                f"{load.total_bytes / 1e6:g} MB float32, one push_pull, rule {rule}",
                "ms",
                "less",
                samples,
                (Bar("share", 0.6, "floor", "memcpy speed"),),
                "Floor: numpy.copyto of as many bytes, twice.",
            )
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

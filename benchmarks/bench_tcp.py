"""How near does TCP come to a bare socket pair, with and without TLS?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Tcp

TINY = Tcp(large_bytes=2_000_000, large_calls=3, calls=50)
CONTESTANTS = {"ours": "benchmarks.over_tcp:ours", "floor": "benchmarks.over_tcp:floor"}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Milliseconds of one push_pull of the large array, microseconds of the small one."""
    load = TINY if tiny else Tcp()
    found = contest.run("tcp", CONTESTANTS, load)
    size = f"{load.large_bytes / 1e6:g} MB float32 push_pull over TCP loopback, 1 worker"
    rows = []
    for name, words, pair in (("plain", "", "a bare pair"), ("tls", ", TLS", "a bare TLS pair")):
        samples = found.samples(f"large_{name}")
        rows.append(
            Row(
                size + words,
                "ms",
                "less",
                {label: [1e3 * each for each in values] for label, values in samples.items()},
                (Bar("share", 0.6, "floor", pair),),
                "" if words else "Floor: as many bytes there and back, into buffers that it has.",
            )
        )
    small = {
        "ours": [1e6 * each for each in found.samples("small").get("ours", [])],
        "floor": [1e6 * each for each in found.samples("ping").get("ours", [])],
    }
    rows.append(
        Row(
            f"{load.small_bytes / 1024:g} KB push_pull over TCP loopback",
            "us",
            "less",
            {label: values for label, values in small.items() if values},
            (Bar("cost", 2.5, "floor", "ping"),),
            "Floor: a TCP ping of 64 bytes to a bare process that sleeps on another core, after "
            f"each call of ours.{_in_a_row(found)}",
        )
    )
    return rows


def _in_a_row(found: harness.Measured) -> str:
    ours, ping = (found.median("ours", f"{name}_in_a_row") for name in ("small", "ping"))
    if ours is None or ping is None:
        return ""
    return f" 50 calls of one kind in a row: ours {1e6 * ours:.1f} us, ping {1e6 * ping:.1f} us."


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What do waits cost that sleep at once, that poll when it pays, and that always poll?

Shown are medians and 90th percentiles of one small step, and the processor time of both sides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks import harness
from benchmarks.table import Bar, Row, figure
from benchmarks.waiting import Waiting

TINY = Waiting(calls=30, slow_calls=10)
HERE = "benchmarks.waiting"
CONTESTANTS = {"ours": f"{HERE}:adaptive", "off": f"{HERE}:off", "always": f"{HERE}:always"}
NAMES = {"off": "never polling", "always": "always polling"}
MORE = 1.15
"""The most processor time of a worker that computes, and of its server, in that without polling."""


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Microseconds by what is between two steps."""
    load = TINY if tiny else Waiting()
    found = contest.run("waiting", CONTESTANTS, load)
    rows = []
    for name, (work_s, _) in load.gaps.items():
        workload = f"{load.bytes / 1024:g} KB push_pull, {name}"
        for what, words in (("median", ""), ("p90", ", 90th percentile")):
            rows.append(_row(f"{workload}{words}", _us(found, f"{name}: {what}")))
        for side in ("client", "server"):
            ran = _us(found, f"{name}: {side}")
            rows.append(_row(f"{workload}, processor time of the {side}", ran))
        if work_s:
            rows.append(_both(workload, found, name))
    return rows


def _row(workload: str, samples: dict[str, list[float]], bars: tuple[Bar, ...] = ()) -> Row:
    """One figure, with what it is under the two others."""
    others = [
        f"{words}: {figure(median(samples[label]))} us"
        for label, words in NAMES.items()
        if label in samples
    ]
    return Row(workload, "us", "less", samples, bars, "; ".join(others))


def _both(workload: str, found: harness.Measured, name: str) -> Row:
    """Processor time of both sides: waiting may take little more than without polling."""
    client, server = (_us(found, f"{name}: {side}") for side in ("client", "server"))
    samples = {
        label: [sum(pair) for pair in zip(values, server[label], strict=True)]
        for label, values in client.items()
    }
    bars = (Bar("cost", MORE, "off", NAMES["off"]),)
    return _row(f"{workload}, processor time of both", samples, bars)


def _us(found: harness.Measured, name: str) -> dict[str, list[float]]:
    return {label: [1e6 * one for one in values] for label, values in found.samples(name).items()}


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

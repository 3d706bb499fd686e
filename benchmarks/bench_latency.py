"""How long does a small or a 1 MB push_pull take, alone and with 4 workers at once?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Latency

TINY = Latency(large_bytes=100_000, calls=50, large_calls=50, workers=2, worker_calls=20)
CONTESTANTS = {
    "ours": "benchmarks.ours:latency",
    "floor": "benchmarks.floor:latency",
    "ray": "benchmarks.rival_ray:latency",
    "rpc": "benchmarks.rival_rpc:latency",
}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Medians of single calls in microseconds, and calls a second over the workers."""
    load = TINY if tiny else Latency()
    found = contest.run("latency", CONTESTANTS, load)
    small, large = f"{load.small_bytes / 1024:g} KB", f"{load.large_bytes / 1e6:g} MB float32"
    ping = Bar("cost", 2.5, "ping")
    work = f"{load.work_s * 1e6:.0f} us of work between calls"
    tenth = (Bar("times", 10, "ray"), Bar("times", 10, "rpc"))
    fifteenth = (Bar("times", 15, "ray"), Bar("times", 5, "rpc"))
    many = (Bar("times", 10, "ray"), Bar("times", 3, "rpc"))
    return [
        _row(found, f"{small} push_pull", "small", (*tenth, ping)),
        _row(found, f"{small} push_pull, {work}", "small_worked"),
        _row(found, f"{large} push_pull", "large", fifteenth),
        _row(found, f"{large} push_pull, {work}", "large_worked"),
        Row(
            f"{large} push_pull, {load.workers} workers, 1 server",
            "a second",
            "more",
            found.samples("worker_calls"),
            many,
            "Floor: add to shared memory under a lock, copy out.",
        ),
    ]


def _row(found: harness.Measured, workload: str, name: str, bars: tuple[Bar, ...] = ()) -> Row:
    """One figure in microseconds, with the ping and our copying call of the same run."""
    samples = _us(found.samples(name))
    notes = []
    for label, figure, about in (
        ("ping", f"{name}_ping", "an asyncio Unix ping in turn with ours"),
        ("copying", f"{name}_copying", "ours with arrays of the caller, copied in and out"),
    ):
        if values := _us(found.samples({"ours": figure})).get("ours"):
            samples[label] = values
            notes.append(f"{about}: {median(values):.1f} us")
    if "ping" in samples:
        samples.setdefault("floor", samples["ping"])
    return Row(workload, "us", "less", samples, bars, "; ".join(notes))


def _us(samples: dict[str, list[float]]) -> dict[str, list[float]]:
    return {label: [seconds * 1e6 for seconds in values] for label, values in samples.items()}


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

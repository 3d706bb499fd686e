"""How long does a small or a 1 MB push_pull take, alone and with 4 workers at once?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Latency

TINY = Latency(
    large_bytes=100_000,
    calls=50,
    large_calls=50,
    slept_calls=20,
    workers=2,
    worker_calls=20,
    names=50,
    name_calls=10,
)
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
    work = f"{load.work_s * 1e6:.0f} us of work between calls"
    sleep = f"{load.sleep_s * 1e3:g} ms of sleep between calls"
    tenth = (Bar("times", 10, "ray"), Bar("times", 10, "rpc"))
    fifteenth = (Bar("times", 15, "ray"), Bar("times", 5, "rpc"))
    many = (Bar("times", 10, "ray"), Bar("times", 3.5, "rpc"), Bar("share", 0.5, "floor"))
    return [
        _row(found, f"{small} push_pull", "small", (*tenth, Bar("cost", 1.5, "ping"))),
        _tail(found, f"{small} push_pull", "small", (Bar("most", 1.5),)),
        _row(found, f"{small} push_pull, {work}", "small_worked"),
        _row(found, f"{small} push_pull, {sleep}", "small_slept", (Bar("cost", 2, "ping"),)),
        _tail(found, f"{small} push_pull, {sleep}", "small_slept"),
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
        *_names(found, load),
    ]


def _row(found: harness.Measured, workload: str, name: str, bars: tuple[Bar, ...] = ()) -> Row:
    """One figure in microseconds, with the ping and our copying call of the same run."""
    samples = _scaled(found.samples(name), 1e6)
    notes = []
    for label, about in (
        ("ping", "64 bytes to a bare process that sleeps on another core, in turn with ours"),
        ("copying", "ours with arrays of the caller, copied in and out"),
    ):
        if values := _scaled(found.samples({"ours": _of(name, label)}), 1e6).get("ours"):
            samples[label] = values
            notes.append(f"{about}: {median(values):.1f} us")
    if "ping" in samples:
        samples.setdefault("floor", samples["ping"])
    return Row(workload, "us", "less", samples, bars, "; ".join(notes))


def _of(name: str, label: str) -> str:
    """The figure of another call that was timed in turn with ours: `small_ping_worked`."""
    array, gap, rest = name.partition("_")
    return f"{array}_{label}{gap}{rest}"


def _tail(found: harness.Measured, workload: str, name: str, bars: tuple[Bar, ...] = ()) -> Row:
    """The 90th percentile over the median, of ours, the rivals and the ping."""
    samples = found.samples(f"{name}_tail")
    samples |= {"floor": found.samples(f"{_of(name, 'ping')}_tail").get("ours", [])}
    about = f"{workload}, 90th percentile over median"
    return Row(about, "times", "less", samples, bars, "Floor: the ping.")


def _names(found: harness.Measured, load: Latency) -> list[Row]:
    """What many names cost, defined one by one and in one call."""
    rows = []
    for name, how in (("names", "defined one by one"), ("names_together", "defined in one call")):
        figures = {"ours": name, "ray": "names", "rpc": "names", "floor": "names"}
        samples = _scaled(found.samples(figures), 1e3)
        slots = found.median("ours", f"{name}_slots")
        note = "" if slots is None else f"with the gradients in their slots: {slots * 1e3:.3g} ms"
        workload = f"push_pull of {load.names:,} names of {load.name_size} floats, {how}"
        rows.append(Row(workload, "ms", "less", samples, (Bar("most", 4.0),), note))
    return rows


def _scaled(samples: dict[str, list[float]], factor: float) -> dict[str, list[float]]:
    return {label: [value * factor for value in values] for label, values in samples.items()}


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

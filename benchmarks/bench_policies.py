"""What does a policy cost where no worker has to wait, and does the number of workers matter?

Each policy is compared with `Async()` in the same processes, in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Literal

from benchmarks import harness
from benchmarks.ours_policies import BASE, Policies
from benchmarks.table import Bar, Row

TINY = Policies(
    calls=40,
    workers=2,
    rounds=2,
    round_calls=10,
    crowd=(1, 2),
    crowd_pushes=20,
    steps=40,
    seeds=2,
)
HERE = "benchmarks.ours_policies"
MORE = 1.10
"""The most that a call may take, as a multiple of `Async()`."""
GROWTH = 1.20
"""The most that a push may cost with all workers, as a multiple of what it costs with one."""
EVENTS = 10_000
"""That the simulator must do in a second."""


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Calls under each policy, the server's work for a push, the simulator's events."""
    load = TINY if tiny else Policies()
    found = {
        name: contest.run(f"policies, {name}", {"ours": f"{HERE}:{name}"}, load)
        for name in ("alone", "together", "crowd", "bare", "simulator")
    }
    size = f"{load.bytes / 1024:g} KB push_pull"
    return [
        *_by_policy(found["alone"], f"{size}, 1 worker", "us", 1e6),
        *_by_policy(found["together"], f"{size}, {load.workers} workers", "a second", 1.0),
        *_by_workers(found["crowd"], "server's time for a push, workers that sleep", "", load),
        *_by_workers(found["bare"], "Shard.step for a push, Async()", "Async() ", load),
        *_by_workers(found["bare"], "Shard.step for a push, Sync()", "Sync() ", load),
        Row(
            "simulated cluster, 2 shards, 3 workers, faults",
            "events a second",
            "more",
            found["simulator"].samples("events_per_s") | {"floor": [float(EVENTS)]},
            (Bar("times", 1, "floor", "10,000 a second"),),
            "By the process's own time.",
        ),
    ]


def _by_policy(found: harness.Measured, workload: str, unit: str, factor: float) -> list[Row]:
    """One row for each policy, beside `Async()` of the same run."""
    names = list(dict.fromkeys(name for one in found.rounds["ours"] for name in one))
    form: Literal["cost", "share"] = "cost" if unit == "us" else "share"
    reach = MORE if unit == "us" else 1 / MORE
    rows = []
    for name in names:
        samples = {
            label: [value * factor for value in values["ours"]]
            for label, values in (("ours", found.samples(name)), ("base", found.samples(BASE)))
        }
        bars = () if name == BASE else (Bar(form, reach, "base", BASE),)
        rows.append(
            Row(f"{workload}, {name}", unit, "less" if unit == "us" else "more", samples, bars)
        )
    return rows


def _by_workers(found: harness.Measured, workload: str, prefix: str, load: Policies) -> list[Row]:
    """What a push costs with the fewest and with the most workers."""
    least, most = load.crowd[0], load.crowd[-1]
    figures = [(count, found.median("ours", f"{prefix}{count}")) for count in load.crowd]
    between = ", ".join(
        f"{count}: {value * 1e6:.1f} us" for count, value in figures if value is not None
    )
    samples = {
        label: [value * 1e6 for value in found.samples(f"{prefix}{count}").get("ours", [])]
        for label, count in (("ours", most), ("one", least))
    }
    bar = Bar("cost", GROWTH, "one", f"with {least}")
    return [
        Row(f"{workload}, {most} of them", "us", "less", samples, (bar,), f"By number: {between}.")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What does the Ray engine cost beside the Local one, and what does it gain over plain Ray?"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import harness
from benchmarks.table import Bar, Row
from benchmarks.workloads import Mnist, Start

TINY = Mnist(ways=("async",), steps=20, warm_steps=3, images=512)
TINY_START = Start(repeats=1)
TRAINING = {
    "ours": "benchmarks.ours_ray:mnist",
    "local": "benchmarks.ours:mnist",
    "ray": "benchmarks.rival_ray:mnist",
}
STARTING = {"ours": "benchmarks.ours_ray:start"}


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Steps a second over both workers on Ray; seconds of an empty run on a cluster that is up."""
    load, begin = (TINY, TINY_START) if tiny else (Mnist(), Start())
    found = contest.run("mnist on ray", TRAINING, load)
    started = contest.run("start on ray", STARTING, begin)
    rows = []
    for way in ("async", "sync"):
        if way not in load.ways:
            continue
        local = found.median("local", f"{way}_per_s")
        rows.append(
            Row(
                f"MNIST ConvNet on Ray, {load.workers} workers, {way}, steps over both",
                "a second",
                "more",
                found.samples(f"{way}_per_s"),
                (Bar("times", 1.5, "ray"), Bar("share", 0.9, "local", "our Local")),
                "" if local is None else f"ours on the Local engine: {local:.0f}.",
            )
        )
    rows.append(
        Row(
            f"empty function on a Ray cluster that is up, {begin.workers} workers without torch, "
            f"{begin.servers} server",
            "s",
            "less",
            started.samples("seconds"),
            (Bar("most", 4.0),),
        )
    )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

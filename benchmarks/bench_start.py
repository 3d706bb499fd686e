"""How long does a run take to start: empty, with many workers, with torch, to its first define?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import harness
from benchmarks.table import Bar, Row, figure
from benchmarks.workloads import FirstStep, Start

TINY = Start(repeats=1)
CONTESTANTS = {
    "ours": "benchmarks.ours:start",
    "floor": "benchmarks.floor:start",
    "ray": "benchmarks.rival_ray:start",
}
MANY = {label: CONTESTANTS[label] for label in ("ours", "floor")}
FIRST_STEP = {"ours": "benchmarks.ours:first_step", "floor": "benchmarks.floor:first_step"}
FIRST_DEFINE = {"ours": "benchmarks.ours:first_define"}
CACHE = "Kernel cache warm."


def measure(contest: harness.Contest, tiny: bool) -> list[Row]:
    """Seconds from the call, or from the command, until the moment that a row names."""
    load = TINY if tiny else Start()
    many = replace(load, workers=4 if tiny else 32)
    step = FirstStep(workers=2, repeats=1) if tiny else FirstStep()
    empty = contest.run("start", CONTESTANTS, load)
    entered = contest.run("start of many", MANY, many)
    stepped = contest.run("first step", FIRST_STEP, step)
    defined = contest.run("first define", FIRST_DEFINE, load)
    where = f"{load.servers} server"
    return [
        Row(
            f"empty function, {load.workers} workers without torch, {where}",
            "s",
            "less",
            empty.samples("seconds"),
            (Bar("most", 2.0),),
            f"{CACHE} Floor: as many Python processes that import numpy{_one(empty)}",
        ),
        Row(
            f"{many.workers} workers without torch, {where}: until the last function is entered",
            "s",
            "less",
            entered.samples({"ours": "entered", "floor": "seconds"}),
            (Bar("most", 3.0),),
            f"{CACHE} Floor: as many Python processes that import numpy{_one(entered)}",
        ),
        Row(
            f"{step.workers} workers, MNIST ConvNet: from the command to the last first step",
            "s",
            "less",
            stepped.samples("seconds"),
            (Bar("cost", 2.0, "floor", "one process"),),
            f"{CACHE} Floor: one process that trains alone, with its import of torch.",
        ),
        Row(
            f"first define of a run, {load.workers} workers, {where}",
            "s",
            "less",
            defined.samples("seconds"),
            (Bar("most", 0.3),),
            f"{CACHE} The first table after it: {_figure(defined, 'ours', 'table')}.",
        ),
    ]


def _one(found: harness.Measured) -> str:
    return f"; one alone: {_figure(found, 'floor', 'one')}."


def _figure(found: harness.Measured, label: str, name: str) -> str:
    seconds = found.median(label, name)
    return f"{figure(seconds)} s" if seconds is not None else "not measured"


def main(argv: Sequence[str] | None = None) -> int:
    return harness.main(argv, __doc__, [measure])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

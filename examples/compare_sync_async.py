"""Which waiting rule reaches 90% first? MNIST with four workers, even ones and slow ones.

Each batch is padded by sleeping to 20 ms, so two cores suffice. In `even` all workers are alike; in
`persistent` the last one takes 100 ms for each batch; in `transient` each step of each worker takes
100 ms with probability 0.1. Every policy gets the same number of workers, and learning rates under
which a sample moves the values equally far.

    python examples/compare_sync_async.py
    python examples/compare_sync_async.py --scenario persistent --policies sync,async,bounded
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

import paramserve as ps
import report
from arguments import count
from ending import exit_code
from racing import SCENARIOS, Course, Entrant, Pace, prepare, race

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "consistency.md"
EVERY_LOCAL = 8
WIDTH = 120
"""Width of the table in a file."""
BALANCED = (16, 256)
"""Batch sizes that `adaptive_batch` may choose, around 128."""


def entrants() -> tuple[Entrant, ...]:
    """Every policy, in the order of the page."""
    return (
        _sync("sync", "Sync()", ps.Sync()),
        _sync("backup", "Sync(backup=1)", ps.Sync(backup=1)),
        _sync(
            "deadline",
            "Sync(timeout_s=Adaptive(1.0))",
            ps.Sync(timeout_s=ps.Adaptive(1.0, least_s=0.01)),
        ),
        _async("async", "Async()", ps.Async()),
        _async("damped", "Async(damping=Inverse(0.1))", ps.Async(damping=ps.Inverse(0.1))),
        # Of momentum 0.9 the servers use 0.9 - 3/4 = 0.15; the learning rate makes up for that.
        Entrant(
            "corrected",
            'Async(momentum="corrected")',
            lambda lr, workers: ps.Async(momentum="corrected"),
            lr_times=0.85,
            momentum=0.9,
        ),
        _async("dropping", "Async(drop_after=8)", ps.Async(drop_after=8)),
        _async("bounded", "BoundedStaleness(4)", ps.BoundedStaleness(4)),
        _async("compensated", "DelayCompensated(0.04)", ps.DelayCompensated(0.04)),
        Entrant("buffered", "Buffered(4)", lambda lr, workers: ps.Buffered(4), means=True, every=2),
        Entrant(
            "local",
            f"LocalSteps(every={EVERY_LOCAL})",
            lambda lr, workers: ps.LocalSteps(every=EVERY_LOCAL, outer=ps.SGD(lr=1.0)),
            means=True,
            by_clock=True,
            steps_per_clock=EVERY_LOCAL,
            every=1,
        ),
        Entrant(
            "own pace",
            f"AsyncLocalSteps(every={EVERY_LOCAL})",
            lambda lr, workers: ps.AsyncLocalSteps(
                EVERY_LOCAL, ps.DelayedNesterov(lr=1.0, momentum=0.0, pushes=workers)
            ),
            means=True,
            steps_per_clock=EVERY_LOCAL,
        ),
        Entrant(
            "elastic",
            "ElasticAverage(rho)",
            lambda lr, workers: ps.ElasticAverage(rho=0.9 / workers / lr),
            means=True,
        ),
        Entrant(
            "balanced",
            "Sync(), adaptive_batch",
            lambda lr, workers: ps.Sync(),
            means=True,
            by_clock=True,
            every=2,
            dynamic=True,
            adaptive=BALANCED,
        ),
        _async("leases", 'Async(), shards="dynamic"', ps.Async(), dynamic=True),
    )


def _sync(name: str, label: str, policy: ps.Sync) -> Entrant:
    return Entrant(name, label, lambda lr, workers: policy, means=True, by_clock=True, every=2)


def _async(name: str, label: str, policy: object, *, dynamic: bool = False) -> Entrant:
    return Entrant(name, label, lambda lr, workers: policy, dynamic=dynamic)


def run(options: argparse.Namespace, console: Console) -> list[report.Race]:
    """All races of the chosen scenarios and policies, each the middle one of its rounds."""
    chosen = [one for one in entrants() if not options.policies or one.name in options.policies]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        prepare(options.data, Path(folder))
        for scenario in options.scenario:
            course = course_of(scenario, Path(folder), options)
            for entrant in chosen:
                console.print(f"{scenario}: {entrant.label}", highlight=False, markup=False)
                seeds = range(options.seed, options.seed + options.rounds)
                found.append(middle([race(entrant, course, seed=seed) for seed in seeds]))
    return found


def course_of(scenario: str, folder: Path, options: argparse.Namespace) -> Course:
    """What the options say of one scenario."""
    return Course(
        data=folder,
        pace=Pace(scenario, options.seed),
        workers=options.workers,
        servers=options.servers,
        steps=options.steps,
        lr=options.lr,
        target=options.target,
        dynamic=options.dynamic,
        adaptive=options.adaptive_batch,
    )


def middle(rounds: Sequence[report.Race]) -> report.Race:
    """The race whose seconds to the target are the median; one that did not get there is slowest.

    Of an even number it is the slower one of the two in the middle.
    """
    ordered = sorted(
        rounds, key=lambda one: one.seconds if one.seconds is not None else float("inf")
    )
    return ordered[len(ordered) // 2]


def findings(races: Sequence[report.Race], scenario: str) -> list[str]:
    """What the races of one scenario say, in sentences, each with its figures."""
    found = {(one.scenario, one.name): one for one in races}

    def seconds(name: str, where: str = scenario) -> float | None:
        one = found.get((where, name))
        return one.seconds if one is not None else None

    told = []
    sync = seconds("sync")
    if scenario == "persistent" and sync is not None:
        for name in ("async", "backup", "bounded"):
            taken = seconds(name)
            if taken is not None:
                label = found[scenario, name].label
                told.append(f"`{label}` was {sync / taken:.2f} times as fast as `Sync()`.")
    balanced, even = seconds("balanced"), seconds("sync", "even")
    if scenario == "persistent" and balanced is not None and even is not None:
        told.append(
            f"`Sync()` with `adaptive_batch` took {balanced / even:.2f} times as long as `Sync()` "
            "with even workers."
        )
    leases = found.get((scenario, "leases"))
    if scenario == "persistent" and leases is not None and leases.samples:
        share = leases.samples.get(len(leases.samples) - 1, 0) / sum(leases.samples.values())
        told.append(
            f"With leases under `Async()` the slow worker did {share * len(leases.samples):.2f} of "
            "an even share."
        )
    bounded, every = found.get((scenario, "bounded")), found.get((scenario, "sync"))
    if scenario == "transient" and bounded is not None and every is not None:
        times = bounded.steps_per_second / every.steps_per_second
        told.append(f"`{bounded.label}` did {times:.2f} times the steps a second of `Sync()`.")
    return told


def place(races: Sequence[report.Race], scenario: str, options: argparse.Namespace) -> str:
    """What stands on the page for one scenario: the table, the findings, how it was measured."""
    own = [one for one in races if one.scenario == scenario]
    rounds = "one run each" if options.rounds == 1 else f"the middle one of {options.rounds} runs"
    told = [f"- {text}" for text in findings(races, scenario)]
    lines = [
        *report.race_rows(own),
        "",
        *([*told, ""] if told else []),
        f"{options.workers} workers, {options.servers} server, seed {options.seed}, learning rate "
        f"{options.lr:g} for a single gradient, {rounds}, {os.cpu_count()} cores.",
    ]
    return "\n".join(lines) + "\n"


def write_page(page: Path, scenario: str, text: str) -> None:
    """Replace what is between the marks of a scenario.

    Raises:
        ValueError: the page does not have both marks. Nothing was written.
    """
    start, end = (f"<!-- compare:{scenario}{part} -->" for part in ("", ":end"))
    before, found, rest = page.read_text().partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{page} has no {start} ... {end}")
    page.write_text(f"{before}{start}\n{text}{end}{after}")


def names(text: str) -> list[str]:
    """Policies, as in "sync,async"."""
    known = [one.name for one in entrants()]
    wrong = [one for one in text.split(",") if one not in known]
    if wrong:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(wrong)}; known: {', '.join(known)}")
    return text.split(",")


def bounds(text: str) -> tuple[int, int]:
    """Smallest and largest batch, as in "32,256"."""
    least, most = (count(part) for part in text.split(","))
    return least, most


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--scenario", choices=SCENARIOS, action="append", help="may be repeated; default: all")
    add("--policies", type=names, help="names with commas; default: all")
    add("--steps", type=count, default=600, help="of each worker at most (default 600)")
    add("--target", type=float, default=0.9, help="accuracy on the test set (default 0.9)")
    add("--workers", type=count, default=4)
    add("--servers", type=count, default=1)
    add("--lr", type=float, default=0.01)
    add("--rounds", type=count, default=1, help="the middle one of them counts (default 1)")
    add("--adaptive-batch", type=bounds, metavar="LEAST,MOST", help="for all: batches by speed")
    add("--dynamic", action="store_true", help="for all: samples by lease")
    add("--data", help="folder with the IDX files, or 'digits'; default: find or fetch MNIST")
    add("--out", type=Path, default=Path("runs"), help="where the results go (default runs/)")
    add("--seed", type=int, default=0)
    add("--write-docs", action="store_true", help="fill docs/consistency.md, with its pictures")
    options = parser.parse_args(argv)
    if options.scenario is None:
        options.scenario = list(SCENARIOS)
    return options


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Race, print a table for each scenario, write pictures and figures."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    races = run(options, console)
    saved = report.save_races(races, options.out / time.strftime("compare-%Y%m%d-%H%M%S"))
    for scenario in options.scenario:
        console.print(report.race_table([one for one in races if one.scenario == scenario]))
        for text in findings(races, scenario):
            console.print(text.replace("`", ""), highlight=False)
        if options.write_docs:
            write_page(PAGE, scenario, place(races, scenario, options))
            picture = f"consistency_{scenario}.png"
            (DOCS / picture).write_bytes((saved / picture).read_bytes())
    console.print(f"Figures and pictures: {saved}")


if __name__ == "__main__":
    raise SystemExit(main())

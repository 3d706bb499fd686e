"""How much of what workers could do reaches the servers, while one is slow and some die, over slow
links: a table of ways to exchange own steps.

Eight simulated workers with links of 100 Mbit/s, one 5 times slower, one dying every 50 outer
steps; what is real in it and what is counted stands in `tests.sim.workloads.useful_work`.

    python -m benchmarks.useful_work --seeds 3
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from statistics import mean

from rich.console import Console
from rich.table import Table
from tests.sim.workloads.useful_work import SimulatedWork, Useful, Work

import paramserve as ps

WORKERS = 8
CODECS = {"push": ps.Int4(), "pull": ps.BFloat16()}
STREAMING = {"fragments": 5, "delay": 5, "merge": 0.5}


def ways() -> Mapping[str, ps.LocalSteps | ps.AsyncLocalSteps]:
    """Policies by name."""
    outer = ps.DelayedNesterov(pushes=WORKERS)
    return {
        "LocalSteps(50)": ps.LocalSteps(50, **CODECS),
        "LocalSteps(50, timeout_s=Adaptive(1.5))": ps.LocalSteps(
            50, timeout_s=ps.Adaptive(1.5), **CODECS
        ),
        "LocalSteps(50, backup=1)": ps.LocalSteps(50, backup=1, **CODECS),
        "LocalSteps(50, backup=2)": ps.LocalSteps(50, backup=2, **CODECS),
        "LocalSteps(50, backup=1, fragments=5, delay=5, merge=0.5)": ps.LocalSteps(
            50, backup=1, **STREAMING, **CODECS
        ),
        "AsyncLocalSteps(50, ...)": ps.AsyncLocalSteps(50, outer, **CODECS),
        "AsyncLocalSteps(100, ...)": ps.AsyncLocalSteps(100, outer, **CODECS),
        "AsyncLocalSteps(200, ...)": ps.AsyncLocalSteps(200, outer, **CODECS),
    }


def measured(policy: ps.LocalSteps | ps.AsyncLocalSteps, work: Work, seed: int) -> Useful:
    cluster = SimulatedWork(seed, policy, work)
    cluster.run()
    return cluster.useful()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1800.0, help="virtual, of each run")
    parser.add_argument("--tiny", action="store_true", help="only show that it runs")
    options = parser.parse_args(argv)
    work, seeds = Work(lasts_s=options.seconds), range(options.seeds)
    if options.tiny:
        work, seeds = Work(workers=3, servers=1, lasts_s=30.0, deaths_every=2), range(1)
    table = Table(title=f"mean of {len(seeds)} seeds, {work.lasts_s:g} s each")
    table.add_column("way")
    for column in ("useful", "least", "waited", "left out", "lost", "deaths", "outer steps"):
        table.add_column(column, justify="right")
    for name, policy in ways().items():
        found = [measured(policy, work, seed) for seed in seeds]
        shares = [mean(each) for each in zip(*found, strict=True)]
        least = min(each.useful for each in found)
        texts = [f"{each:.1%}" for each in (shares[0], least, *shares[1:4])]
        table.add_row(name, *texts, *(f"{each:g}" for each in shares[4:]))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

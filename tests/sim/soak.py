"""As many simulated seeds as asked, on all cores: `make soak SEEDS=10000`; with `SOAK=--tables`
the clients train a keyed table, with `SOAK="--tables --second sync"` a table beside tensors, with
`SOAK=--encoded` tensors whose gradients are encoded, with `SOAK="--tables --encoded"` a table with
codecs, with `SOAK=--halves` tensors of 16 bits, with `SOAK=--own-steps` by own steps. Of clusters
that write checkpoints, are lost and go on, it runs `RESUMES=1000` seeds.

It prints how many seeds a second it runs, and stops at the first violation, with the line that runs
that seed again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import get_context
from typing import NamedTuple

from tests.sim.policies import OWN_STEPS, POLICIES, TABLE_POLICIES
from tests.sim.resumes import CASES, resumed
from tests.sim.workloads.encoded import encoded_tensors
from tests.sim.workloads.encoded_tables import encoded_table
from tests.sim.workloads.halves import halves
from tests.sim.workloads.local_steps import own_steps
from tests.sim.workloads.tables import table, table_beside_tensors

from paramserve_testing import Scenario, SimulatedCluster, Violation
from paramserve_testing.counting import counting
from paramserve_testing.workload import WorkloadFactory

CHUNK = 20
"""Seeds that a process takes at a time."""
TOLD_S = 5.0
"""How often it says how far it is."""


class Chunk(NamedTuple):
    """Seeds that a process takes at a time."""

    tables: bool
    slow_readers: bool
    encoded: bool
    other: str
    """What else the clients train: a key of `OTHERS`, or nothing else."""
    policy: str
    second: str
    """Policy of a second group; empty: there is none."""
    servers: int
    workers: int
    first: int
    stop: int
    """The seed behind the last."""


class Lost(NamedTuple):
    """Seeds of clusters that are lost and go on from a checkpoint."""

    case: str
    """A key of `resumes.CASES`."""
    first: int
    stop: int
    """The seed behind the last."""


OTHERS: dict[str, WorkloadFactory] = {"halves": halves, "own_steps": own_steps}


def workload_of(chunk: Chunk) -> WorkloadFactory:
    """What the clients train: with a second group, the table is that."""
    if chunk.other:
        return OTHERS[chunk.other]
    if chunk.encoded:
        return encoded_table if chunk.tables else encoded_tensors
    if not chunk.tables:
        return counting
    return table_beside_tensors if chunk.second else table


def run(chunk: Chunk | Lost) -> tuple[int, int, str]:
    """Run the seeds [first, stop) of a policy or case: seeds and events run, and the first
    violation."""
    return run_lost(chunk) if isinstance(chunk, Lost) else run_policy(chunk)


def run_lost(chunk: Lost) -> tuple[int, int, str]:
    events = 0
    for seed in range(chunk.first, chunk.stop):
        try:
            events += resumed(seed, **CASES[chunk.case]).clock.events
        except Exception as error:  # what breaks the simulator is found as well
            again = f"again: tests.sim.resumes.resumed({seed}, **CASES[{chunk.case!r}])"
            told = f"{chunk.case}: {type(error).__name__}: {error}\n{again}"
            return seed - chunk.first + 1, events, told
    return chunk.stop - chunk.first, events, ""


def run_policy(chunk: Chunk) -> tuple[int, int, str]:
    workload = workload_of(chunk)
    policies = OWN_STEPS if workload is own_steps else POLICIES
    name, first = chunk.policy, chunk.first
    events = 0
    for seed in range(first, chunk.stop):
        scenario = Scenario(
            servers=chunk.servers,
            workers=chunk.workers,
            consistency=policies[name],
            slow_readers=chunk.slow_readers,
            workload=workload,
        )
        if policies is OWN_STEPS:
            scenario = replace(scenario, others=())
        if chunk.second:
            second = POLICIES[chunk.second]
            scenario = replace(scenario, second=second, others=())
        cluster = SimulatedCluster(seed, scenario)
        try:
            cluster.run()
            cluster.check()
        except Violation as violation:
            return seed - first + 1, events + cluster.clock.events, f"{name}: {violation}"
        except Exception as error:  # what breaks the simulator is found as well
            again = cluster.again
            return seed - first + 1, events, f"{name}: {again}\n  {type(error).__name__}: {error}"
        events += cluster.clock.events
    return chunk.stop - first, events, ""


def chunks(
    policies: Sequence[str],
    first: int,
    seeds: int,
    servers: int = 2,
    workers: int = 3,
    tables: bool = False,
    second: str = "",
    slow: bool = False,
    encoded: bool = False,
    other: str = "",
) -> list[Chunk]:
    """`seeds` seeds in all, shared by the policies, each from `first` on."""
    each = -(-seeds // len(policies))
    return [
        Chunk(
            tables,
            slow,
            encoded,
            other,
            name,
            second,
            servers,
            workers,
            low,
            min(low + CHUNK, first + each),
        )
        for low in range(first, first + each, CHUNK)
        for name in policies
    ]


def lost(first: int, seeds: int) -> list[Lost]:
    """`seeds` seeds in all, shared by the cases, each from `first` on."""
    end = first + -(-seeds // len(CASES))
    return [
        Lost(case, low, min(low + CHUNK, end)) for low in range(first, end, CHUNK) for case in CASES
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="make soak")
    parser.add_argument("--seeds", type=int, default=10_000, help="over all policies together")
    parser.add_argument("--resumes", type=int, default=0, help="of clusters that are lost, besides")
    parser.add_argument("--first", type=int, default=0, help="the first seed of each policy")
    known_policies = sorted({*POLICIES, *OWN_STEPS})
    parser.add_argument("--policy", choices=known_policies, help="only this one")
    parser.add_argument("--second", choices=sorted(POLICIES), default="", help="a second group's")
    parser.add_argument("--tables", action="store_true", help="train a keyed table")
    parser.add_argument("--encoded", action="store_true", help="gradients are encoded")
    parser.add_argument("--halves", action="store_true", help="train tensors of 16 bits")
    parser.add_argument("--own-steps", action="store_true", help="workers make own steps")
    parser.add_argument("--slow-readers", action="store_true", help="clients read slowly")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    given = parser.parse_args(argv)
    if min(given.seeds, given.resumes, given.first) < 0 or given.seeds + given.resumes < 1:
        parser.error("--seeds, --resumes and --first are at least 0, one of the former at least 1")
    other = next((each for each in OTHERS if getattr(given, each)), "")
    if (given.encoded or other) and given.second:
        parser.error("--encoded, --halves and --own-steps are for one group")
    if given.halves + given.own_steps + (given.encoded or given.tables) > 1:
        parser.error("--halves and --own-steps go with no other kind")
    only = given.tables and not given.second
    known = list(TABLE_POLICIES if only or given.encoded or given.halves else POLICIES)
    known += ["async-drop"] * (given.encoded or given.halves)
    known = list(OWN_STEPS) if given.own_steps else known
    names = [given.policy] if given.policy else known
    if not set(names) <= set(known):
        parser.error(f"the policy is one of {', '.join(known)}")
    table = names[0] if only else given.second
    if given.tables and table not in TABLE_POLICIES and not given.encoded:
        parser.error(f"a table's policy is one of {', '.join(TABLE_POLICIES)}")
    shape = given.servers, given.workers, given.tables, given.second, given.slow_readers
    shape += (given.encoded, other)
    work: list[Chunk | Lost] = [*chunks(names, given.first, given.seeds, *shape)]
    work += lost(given.first, given.resumes)
    began = told = time.monotonic()
    seeds = events = 0
    with get_context("spawn").Pool(given.processes) as pool:
        for done, happened, violation in pool.imap_unordered(run, work):
            seeds, events = seeds + done, events + happened
            now = time.monotonic()
            if violation:
                print(f"{seeds} seeds, then a violation of {violation}")
                return 1
            if now - told > TOLD_S:
                told = now
                print(f"{seeds} seeds, {seeds / (now - began):.1f} a second", flush=True)
    wall_s = time.monotonic() - began
    print(
        f"{seeds} seeds without a violation in {wall_s:.1f} s: {seeds / wall_s:.1f} seeds and "
        f"{events / wall_s:,.0f} events a second, from seed {given.first}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

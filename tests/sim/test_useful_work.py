"""Simulated workers with own steps over slow links, one slow, some dying: what reaches the servers.

`docs/compression.md` has the table of all ways (`benchmarks/useful_work.py`).
"""

from __future__ import annotations

import pytest
from tests.sim.workloads.useful_work import SimulatedWork, Useful, Work

from benchmarks import useful_work
from paramserve.codecs import BFloat16, Int4
from paramserve.consistency.built_in import AsyncLocalSteps, LocalSteps
from paramserve.rules import DelayedNesterov

WAYS = useful_work.ways()
STREAMING = WAYS["LocalSteps(50, backup=1, fragments=5, delay=5, merge=0.5)"]
ASYNCHRONOUS = WAYS["AsyncLocalSteps(200, ...)"]
MUST_REACH = 0.88


def measured(policy: LocalSteps | AsyncLocalSteps, work: Work, seed: int = 1) -> Useful:
    """Run it, and see that all own steps are accounted for."""
    cluster = SimulatedWork(seed, policy, work)
    cluster.run()
    found = cluster.useful()
    assert sum(found[:4]) == pytest.approx(1.0)
    assert min(found[:4]) > -1e-6, found
    return found


def test_useful_work_with_a_slow_worker_and_deaths_reaches_88_percent() -> None:
    found = measured(ASYNCHRONOUS, Work(lasts_s=400.0))
    assert found.deaths >= 2
    assert found.useful >= MUST_REACH, found
    assert min(found.waited, found.lost) > 1e-3, found


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [STREAMING, ASYNCHRONOUS], ids=["streaming", "asynchronous"])
def test_useful_work_of_seeds_reaches_88_percent(
    policy: LocalSteps | AsyncLocalSteps, seed: int
) -> None:
    found = measured(policy, Work(lasts_s=900.0), seed)
    assert found.deaths >= 3
    assert found.useful >= MUST_REACH, found


def test_useful_work_without_backup_is_that_of_the_slow_worker() -> None:
    """Seven wait for the eighth: 8 of 7 * 5 + 1 own steps are made, less the exchanges."""
    work = Work(lasts_s=150.0, deaths_every=0)
    found = measured(LocalSteps(50, push=Int4(), pull=BFloat16()), work)
    assert 0.7 * 8 / 36 < found.useful < 8 / 36
    assert (found.dropped, found.deaths) == (0.0, 0)


def test_useful_work_of_one_worker_waits_as_long_as_its_bytes_take() -> None:
    values, bytes_s = 5e6, 100e6 / 8
    # Of each value 4 bits there, with a scale of 4 bytes for each 64, and 2 bytes back; two delays.
    exchange_s = values * (4 / 8 + 4 / 64 + 2) / bytes_s + 0.04
    once_s = values * (4 + 2 + 2) / bytes_s  # to define, and to read all at the beginning and end
    work = Work(workers=1, servers=1, slow=1.0, deaths_every=0, lasts_s=300.0)
    policy = AsyncLocalSteps(50, DelayedNesterov(), push=Int4(), pull=BFloat16())
    found = measured(policy, work)
    waited = exchange_s / (5.0 + exchange_s) + once_s / work.lasts_s
    assert found.waited == pytest.approx(waited, abs=0.005)
    assert found.useful == pytest.approx(1.0 - found.waited)


def test_useful_work_is_lost_where_workers_die() -> None:
    """Each death loses up to the own steps of one exchange, and nothing else does."""
    work = Work(workers=3, servers=1, slow=1.0, deaths_every=5, lasts_s=200.0)
    policy = AsyncLocalSteps(50, DelayedNesterov(pushes=3), push=Int4(), pull=BFloat16())
    found = measured(policy, work)
    possible = 3 * 200.0 / work.step_s
    assert found.deaths > 5
    assert 0.0 < found.lost * possible < found.deaths * 50


@pytest.mark.slow
def test_benchmark_of_useful_work_tiny_runs() -> None:
    assert useful_work.main(["--tiny"]) == 0

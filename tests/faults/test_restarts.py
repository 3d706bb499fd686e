"""Workers that die and are started again: who waits, where they go on, what the values are."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from tests.faults import restart_victims as victims

import paramserve as ps
from paramserve.errors import WorkerFailed

pytestmark = pytest.mark.usefixtures("leaves_nothing")

SOON = ps.Deadlines(heartbeat_s=0.2, stall_s=2.0)


def values(result: ps.Result) -> bytes:
    return bytes(result.values["default"]["w"].tobytes())


@functools.cache
def unbroken() -> ps.Result:
    """Sums are in rank order whatever the number of servers: one run is good for all."""
    return ps.run(victims.regress, workers=3, seed=5)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_restart_sync_run_is_bitwise_that_of_an_unbroken_one(
    how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = unbroken()
    broken = ps.run(
        victims.regress,
        args=(how,),
        workers=3,
        servers=2,
        seed=5,
        on_worker_death=ps.Restart(1),
    )
    assert broken.returns == {0: (1, 20), 1: (2, 20), 2: (1, 20)}
    assert values(broken) == values(whole)
    (restart,) = broken.restarts
    assert (restart.rank, restart.clock, restart.repeated) == (1, 7, 0)
    assert isinstance(restart.error, WorkerFailed)
    ended = {"kill": "was killed by SIGKILL", "raise": "raised ZeroDivisionError: on purpose"}
    told = f"paramserve: worker 1 {ended[how]}; it is started again (1 of 1)\n"
    assert capfd.readouterr().err.count(told) == 1
    assert not whole.restarts
    assert not broken.failures


def test_restart_worker_that_hangs_is_replaced() -> None:
    result = ps.run(
        victims.regress,
        args=("stop",),
        workers=2,
        servers=2,
        on_worker_death=ps.Restart(1),
        engine=ps.Local(deadlines=SOON),
    )
    assert result.returns == {0: (1, 20), 1: (2, 20)}
    assert "no sign of life" in str(result.restarts[0].error)


def test_restart_async_others_never_wait(tmp_path: Path) -> None:
    result = ps.run(
        victims.counts,
        args=(str(tmp_path),),
        workers=2,
        servers=2,
        consistency=ps.Async(),
        on_worker_death=ps.Restart(1),
        timeout_s=60,
    )
    assert result.returns[0] == [victims.STEPS + 5.0] * 3  # the first incarnation's five were in
    np.testing.assert_array_equal(result.values["default"]["w"], [2.0 * victims.STEPS] * 3)
    assert [(each.rank, each.clock) for each in result.restarts] == [(1, 5)]


def test_restart_sync_that_takes_too_long_is_gone_on_without() -> None:
    """The others wait `restart_s` and no longer; here the successor needs longer to come up."""
    result = ps.run(
        victims.regress,
        args=("kill",),
        workers=2,
        on_worker_death=ps.Restart(1),
        engine=ps.Local(deadlines=ps.Deadlines(restart_s=0.001)),
    )
    assert result.returns[0] == (1, 20)
    assert result.returns[1][0] == 2

"""What a worker logged before its function raised."""

from __future__ import annotations

from typing import Any

import pytest

import paramserve as ps

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def logs_and_ends(worker: ps.Worker, how: str) -> None:
    """Rank 1's first incarnation ends right after what it has logged."""
    worker.log(incarnation=worker.incarnation)
    if worker.rank == 1 and worker.incarnation == 1:
        raise SystemExit(3) if how == "exit" else ZeroDivisionError("on purpose")


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_records_of_a_worker_that_raises_are_in_the_result(how: str) -> None:
    """No heartbeat is due before it ends."""
    deadlines: Any = ps.Deadlines(heartbeat_s=8.0, stall_s=30.0)
    result = ps.run(
        logs_and_ends,
        args=(how,),
        workers=2,
        on_worker_death=ps.Restart(1),
        deadlines=deadlines,
        timeout_s=60,
    )
    found = sorted((each.rank, each.values["incarnation"]) for each in result.metrics)
    assert found == [(0, 1.0), (1, 1.0), (1, 2.0)]

"""What workers tell of their time and memory."""

from __future__ import annotations

import math

from tests.suites import each_case

from paramserve.core.worker_usage import UsageByRank
from paramserve.messages import WorkerUsage

USED = WorkerUsage(10.0, 2.5, 0.5, 1 << 20, 0.25)


def test_last_incarnation_of_a_rank_counts() -> None:
    told = UsageByRank()
    told.on_report(0, 7, USED)
    told.on_report(1, 8, USED)
    later = WorkerUsage(1.0, 0.5)
    told.on_report(0, 9, later)
    told.on_report(0, 7, USED)  # a heartbeat of the one before, that was on its way
    assert told.report([7, 8, 9]) == ((0, later), (1, USED))
    assert told.report([7, 8]) == ((1, USED),), "its new incarnation has ended"


@each_case(
    "wrong",
    [
        WorkerUsage(-1.0),
        WorkerUsage(math.nan),
        WorkerUsage(1.0, math.inf),
        WorkerUsage(1.0, 0.0, -0.5),
        WorkerUsage(1.0, memory_bytes=-1),
        WorkerUsage(1.0, memory_bytes=1 << 63),
        WorkerUsage(1.0, looped=1.5),
        WorkerUsage(1.0, looped=math.nan),
    ],
    ids=str,
)
def test_what_cannot_be_is_left_out(wrong: WorkerUsage) -> None:
    told = UsageByRank()
    told.on_report(0, 7, USED)
    told.on_report(0, 7, wrong)
    assert told.report([7]) == ((0, USED),)

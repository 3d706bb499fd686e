"""Workers that log more than can be carried: the run goes on, and every record is accounted for."""

from __future__ import annotations

from collections import Counter

import paramserve as ps

LIMITS = ps.Limits(header_bytes_max=1 << 16, log_records_max=300)
RECORDS = 2000
NAMES = [f"layer.{number}.weight.gradient.norm" for number in range(40)]


def test_flood_of_records_ends_no_run_and_every_record_is_returned_or_counted() -> None:
    def train(worker: ps.Worker) -> None:
        for step in range(RECORDS):
            worker.log(step=step, **dict.fromkeys(NAMES, 1.0))

    result = ps.run(train, workers=2, limits=LIMITS)
    assert len(result.metrics) + result.dropped_records == 2 * RECORDS
    assert result.dropped_records > 0
    for rank in range(2):
        steps = [record.values["step"] for record in result.metrics if record.rank == rank]
        assert steps == sorted(set(steps)), "in order, each once"
        assert RECORDS - 1 in steps, "the oldest are dropped first"


def test_records_that_fit_all_come_back() -> None:
    count = LIMITS.log_records_max - 1

    def train(worker: ps.Worker) -> None:
        for step in range(count):
            worker.log(step=step, **dict.fromkeys(NAMES, 1.0))

    result = ps.run(train, workers=2, limits=LIMITS)
    assert result.dropped_records == 0
    assert Counter(record.rank for record in result.metrics) == {0: count, 1: count}

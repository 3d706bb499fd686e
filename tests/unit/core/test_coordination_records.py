"""Log records: bounded, told in pages, and counted where they are dropped."""

from __future__ import annotations

from paramserve.config import CoordinatorConfig, Limits, RuleSpec
from paramserve.core.coordination import Called, Coordination, Noticed
from paramserve.messages import AskStatus, Record, Status, WorkerBeat, encode

PAGE_BYTES = 1000
DRIVER = 99


def coordination(**limits: int) -> Coordination:
    told = Limits(header_bytes_max=4 * PAGE_BYTES, **limits)
    return Coordination(CoordinatorConfig(1, 1, "", RuleSpec("Async"), limits=told))


def record(number: int, names: int = 10) -> Record:
    return Record(0.0, 0, number, {f"value {name}": 1.0 for name in range(names)})


def log(one: Coordination, first: int, end: int, *, connection: int = 0) -> None:
    records = tuple(record(number) for number in range(first, end))
    one.step(Noticed(connection, WorkerBeat(0, records, first)), 0.0)


def ask(one: Coordination, after: int) -> Status:
    ((_, status),) = one.step(Called(DRIVER, AskStatus(1, after)), 0.0).replies
    assert isinstance(status, Status)
    return status


def test_status_takes_a_page_of_the_records_and_tells_that_there_are_more() -> None:
    one = coordination()
    log(one, 0, 30)
    found: list[int] = []
    after = pages = 0
    while after < 30:
        status = ask(one, after)
        assert status.records
        assert len(encode(status.records)) <= PAGE_BYTES + 10
        assert (status.end_record, status.lost_records) == (30, 0)
        assert status.next_record == after + len(status.records)
        found += [each.clock for each in status.records]
        after, pages = status.next_record, pages + 1
    assert found == list(range(30))
    assert pages > 1
    assert ask(one, 10**9).records == ()
    assert ask(one, 10**9).next_record == 30


def test_oldest_records_go_when_all_have_more_bytes_than_are_kept() -> None:
    size = len(encode(record(0)))
    one = coordination(log_bytes_max=5 * size)
    log(one, 0, 30)
    status = ask(one, 0)
    assert [each.clock for each in status.records] == list(range(25, 30))
    assert (status.dropped_records, status.next_record, status.end_record) == (25, 30, 30)


def test_records_that_a_worker_has_dropped_are_counted() -> None:
    one = coordination()
    log(one, 0, 2)
    log(one, 5, 7)
    log(one, 4, 6, connection=1)
    assert ask(one, 0).lost_records == 3 + 4
    one.step(Noticed(0, WorkerBeat(0, (), 9)), 0.0)
    assert ask(one, 0).lost_records == 3 + 4 + 2
    assert ask(one, 0).end_record == 6


def test_record_that_fits_into_no_answer_is_dropped_and_counted() -> None:
    one = coordination()
    one.step(Noticed(0, WorkerBeat(0, (record(0, 200), record(1)), 0)), 0.0)
    status = ask(one, 0)
    assert ([each.clock for each in status.records], status.lost_records) == ([1], 1)


def test_dropped_records_that_peers_tell_stay_within_what_a_status_holds() -> None:
    one = coordination()
    for connection in range(5):
        one.step(Noticed(connection, WorkerBeat(0, (), (1 << 64) - 1)), 0.0)
    assert ask(one, 0).lost_records > 1 << 60
    assert encode(ask(one, 0))

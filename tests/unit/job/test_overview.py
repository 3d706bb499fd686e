"""The driver's line to the coordinator, which is a puppet here."""

from __future__ import annotations

from collections import deque

import pytest

from paramserve.config import NO_CREDENTIALS, Deadlines, Limits
from paramserve.job import overview as module
from paramserve.job.entries import COORDINATOR
from paramserve.job.overview import EVERY_S, PAUSE_S, Overview
from paramserve.messages import AskStatus, CoordinatorRequest, Record, Status, decoder, encode

STALL_S = 5.0
_decode = decoder(CoordinatorRequest).decode


class Coordinator:
    """A link on which the coordinator answers when it is told to."""

    def __init__(self) -> None:
        self.asked: deque[AskStatus] = deque()
        self.answers: deque[bytes] = deque()

    def send(self, header: bytes) -> None:
        message = _decode(header)
        assert isinstance(message, AskStatus)
        self.asked.append(message)

    def receive(self, timeout_s: float) -> bytes | None:
        return self.answers.popleft() if self.answers else None

    def answer(self) -> None:
        call = self.asked.popleft().call
        self.answers.append(encode(Status(call, (), (), (), (), 0)))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    link = Coordinator()
    monkeypatch.setattr(module.Link, "connect", lambda *_, **__: link)
    return link


@pytest.fixture
def overview(coordinator: Coordinator) -> Overview:
    return Overview((), NO_CREDENTIALS, Limits(), Deadlines(stall_s=STALL_S))


def run(overview: Overview, start: float, end: float) -> None:
    """Tick as the driver does."""
    now = start
    while now < end:
        overview.tick(now)
        now += EVERY_S


def test_coordinator_without_an_answer_is_silent_after_stall_s(overview: Overview) -> None:
    run(overview, 0.0, STALL_S)
    assert overview.silent(STALL_S) == {}
    assert overview.silent(STALL_S + 1.0) == {COORDINATOR: 0}


def test_pause_of_the_driver_is_no_silence_of_the_coordinator(
    overview: Overview, coordinator: Coordinator
) -> None:
    overview.tick(0.0)
    now = 10 * STALL_S
    overview.tick(now)  # the driver was stopped in between, and so may the coordinator have been
    assert overview.silent(now) == {}
    coordinator.answer()
    run(overview, now, now + STALL_S)
    assert overview.silent(now + STALL_S) == {}


def test_silence_after_a_pause_of_the_driver_counts(overview: Overview) -> None:
    overview.tick(0.0)
    now = 10 * STALL_S
    run(overview, now, now + STALL_S + PAUSE_S)
    assert overview.silent(now + STALL_S + PAUSE_S) == {COORDINATOR: 0}


def logged(start: int, stop: int) -> tuple[Record, ...]:
    return tuple(Record(0.0, 0, number, {"loss": 1.0}) for number in range(start, stop))


def status(start: int, stop: int, end: int, lost: int = 0) -> bytes:
    """An answer with the records from `start` to `stop` of `end`."""
    records = logged(start, stop)
    return encode(Status(1, (), (), (), records, stop, end_record=end, lost_records=lost))


def test_ask_now_fetches_all_pages(overview: Overview, coordinator: Coordinator) -> None:
    overview.tick(0.0)
    coordinator.answers += [status(0, 0, 0), status(0, 3, 7), status(3, 6, 7), status(6, 7, 7)]
    overview.ask_now(1.0, 1.0)
    assert [record.clock for record in overview.records] == list(range(7))
    assert [asked.after_record for asked in coordinator.asked] == [0, 0, 3, 6]
    assert overview.dropped_records == 0


def test_next_page_is_asked_for_with_the_next_tick(
    overview: Overview, coordinator: Coordinator
) -> None:
    coordinator.answers += [status(0, 3, 7)]
    overview.tick(0.0)
    overview.tick(EVERY_S / 10)
    assert [asked.after_record for asked in coordinator.asked] == [0, 3]


def test_every_missing_record_is_counted(
    overview: Overview, coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECORDS_MAX", 4)
    overview.records = deque(maxlen=4)
    coordinator.answers += [status(2, 5, 5, lost=10)]  # the first two were dropped there
    overview.tick(0.0)
    assert overview.dropped_records == 2 + 10
    coordinator.answers += [status(5, 8, 20, lost=11)]  # of six records here, two are too many
    overview.tick(1.0)
    assert overview.dropped_records == 2 + 11 + 2
    overview.ask_now(2.0, 0.0)  # the last ones do not come in time
    assert overview.dropped_records == 2 + 11 + 2 + 12

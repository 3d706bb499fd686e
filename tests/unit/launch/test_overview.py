"""The driver's line to the coordinator, which is a puppet here."""

from __future__ import annotations

from collections import deque

import pytest

from paramserve.config import NO_CREDENTIALS, Deadlines, Limits
from paramserve.errors import ConnectTimeout, CoordinatorGone, ProtocolError
from paramserve.launch import overview as module
from paramserve.launch.entries import COORDINATOR
from paramserve.launch.overview import AGAIN_S, EVERY_S, PAUSE_S, Overview
from paramserve.messages import (
    AskStatus,
    CoordinatorRequest,
    MarkDead,
    Ok,
    Record,
    Status,
    decoder,
    encode,
)

STALL_S = 5.0
_decode = decoder(CoordinatorRequest).decode


class Coordinator:
    """A link on which the coordinator answers when it is told to."""

    def __init__(self) -> None:
        self.asked: deque[AskStatus] = deque()
        self.dead: list[MarkDead] = []
        self.answers: deque[bytes] = deque()
        self.error: Exception | None = None
        """What every use of the line raises."""
        self.connected = 0

    def connect(self, *_: object, **__: object) -> Coordinator:
        self._check()
        self.connected += 1
        return self

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def send(self, header: bytes) -> None:
        self._check()
        message = _decode(header)
        if isinstance(message, MarkDead):
            self.dead.append(message)
        elif isinstance(message, AskStatus):
            self.asked.append(message)

    def receive(self, timeout_s: float) -> bytes | None:
        self._check()
        return self.answers.popleft() if self.answers else None

    def close(self) -> None: ...

    def answer(self) -> None:
        call = self.asked.popleft().call
        self.answers.append(encode(Status(call, (), (), (), (), 0)))


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> Coordinator:
    link = Coordinator()
    monkeypatch.setattr(module.Link, "connect", link.connect)
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


LATE = ConnectTimeout("no process answered", fix="look")
BROKEN = ConnectionResetError("reset")


@pytest.mark.parametrize("error", [LATE, BROKEN], ids=["late", "reset"])
@pytest.mark.parametrize("when", ["connecting", "waiting"])
def test_line_that_failed_once_is_made_anew_and_no_record_is_lost(
    overview: Overview, coordinator: Coordinator, error: Exception, when: str
) -> None:
    coordinator.answers += [status(0, 2, 2)] if when == "waiting" else []
    coordinator.error = error if when == "connecting" else None
    overview.tick(0.0)
    coordinator.error = error
    overview.tick(EVERY_S)
    assert overview.error is error
    coordinator.error = None
    first = len(overview.records)
    coordinator.answers += [status(first, 4, 4)]
    run(overview, 2 * EVERY_S, 2 * EVERY_S + AGAIN_S + EVERY_S)
    assert overview.error is None
    assert [record.clock for record in overview.records] == list(range(4))
    assert overview.dropped_records == 0


def test_coordinator_that_is_not_reached_is_silent_after_stall_s(
    overview: Overview, coordinator: Coordinator
) -> None:
    coordinator.error = LATE
    run(overview, 0.0, STALL_S)
    assert overview.silent(STALL_S) == {}
    assert overview.silent(STALL_S + 1.0) == {COORDINATOR: 0}
    coordinator.error = None
    coordinator.answers += [status(0, 0, 0)]
    run(overview, STALL_S, STALL_S + AGAIN_S + EVERY_S)
    assert overview.silent(STALL_S + 1.0) == {}


def test_failure_of_the_drivers_own_is_no_silence_of_the_coordinator(
    overview: Overview, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator.error = ProtocolError("a header is too large", fix="raise it")
    run(overview, 0.0, 2 * STALL_S)
    assert overview.silent(2 * STALL_S) == {}
    assert "line to the coordinator failed: a header is too large" in caplog.text


def test_end_of_a_worker_is_told_again_on_the_next_line_until_it_is_confirmed(
    overview: Overview, coordinator: Coordinator
) -> None:
    coordinator.answers += [status(0, 0, 0)]
    overview.tick(0.0)
    overview.mark_dead(1, incarnation=3)
    overview.mark_dead(2)  # it is not known which one: told again, it could be about a successor
    coordinator.error = BROKEN
    overview.mark_dead(0)
    assert [each.number for each in coordinator.dead] == [1, 2]
    coordinator.error = None
    coordinator.answers += [status(0, 0, 0)]
    overview.tick(AGAIN_S)
    assert [each.number for each in coordinator.dead] == [1, 2, 1, 0]
    coordinator.answers += [encode(Ok(each.call)) for each in coordinator.dead]
    run(overview, AGAIN_S + EVERY_S, AGAIN_S + 4 * EVERY_S)
    coordinator.error = BROKEN
    overview.tick(2 * AGAIN_S + EVERY_S)
    coordinator.error = None
    overview.tick(4 * AGAIN_S)
    assert [each.number for each in coordinator.dead] == [1, 2, 1, 0]


def test_answer_that_was_lost_with_its_line_is_told_so(
    overview: Overview, coordinator: Coordinator
) -> None:
    overview.tick(0.0)
    call = overview.scale(3)
    assert overview.answer(call) is None
    coordinator.error = BROKEN
    overview.tick(EVERY_S)
    coordinator.error = None
    overview.tick(EVERY_S + AGAIN_S)
    with pytest.raises(ConnectionError, match="before it answered"):
        overview.answer(call)


def test_fresh_is_an_answer_to_this_question_or_an_error(
    overview: Overview, coordinator: Coordinator
) -> None:
    coordinator.answers.append(status(0, 0, 0))
    assert overview.fresh(0.5).call == 1
    with pytest.raises(CoordinatorGone, match=r"did not answer in 0.5 s"):
        overview.fresh(0.5)
    for broken in (ConnectionResetError(104, "reset"), ConnectTimeout("reset", fix="raise it")):
        coordinator.error = broken
        with pytest.raises(
            CoordinatorGone, match=r"has ended, or cannot .*reset.*lives as long"
        ) as e:
            overview.fresh(0.5)
        assert str(e.value).count("To fix:") == 1
    coordinator.error = ProtocolError("other", fix="look")
    with pytest.raises(ProtocolError, match="other"):
        overview.fresh(0.5)

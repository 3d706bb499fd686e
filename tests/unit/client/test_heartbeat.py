"""A client's heartbeats and their records, also of signal handlers that log; the link is a fake."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from tests.suites import each_case

from paramserve.client.heartbeat import BEAT_BYTES_MAX, RECORDS_PER_BEAT_MAX, Heartbeat
from paramserve.config import Limits
from paramserve.errors import ProtocolError
from paramserve.messages import SentGradients, WorkerBeat, encode

NEVER_S = 1e6
WAIT_S = 10.0


class TakesBeats:
    """A link that keeps what is sent, refuses it while `closed`, and raises `error` once."""

    def __init__(self) -> None:
        self.beats: list[WorkerBeat] = []
        self.closed = False
        self.error: Exception | None = None
        self.sent = threading.Event()

    def notify(self, beat: WorkerBeat) -> bool:
        error, self.error = self.error, None
        if error is not None:
            raise error
        if not self.closed:
            self.beats.append(beat)
            self.sent.set()
        return not self.closed

    def restore(self, *, ended: Callable[[], bool]) -> bool:
        return False

    def numbers(self) -> list[int]:
        return [record.clock for beat in self.beats for record in beat.records]


@pytest.fixture
def link() -> TakesBeats:
    return TakesBeats()


def beating(link: TakesBeats, every_s: float = NEVER_S, **limits: int) -> Heartbeat:
    return Heartbeat(link, 0, every_s, Limits(**limits))  # type: ignore[arg-type]  # a fake


@pytest.fixture
def quiet(link: TakesBeats) -> Iterator[Heartbeat]:
    found = beating(link, log_records_max=5000)
    yield found
    found.stop()


def log(heartbeat: Heartbeat, start: int, stop: int, names: int = 1) -> None:
    for number in range(start, stop):
        heartbeat.log(number, {f"value {name}": 1.0 for name in range(names)})


def test_stop_sends_all_records_in_order_in_beats_of_bounded_size(
    link: TakesBeats, quiet: Heartbeat
) -> None:
    log(quiet, 0, 2500)
    log(quiet, 2500, 2600, names=2000)
    quiet.stop()
    assert link.numbers() == list(range(2600))
    assert max(len(beat.records) for beat in link.beats) == RECORDS_PER_BEAT_MAX
    assert max(len(encode(beat)) for beat in link.beats) < BEAT_BYTES_MAX + 1000
    for beat, after in pairwise(link.beats):
        assert after.first_record == beat.first_record + len(beat.records)


@pytest.mark.parametrize("bound", ["number", "bytes"])
def test_oldest_records_are_dropped_and_the_next_beat_tells_how_many(
    link: TakesBeats, bound: str
) -> None:
    limits = {"log_records_max": 10} if bound == "number" else {"log_bytes_max": 500}
    heartbeat = beating(link, **limits)
    log(heartbeat, 0, 100)
    heartbeat.stop()
    kept = link.numbers()
    assert kept == list(range(100 - len(kept), 100))
    assert 0 < len(kept) < 100
    assert link.beats[0].first_record == 100 - len(kept)


def test_record_that_fits_into_no_beat_leaves_a_gap(link: TakesBeats) -> None:
    heartbeat = beating(link, header_bytes_max=4000)
    log(heartbeat, 0, 1)
    log(heartbeat, 1, 2, names=1000)
    log(heartbeat, 2, 3)
    heartbeat.stop()
    assert [(beat.first_record, len(beat.records)) for beat in link.beats] == [(0, 1), (2, 1)]


def test_records_that_could_not_be_sent_go_with_the_next_beat(
    link: TakesBeats, quiet: Heartbeat
) -> None:
    link.closed = True
    log(quiet, 0, 3)
    assert not quiet.beat()
    link.closed = False
    log(quiet, 3, 5)
    quiet.stop()
    assert link.numbers() == list(range(5))


def test_heartbeats_go_on_after_an_unexpected_error(
    link: TakesBeats, caplog: pytest.LogCaptureFixture
) -> None:
    link.error = ProtocolError("a header was not sent", fix="none")
    heartbeat = beating(link, every_s=0.001)
    assert link.sent.wait(WAIT_S)
    heartbeat.stop()
    assert "a heartbeat of rank 0 failed" in caplog.text


# --- signal handlers ------------------------------------------------------------------------------


MOMENTS_MAX = 2000
MODULE = sys.modules[Heartbeat.__module__].__file__


def interrupted(call: Callable[[], object], moment: int, handler: Callable[[], object]) -> bool:
    """Make a call, and run a handler before its `moment`th instruction; whether it came so far."""
    left = moment

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != MODULE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                handler()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left < 0


@each_case("main", ["log", "send"])
def test_handler_that_logs_within_the_call_loses_nothing(main: str) -> None:
    link = TakesBeats()
    heartbeat = Heartbeat(link, 0, NEVER_S, Limits())  # type: ignore[arg-type]  # a fake
    logged = 0

    def log() -> None:
        nonlocal logged
        logged += 1
        heartbeat.log(logged, {"loss": 1.0})

    moments = 0

    def run() -> None:
        nonlocal moments
        while moments < MOMENTS_MAX:
            log()
            reached = interrupted(log if main == "log" else heartbeat.send_all, moments, log)
            heartbeat.send_all()
            if not reached:
                break
            moments += 1

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive(), f"the handler's log does not return, at moment {moments}"
    heartbeat.stop()
    assert 50 < moments < MOMENTS_MAX
    clocks = [record.clock for beat in link.beats for record in beat.records]
    assert sorted(clocks) == list(range(1, logged + 1))
    for beat, after in pairwise(link.beats):
        assert after.first_record == beat.first_record + len(beat.records)


def test_what_was_sent_encoded_is_told_where_it_has_changed(
    link: TakesBeats, quiet: Heartbeat
) -> None:
    told = [SentGradients("model", 10, 40, 0.5)]
    quiet.sent_gradients = lambda: tuple(told)
    assert quiet.beat()
    assert quiet.beat()
    told[0] = SentGradients("model", 20, 80, 0.25)
    link.closed = True
    assert not quiet.beat(), "the coordinator does not know it"
    link.closed = False
    assert quiet.beat()
    assert [beat.sent for beat in link.beats] == [
        (SentGradients("model", 10, 40, 0.5),),
        (),
        (SentGradients("model", 20, 80, 0.25),),
    ]


def test_stop_tells_what_was_sent_last(link: TakesBeats) -> None:
    heartbeat = beating(link)
    heartbeat.sent_gradients = lambda: (SentGradients("model", 10, 40, 0.5),)
    heartbeat.stop()
    assert [beat.sent for beat in link.beats] == [(SentGradients("model", 10, 40, 0.5),)]
    quiet = beating(link)
    quiet.stop()
    assert len(link.beats) == 1

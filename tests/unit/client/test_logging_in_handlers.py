"""A signal handler that logs while its thread logs or sends: at each moment of that call."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest

from paramserve.client.heartbeat import Heartbeat
from paramserve.config import Limits
from paramserve.messages import WorkerBeat

NEVER_S = 1e6
WAIT_S = 10.0
MOMENTS_MAX = 2000
MODULE = sys.modules[Heartbeat.__module__].__file__


class TakesBeats:
    def __init__(self) -> None:
        self.beats: list[WorkerBeat] = []

    def notify(self, beat: WorkerBeat) -> bool:
        self.beats.append(beat)
        return True


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


@pytest.mark.parametrize("main", ["log", "send"])
def test_handler_that_logs_within_the_call_loses_nothing(main: str) -> None:
    link = TakesBeats()
    heartbeat = Heartbeat(link, 0, NEVER_S, Limits())  # type: ignore[arg-type]
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

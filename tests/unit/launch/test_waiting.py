"""Waits of the main thread end by a signal, whenever it comes and whichever thread receives it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

import pytest
from tests.suites import each_case

from paramserve.launch.waiting import Latch


class Alarm(Exception):
    """What the handler raises."""


@pytest.fixture
def _handler_raises() -> Iterator[None]:
    def strike(number: int, frame: FrameType | None) -> NoReturn:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, strike)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_handler_raises")
def test_signal_that_another_thread_receives_ends_the_wait() -> None:
    def receive() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    def wait() -> None:
        timer.start()
        Latch().wait(10.0)

    timer = threading.Timer(0.01, receive)
    with pytest.raises(Alarm):
        wait()
    timer.join()


def waits(latch: Latch, done: list[bool]) -> None:
    done.append(latch.wait(10.0))


def test_exception_at_any_line_of_a_wait_or_a_set_leaves_other_waits_alone() -> None:
    """A signal's handler may raise at any of them."""

    def step(frame: FrameType, event: str, _: object) -> object:
        nonlocal line
        if frame.f_code.co_filename == sys.modules[Latch.__module__].__file__ and event == "line":
            line += 1
            if line == at:
                raise Alarm
        return step

    raised, at = True, 0
    while raised:
        raised, at, line = False, at + 1, 0
        latch = Latch()
        done: list[bool] = []
        other = threading.Thread(target=waits, args=(latch, done))
        other.start()
        before = sys.gettrace()
        sys.settrace(step)
        try:
            latch.wait(0.001)
            latch.set()
            latch.wait()
        except Alarm:
            raised = True
        finally:
            sys.settrace(before)
        latch.set()
        other.join()
        assert done == [True]
    assert at > 10


@each_case("comes", [True, False])
def test_wait_tells_whether_it_is_set(comes: bool) -> None:
    latch = Latch()
    if comes:
        latch.set()
    assert latch.is_set() is latch.wait(0.0) is latch.wait(0.001) is comes

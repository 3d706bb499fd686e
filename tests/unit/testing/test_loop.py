"""The event loop in virtual time: order, threads, descriptors, and a process that stands still."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

THREAD_S = 0.25


class Notes:
    """Calls, with the time of each."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.calls: list[tuple[str, float]] = []

    def __call__(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append((name, round(self.loop.time(), 3)))


@pytest.fixture
def loop() -> VirtualLoop:
    return VirtualLoop(VirtualClock(), lambda: THREAD_S)


@pytest.fixture
def notes(loop: VirtualLoop) -> Notes:
    return Notes(loop)


def test_calls_happen_at_their_times_unless_cancelled(loop: VirtualLoop, notes: Notes) -> None:
    loop.call_later(0.2, notes("later"))
    loop.call_later(0.1, notes("never")).cancel()
    loop.call_soon(notes("soon"))
    loop.clock.run(1.0)
    assert notes.calls == [("soon", 0.0), ("later", 0.2)]


def test_time_goes_on_for_a_process_that_polls(loop: VirtualLoop) -> None:
    def poll() -> None:
        if loop.time() < 0.001:
            loop.call_soon(poll)

    loop.call_soon(poll)
    loop.clock.events_max = 1000
    loop.clock.run(1.0)
    assert loop.clock.events < 1000


def test_what_runs_in_a_thread_ends_later_with_its_result_or_error(loop: VirtualLoop) -> None:
    ended: list[Any] = []

    def fails() -> None:
        raise ConnectionResetError("gone")

    loop.run_in_executor(None, lambda: 7).add_done_callback(ended.append)
    loop.run_in_executor(None, fails).add_done_callback(ended.append)
    assert ended == []
    loop.clock.run(THREAD_S)
    good, bad = ended
    assert (good.result(), good.exception()) == (7, None)
    assert isinstance(bad.exception(), ConnectionResetError)
    with pytest.raises(ConnectionResetError, match="gone"):
        bad.result()


def test_reader_is_called_once_for_what_comes_together(loop: VirtualLoop, notes: Notes) -> None:
    loop.add_reader(3, notes("read"))
    for _ in range(2):
        loop.readable(3)
    loop.clock.run(0.1)
    assert [name for name, _ in notes.calls] == ["read"]
    loop.readable(3)
    loop.remove_reader(3)
    loop.clock.run(0.2)
    assert len(notes.calls) == 1


def test_writer_is_called_until_it_is_removed(loop: VirtualLoop, notes: Notes) -> None:
    loop.add_writer(3, notes("write"))
    loop.clock.run(0.055)
    assert len(notes.calls) == 5
    loop.remove_writer(3)
    loop.clock.run(1.0)
    assert len(notes.calls) == 5


def test_frozen_process_finds_everything_in_order_when_it_goes_on(
    loop: VirtualLoop, notes: Notes
) -> None:
    loop.call_later(0.1, notes("first"))
    loop.call_later(0.2, notes("second"))
    loop.clock.after(0.05, partial(loop.freeze, 0.5))
    loop.call_later(0.6, notes("third"))
    loop.clock.run(1.0)
    assert notes.calls == [("first", 0.55), ("second", 0.55), ("third", 0.6)]

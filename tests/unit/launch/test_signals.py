"""Which signals end a run or a server in order, and which stay as the program has them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from paramserve.launch.signals import ends_for_server, interrupt_by_ends

ENDS = (signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    before = {number: signal.signal(number, signal.SIG_DFL) for number in ENDS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ENDS)
def test_signal_that_ends_is_an_interrupt_until_the_stack_is_closed(number: int) -> None:
    with ExitStack() as stack:
        interrupt_by_ends(stack)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_second_hangup_interrupts_no_last_checkpoint() -> None:
    with ExitStack() as stack:
        interrupt_by_ends(stack)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)


def test_ignored_hangup_and_a_programs_own_handler_stay() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, own := lambda number, frame: None)
    with ExitStack() as stack:
        interrupt_by_ends(stack)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is own
    assert signal.SIGHUP not in ends_for_server()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in ends_for_server()

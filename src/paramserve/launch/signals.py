"""What a signal to the process that called `run` or `serve` means for it."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack
from types import FrameType
from typing import NoReturn


def interrupt_by_ends(stack: ExitStack) -> None:
    """Raise `KeyboardInterrupt` at SIGTERM and SIGHUP until the stack is closed, as at Ctrl-C:
    schedulers and clouds send the first before they take a machine away, and a terminal that is
    lost the second. A program's own handler stays, and so does `nohup`, which ignores SIGHUP; a
    thread other than the main one can set none."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number, handler in (
        (signal.SIGTERM, signal.default_int_handler),
        (signal.SIGHUP, _interrupt_once),
    ):
        if signal.getsignal(number) is signal.SIG_DFL:
            stack.callback(signal.signal, number, signal.SIG_DFL)
            signal.signal(number, handler)


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    # Kernel and shell both send it when a terminal is lost, and a second interrupt would end the
    # run without its last checkpoint.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def ends_for_server() -> tuple[signal.Signals, ...]:
    """The signals that end `serve` in order."""
    always = (signal.SIGTERM, signal.SIGINT)
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return always if ignored else (*always, signal.SIGHUP)

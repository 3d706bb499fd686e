"""What a signal to the process that called `run` means for the run."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack


def interrupt_by_sigterm(stack: ExitStack) -> None:
    """Until the stack is closed SIGTERM raises `KeyboardInterrupt`, as Ctrl-C does: schedulers and
    clouds send it before they take a machine away. A program's own handler stays; a thread other
    than the main one can set none."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.default_int_handler)

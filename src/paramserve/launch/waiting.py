"""What the main thread waits for, in a way that a signal's exception always ends."""

from __future__ import annotations

import math
import threading
import time

SIGNAL_S = 0.2
"""How long a signal's handler may have to wait for its turn."""


class Latch:
    """Set once; any thread may wait for it.

    Python runs a signal's handler in the main thread, between two instructions. A signal that comes
    just before that thread blocks, or that another thread receives, does not wake it: so a wait
    looks up every `SIGNAL_S`. And an exception of the handler may leave the lock inside a
    `threading.Event` taken, for ever: here a lock only wakes waiting threads, and whether it is set
    is told without it.
    """

    def __init__(self) -> None:
        self._set = False
        self._wakes = threading.Lock()
        self._wakes.acquire()

    def set(self) -> None:
        """Let all go on that wait. For one thread at a time."""
        if not self._set:
            self._set = True
            self._wakes.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait until it is set, or for so long; whether it is set."""
        until = time.monotonic() + timeout_s
        while not self._set:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            if self._wakes.acquire(timeout=min(left_s, SIGNAL_S)):
                self._wakes.release()
        return True

"""How a driver waits: on the clock and the sockets of this machine, or on those of a simulation."""

from __future__ import annotations

import select
import time
from typing import Final, Protocol


class Poller(Protocol):
    """What `select.poll` makes, as far as drivers use it. Descriptors are ints."""

    def register(self, fd: int, eventmask: int, /) -> None: ...

    def unregister(self, fd: int, /) -> None: ...

    def poll(self, timeout_ms: float, /) -> list[tuple[int, int]]: ...


class Timing(Protocol):
    """Gives a driver the time, and lets it wait.

    Attributes:
        spins: whether looking for a moment before sleeping is faster than waking up.
    """

    spins: bool

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic`."""
        ...

    def sleep(self, seconds: float, /) -> None: ...

    def poller(self) -> Poller: ...


class SystemTiming:
    """This machine's."""

    spins = True
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    poller = staticmethod(select.poll)


SYSTEM: Final[Timing] = SystemTiming()

"""What drivers wait with: clock, poller and event loop, of this machine or of a simulation."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from paramserve.transport.wakeup import wake_s


class Poller(Protocol):
    """What `select.poll` makes, as far as drivers use it. Descriptors are ints."""

    def register(self, fd: int, eventmask: int, /) -> None: ...

    def unregister(self, fd: int, /) -> None: ...

    def poll(self, timeout_ms: float, /) -> list[tuple[int, int]]: ...


class Timing(Protocol):
    """Gives a driver the time, and lets it wait."""

    def monotonic(self) -> float:
        """Seconds, as `time.monotonic`."""
        ...

    def wake_s(self) -> float:
        """What waking a process that sleeps costs, in seconds; 0.0: nothing."""
        ...

    def sleep(self, seconds: float, /) -> None: ...

    def poller(self) -> Poller: ...


class SystemTiming:
    """This machine's."""

    monotonic = staticmethod(time.monotonic)
    wake_s = staticmethod(wake_s)
    sleep = staticmethod(time.sleep)
    poller = staticmethod(select.poll)


SYSTEM: Final[Timing] = SystemTiming()


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Handle(Protocol):
    """A planned call."""

    def cancel(self) -> object:
        """Do not make it."""


class Pending(Protocol[T_co]):
    """The result of a function that runs in another thread."""

    def add_done_callback(self, callback: Callable[[Any], object], /) -> object:
        """Call `callback(self)` on the loop, once the function has ended."""

    def exception(self) -> BaseException | None:
        """What the function raised."""

    def result(self) -> T_co:
        """What the function returned; raises what it raised."""


class Loop(Protocol):
    """The methods are those of `asyncio.AbstractEventLoop`."""

    def time(self) -> float: ...

    def call_soon(self, callback: Callable[[], object], /) -> object: ...

    def call_later(self, delay_s: float, callback: Callable[[], object], /) -> Handle: ...

    def run_in_executor(self, executor: None, function: Callable[[], T], /) -> Pending[T]: ...

    def add_reader(self, fd: int, callback: Callable[[], object], /) -> None: ...

    def add_writer(self, fd: int, callback: Callable[[], object], /) -> None: ...

    def remove_reader(self, fd: int, /) -> object: ...

    def remove_writer(self, fd: int, /) -> object: ...

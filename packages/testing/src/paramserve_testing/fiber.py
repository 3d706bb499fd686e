"""A simulated process: ordinary code that waits, run on the virtual clock in a greenlet.

Where the code would sleep, the greenlet is left and other things happen; nothing runs at the same
time. So the driver that ships runs in a simulation as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from greenlet import GreenletExit, getcurrent, greenlet

from paramserve.virtual import VirtualClock

READABLE = 1
"""Readable event, the same number as `select.POLLIN`."""


class Fiber:
    """One process on a virtual clock.

    Args:
        run: what it does; begins with `start`.
    """

    def __init__(self, clock: VirtualClock, run: Callable[[], None]) -> None:
        self._clock = clock
        self._greenlet = greenlet(run)
        self._hub = getcurrent()
        self._turn = 0
        """Counts its waits: a wake-up is for one of them."""
        self.frozen_until = 0.0
        self._killed = False

    def start(self) -> None:
        self._greenlet.switch()

    @property
    def running(self) -> bool:
        """Whether the caller is this process."""
        return getcurrent() is self._greenlet

    def wait_until(self, time_s: float) -> None:
        """Do nothing, within the fiber, until a time or until `wake`."""
        assert self.running
        self._clock.at(time_s, self._resume, self._turn)
        self._hub.switch()

    def wait(self, seconds: float) -> None:
        """Wait for some seconds, as `wait_until`."""
        self.wait_until(self._clock.now + seconds)

    def wake(self) -> None:
        """End its wait now, or when it stands still no more."""
        self._clock.at(self._clock.now, self._resume, self._turn)

    def freeze(self, seconds: float) -> None:
        """Stop the fiber from its next wait on."""
        self.frozen_until = max(self.frozen_until, self._clock.now + seconds)

    def kill(self) -> None:
        """End it where it is. From within, this does not return."""
        self._killed = True
        if self.running:
            raise GreenletExit
        self._clock.at(self._clock.now, self.end)

    def end(self) -> None:
        """End the fiber, from the outside, where it waits."""
        self._killed = True
        if self._greenlet:  # begun and not ended
            self._greenlet.throw(GreenletExit)

    def _resume(self, turn: int) -> None:
        if turn != self._turn or self._killed or self._greenlet.dead:
            return
        if self._clock.now < self.frozen_until:
            self._clock.at(self.frozen_until, self._resume, turn)
            return
        self._turn += 1
        self._greenlet.switch()


class VirtualTiming:
    """A `transport.timing.Timing` for the driver of one process.

    Args:
        readable: whether something can be read at a descriptor.
    """

    def __init__(self, clock: VirtualClock, fiber: Fiber, readable: Callable[[int], bool]) -> None:
        self._clock = clock
        self._fiber = fiber
        self._readable = readable

    def monotonic(self) -> float:
        return self._clock.now

    def wake_s(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        until = self._clock.now + seconds
        while self._clock.now < until:
            self._fiber.wait_until(until)

    def poller(self) -> VirtualPoller:
        return VirtualPoller(self._clock, self._fiber, self._readable)


class VirtualPoller:
    """A `transport.timing.Poller` over descriptors that are only numbers.

    A wait ends early, with nothing, when its process is woken: something else is to be done.
    """

    def __init__(self, clock: VirtualClock, fiber: Fiber, readable: Callable[[int], bool]) -> None:
        self._clock = clock
        self._fiber = fiber
        self._readable = readable
        self._registered: list[int] = []

    def register(self, fd: int, eventmask: int, /) -> None:
        self._registered.append(fd)

    def unregister(self, fd: int, /) -> None:
        if fd not in self._registered:
            raise KeyError(fd)
        self._registered.remove(fd)

    def poll(self, timeout_ms: float, /) -> list[tuple[int, int]]:
        found = self._ready()
        if not found and timeout_ms > 0:
            self._fiber.wait_until(self._clock.now + timeout_ms / 1000)
            found = self._ready()
        return found

    def _ready(self) -> list[tuple[int, int]]:
        return [(fd, READABLE) for fd in self._registered if self._readable(fd)]

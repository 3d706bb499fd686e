"""Processor time in the model: a process does one thing after the other, on a core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from paramserve.virtual import VirtualClock

Job = tuple[float, float, Callable[..., None], tuple[Any, ...]]
"""Seconds, seconds of passes over memory, and what to do then."""


class Cores:
    """Cores that some processes share, first come, first served.

    Args:
        contention: passes over memory take so many times longer while another core works.
    """

    def __init__(self, clock: VirtualClock, count: int, contention: float) -> None:
        self.clock = clock
        self._free = count
        self._count = count
        self._contention = contention
        self._waiting: deque[Processor] = deque()

    def want(self, process: Processor) -> None:
        """A process has something to do; it gets a core, now or later."""
        if self._free:
            self._start(process)
        else:
            self._waiting.append(process)

    def _start(self, process: Processor) -> None:
        self._free -= 1
        job = process.jobs.popleft()
        alone = self._free == self._count - 1
        seconds = job[0] + job[1] * (1.0 if alone else self._contention)
        process.busy_s += seconds
        self.clock.after(seconds, self._end, process, job)

    def _end(self, process: Processor, job: Job) -> None:
        self._free += 1
        if process.jobs:
            self._waiting.append(process)
        else:
            process.active = False
        if self._waiting:
            self._start(self._waiting.popleft())
        job[2](*job[3])


class Processor:
    """One process. Without `cores` it has a core of its own."""

    __slots__ = ("_clock", "_cores", "_free_at", "active", "busy_s", "jobs")

    def __init__(self, clock: VirtualClock, cores: Cores | None) -> None:
        self._clock = clock
        self._cores = cores
        self._free_at = 0.0
        self.jobs: deque[Job] = deque()
        self.active = False
        """Whether it has a core or waits for one."""
        self.busy_s = 0.0

    def do(
        self, at_s: float, seconds: float, memory_s: float, action: Callable[..., None], *args: Any
    ) -> None:
        """Work for so long, not before `at_s` and after all earlier work; then `action(*args)`."""
        if self._cores is None:
            self.busy_s += seconds + memory_s
            self._free_at = max(self._free_at, at_s) + seconds + memory_s
            self._clock.at(self._free_at, action, *args)
        else:
            self._clock.at(at_s, self._add, (seconds, memory_s, action, args))

    def _add(self, job: Job) -> None:
        self.jobs.append(job)
        if not self.active and self._cores is not None:
            self.active = True
            self._cores.want(self)

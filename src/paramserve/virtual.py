"""Virtual time: a heap of what will happen, run one after the other in one thread."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class VirtualClock:
    """Time that stands still while something happens and then jumps to what happens next.

    Of two things at the same time the one that was planned first happens first.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.events = 0
        """Things that have happened."""
        self.events_max: int | None = None
        """`run` returns after so many in all: a run without an end is a fault of its own."""
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._planned = 0
        self._stopped = False

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """Let `action(*args)` happen at a time, or now if that is past."""
        self._planned += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._planned, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Let `action(*args)` happen in `delay_s`."""
        self.at(self.now + delay_s, action, *args)

    def stop(self) -> None:
        """Let `run` return after what happens now."""
        self._stopped = True

    def run(self, until_s: float) -> None:
        """Let things happen up to a time, or until `stop`, or until nothing is planned."""
        self._stopped = False
        heap = self._heap
        limit = self.events_max if self.events_max is not None else math.inf
        while heap and heap[0][0] <= until_s and not self._stopped and self.events < limit:
            self.now, _, action, args = heapq.heappop(heap)
            self.events += 1
            action(*args)
        if not self._stopped:
            self.now = max(self.now, until_s)

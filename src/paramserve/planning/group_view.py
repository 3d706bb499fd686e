"""How the modelled group stands on one shard: what policies look at, in O(1) an event."""

from __future__ import annotations

from collections import Counter, deque
from statistics import median

RECENT = 64
"""Steps whose time `step_s` is the median of."""


class ShardGroupView:
    """A `core.decisions.GroupView`."""

    def __init__(self, workers: int) -> None:
        self.clocks: dict[int, int] = dict.fromkeys(range(workers), 0)
        self.slowest = 0
        self.version = 0
        self.buffered = 0
        self.brought: set[int] = set()
        self.waited_s = 0.0
        self.step_s = 0.0
        self._at = Counter({0: workers})
        """How many workers have finished so many steps."""
        self._recent: deque[float] = deque(maxlen=RECENT)

    def tick(self, rank: int) -> bool:
        """A worker has ended a step; whether the slowest clock has risen."""
        clock = self.clocks[rank]
        self.clocks[rank] = clock + 1
        self._at[clock] -= 1
        self._at[clock + 1] += 1
        if clock != self.slowest or self._at[clock]:
            return False
        del self._at[clock]
        self.slowest += 1  # the one that has ticked is there
        return True

    def bring(self, rank: int, took_s: float) -> None:
        """A worker's gradients of the clock under way have come, so long after the clock before."""
        self.brought.add(rank)
        self._recent.append(took_s)

    def commit(self) -> None:
        """The clock under way is decided; all workers go on from it."""
        self.slowest += 1
        self.clocks = dict.fromkeys(self.clocks, self.slowest)
        self.brought = set()
        self.waited_s = 0.0
        self.step_s = median(self._recent) if self._recent else 0.0

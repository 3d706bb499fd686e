"""What was given to whom by lease, and how much of it is done: the records that `leases` keeps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from paramserve.messages import Leased

Mark = tuple[int, int]
"""(lease, samples): all of a client's older leases of that turn, and so much of this one."""
NO_MARK: Mark = (0, 0)


class Span(NamedTuple):
    """Positions [start, stop) of one epoch's order. Spans sort in the order of training."""

    epoch: int
    start: int
    stop: int


@dataclass
class Grant:
    """A lease that is not finished; `done`: how many of its samples are."""

    number: int
    span: Span
    done: int = 0

    @property
    def samples(self) -> int:
        return self.span.stop - self.span.start

    def reached(self, mark: Mark) -> int:
        """How many of its samples a mark says are done."""
        if self.number != mark[0]:
            return self.samples if self.number < mark[0] else 0
        return min(mark[1], self.samples)


@dataclass
class Holder:
    """What one client holds; `ended`: number of the membership in which it has ended."""

    rank: int
    grants: deque[Grant] = field(default_factory=deque)
    last: Leased | None = None
    """What it was given last, for the case that the reply was lost."""
    idle: bool = False
    ended: int | None = None

    @property
    def open(self) -> int:
        """Samples that are not finished."""
        return sum(grant.samples - grant.done for grant in self.grants)


@dataclass
class Tally:
    """What has become of a loader's samples, by rank."""

    given: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    repeated: int = 0
    left_over: int = 0

"""Outcomes of a worker's steps: the last one, and some of all for the run's result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

KEPT_MAX = 2048
"""Steps of one group that a worker keeps for the result."""


class StepRecord(NamedTuple):
    """Outcome of one step of a worker on one group.

    Attributes:
        clock: steps that the worker had ended on the group by then, with this one.
        version: updates that the group had had after it, on the shard that had had the fewest.
        staleness: updates between the values that the gradient came from and its own, at most.
        waited_s: seconds that the worker waited for the answer once the push was sent: for the
            network, the update and, under `Sync`, the slowest rank. With `overlap=True`, what was
            left of that when the next step began.
        dropped: the gradient was not applied, or that of a table in the same step: it was too late,
            too stale, or held NaN or Inf that the policy skips.
    """

    clock: int
    version: int
    staleness: int
    waited_s: float
    dropped: bool


Steps = Mapping[str, Mapping[int, Sequence[StepRecord]]]
"""Steps by group and rank."""


class StepsTaken(Struct, frozen=True, array_like=True):
    """Body of the report "steps": what a worker has kept of its steps on a group."""

    group: str
    records: tuple[StepRecord, ...]


class History:
    """The steps of one worker on one group, at most `KEPT_MAX`: when there are more, every second
    one is dropped, and then only every second, fourth, ... one is kept. The last is always there.

    Attributes:
        last: outcome of the last step; None: there was none.
    """

    def __init__(self) -> None:
        self.last: StepRecord | None = None
        self._records: list[StepRecord] = []
        self._count = 0
        self._every = 1

    def add(self, record: StepRecord) -> None:
        """Another step was answered."""
        self.last = record
        if self._count % self._every == 0:
            self._records.append(record)
            if len(self._records) > KEPT_MAX:
                del self._records[1::2]
                self._every *= 2
        self._count += 1

    def records(self) -> tuple[StepRecord, ...]:
        """Steps from the first to the last one, evenly spaced but for the last."""
        last = self.last
        if last is None or self._records[-1] is last:
            return tuple(self._records)
        return (*self._records, last)

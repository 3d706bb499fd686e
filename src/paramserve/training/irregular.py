"""Passes over loaders with batches that were in no step, as far as later incarnations need them.

Of each loader the newest passes are known one by one, and those before them by their sums: these
are over, so that a later incarnation leaves out all of them, with as many steps and epochs. What
has not changed is not encoded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

RUNS_MAX = 64
"""Runs of equal passes over one loader that are known one by one."""
LOADERS_MAX = 64
"""Loaders with such passes. The one without a new one for the longest time is forgotten."""


class Extent(NamedTuple):
    """A whole pass: its batches, the batches of one step, and the epochs that it begins."""

    length: int
    per_step: int
    epochs: int


class Irregular(msgspec.Struct, frozen=True, array_like=True):
    """Passes over one loader, one after the other, with batches that were in no step."""

    first: int
    """Number of the first of them."""
    passes: int
    skipped: int
    """Batches of each pass that were in no step, those behind its end included."""
    end: int
    """Batches after which the loop was left; 0: it was not."""
    epochs: int
    """Epochs that each pass has begun, where it was left."""

    def steps(self, extent: Extent) -> int:
        """Steps of each pass."""
        return (extent.length - self.skipped) // extent.per_step


REGULAR = Irregular(0, 1, 0, 0, 0)


class Record(msgspec.Struct, array_like=True):
    """The passes over one loader: the first `passes` are known by the sums of their steps and
    epochs."""

    passes: int = 0
    steps: int = 0
    epochs: int = 0
    trains: bool = False
    """Whether gradients were on as a pass began, or steps were made in it."""
    runs: list[Irregular] = msgspec.field(default_factory=list)
    """The irregular ones behind these, in order; those between them are regular."""

    def find(self, number: int) -> Irregular:
        """What is known of a pass behind those of the sums."""
        for each in self.runs:
            if 0 <= number - each.first < each.passes:
                return each
        return REGULAR

    def usual(self, number: int) -> Irregular:
        """What all passes before this one had in common."""
        runs = self.runs
        alike = not self.passes and runs and runs[0].first == 0 and runs[0].passes >= number > 0
        return runs[0] if alike else REGULAR

    def add(self, run: Irregular) -> None:
        """Put a pass behind those before it. Where it is not as it was known, what was known of it
        and of later ones goes."""
        if run == replace(self.find(run.first), first=run.first, passes=1):
            return  # gone through again, as one without steps where another optimizer takes over
        if run.first < self.passes:
            self.passes = self.steps = self.epochs = 0
        runs = self.runs
        while runs and runs[-1].first >= run.first:
            runs.pop()
        if runs:
            last = runs[-1]
            before = min(last.passes, run.first - last.first)
            runs[-1] = replace(last, passes=before)
            if replace(run, first=last.first, passes=before) == runs[-1] and (
                last.first + before == run.first
            ):
                runs[-1] = replace(last, passes=before + 1)
                return
        runs.append(run)

    def sum_up(self, extent: Extent) -> None:
        """Add the oldest runs, and the regular passes before them, to the sums."""
        while len(self.runs) > RUNS_MAX:
            run = self.runs.pop(0)
            regular = run.first - self.passes
            self.steps += regular * REGULAR.steps(extent) + run.passes * run.steps(extent)
            self.epochs += regular * extent.epochs + run.passes * (run.epochs or extent.epochs)
            self.passes = run.first + run.passes


REGULAR_ONLY = Record()
"""Record of a loader whose passes were all regular."""


class Records(msgspec.Struct, array_like=True):
    """What goes out with a step: by the numbers of their loaders, the one without a new pass for
    the longest time first; and how many are forgotten that may have been trained with."""

    loaders: dict[int, Record] = msgspec.field(default_factory=dict)
    forgotten: int = 0


UnderWay = dict[int, Irregular]
"""Passes that are not over, by the numbers of their loaders."""


class IrregularPasses:
    """The passes over the loaders of one worker.

    Args:
        ended, under_way: what an older incarnation has told last; empty: nothing.

    Attributes:
        dropped_loaders: how many may have been trained with and are known no longer: their
            batches count as if all had been in steps.
    """

    def __init__(self, ended: bytes, under_way: bytes) -> None:
        records = msgspec.msgpack.decode(ended, type=Records) if ended else Records()
        self._loaders, self.dropped_loaders = records.loaders, records.forgotten
        self._under_way = msgspec.msgpack.decode(under_way, type=UnderWay) if under_way else {}
        """Pass under way, as it was reported last."""
        self._changed = False
        for number, run in self._under_way.items():
            self._newest(number).add(run)

    def __contains__(self, number: int) -> bool:
        """Whether a loader had irregular passes, or was stepped with while gradients were off."""
        return number in self._loaders

    def of(self, number: int) -> Record:
        """What is known of a loader; it is not to be changed."""
        return self._loaders.get(number, REGULAR_ONLY)

    def add(self, number: int, run: Irregular, extent: Extent, *, trains: bool) -> None:
        """A pass over a loader is over."""
        record = self._newest(number)
        record.trains = record.trains or trains
        if run.first < record.passes and record.steps:
            self.dropped_loaders += 1
        record.add(run)
        record.sum_up(extent)

    def step_without_gradients(self, number: int) -> None:
        """A step was made in a pass that had begun with gradients off."""
        if not self.of(number).trains:
            self._newest(number).trains = True

    def _newest(self, number: int) -> Record:
        """The record of a loader, which changes now."""
        self._changed = True
        record = self._loaders.pop(number, None)
        self._loaders[number] = record = record if record is not None else Record()
        while len(self._loaders) > LOADERS_MAX:
            self.dropped_loaders += self._loaders.pop(next(iter(self._loaders))).trains
        return record

    def pack(self) -> bytes | None:
        """What is known of passes that are over; None: nothing new."""
        if not self._changed:
            return None
        self._changed = False
        return msgspec.msgpack.encode(Records(self._loaders, self.dropped_loaders))

    def pack_under_way(self, passes: Iterable[tuple[int, Irregular]]) -> bytes | None:
        """What is known of those that are not; None: nothing new."""
        present = dict(passes)
        if present == self._under_way:
            return None
        self._under_way = present
        return msgspec.msgpack.encode(present)

"""What workers save for their next incarnations, as a group's shard keeps it."""

from __future__ import annotations

from collections.abc import Mapping

from paramserve.errors import Overloaded
from paramserve.messages import SAVED_BYTES_MAX, SAVED_NAMES_MAX, Saved, SavedAt, Step

KEPT = 2
"""Steps kept of each rank: the last reported one may be repeated by the next incarnation."""


class SavedStates:
    """Saved states by rank, of its last two steps that reported some, the older first."""

    def __init__(self) -> None:
        self.by_rank: dict[int, tuple[SavedAt, ...]] = {}

    def record(self) -> dict[int, tuple[SavedAt, ...]]:
        """What each rank has saved, as it is now."""
        return dict(self.by_rank)

    def restore(self, record: Mapping[int, tuple[SavedAt, ...]]) -> None:
        """Have what ranks had saved before."""
        self.by_rank = dict(record)

    def before(self, rank: int, clock: int) -> tuple[Saved, ...]:
        """What a rank has saved, as of the newest step before a clock."""
        found = [each.values for each in self.by_rank.get(rank, ()) if each.clock < clock]
        return found[-1] if found else ()

    def step(self, rank: int, step: Step) -> None:
        """Take what a step tells. What an older incarnation told with a step that this one takes
        again, or with a later one, is forgotten.

        A step that ends no clock tells what was saved after the clock before.

        Raises:
            Overloaded: it is too much. Nothing was taken.
        """
        kept = self.by_rank.get(rank, ())
        if step.tick:
            kept = tuple(each for each in kept if each.clock < step.clock)
        if step.saved:
            clock = step.clock if step.tick else step.clock - 1
            values = {each.name: each for each in kept[-1].values} if kept else {}
            values |= {each.name: each for each in step.saved}
            self._check(rank, values)
            before = [each for each in kept if each.clock < clock]
            kept = (*before[1 - KEPT :], SavedAt(clock, tuple(values.values())))
        self.by_rank[rank] = kept

    def _check(self, rank: int, values: dict[str, Saved]) -> None:
        size = sum(len(each.data) for each in values.values())
        if len(values) > SAVED_NAMES_MAX or size > SAVED_BYTES_MAX:
            raise Overloaded(
                f"rank {rank} saved {size} bytes under {len(values)} names, the most are "
                f"{SAVED_BYTES_MAX} and {SAVED_NAMES_MAX}",
                fix="save less",
            )

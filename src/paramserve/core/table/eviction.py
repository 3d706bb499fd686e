"""Which rows were used when: an exact list, the last used in front."""

from __future__ import annotations

import numpy as np

from paramserve.core.table.compiled import use_kernels
from paramserve.core.table.hashing import Keys
from paramserve.core.table.memory import Growing

EVER = np.iinfo(np.int64).max
"""A clock after all others."""


class UseOrder:
    """The rows of a table in the order of their last use. Within a request: that of its keys."""

    row_bytes = 24

    def __init__(self) -> None:
        self._links = Growing(3, np.int64)
        self._ends = np.full(2, -1, np.int64)

    def reserve(self, rows: int) -> None:
        """Have room for row numbers below `rows`."""
        self._links.reserve(rows)

    def add(self, rows: Keys, clock: int) -> None:
        """Put new rows in front."""
        use_kernels().add(self._links.array, self._ends, rows, clock)

    def touch(self, rows: Keys, clock: int) -> None:
        """Move rows to the front; -1 is left out."""
        use_kernels().touch(self._links.array, self._ends, rows, clock)

    def oldest(self, limit: int, before: int = EVER) -> Keys:
        """At most `limit` rows last used before a clock, the oldest first. They stay."""
        taken = np.empty(limit, np.int64)
        found = use_kernels().oldest(self._links.array, self._ends, before, taken)
        return taken[:found]

    def used_before(self, rows: Keys, clock: int) -> Keys:
        """Those of `rows` (-1 is left out) that were last used before a clock, each once."""
        there = np.unique(rows[rows >= 0])
        late: Keys = there[self._links.array[there, 2] < clock]
        return late

    def drop(self, rows: Keys) -> None:
        use_kernels().drop(self._links.array, self._ends, rows)

"""Which rows of a table have changed since the last checkpoint that has them: what is written next.

A checkpoint that goes on from the one before has the rows that changed, the keys that went, and of
rows that were only used, when. What has changed after a cut belongs to the next checkpoint; what a
checkpoint was to have that is given up belongs to the next one, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.table.hashing import Keys
from paramserve.core.table.memory import sparse

Flags = npt.NDArray[np.bool_]

REMOVED_MAX = 1 << 24
"""Keys that went since the last checkpoint; past that the next one has all rows. 128 MiB."""
SMALL = 1024
"""Rows that there are flags for at first."""


class Changed(NamedTuple):
    """What has changed from one cut to the next.

    Attributes:
        rows: by row number, whether it changed; may be shorter than there are rows.
        used: whether it was used; of one that changed it says nothing.
        removed_keys: keys whose rows went, some of which may have come again, in parts.
        whole: whether nothing of this can be relied on, since no checkpoint has the rest.
    """

    rows: Flags
    used: Flags
    removed_keys: tuple[Keys, ...]
    whole: bool

    def removed(self) -> Keys:
        """The keys that went, each once."""
        keys = np.sort(np.concatenate([np.zeros(0, np.int64), *self.removed_keys]))
        first = np.ones(keys.size, np.bool_)
        np.not_equal(keys[1:], keys[:-1], first[1:])
        return keys[first]


class RowChanges:
    """Follows the changes of one table on one shard; a `store.RowWatcher`."""

    def __init__(self) -> None:
        self._begin()
        self._whole = True
        """Whether the next checkpoint has to have all rows."""
        self._pending: tuple[int, Changed] | None = None
        """The checkpoint that is under way, and what it is to have."""

    def _begin(self) -> None:
        # One flag more: row -1, which is none, is the last.
        self._rows, self._used = np.zeros(SMALL + 1, np.bool_), np.zeros(SMALL + 1, np.bool_)
        self._removed = list[Keys]()
        self._removed_count = 0

    # --- what the store tells --------------------------------------------------------------------

    def before(self, rows: Keys) -> None:
        """Rows are about to change."""
        if not _marked(self._rows, rows):
            self._grow(int(rows.max()) + 1)
            _marked(self._rows, rows)

    def on_use(self, rows: Keys) -> None:
        """Rows are about to be used; -1 is left out."""
        if not _marked(self._used, rows):
            self._grow(int(rows.max()) + 1)
            _marked(self._used, rows)

    def on_create(self, rows: Keys) -> None:
        """Rows are about to be given to new keys."""
        self.before(rows)

    def on_remove(self, rows: Keys, keys: Keys) -> None:
        """Rows were evicted or deleted."""
        end = self._rows.size - 1
        rows_before = rows[rows < end]
        self._rows[rows_before] = self._used[rows_before] = False
        if not self._whole:
            self._removed.append(keys)
            self._removed_count += keys.size
            if self._removed_count > REMOVED_MAX:
                self._removed, self._removed_count, self._whole = [], 0, True

    def _grow(self, rows: int) -> None:
        size = max(rows, 2 * self._rows.size) + 1
        self._rows, self._used = _longer(self._rows, size), _longer(self._used, size)

    # --- checkpoints -----------------------------------------------------------------------------

    def cut(self, checkpoint: int) -> Changed:
        """What a checkpoint is to have; what changes from now on is none of it."""
        self.end_checkpoint(0, committed=False)  # the one before was given up
        changed = Changed(self._rows[:-1], self._used[:-1], tuple(self._removed), self._whole)
        self._begin()
        self._whole = False
        self._pending = checkpoint, changed
        return changed

    def end_checkpoint(self, checkpoint: int, *, committed: bool) -> None:
        """Forget what a committed checkpoint has; what was for one that was given up, the next one
        has."""
        if self._pending is None:
            return
        number, changed = self._pending
        self._pending = None
        if committed and number == checkpoint:
            return
        if changed.whole or self._whole:
            self._whole = True
            return
        size = changed.rows.size
        if size >= self._rows.size:
            self._grow(size)
        self._rows[:size] |= changed.rows
        self._used[:size] |= changed.used
        self._removed[:0] = changed.removed_keys
        self._removed_count += sum(each.size for each in changed.removed_keys)


def _longer(flags: Flags, size: int) -> Flags:
    longer: Flags = sparse(size, np.bool_)
    longer[: flags.size - 1] = flags[:-1]
    return longer


def _marked(flags: Flags, rows: Keys) -> bool:
    """Set the flags of rows; False: some have none yet."""
    try:
        flags[rows] = True
    except IndexError:
        return False
    if flags[-1]:  # of row -1, or of the row whose number that flag has
        flags[-1] = False
        return int(rows.max()) < flags.size - 1
    return True

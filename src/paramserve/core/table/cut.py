"""A table's rows on one shard as they were at a cut: each is copied before it changes.

Nothing is copied when the cut is taken, and nothing then takes longer in a larger table. What
nothing has changed is read from the table itself. So a cut costs the memory of the rows that were
written while it is read, up to `COPIED_BYTES_MAX`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paramserve.core.table.admission import Waiting
from paramserve.core.table.changes import Changed
from paramserve.core.table.hashing import Keys
from paramserve.core.table.memory import Growing, sparse
from paramserve.core.table.store import Floats, RowStore, clocks_of
from paramserve.errors import Overloaded, UnknownName
from paramserve.rules.layout import RowLayout

ROWS_AT_ONCE = 1 << 16
"""Rows of a table that are read at once when all are read."""
COPIED_BYTES_MAX = 256 << 20
"""Rows copied ahead of their change, of one table on one shard; past that the cut is lost."""
WRITTEN, REMOVED, NEW = -1, -2, -3
"""Values of a copy's place for a row without one: it needs none any more; it was removed after the
cut, and lies there until its number is given to another key; at the cut no key had its number."""


class CutRows(NamedTuple):
    """Some rows of a cut.

    Attributes:
        keys: int64 [n].
        raw: float32 [n, words], as the table has them (`RowLayout`).
    """

    keys: Keys
    raw: Floats


class RowsCopy:
    """The rows of one table on one shard at a cut.

    Args:
        changed: which rows are wanted; None, or `whole`: all.

    Attributes:
        size: numbers of rows that may be wanted are below it.
        clock: the table's latest one, from which a TTL counts.
    """

    def __init__(self, store: RowStore, changed: Changed | None = None) -> None:
        self.clock = store.clock
        self.created, self.evicted, self.deleted = store.created, store.evicted, store.deleted
        self._candidates = store.candidates()
        self.layout = store.layout
        self.changed = None if changed is None or changed.whole else changed
        self._store: RowStore | None = store
        size = store.rows_used if self.changed is None else self.changed.rows.size
        self.size = min(store.rows_used, size)
        self._place = sparse(self.size, np.int32)
        """Place of each row's copy, from 1; 0: it has not changed; `WRITTEN`, `GONE`, `NEW`."""
        self._uses = sparse(self.size if store.orders_use else 0, np.int64)
        """Last use of each row, if it was used after the cut."""
        self._free = list[Keys]()
        """Rows that no key has, some of them since the cut."""
        self._looked = 0
        self._keys = Growing(0, np.int64)
        self._raw = Growing(self.layout.words, np.float32)
        self._copied = 0
        self._overflowed = False
        self.orders_use = store.orders_use
        store.watchers.append(self)

    # --- what the store tells --------------------------------------------------------------------

    def before(self, rows: Keys) -> None:
        """Copy rows, which are about to change."""
        if self._following:
            old = self._wanted_of(rows)
            self._copy(old[self._place[old] == 0])

    def on_use(self, rows: Keys) -> None:
        """Copy when rows, which are about to be used, were used last."""
        if self._following and self._store is not None:
            old = rows[(rows >= 0) & (rows < self.size)]
            fresh = old[self._uses[old] == 0]
            self._uses[fresh] = self._store.uses(fresh)

    def on_create(self, rows: Keys) -> None:
        """Copy rows that went after the cut, whose numbers other keys are about to get."""
        if not self._following:
            return
        old = rows[rows < self.size]
        place = self._place[old]
        self._place[old[place == 0]] = NEW
        removed = old[place == REMOVED]
        if self.orders_use:
            self.on_use(removed)
        self._copy(removed)

    def on_remove(self, rows: Keys, keys: Keys) -> None:
        """Rows that went lie there until their numbers are used again."""
        if self._following:
            old = self._wanted_of(rows)
            self._place[old[self._place[old] == 0]] = REMOVED

    @property
    def _following(self) -> bool:
        return self._store is not None and not self._overflowed

    def _wanted_of(self, rows: Keys) -> Keys:
        """Subset of rows that may be wanted."""
        old = rows[rows < self.size]
        if self.changed is None:
            return old
        return old[self.changed.rows[old] | self.changed.used[old]]

    def _copy(self, rows: Keys) -> None:
        """Copy rows before they are written; where there is no memory for that, the cut is lost."""
        if not rows.size:
            return
        assert self._store is not None
        end = self._copied + rows.size
        if end * 4 * self.layout.words > COPIED_BYTES_MAX:
            self._lose()
            return
        try:
            self._keys.reserve(end)
            self._raw.reserve(end)
        except MemoryError:
            self._lose()
            return
        self._keys.array[self._copied : end] = self._store.keys_of(rows)
        self._store.raw(rows, self._raw.array[self._copied : end])
        self._place[rows] = np.arange(self._copied + 1, end + 1)
        self._copied = end

    def _lose(self) -> None:
        self._overflowed = True
        self._forget()

    def _forget(self) -> None:
        self._keys, self._raw = Growing(0, np.int64), Growing(self.layout.words, np.float32)

    # --- what is read ----------------------------------------------------------------------------

    def find_free(self, limit: int) -> bool:
        """Scan up to `limit` free rows. True: more remain, and `rows_to_copy` is incomplete. Raises
        what `of` raises."""
        free = self._open().free(self._looked, self._looked + limit)
        self._looked += free.size
        self._free.append(free)
        return free.size == limit

    def rows_to_copy(self) -> Keys:
        """The numbers of the rows to copy, once `find_free` is False. It takes long if there are
        many, and may run in another thread."""
        marked = np.ones(self.size, np.bool_)
        if self.changed is not None:
            np.logical_or(self.changed.rows[: self.size], self.changed.used[: self.size], marked)
        for free in self._free:
            here = free[free < self.size]
            marked[here[self._place[here] == 0]] = False
        marked[self._place == NEW] = False
        return np.flatnonzero(marked)

    def _rows_now(self) -> Keys:
        while self.find_free(ROWS_AT_ONCE):
            pass
        return self.rows_to_copy()

    def batches(self, layout: RowLayout) -> Iterator[CutRows]:
        """All rows, some at a time. Raises what `of` raises."""
        rows = self._rows_now()
        for begin in range(0, rows.size, ROWS_AT_ONCE):
            yield self.of(rows[begin : begin + ROWS_AT_ONCE])

    def uses(self) -> tuple[Keys, Keys] | None:
        """All keys with the clocks of their last use, the one first whose use is longest ago; None:
        the table lets no rows go. Raises what `of` raises."""
        if not self.orders_use:
            return None
        rows = self._rows_now()
        uses = self.uses_of(rows)
        oldest = np.argsort(uses)
        return self.keys_of(rows[oldest]), clocks_of(uses[oldest])

    def uses_of(self, rows: Keys) -> Keys:
        """When rows that were there were used last: numbers that only grow (`store.clocks_of`).
        Raises what `of` raises."""
        uses = self._uses[rows]
        still = np.flatnonzero(uses == 0)
        uses[still] = self._open().uses(rows[still])
        return uses

    def find_waiting(self, limit: int) -> bool:
        """Look at some of the keys that wait for admission; whether there are more, so that
        `candidates` would take long."""
        return self._candidates is not None and self._candidates.read(limit)

    @property
    def candidates(self) -> Waiting | None:
        """Keys that wait for admission with their counts; None: every key gets a row."""
        return None if self._candidates is None else self._candidates.entries()

    @property
    def admits(self) -> bool:
        """Whether keys wait for admission."""
        return self._candidates is not None

    def keys_of(self, rows: Keys) -> Keys:
        """The keys of rows that were there, and are not `written`. Raises what `of` raises."""
        store = self._open()
        keys, places = store.keys_of(rows), self._place[rows]
        moved = np.flatnonzero(places > 0)
        keys[moved] = self._keys.array[places[moved] - 1]
        return keys

    def of(self, rows: Keys, into: Floats | None = None) -> CutRows:
        """Rows that were there, as they were.

        Args:
            into: memory for them, [n, words]; None: new memory.
        Raises:
            Overloaded: too much has changed before it was read, or there was no memory.
            UnknownName: the cut was released.
        """
        keys, places = self.keys_of(rows), self._place[rows]
        raw = into
        if raw is None:
            raw = np.empty((rows.size, self.layout.words), np.float32)
        self._open().raw(rows, raw)
        moved = np.flatnonzero(places > 0)
        raw[moved] = self._raw.array[places[moved] - 1]
        return CutRows(keys, raw)

    def written(self, rows: Keys) -> None:
        """These rows are not read again."""
        self._place[rows] = WRITTEN

    def _open(self) -> RowStore:
        if self._overflowed:
            raise Overloaded(
                f"the cut is lost: over {COPIED_BYTES_MAX >> 20} MiB of a table's rows changed "
                "before they were read, or there was no memory for their copies",
                fix="take another one when fewer rows change, or use more servers",
            )
        if self._store is None:
            raise UnknownName("the cut was released", fix="take another one")
        return self._store

    def close(self) -> None:
        """The cut is not needed any more."""
        if self._store is not None and self in self._store.watchers:
            self._store.watchers.remove(self)
        self._store = self._candidates = self.changed = None
        self._place, self._uses, self._free = np.zeros(0, np.int32), np.zeros(0, np.int64), []
        self._forget()

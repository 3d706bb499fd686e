"""The rows of one table on one shard: found, created and removed by key; read and written.

It decides which rows are there. What an update does to a row is a rule's business (`rules.rows`),
who may ask for what the block's.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.core.table.admission import BYTES_MAX as CANDIDATE_BYTES_MAX
from paramserve.core.table.admission import CANDIDATES_MAX, Candidates, Counted, Waiting
from paramserve.core.table.compiled import index_kernels, row_kernels, use_kernels
from paramserve.core.table.hashing import Keys
from paramserve.core.table.index import KEY_BYTES_MAX, PLACES, Index
from paramserve.core.table.memory import Growing
from paramserve.core.table.options import Constant, Init, Normal, TableOptions, Uniform
from paramserve.errors import TableFull
from paramserve.rules.rows import RowLayout, RowView

Floats = npt.NDArray[np.float32]
Counts = npt.NDArray[np.uint32]
Positions = npt.NDArray[np.int32]

ROWS_MAX = 1 << 31
"""Most rows of one shard; the limit of its index is twice as high."""
SWEPT_PER_KEY = 4
"""Rows past their TTL that a request removes for each of its keys."""
SWEPT_MIN = 1024
"""Rows past their TTL that a request removes at least."""
CANDIDATES_SHARE = 8
"""Share of `max_bytes`, an eighth, for keys that have no row yet, at most."""
EVERYWHERE = np.empty(0, np.int32)
TO_COME = -2
"""Row number of a key whose row does not exist before its push."""


class Drawing(NamedTuple):
    """What the kernels draw initial values from, besides the key: their first arguments."""

    stream: np.uint64
    kind: int
    a: float
    b: float
    work: npt.NDArray[np.float64]
    """Overwritten by each call, as is `line`."""
    line: npt.NDArray[np.float32]


def drawing(init: Init, stream: int, dim: int) -> Drawing:
    """The numbers of an option, for a table whose stream (`hashing.stream_of`) is given."""
    kernels = row_kernels()
    kind, a, b = kernels.CONSTANT, 0.0, 0.0
    if isinstance(init, Uniform):
        kind, a, b = kernels.UNIFORM, init.low, init.high
    elif isinstance(init, Normal):
        kind, a, b = kernels.NORMAL, init.mean, init.std
    elif isinstance(init, Constant):
        a = init.value
    work, line = np.empty((3, kernels.TILE)), np.empty(dim, np.float32)
    return Drawing(np.uint64(stream), kind, a, b, work, line)


class Purpose(Enum):
    """What rows are wanted for, and so whether they are created."""

    READ = "read"
    """Purpose of a look: nothing is created, nothing counts as used."""
    PUSH = "push"
    """Creates; a key that needs to be admitted is counted first. Counts as use."""
    DRAFT = "draft"
    """Purpose of a test what a PUSH of these keys would do, which is still to come: nothing is
    created, removed or counted, and nothing counts as used. Memory for its rows is there after
    that."""
    PUT = "put"
    """Creates always. Counts as use."""


class RowsTaken(NamedTuple):
    """Where the rows of some keys are."""

    rows: Keys
    """[n], -1 where a key has none; of a DRAFT `TO_COME` where the push would create one."""
    created: int
    """Rows that were made for this."""
    dropped: int
    """Keys of a PUSH or DRAFT that have no row, each counted as often as it occurs."""


class RowWatcher(Protocol):
    """Is told what happens to rows, for cuts and checkpoints."""

    def before(self, rows: Keys) -> None:
        """These rows, none of them -1, are about to change."""

    def on_use(self, rows: Keys) -> None:
        """These rows, -1 left out, are about to be used, where the table keeps the order of use."""

    def on_create(self, rows: Keys) -> None:
        """These rows, which no key has, are about to be given to new keys."""

    def on_remove(self, rows: Keys, keys: Keys) -> None:
        """These rows, of these keys, were evicted or deleted."""


class RowStore:
    """Rows by key.

    Requests come one after the other; the same ones in the same order give the same bytes. Row
    numbers are good until the next `take`.

    Args:
        layout: how a row lies in memory.
        state: the rule's state in a fresh row, float32 [layout.state_words].
        options: `max_bytes` and `LRU.rows` are limits of this store: the caller has divided what is
            meant for the whole table.
        stream: what initial values are drawn from (`hashing.stream_of`).
        name: of the table, for errors.
    Raises:
        ValueError: `max_bytes` has no room for a row, or initial values do not fit the dtype.
    """

    def __init__(
        self,
        layout: RowLayout,
        state: Floats,
        options: TableOptions,
        stream: int,
        name: str = "this table",
    ) -> None:
        options.check_dtype(layout.dtype)
        if state.shape != (layout.state_words,):
            raise ValueError(f"a row has {layout.state_words} words of state, not {state.shape}")
        self.layout = layout
        self.options = options
        self.stream = stream
        self._name = name
        self.watchers: list[RowWatcher] = []
        """Watchers for cuts and checkpoints."""
        self.drafted = 0
        """Rows that the push of the last DRAFT would make."""
        self.reserved_rows = 0
        """Rows that nothing but a push takes the room of."""
        self.created = self.evicted = self.deleted = 0
        self._state = np.ascontiguousarray(state, np.float32)
        self._drawing = drawing(options.init, stream, layout.dim)
        self._index = Index()
        self._rows = Growing(layout.words, np.float32)
        self._keys = Growing(0, np.int64)
        self._free = Growing(0, np.int64)
        self._scratch = np.empty(0, np.int64)
        self._free_rows = 0
        self._free_most = 0
        self._rows_used = 0
        """Row numbers that have been given out; those of rows that went are in `_free`."""
        self._clock = 0
        evicts = options.evict is not None
        self._use = UseOrder() if evicts else None
        self._ttl = options.ttl.clocks if options.ttl is not None else None
        counts = options.admit is not None and options.admit.count > 1
        candidates = _candidates_max(options) if counts else 0
        self._candidates: Candidates | None = None
        if options.admit is not None and counts:
            self._candidates = Candidates(options.admit.count, candidates)
        self.room = self._room(candidates)
        """Rows that there may ever be."""
        lru = options.lru.rows if options.lru is not None else None
        self.rows_max = self.room if lru is None else min(self.room, lru)
        """Rows that a request which creates some leaves, unless it names more itself."""

    def __len__(self) -> int:
        """Rows that are there, with those past their TTL that have not been removed yet."""
        return len(self._index)

    @property
    def memory_bytes(self) -> int:
        """Rows, keys, index, order of use, free rows and keys that wait for admission.

        Memory that was mapped ahead of its use and has not been touched is not counted.
        """
        row = self._rows.row_bytes + self._keys.row_bytes
        row += self._use.row_bytes if self._use is not None else 0
        waiting = self._candidates.nbytes if self._candidates is not None else 0
        return self._rows_used * row + self._free_most * 8 + self._index.nbytes + waiting

    def _room(self, candidates: int) -> int:
        """Rows that `max_bytes` allows, with the index as large as it ever gets."""
        limit, most = ROWS_MAX, self.options.max_bytes
        if most:
            row = self._rows.row_bytes + self._keys.row_bytes + KEY_BYTES_MAX + 8  # in `_free`
            row += self._use.row_bytes if self._use is not None else 0
            room = most - PLACES * 16 - candidates * CANDIDATE_BYTES_MAX
            limit = min(limit, room // row)
        if limit < 1:
            raise ValueError(f"max_bytes={most} has no room for a row of {self.layout}: raise it")
        return limit

    # --- which rows are there ------------------------------------------------------------------

    def take(self, keys: Keys, clock: int, purpose: Purpose) -> RowsTaken:
        """The rows of some keys, created where `purpose` says so.

        Args:
            keys: int64 [n], contiguous. They may repeat, and then have the same row.
            clock: of the request. The latest one so far is what a TTL counts from.
        Raises:
            TableFull: there is no room for the rows to create, or the system has no memory for
                them. Nothing was changed.
        """
        self._clock = max(self._clock, min(clock, CLOCK_MAX))
        self._index.move(keys.size)
        rows = np.empty(keys.size, np.int64)
        absent = self._find(keys, rows)
        created = dropped = 0
        if absent and purpose is not Purpose.READ:
            created, absent = self._create(keys, rows, absent, purpose)
            dropped = absent if purpose in (Purpose.PUSH, Purpose.DRAFT) else 0
        elif self._use is not None and purpose not in (Purpose.READ, Purpose.DRAFT):
            for each in self.watchers:
                each.on_use(rows)
            self._use.touch(rows, self._clock)
        if purpose is Purpose.DRAFT:
            self.drafted, created = created, 0
        self.created += created
        return RowsTaken(rows, created, dropped)

    def delete(self, keys: Keys, clock: int) -> int:
        """Remove the rows of some keys, and the counts of those that wait for admission: a key that
        is used again is a new one. How many rows there were.

        Args:
            keys, clock: as for `take`.
        Raises:
            MemoryError: there is none to note which row numbers are free. Nothing was changed.
        """
        rows = self.take(keys, clock, Purpose.READ).rows
        rows = np.unique(rows[rows >= 0])
        self._free.reserve(self._free_rows + rows.size)
        if self._candidates is not None:
            self._candidates.forget(keys)
        self._remove(rows)
        self.deleted += rows.size
        return rows.size

    def _find(self, keys: Keys, rows: Keys) -> int:
        """Find rows as the index does, where rows past their TTL are removed."""
        if self._use is None or self._ttl is None:
            return self._index.find(keys, rows)
        before = self._clock - self._ttl
        limit = max(SWEPT_MIN, SWEPT_PER_KEY * keys.size)
        swept = self._use.oldest(limit, before)
        self._evict(swept)
        absent = self._index.find(keys, rows)
        if swept.size == limit:  # more may be left, and be asked for
            late = self._use.used_before(rows, before)
            if late.size:
                self._evict(late)
                absent = self._index.find(keys, rows)
        return absent

    def _create(self, keys: Keys, rows: Keys, absent: int, purpose: Purpose) -> tuple[int, int]:
        """Rows for the keys that have none. How many were made, how many keys still have none.

        All memory is taken before anything is changed; a DRAFT ends there, with how many it would
        make.
        """
        kernels = index_kernels()
        pushes = purpose in (Purpose.PUSH, Purpose.DRAFT)
        try:
            which, fresh, chains = self._spare(keys.size, absent, 2 * absent)
            chains[:] = 0
            count = kernels.distinct(keys, rows, chains, fresh, which, self._index.secret)
            fresh = fresh[:count]
            admitted = None
            if self._candidates is not None and pushes:
                admitted = self._candidates.admitted(fresh)
            new_keys = fresh if admitted is None else fresh[admitted]
            reserved = 0 if pushes or self.options.lru is not None else self.reserved_rows
            over = self._over(new_keys.size, rows, reserved)
            self._reserve(new_keys.size + reserved, over)
            if self._candidates is not None and admitted is not None:
                self._candidates.reserve(fresh)
        except MemoryError:
            raise self._no_memory(absent) from None
        if purpose is Purpose.DRAFT:
            numbers = np.full(new_keys.size, TO_COME, np.int64)
        else:
            if self._use is not None:
                for each in self.watchers:
                    each.on_use(rows)
                self._use.touch(rows, self._clock)
                self._evict(self._use.oldest(over))
            if self._candidates is not None and admitted is not None:
                self._candidates.count(fresh, admitted)
            numbers = self._new_rows(new_keys)
        if admitted is not None:
            every = np.full(fresh.size, -1, np.int64)
            every[admitted] = numbers
            numbers = every
        absent = int(kernels.give_rows(which, numbers, rows))
        return new_keys.size, absent if purpose is not Purpose.DRAFT else int((rows == -1).sum())

    def _spare(self, *sizes: int) -> list[Keys]:
        """Arrays of these sizes, until the next request: pages that are new each time cost more."""
        if sum(sizes) > self._scratch.size:
            self._scratch = np.empty(sum(sizes), np.int64)
        ends = np.cumsum(sizes).tolist()
        return [self._scratch[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def _over(self, more: int, rows: Keys, reserved: int) -> int:
        """How many rows have to go for `more` rows, besides those past their TTL and `rows`.

        Args:
            reserved: rows that are to have room besides.
        Raises:
            TableFull: that cannot be.
        """
        limit = self.rows_max - reserved
        over = len(self) + more - limit
        if more and over > 0:
            if self._use is not None and self._ttl is not None:
                self._evict(self._use.oldest(over, self._clock - self._ttl))
                over = len(self) + more - limit
            if over > 0 and self.options.lru is None:
                raise self._full(more, more)
            if over > 0 and more + rows.size > self.rows_max:  # else they fit, however they repeat
                distinct_rows = np.unique(rows[rows >= 0]).size
                if more + distinct_rows > self.room:
                    raise self._full(more, more + distinct_rows)
                over = min(over, len(self) - distinct_rows)
        return max(over, 0) if more else 0

    def _reserve(self, more: int, over: int) -> None:
        """Have the memory for `more` rows when `over` are gone, and for all to be free one day."""
        end = self._rows_used + more - min(self._free_rows + over, more)
        self._rows.reserve(end)
        self._keys.reserve(end)
        if self._use is not None:
            self._use.reserve(end)
            self._free.reserve(end)
        self._index.reserve(more)

    def _no_memory(self, more: int) -> TableFull:
        return TableFull(
            f"the server has no memory for {more} more rows of {self._name}, which has {len(self)}",
            fix="let rows go with evict=ps.LRU(rows=...), or start more servers on more machines",
        )

    def _full(self, more: int, rows: int) -> TableFull:
        limit = f"{self.room} rows" + (
            f" (max_bytes={self.options.max_bytes} on each server)"
            if self.options.max_bytes
            else ""
        )
        if self.options.lru is None:
            failed = f"the table is full: it has {len(self)} of {limit}, {more} more were asked for"
            fix = "raise max_bytes, let rows go with evict=ps.LRU(), or start more servers"
        else:
            failed = f"a request needs {rows} rows at once, {self._name} has room for {limit}"
            fix = "raise max_bytes, or ask for fewer keys at once"
        return TableFull(failed, fix=fix)

    def _new_rows(self, keys: Keys) -> Keys:
        """Make rows for keys that have none: freed ones, the last freed first, then new ones. There
        is memory for them."""
        again = min(self._free_rows, keys.size)
        rows = np.arange(
            self._rows_used - again, self._rows_used - again + keys.size, dtype=np.int64
        )
        if again:
            rows[:again] = self._free.array[self._free_rows - again : self._free_rows][::-1]
        for each in self.watchers:
            each.on_create(rows)
        self._index.insert(keys, rows)
        self._free_rows -= again
        self._rows_used += keys.size - again
        row_kernels().fill(
            *self._drawing, self._rows.array, self._words(), self.layout.half,
            self._state, keys, rows, self._keys.array,
        )  # fmt: skip
        if self._use is not None:
            self._use.add(rows, self._clock)
        return rows

    def _evict(self, rows: Keys) -> None:
        """Remove rows; `_reserve` has seen to the memory."""
        self._remove(rows)
        self.evicted += rows.size

    def _remove(self, rows: Keys) -> None:
        """Take rows, each once, from their keys; `_free` has room for their numbers."""
        if not rows.size:
            return
        keys = self._keys.array[rows]
        end = self._free_rows + rows.size
        if self._use is not None:
            self._use.drop(rows)
        self._index.remove(keys)
        self._free.array[self._free_rows : end] = rows
        self._free_rows = end
        self._free_most = max(self._free_most, end)
        for each in self.watchers:
            each.on_remove(rows, keys)

    # --- what is in them -----------------------------------------------------------------------

    def _words(self) -> npt.NDArray[np.uint32]:
        words: npt.NDArray[np.uint32] = self._rows.array.view(np.uint32)
        return words

    def view(self, rows: Keys, keys: Keys) -> RowView:
        """Rows, distinct and none of them -1, for a rule. Good until the next `take`."""
        if self.watchers:
            self._save(rows)
        return RowView(self._rows.array, self._words(), self.layout, rows, keys, self.stream)

    def read(self, rows: Keys, keys: Keys, out: Floats, positions: Positions | None = None) -> None:
        """Write the values of each row to out[positions[i]], or to out[i] without positions.

        Where the row is -1 it is the key's initial value, as its row would begin with.

        Args:
            rows: int64 [n], from `take` of `keys`.
            out: float32 [m, dim], contiguous.
            positions: int32 [n]; at those that `out` does not have, nothing is written.
        """
        at = EVERYWHERE if positions is None else positions
        kernels, layout = row_kernels(), self.layout
        if layout.half:
            absent = kernels.gather_half(self._words(), layout.half, rows, at, out)
        else:
            absent = kernels.gather(self._rows.array, rows, layout.dim, at, out)
        if absent:
            kernels.gather_initial(*self._drawing, keys, rows, layout.half, at, out)

    def drafts(self, rows: Keys, keys: Keys) -> RowView:
        """Copies of rows as a DRAFT of `keys` gave them, none of them -1: a rule may write there.
        Those that are to come are as they would begin."""
        raw = np.empty((rows.size, self.layout.words), np.float32)
        words, slots = raw.view(np.uint32), np.arange(rows.size)
        self.raw(rows, raw)
        fresh = np.flatnonzero(rows < 0)
        row_kernels().fill(
            *self._drawing, raw, words, self.layout.half,
            self._state, keys[fresh], fresh, np.empty(rows.size, np.int64),
        )  # fmt: skip
        return RowView(raw, words, self.layout, slots, keys, self.stream)

    def read_state(self, rows: Keys) -> tuple[Floats, Counts | None]:
        """The rule's state [n, state_words] of rows, none of them -1, and their update counts."""
        begin = self.layout.value_words
        state = self._rows.array[rows, begin : begin + self.layout.state_words]
        if not self.layout.counted:
            return state, None
        return state, self._words()[rows, self.layout.count_at]

    def write(
        self,
        rows: Keys,
        values: Floats,
        state: Floats | None = None,
        counts: Counts | None = None,
    ) -> None:
        """Overwrite rows, none of them -1. Of a row that is named twice, the later one holds.

        Args:
            values: float32 [n, dim]; 16-bit rows hold the nearest.
            state: float32 [n, state_words]; None: it stays as it is.
            counts: uint32 [n]; None: they stay. Ignored where rows keep none.
        """
        if self.watchers:
            self._save(rows)
        floats, words, layout = self._rows.array, self._words(), self.layout
        scatter = row_kernels().scatter
        scatter(floats, words, layout.half, 0, rows, values, layout.half > 0)
        if state is not None:
            scatter(floats, words, 0, layout.value_words, rows, state, False)
        if counts is not None and layout.counted:
            words[rows, layout.count_at] = counts

    def _save(self, rows: Keys) -> None:
        for each in self.watchers:
            each.before(rows)

    # --- for a cut -----------------------------------------------------------------------------

    @property
    def rows_used(self) -> int:
        """Row numbers that have been given out."""
        return self._rows_used

    def free(self, begin: int, end: int) -> Keys:
        """Some of those that no key has, by their place among them. A row keeps its place until it
        is given to a key."""
        rows: Keys = self._free.array[begin : min(end, self._free_rows)].copy()
        return rows

    def raw(self, rows: Keys, out: Floats) -> None:
        """Write rows as they lie in memory to `out`, [n, layout.words]; nothing where one is below
        0."""
        row_kernels().gather(self._rows.array, rows, self.layout.words, EVERYWHERE, out)

    def write_raw(self, rows: Keys, raw: Floats) -> None:
        """Overwrite rows, none of them -1, by what `raw` gave."""
        if self.watchers:
            self._save(rows)
        row_kernels().scatter(self._rows.array, self._words(), 0, 0, rows, raw, False)

    @property
    def orders_use(self) -> bool:
        """Whether it knows when its rows were used: it lets some go."""
        return self._use is not None

    def uses(self, rows: Keys) -> Keys:
        """When rows, none of them -1, were used last: numbers that only grow (`clocks_of`)."""
        assert self._use is not None
        return self._use.numbers(rows)

    @property
    def clock(self) -> int:
        """The latest one so far, from which a TTL counts."""
        return self._clock

    def candidates(self) -> Counted | None:
        """Keys that wait for admission; None: every key gets a row."""
        return None if self._candidates is None else self._candidates.counted()

    def restore(
        self,
        clock: int,
        created: int,
        evicted: int,
        deleted: int,
        candidates: Waiting | None,
    ) -> None:
        """Take over what is not in the rows, of a store whose rows were `put_new` before."""
        self._clock = clock
        self.created, self.evicted, self.deleted = created, evicted, deleted
        if self._candidates is not None and candidates is not None:
            self._candidates.restore(*candidates)

    def put_new(self, keys: Keys) -> Keys:
        """Rows for keys that have none.

        Raises:
            TableFull: the system has no memory for them. Nothing was changed.
        """
        try:
            self._reserve(keys.size, 0)
        except MemoryError:
            raise self._no_memory(keys.size) from None
        return self._new_rows(keys)

    def idle(self, rows: Keys, clock: int) -> Keys:
        """Clocks for which rows, none of them -1, are idle at a clock; 0: it is not known."""
        if self._use is None:
            return np.zeros(rows.size, np.int64)
        return np.maximum(max(self._clock, clock) - clocks_of(self._use.numbers(rows)), 0)

    def is_past(self, idle: Keys) -> npt.NDArray[np.bool_]:
        """Whether rows that were used last so many clocks ago are past the TTL."""
        return idle > (EVER if self._ttl is None else self._ttl)

    def set_idle(self, rows: Keys, idle: Keys) -> None:
        """Say of rows that were just taken, none of them -1, for how many clocks they are idle."""
        if self._use is not None:
            late = np.flatnonzero(idle > 0)
            self._use.date(rows[late], self._clock - np.minimum(idle[late], CLOCK_MAX))

    def set_uses(self, keys: Keys, clocks: Keys) -> None:
        """Say when the rows of all keys were used last, that first whose use is longest ago."""
        if self._use is not None:
            rows = np.empty(keys.size, np.int64)
            self._index.find(keys, rows)
            self._use.touch(rows, 0)
            self._use.set_clocks(rows, clocks)

    def keys_of(self, rows: Keys) -> Keys:
        """The keys of rows, none of them -1."""
        keys: Keys = self._keys.array[rows]
        return keys

    def scan(self, cursor: int, limit: int) -> tuple[Keys, Keys, int]:
        """Some rows that are there: keys, rows and the cursor to go on from, -1 at the end.

        A row that is there all the while is met once. There may be fewer than `limit` in a part,
        and even none before the end.

        Args:
            cursor: 0 at first.
            limit: row numbers to look at, at least 1.
        """
        end = min(self._rows_used, cursor + limit)
        keys = self._keys.array[cursor:end].copy()
        rows = np.empty(keys.size, np.int64)
        self._index.find(keys, rows)
        there = rows == np.arange(cursor, cursor + keys.size)  # else the row is a free one
        return keys[there], rows[there], end if end < self._rows_used else -1


def _candidates_max(options: TableOptions) -> int:
    if not options.max_bytes:
        return CANDIDATES_MAX
    return max(1, min(CANDIDATES_MAX, options.max_bytes // CANDIDATES_SHARE // CANDIDATE_BYTES_MAX))


USES_OF_A_CLOCK = 28
"""Bits. Past so many uses in one clock, further ones count as of the next clock."""
CLOCK_MAX = (1 << 63 - USES_OF_A_CLOCK) - 1
"""Later ones count as this one."""
EVER = np.iinfo(np.int64).max
"""A use after all others."""


def clocks_of(uses: Keys) -> Keys:
    """The clocks of uses."""
    return uses >> USES_OF_A_CLOCK


class UseOrder:
    """The rows of a table in the order of their last use. Within a request: that of its keys.

    Each use has a number, which is higher than those before and has the clock in its upper bits. So
    a row's number says all about its place in the order, without the other rows. Rows that are
    given an older one stay where they are in the list until the order of such rows matters.
    """

    row_bytes = 24

    def __init__(self) -> None:
        self._links = Growing(3, np.int64)
        self._ends = np.full(2, -1, np.int64)
        self._next = 1
        """The least number of the next use."""
        self._rows = 0
        self._dated = 0
        """Rows that were given an older number."""
        self._astray = EVER
        """The least number of a row that may not be in its place in the list."""

    def reserve(self, rows: int) -> None:
        """Have room for row numbers below `rows`."""
        self._links.reserve(rows)

    def add(self, rows: Keys, clock: int) -> None:
        """Put new rows in front."""
        first = max(self._next, clock << USES_OF_A_CLOCK)
        self._next = first + rows.size
        self._rows += rows.size
        use_kernels().add(self._links.array, self._ends, rows, first)

    def date(self, rows: Keys, clocks: Keys) -> None:
        """Say that rows were used last at these clocks, all before the present one."""
        if rows.size:
            half = 1 << USES_OF_A_CLOCK - 1  # of a clock's numbers, behind those that uses get
            place = half + (self._dated + np.arange(rows.size)) % half
            numbers = (clocks << USES_OF_A_CLOCK) + place
            self._links.array[rows, 2] = numbers
            self._dated += rows.size
            self._astray = min(self._astray, int(numbers.min()))

    def _sort(self) -> None:
        """Put all rows in their places in the list."""
        rows = np.empty(self._rows, np.int64)
        use_kernels().oldest(self._links.array, self._ends, EVER, rows)
        numbers = self._links.array[rows, 2]
        order = np.argsort(numbers, kind="stable")
        rows, numbers = rows[order], numbers[order]
        self._ends[:] = -1
        use_kernels().add(self._links.array, self._ends, rows, 0)
        self._links.array[rows, 2] = numbers
        self._astray = EVER

    def touch(self, rows: Keys, clock: int) -> None:
        """Move rows to the front; -1 is left out."""
        first = max(self._next, clock << USES_OF_A_CLOCK)
        self._next = first + rows.size
        use_kernels().touch(self._links.array, self._ends, rows, first)

    def oldest(self, limit: int, before: int | None = None) -> Keys:
        """At most `limit` rows last used before a clock, the oldest first. They stay."""
        rows = np.empty(limit, np.int64)
        end = EVER if before is None else before << USES_OF_A_CLOCK
        if limit and self._astray < end:
            self._sort()
        count = use_kernels().oldest(self._links.array, self._ends, end, rows)
        return rows[:count]

    def used_before(self, rows: Keys, clock: int) -> Keys:
        """Subset of `rows` (-1 is left out) last used before a clock, each once."""
        there = np.unique(rows[rows >= 0])
        late: Keys = there[self._links.array[there, 2] < clock << USES_OF_A_CLOCK]
        return late

    def numbers(self, rows: Keys) -> Keys:
        """Numbers of the last use of rows."""
        uses: Keys = self._links.array[rows, 2]
        return uses

    def set_clocks(self, rows: Keys, clocks: Keys) -> None:
        """Say when all rows were used last; they are given in their order, which stays."""
        place = np.arange(rows.size)
        first = clocks << USES_OF_A_CLOCK
        numbers = np.maximum.accumulate(first - place) + place + 1
        self._links.array[rows, 2] = numbers
        self._next = int(numbers.max(initial=0)) + 1

    def drop(self, rows: Keys) -> None:
        """Take rows out of the order; their numbers stay until they are added again."""
        self._rows -= rows.size
        use_kernels().drop(self._links.array, self._ends, rows)

"""Copies of a table's rows on the client, each for some clocks: which are fresh, and which go.

It sends nothing and decides nothing about pulls; `row_reads` asks it. The caller holds the client's
lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.compiling import load_index
from paramserve.core.table.index import Index

Array = npt.NDArray[Any]

LOOKED_AT_MIN = 1024
"""Copies that are looked at together for those that may go: a call of numpy costs 1 us."""
NEVER = np.iinfo(np.int64).min


class CacheReport(NamedTuple):
    """What a cache has, and has done since it was made. All counts are of keys."""

    rows: int
    """Copies that are here, the too old ones among them."""
    hits: int
    """Keys of pulls and prefetches that were read here."""
    misses: int
    """Keys of pulls and prefetches that were read from the servers."""
    memory_bytes: int


class CachedRows(NamedTuple):
    """What of some keys is here."""

    rows: Array
    """float32 [n, dim]; undefined where a key is missing."""
    missing: Array
    """The numbers of the keys that are not here, int64 [m]."""
    versions: list[int] | None
    """What the oldest of the copies was read at, for each shard; None: all are missing."""


class RowCache:
    """At most `rows` copies of rows, each used until it is `clocks` clocks old.

    A copy that was used since the last look at it stays when room is needed, another goes (Clock,
    also called second chance): keys that come once do not push out those that come again.

    Args:
        rows: copies at most, at least 1.
        clocks: a copy that was read at clock c is used up to clock c + clocks.
        keep_pushed: whether a copy stays when this client pushes to its row.
    Source: Corbato, A paging experiment with the Multics system, 1968.
    """

    def __init__(self, rows: int, clocks: int, dim: int, *, keep_pushed: bool) -> None:
        load_index()
        self.clocks = clocks
        self.keep_pushed = keep_pushed
        self._index = Index()
        self._values = np.empty((rows, dim), np.float32)
        self._keys = np.empty(rows, np.int64)
        self._read_at = np.full(rows, NEVER)
        """The client's clock; `NEVER` where there is no copy."""
        self._used = np.zeros(rows, np.bool_)
        self._first_unused = 0
        """Places that have been used at all."""
        self._free = np.empty(0, np.int64)
        """Rows of the cache that are free again."""
        self._hand = 0
        self._versions: dict[int, list[int]] = {}
        """Lowest versions, by clock, that copies of it were read at."""
        self._hits, self._misses = 0, 0

    @property
    def report(self) -> CacheReport:
        """What there is, and what was done."""
        arrays = (self._values, self._keys, self._read_at, self._used, self._index)
        nbytes = sum(each.nbytes for each in arrays)
        return CacheReport(len(self._index), self._hits, self._misses, nbytes)

    def find(self, keys: Array, clock: int) -> CachedRows:
        """Copies of these keys, int64 [n], that are fresh at a clock."""
        places = self._places(keys)
        read_at = self._read_at[places]
        fresh = (places >= 0) & (read_at >= clock - self.clocks)
        missing = np.flatnonzero(~fresh)
        self._hits += keys.size - missing.size
        self._misses += missing.size
        if missing.size == keys.size:
            rows = np.empty((keys.size, self._values.shape[1]), np.float32)
            return CachedRows(rows, missing, None)
        self._used[places[fresh]] = True
        rows = self._values.take(places, axis=0, mode="clip")
        return CachedRows(rows, missing, self._lowest(int(read_at[fresh].min())))

    def _places(self, keys: Array) -> Array:
        self._index.move(keys.size)
        places = np.empty(keys.size, np.int64)
        self._index.find(keys, places)
        return places

    def _lowest(self, clock: int) -> list[int]:
        """Lowest version of each shard since that clock."""
        since = [each for at, each in self._versions.items() if at >= clock]
        return [min(each) for each in zip(*since, strict=True)]

    def keep(self, keys: Array, rows: Array, clock: int, versions: Sequence[int]) -> None:
        """Keep copies of rows that were read at a clock, unless newer ones are here.

        Args:
            keys: int64 [n], each once.
            rows: float32 [n, dim].
            versions: that the shards read them at.
        """
        self._note(clock, versions)
        places = self._places(keys)
        present = np.flatnonzero(places >= 0)
        present = present[self._read_at[places[present]] <= clock]
        self._values[places[present]] = rows[present]
        self._read_at[places[present]] = clock
        new = np.flatnonzero(places < 0)
        room = self._make_room(min(new.size, self._keys.size), clock)
        new = new[: room.size]
        self._index.insert(np.ascontiguousarray(keys[new]), room)
        self._keys[room] = keys[new]
        self._values[room] = rows[new]
        self._read_at[room] = clock
        self._used[room] = False

    def _note(self, clock: int, versions: Sequence[int]) -> None:
        oldest = self._versions.get(clock)
        if oldest is None:
            recent = {at: v for at, v in self._versions.items() if at >= clock - self.clocks}
            self._versions = recent | {clock: list(versions)}
        else:
            self._versions[clock] = [min(each) for each in zip(oldest, versions, strict=True)]

    def drop(self, keys: Array) -> None:
        """Release the copies of these keys, int64 [n]; they may repeat."""
        places = self._places(keys)
        self._let_go(np.unique(places[places >= 0]))

    def _let_go(self, places: Array) -> None:
        self._take_out(places)
        self._free = np.concatenate([self._free, places])

    def _take_out(self, places: Array) -> None:
        self._index.remove(self._keys[places])
        self._read_at[places] = NEVER

    def _make_room(self, count: int, clock: int) -> Array:
        """Places for new copies, int64 [count]; the copies that were there are dropped."""
        unused_count = min(count, self._keys.size - self._first_unused)
        unused = np.arange(self._first_unused, self._first_unused + unused_count, dtype=np.int64)
        self._first_unused += unused_count
        remaining = max(self._free.size - (count - unused_count), 0)
        free, self._free = self._free[remaining:], self._free[:remaining]
        places = [unused, free]
        needed = count - unused_count - free.size
        while needed:
            evicted = self._sweep(needed, clock - self.clocks)
            self._take_out(evicted)
            places.append(evicted)
            needed -= evicted.size
        return np.concatenate(places)

    def _sweep(self, count: int, oldest: int) -> Array:
        """Places of copies that may go, at most so many, among the next ones under the hand."""
        end = min(self._hand + max(2 * count, LOOKED_AT_MIN), self._keys.size)
        used, read_at = self._used[self._hand : end], self._read_at[self._hand : end]
        evicted = np.flatnonzero(((read_at < oldest) | ~used) & (read_at != NEVER))[:count]
        passed = int(evicted[-1]) + 1 if evicted.size == count else end - self._hand
        used[:passed] = False
        places = evicted + self._hand
        self._hand = (self._hand + passed) % self._keys.size
        return places

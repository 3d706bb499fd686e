"""A client's reads of tables: pulled now, asked for ahead, or found among the copies kept here.

Each is begun and finished; between the two a prefetch waits for its pull, for one clock at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.client.connection import Connection
from paramserve.client.row_cache import CachedRows, CacheReport, RowCache
from paramserve.client.row_slots import RowPull, by_shard, decode_rows, lay_pull, owned
from paramserve.client.step_parts import StepParts
from paramserve.client.steps import Steps
from paramserve.client.ticket import Ticket, finish
from paramserve.core.partition import Block
from paramserve.core.table import routing
from paramserve.errors import Overloaded

if TYPE_CHECKING:
    from paramserve.client.rows import KeyedTable

Array = npt.NDArray[Any]

NOT_READ = 1 << 62
"""Version instead of that of a shard that none of the rows is on: above any, so that nothing is
stale there."""
NO_ROWS: Array = np.empty((0, 0), np.float32)
PREFETCHED_MAX = 64
"""Prefetches of one table that wait to be read; the oldest goes first. A batch may have one for
each of its features, and the next batch as many."""
AHEAD_CLOCKS_MAX = 1
"""Clocks that this client may have ended on a table between a prefetch and its pull."""
TOGETHER_MAX = 64
"""Reads that go in one message to each shard."""
PUSHED_MAX = 1 << 14
"""Keys pushed to during a read that are noted as they come; past it only those that it reads."""


class TableRead(NamedTuple):
    """Rows of one table, as a prefetch of several tables takes them."""

    table: KeyedTable
    keys: npt.ArrayLike
    """Integers [...]."""


class RowRead(Struct, eq=False, weakref=True):
    """A read of rows of one table that is under way.

    Attributes:
        clock: of this client when it began.
        requested: the keys that the shards are asked for, int64 [m].
        numbers: which of the requested keys each key is of which no copy is here; None:
            `requested` are just these.
        cached: copies of the keys' rows that are here.
        exact: whether the rows come as they are, whatever codec of pulls the table has.
        grouped: whether `requested` are as `by_shard` gives them. Links may change before the read
            is sent: it is laid as was decided here.
    """

    _reads: RowReads
    block: Block
    keys: Array
    clock: int
    requested: Array
    numbers: Array | None = None
    cached: CachedRows | None = None
    ticket: Ticket | None = None
    pull: RowPull | None = None
    _pushed: list[Array] = []
    """Keys that this client has pushed to since then, if copies are to be kept."""
    _pushed_size: int = 0
    exact: bool = False
    grouped: bool = False

    def drop(self) -> None:
        """Forget this prefetch, if no pull has read it; its memory goes back."""
        self._reads.drop(self)

    def wrote(self, keys: Array) -> None:
        """This client pushes to these keys, int64 [n > 0], while the read is under way.

        However many come, at most `PUSHED_MAX` and two for each wanted key are remembered.
        """
        self._pushed.append(keys)
        self._pushed_size += keys.size
        if self._pushed_size > PUSHED_MAX + 2 * self.requested.size:
            own = self.requested[self.overtaken()]
            self._pushed, self._pushed_size = [own] if own.size else [], own.size

    def overtaken(self) -> Array:
        """Which of the wanted keys were pushed to since the read began: bool [m]."""
        if not self._pushed:
            return np.zeros(self.requested.size, np.bool_)
        return _among(np.concatenate(self._pushed), self.requested)


class ReadVersions:
    """The lowest versions that the rows of one table were read at for the next push.

    Reads of an evaluation, which no push follows, do not count if there are others.
    """

    def __init__(self) -> None:
        self._lowest: list[int] = []
        self._learned = False
        """Whether a read that a push is to follow came since the last push."""

    def read(self, versions: Sequence[int], learns: bool) -> None:
        """Rows have been handed out that were read at these versions, one for each shard."""
        if self._learned and not learns:
            return
        lowest = [*versions]
        if self._learned:
            for shard, version in enumerate(self._lowest):
                if version < lowest[shard]:
                    lowest[shard] = version
        self._lowest, self._learned = lowest, learns

    def pushed(self) -> list[int]:
        """Versions for a push; later reads are for the next one. Empty: nothing was read yet."""
        self._learned = False
        return list(self._lowest)


class RowReads:
    """What a client reads of tables, has asked for ahead, and keeps copies of.

    Attributes:
        exact: whether all rows come as they are, whatever codecs of pulls the tables have; may be
            changed.
    """

    def __init__(self, connection: Connection, steps: Steps) -> None:
        self.exact = False
        self._connection = connection
        self._steps = steps
        self._exchange = connection.exchange
        self._lock = connection.lock
        self._prefetched: dict[int, deque[RowRead]] = {}
        self._caches: dict[int, RowCache] = {}
        self._under_way: dict[int, WeakSet[RowRead]] = {}
        """Reads under way by block, where copies are kept and dropped when they are pushed to."""
        self._read_versions: dict[int, ReadVersions] = {}
        """Versions read, by group."""

    # --- one read --------------------------------------------------------------------------------

    def pull(
        self,
        block: Block,
        keys: Array,
        *,
        learns: bool,
        timeout_s: float | None,
        exact: bool = False,
    ) -> Array:
        """Rows of keys, int64 [n], as float32 [n, dim]; see `Table.pull`."""
        if self._connection.checks:
            self._connection.check()
        assert block.table is not None
        if not keys.size:
            return np.empty((0, block.table.dim), np.float32)
        with self._lock:
            ahead = None
            if self._prefetched and not exact:
                ahead = self._ahead(block, keys)
            if ahead is None:
                read, places = self._look(block, keys, exact), None
                self._begin([read], timeout_s)
            else:
                read, places = ahead
        rows = self._finish(read, timeout_s, learns)
        return rows if places is None else rows[places]

    def _look(self, block: Block, keys: Array, exact: bool = False) -> RowRead:
        """A read that is not sent yet, of what is not found here: copies are what came."""
        clock = self._steps.clocks.get(block.group_name, 0)
        grouped = not self._exchange.shared  # asked once: another thread may make a link anew
        as_is = exact or self.exact
        read = RowRead(self, block, keys, clock, keys, exact=as_is, grouped=grouped)
        cache = self._cache(block) if self._caches and not exact else None
        if cache is not None:
            read.cached = cache.find(keys, read.clock)
            missing = keys[read.cached.missing]
            read.requested, read.numbers = self._distinct(block, missing, grouped)
            if read.requested.size:
                self._under_way.setdefault(block.id, WeakSet()).add(read)
        elif grouped:  # Over a network each row travels once.
            read.requested, read.numbers = self._distinct(block, keys, grouped)
        return read

    def _distinct(self, block: Block, keys: Array, grouped: bool) -> tuple[Array, Array]:
        """The distinct keys as `lay_pull` takes them, and the number of each key among them."""
        distinct, numbers = routing.distinct(keys)
        shards = self._exchange.count
        if not grouped or (shards == 1 and block.row_codecs is None):
            return distinct, numbers
        return by_shard(distinct, numbers, shards)

    def _cache(self, block: Block) -> RowCache | None:
        """The copies of a table's rows, if they may be used: not while its clocks are in step."""
        cache = self._caches.get(block.id)
        return None if cache is None or self._steps.traits_of(block).collects else cache

    def _begin(self, reads: list[RowRead], timeout_s: float | None) -> list[RowRead]:
        """Send reads in one message to each shard."""
        # Loops and `+=`, as in `Steps`: a comprehension or an `append` is one call more.
        requests: list[RowRead] = []
        for read in reads:
            if read.requested.size:
                requests += [read]
        if not requests:
            return reads
        self._steps.begin(timeout_s, "pull", len(requests), reads=True)
        parts: list[StepParts] = []
        try:
            for read in requests:
                requested, grouped = read.requested, read.grouped
                read.pull = lay_pull(
                    self._exchange, read.block, requested, grouped=grouped, exact=read.exact
                )
                parts += [StepParts("pull", read.block, row_pulls=(read.pull,))]
        except Overloaded:  # at once: what refers to the error refers to these
            self._exchange.give_back([slot for each in parts for slot in each.taken_slots])
            raise
        for read, ticket in zip(requests, self._steps.ask(parts), strict=True):
            read.ticket = ticket
        return reads

    def _finish(self, read: RowRead, timeout_s: float | None, learns: bool) -> Array:
        """Wait for a read: its rows, float32 [n, dim]."""
        versions: list[int] | None = None
        rows = NO_ROWS
        if read.ticket is not None and read.pull is not None:
            try:
                finish(read.ticket, timeout_s)
            except BaseException:
                with self._lock:
                    self._steps.forget(read.ticket)
                raise
            if read.block.row_codecs is not None:
                decode_rows(self._exchange, read.pull, exact=read.exact)
            rows = owned(self._exchange, read.pull)
            assert read.ticket.operation is not None
            replies = read.ticket.operation.replies
            versions = []
            for shard in range(self._exchange.count):
                versions += [replies[shard].version if shard in replies else NOT_READ]
        with self._lock:
            if read.cached is not None and versions is not None:
                self._keep(read, rows, versions)
            self._note_versions(read, versions, learns)
        if read.cached is None:
            return rows if read.numbers is None else rows[read.numbers]
        if read.numbers is not None and read.numbers.size:
            read.cached.rows[read.cached.missing] = rows[read.numbers]
        return read.cached.rows

    def _note_versions(self, read: RowRead, versions: list[int] | None, learns: bool) -> None:
        cached = read.cached.versions if read.cached is not None else None
        noted = self._read_versions.get(read.block.group)
        if noted is None:
            noted = self._read_versions[read.block.group] = ReadVersions()
        if versions is None or cached is None:
            noted.read(versions or cached or [], learns)
        else:
            noted.read([min(each) for each in zip(versions, cached, strict=True)], learns)

    def base_of_push(self, block: Block) -> None:
        """Let the next push to a table's group say what its rows were read at: a read that was
        answered and is for a later push does not count."""
        noted = self._read_versions.get(block.group)
        if noted is not None and (lowest := noted.pushed()):
            self._steps.versions[block.group] = lowest

    # --- ahead -----------------------------------------------------------------------------------

    def prefetch(self, requests: Sequence[tuple[Block, Array]]) -> list[RowRead]:
        """Ask for rows ahead, of several tables in one message to each shard.

        Args:
            requests: blocks of tables, and keys as int64 [n].
        Raises:
            As `Table.prefetch`. None of them is read ahead.
        """
        self._connection.check()
        reads: list[RowRead] = []
        with self._lock:
            most = min(TOGETHER_MAX, self._exchange.requests)
            try:
                for some in _parts([each for each in requests if each[1].size], most):
                    looked = [self._look(block, keys.copy()) for block, keys in some]
                    for read in self._begin(looked, None):
                        reads.append(read)
                        usable = self._usable(read.block)
                        usable.append(read)
                        if len(usable) > PREFETCHED_MAX:
                            self._forget_read(usable.popleft())
            except BaseException:
                for read in reads:
                    self.drop(read)
                raise
        return reads

    def drop(self, read: RowRead) -> None:
        """Forget a prefetch, if no pull has read it; its memory goes back."""
        with self._lock:
            prefetched = self._prefetched.get(read.block.id, ())
            if read in prefetched:
                self._prefetched[read.block.id].remove(read)
                self._forget_read(read)

    def _forget_read(self, read: RowRead) -> None:
        self._under_way.get(read.block.id, WeakSet()).discard(read)
        if read.ticket is not None:
            self._steps.forget(read.ticket)

    def _usable(self, block: Block) -> deque[RowRead]:
        """The prefetches of a table that a pull may use at this clock; older ones are released."""
        prefetched = self._prefetched.setdefault(block.id, deque())
        if prefetched:
            clocks = 0 if self._steps.traits_of(block).collects else AHEAD_CLOCKS_MAX
            oldest = self._steps.clocks.get(block.group_name, 0) - clocks
            while prefetched and prefetched[0].clock < oldest:
                self._forget_read(prefetched.popleft())
        return prefetched

    def _ahead(self, block: Block, keys: Array) -> tuple[RowRead, Array | None] | None:
        """A read that was begun ahead and has all of these keys, with the number of each among its
        own; None: they are just these. The caller is its owner now."""
        if not self._prefetched.get(block.id):
            return None
        usable = self._usable(block)
        for read in usable:
            if np.array_equal(read.keys, keys):
                usable.remove(read)
                return read, None
        for read in usable:
            places = places_among(read.keys, keys)
            if places is not None:
                usable.remove(read)
                return read, places
        return None

    # --- copies ----------------------------------------------------------------------------------

    def cache(self, block: Block, rows: int, clocks: int, *, keep_pushed: bool) -> None:
        """Keep copies of a table's rows from now on, or none; see `Table.cache_rows`."""
        self._connection.check()
        assert block.table is not None
        with self._lock:
            if self._steps.traits_of(block).collects:
                raise ValueError(
                    f"table {block.group_name!r} has a policy whose workers all read the values of "
                    "the same clock: copies that are older would break that. Give the table "
                    "ps.Async() or ps.BoundedStaleness() to cache its rows"
                )
            self._caches.pop(block.id, None)
            self._under_way.pop(block.id, None)
            if rows:
                dim = block.table.dim
                self._caches[block.id] = RowCache(rows, clocks, dim, keep_pushed=keep_pushed)

    def cache_report(self, block: Block) -> CacheReport:
        """Counts of the cached copies of a table's rows; see `Table.cache_report`."""
        with self._lock:
            cache = self._caches.get(block.id)
            return CacheReport(0, 0, 0, 0) if cache is None else cache.report

    def _keep(self, read: RowRead, rows: Array, versions: list[int]) -> None:
        """Keep copies of what a read has found, but not of rows that were pushed to meanwhile."""
        self._under_way.get(read.block.id, WeakSet()).discard(read)
        cache = self._cache(read.block)
        if cache is None:
            return
        keys, overtaken = read.requested, read.overtaken()
        if overtaken.any():
            keys, rows = keys[~overtaken], rows[~overtaken]
        cache.keep(keys, rows, read.clock, versions)

    def wrote(self, block: Block, keys: Array) -> None:
        """This client changes rows: it will not read copies from before that, unless told so."""
        if self._prefetched.get(block.id):
            self._usable(block)  # that old prefetches give their memory back does not need a pull
        cache = self._caches.get(block.id)
        if cache is not None and not cache.keep_pushed and keys.size:
            self._drop_copies(block, cache, keys)

    def deleted(self, block: Block, keys: Array) -> None:
        """This client deletes rows, of keys [n > 0]: it reads none of them from copies, nor from
        what it has asked for ahead."""
        prefetched = self._prefetched.get(block.id, ())
        for read in [each for each in prefetched if _among(keys, each.keys).any()]:
            self._prefetched[block.id].remove(read)
            self._forget_read(read)
        cache = self._caches.get(block.id)
        if cache is not None:
            self._drop_copies(block, cache, keys)

    def _drop_copies(self, block: Block, cache: RowCache, keys: Array) -> None:
        """Release the copies of some rows, and keep none that are being read."""
        cache.drop(keys)
        if under_way := self._under_way.get(block.id):
            own = keys.copy()
            for read in under_way:
                read.wrote(own)


def places_among(others: Array, keys: Array) -> Array | None:
    """Where each of some keys, int64 [n], first stands among others, int64 [m]; None if one does
    not."""
    if not bool((others == keys[0]).any()):  # the common way not to be among them, and quick
        return None
    distinct, numbers = routing.distinct(np.concatenate([others, keys]))
    among, key_numbers = numbers[: others.size], numbers[others.size :]
    count = int(among.max()) + 1
    if distinct.size > count:
        return None
    if count == others.size:
        return key_numbers
    first = np.empty(count, np.int64)
    first[among[::-1]] = np.arange(others.size - 1, -1, -1)
    places: Array = first[key_numbers]
    return places


def _among(others: Array, keys: Array) -> Array:
    """Which of some keys are among others."""
    _, numbers = routing.distinct(np.concatenate([others, keys]))
    count = int(numbers[: others.size].max()) + 1
    mask: Array = numbers[others.size :] < count
    return mask


def _parts(
    requests: Sequence[tuple[Block, Array]], most: int
) -> Iterator[Sequence[tuple[Block, Array]]]:
    for start in range(0, len(requests), most):
        yield requests[start : start + most]

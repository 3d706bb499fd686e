"""A keyed table as its users hold it: rows by `int64` key, pulled and pushed by the batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client import arrow
from paramserve.client.keyed import Keyed
from paramserve.client.labels import Labels
from paramserve.client.names import as_keys, as_rows
from paramserve.client.row_cache import CacheReport
from paramserve.client.rows import CheckedRows
from paramserve.client.string_keys import READ_AS_STRINGS, hashed
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.core.table.options import TableOptions
from paramserve.core.table.parts import Records, check_records
from paramserve.errors import ShapeMismatch, warn_user
from paramserve.messages import TableReport
from paramserve.rules.base import Hyper
from paramserve.rules.layout import WIDE, words_of

Array = npt.NDArray[Any]

SCAN_ROWS = 65_536
"""Rows that one request reads or writes, unless the caller says otherwise."""

HASHES = 1 << 32
"""Keys of strings are mostly above this, either way."""
ASKED_KEYS = 64
"""First keys given to a table with labels that are compared with its labels, at most."""


class Table:
    """Rows of `dim` values by key, on the servers of a client; `client.table` makes it.

    Keys are integers of 64 bits, any of them. A row is there from the first push to it on; until
    then it reads as its initial value. Each shard holds the keys that hash to it.

    Attributes:
        name: also of its group, for `client.tick`, `client.set_consistency` and reports.
        dim: values of a row.
        wide: the numpy dtype of its values where they count in 64 bits; None: float32.
        client: that it was got from.
        evicts: whether it lets rows go (`evict=`), and so knows when each was last used.
    """

    def __init__(self, client: Any, keyed: Keyed, block: Block) -> None:
        assert block.table is not None
        self.client = client
        self.block = block
        self.name = block.group_name
        self.dim = block.table.dim // words_of(block.table.dtype)
        self.wide = WIDE.get(block.table.dtype)
        self._keyed = keyed
        self._reads = keyed.reads
        self._labels: Labels | None = None
        self._sought_labels = False
        self.evicts = TableOptions.from_spec(block.table.options).evict is not None
        self._unasked = block.table.labels > 0
        """Whether keys of this client have yet to be compared with the labels."""

    def __repr__(self) -> str:
        return f"Table({self.name!r}, dim={self.dim})"

    @property
    def group(self) -> str:
        """The group that steps with it: its own."""
        return self.name

    def keys_of(self, strings: Any) -> Array:
        """Keys of strings, as `ps.keys_of`; a table with labels keeps the strings as well.

        `push` and `put` take the strings themselves, and do the same; `pull` and `prefetch` take
        them and keep none. Hash a column once where it is used often.

        Raises:
            As `ps.keys_of`; where labels are sent also as `put`.
        """
        keys = hashed(strings, f"keys of table {self.name!r}")
        labels = self.known_labels()
        if labels is not None:
            labels.keep(strings, keys)
        return keys

    def labels(self, keys: npt.ArrayLike) -> list[str]:
        """The strings that keys were made of, in their order; empty where none is known.

        Known is what any client has given to this table as a string: to `keys_of`, `push` or `put`.
        Of strings with equal keys, the one that was sent last; of one above 96 bytes, its
        beginning.

        Raises:
            ValueError: the table was made without `labels=True`.
            As `pull`.
        """
        labels = self.known_labels()
        if labels is None:
            raise ValueError(
                f"table {self.name!r} keeps no labels. Applied: no. To fix: make it with "
                f"client.table({self.name!r}, ..., labels=True)"
            )
        return labels.of(as_keys(keys, self.name)[0])

    def known_labels(self) -> Labels | None:
        """What it keeps strings in, if it was defined with labels."""
        if not self._sought_labels:
            self._labels = self._keyed.labels_of(self.block)
            self._sought_labels = True
        return self._labels

    def _compare_with_labels(self, keys: Array) -> None:
        """Warn where the first keys are integers that no string has made. Hashes are larger: all of
        a batch are this small by a chance below 1 in 2**31."""
        if not keys.size:
            return
        self._unasked = False
        labels, first = self.known_labels(), keys[:ASKED_KEYS]
        if (
            labels is None
            or np.abs(keys, dtype=np.float64).max() >= HASHES
            or any(labels.of(first))
        ):
            return
        warn_user(
            f"table {self.name!r} keeps labels, and its first keys here are integers without one, "
            f"such as {int(first[0])}: they get new rows, and not those of the string "
            f"'{int(first[0])}'. To fix: where the ids are strings, as in an earlier run, "
            f"{READ_AS_STRINGS}; where they are integers everywhere, leave labels=True out"
        )

    def pull(
        self,
        keys: npt.ArrayLike,
        *,
        learns: bool = True,
        exact: bool = False,
        timeout_s: float | None = None,
    ) -> Array:
        """Read rows. That changes nothing on the servers: a key without a row reads as its initial
        value and gets none, and reading a row is no use of it for `evict`.

        Args:
            keys: integers or strings (see `ps.keys_of`) of any shape; they may repeat.
            learns: whether a push may follow that was computed from these rows: its staleness
                counts from the oldest such read since the last push. False, as for an evaluation:
                it does not count from this one.
            exact: ask the servers for the rows as they have them: no codec of pulls rounds them,
                and none is a copy kept here or was prefetched.
        Returns:
            float32 [*keys.shape, dim], yours to keep; of a table of int64 or float64 as such.
        Raises:
            TypeError, ValueError: the keys are neither integers of 64 bits nor strings. Nothing was
                read.
            PullTimeout: not there in `timeout_s`; the text says who is missing.
        """
        flat, shape = as_keys(keys, self.name)
        if self._unasked and learns:
            self._compare_with_labels(flat)
        rows = self._reads.pull(self.block, flat, learns=learns, timeout_s=timeout_s, exact=exact)
        if self.wide is not None:
            rows = rows.view(self.wide)
        return rows if len(shape) == 1 else rows.reshape(*shape, self.dim)

    def push(
        self,
        keys: npt.ArrayLike,
        gradients: npt.ArrayLike,
        *,
        hyper: Hyper | None = None,
        weight: float | None = None,
    ) -> Ticket:
        """Send gradients of rows; the rule runs once for each key. Returns when they are captured.

        Keys that have no row get one, if the table admits them. Under a policy that collects
        (Sync) the gradients are put together until `client.tick(table.name)`.

        Args:
            keys: integers or strings of any shape; gradients of equal keys are summed.
            gradients: floating point [*keys.shape, dim].
            hyper: the rule's hyper-parameters for this push; None: as defined.
            weight: number of samples behind it, above 0; 1 if None.
        Returns:
            Ticket of the outcome.
        Raises:
            TypeError, ValueError: the keys, the weight or hyper. ShapeMismatch, DtypeMismatch: the
                gradients. NonFinite: one of them, with its key. In all cases nothing was applied.
            PushTimeout: a server left too much unanswered. Overloaded: no memory here, or too many
                rows wait for their tick. Nothing was applied.
            TableFull: from the ticket: a server has no room for the new keys, and applied nothing.
                ServerGone: from it or from here; applied: unknown.
        """
        flat, values = self.checked(keys, gradients)
        return self._keyed.push_rows([CheckedRows(self.block, flat, values, hyper)], weight=weight)

    def checked(self, keys: npt.ArrayLike, gradients: npt.ArrayLike) -> tuple[Array, Array]:
        """Keys as int64 [n] and their gradients or values, float32 [n, dim], of 64-bit ones the
        words; raises as `push`."""
        flat, rows = as_rows(keys, gradients, self.dim, self.name, self.keys_of, self.wide)
        if self._unasked:
            self._compare_with_labels(flat)
        return flat, rows

    def prefetch(self, keys: npt.ArrayLike) -> None:
        """Ask for rows now, for one pull to come: the next one of only these keys finds them here.

        They are read as they are now; what is pushed in between is not in them. A pull uses them if
        this client has ended at most one clock on the table since, or under `ps.Sync`, where all
        read the values of one clock, none. Else they are released, and it asks the servers. So
        under `ps.BoundedStaleness(bound)` a row may be bound + 1 clocks behind.

        Raises:
            As `pull`; what the servers refuse is raised by the pull.
        """
        flat, _ = as_keys(keys, self.name)
        self._reads.prefetch([(self.block, flat)])

    def cache_rows(
        self, rows: int = 100_000, *, clocks: int = 4, keep_pushed: bool = False
    ) -> Table:
        """Keep copies of rows that are pulled here, and read them instead for some clocks.

        It is this client's own choice: others may choose differently. A clock is a step that this
        client ends on the table, by an optimizer, `push_tables` or `client.tick`; for a client that
        ends none, copies never grow old. A copy that was read at clock c is used up to clock
        c + `clocks`, so under `ps.BoundedStaleness(bound)` a row may be bound + `clocks` clocks
        behind, or one more if it is prefetched. The staleness that is reported for pushes counts
        from the oldest copy used.

        Args:
            rows: copies at most, of 4 x dim + 17 bytes and up to 64 for their index; those that are
                not used again go first. 0: none any more. What was kept before is dropped.
            clocks: at least 0.
            keep_pushed: False: a row that this client pushes to, or puts, is read anew, so that it
                reads what it wrote. True: its copy stays until it is too old; without that, a
                worker whose every step pushes all the rows that it has pulled finds none here.
        Returns:
            This table.
        Raises:
            ValueError: a number is out of its range, or the table's policy is one whose workers
                read the same clock's values (`ps.Sync`). Nothing was changed.
        """
        for name, value in (("rows", rows), ("clocks", clocks)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{name} of the cache of table {self.name!r} has to be an int of at least 0, "
                    f"not {value!r}"
                )
        self._reads.cache(self.block, rows, clocks, keep_pushed=keep_pushed)
        return self

    def cache_report(self) -> CacheReport:
        """How many copies are kept here, and how many keys were read there (hits) or not (misses)
        since `cache_rows`; all 0 without a cache."""
        return self._reads.cache_report(self.block)

    def __len__(self) -> int:
        """Rows that are there, on all servers."""
        return sum(report.rows for report in self._keyed.reports(self.block))

    def __bool__(self) -> bool:
        """A table is a table also when it is empty."""
        return True

    def memory_bytes(self) -> int:
        """Bytes of rows, rule state and index on all servers."""
        return sum(report.memory_bytes for report in self._keyed.reports(self.block))

    def reports(self) -> list[TableReport]:
        """What each shard has of it and has done, in shard order."""
        return self._keyed.reports(self.block)

    def keys(self, *, timeout_s: float | None = None) -> Array:
        """The keys that have a row, int64 [n], shard by shard."""
        parts = [each.keys for each in self.scan(timeout_s=timeout_s)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def scan(
        self, rows: int = SCAN_ROWS, *, state: bool = False, timeout_s: float | None = None
    ) -> Iterator[Records]:
        """Read the whole table, shard by shard, some rows at a time; memory here stays flat.

        Rows that others create or evict meanwhile may be in it or not; each other row is, once.

        Args:
            rows: at most in one part, at least 1.
            state: read the rule's state and the update counts as well, and of a table with `evict`
                for how many clocks each row has not been used.
        Yields:
            Records(keys int64 [n], values float32 [n, dim], state float32 [n, width] | None,
            counts uint32 [n] | None, idle int64 [n] | None), yours to keep.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1, not {rows}")
        width = self.reports()[0].width if state else -1
        idle = state and self.evicts
        for each in self._keyed.scan(self.block, rows, width, idle, timeout_s):
            if self.wide is not None:
                each = each._replace(values=each.values.view(self.wide))
            yield each

    def put(
        self,
        keys: npt.ArrayLike,
        values: npt.ArrayLike,
        state: npt.ArrayLike | None = None,
        counts: npt.ArrayLike | None = None,
        *,
        idle: npt.ArrayLike | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Overwrite rows, or create them; returns when they are in place on all servers.

        Args:
            keys: integers or strings of any shape. Of equal ones the last counts.
            values: floating point [*keys.shape, dim].
            state: the rule's state as `scan` has read it, float32 [keys, width], with `counts`. It
                is taken as it is: of a sum of squares below 0 a rule makes NaN. None: that of rows
                which are there stays, and new ones begin with that of a new row.
            counts: updates of each row, [keys].
            idle: clocks since each row was last used, [keys], as `scan` has read it; those past the
                table's `ps.TTL` are left out. None: they are used now.
        Raises:
            As `push`. NonFinite: a value, or one that is too large for 16-bit rows, or the state,
                with its key; nothing was applied. TableFull: some servers may have taken their
                part.
        """
        flat, rows = self.checked(keys, values)
        if (state is None) != (counts is None):
            raise ValueError("state and counts of rows come together, or not at all")
        records = Records(flat, rows)
        if state is not None and counts is not None:
            width = self.reports()[0].width
            state_rows = np.ascontiguousarray(state, np.float32)
            if state_rows.shape != (flat.size, width) or np.shape(counts) != (flat.size,):
                raise ShapeMismatch(
                    f"state {list(state_rows.shape)} and counts {list(np.shape(counts))} came for "
                    f"{flat.size} rows of table {self.name!r}, expected [{flat.size}, {width}] and "
                    f"[{flat.size}]",
                    fix="give what scan(state=True) of a table with the same rule gave",
                )
            records = Records(flat, rows, state_rows, np.ascontiguousarray(counts, np.uint32))
        if idle is not None:
            records = records._replace(idle=_clocks(idle, flat.size, self.name))
        check_records(records, self.block.spec)
        self._keyed.put(self.block, records, timeout_s)

    def delete(self, keys: npt.ArrayLike, *, timeout_s: float | None = None) -> int:
        """Remove rows with all that belongs to them; returns when they are gone from all servers.

        A row goes with its rule state, its count and its last use, a label with it; a key that
        waits for admission is counted from the beginning. The key reads as its initial value, and
        a later push or `put` makes a new row. What this client pushed before is deleted with it,
        what it pushes later is not; repeating is safe (exactly once). Copies of the rows here go,
        too (`cache_rows`, `prefetch`). Gradients that wait when it comes, for their clock under
        `ps.Sync` or in a buffer under `ps.Buffered`, are applied later, and make a new row.

        Args:
            keys: integers or strings of any shape; they may repeat, or have no row.
        Returns:
            Rows that were removed.
        Raises:
            TypeError, ValueError: the keys, as for `pull`; nothing was removed.
            PushTimeout: no answer in `timeout_s`. Applied: unknown; retrying is safe.
        """
        flat, _ = as_keys(keys, self.name)
        removed = self._keyed.delete(self.block, flat, timeout_s)
        labels = self.known_labels()
        if labels is not None:
            labels.delete(flat, timeout_s)
        return removed

    def contains(self, keys: npt.ArrayLike, *, timeout_s: float | None = None) -> Array:
        """Whether keys have a row.

        Args:
            keys: integers or strings of any shape; they may repeat.
        Returns:
            bool [*keys.shape], as the servers have it now.
        Raises:
            As `pull`.
        """
        flat, shape = as_keys(keys, self.name)
        return self._keyed.contains(self.block, flat, timeout_s).reshape(shape)

    # --- Arrow and Parquet -----------------------------------------------------------------------

    def to_arrow(self, *, state: bool = False, timeout_s: float | None = None) -> Any:
        """The whole table as a `pyarrow.Table`, which is as large.

        Columns: `key` int64, `value` fixed_size_list<float32>[dim]; with the state also `state`
        fixed_size_list<float32>[width] (if the rule has any) and `count` uint32, updates of the
        row; of a table with `evict` also `idle_clocks` uint32, clocks since the row was last used.
        The schema's metadata say the table's name, dim, dtype, seed and rule, as JSON under
        "paramserve". As for `scan`, rows that are changed meanwhile may be there as they were
        before or after.

        Args:
            state: what training goes on from: the rule's state, update counts and last use as well.
            timeout_s: of each part.
        Raises:
            ParamServeError: pyarrow is not installed (`pip install 'paramserve[arrow]'`).
        """
        return arrow.to_arrow(self, state=state, timeout_s=timeout_s)

    def to_parquet(
        self, path: str | os.PathLike[str], *, state: bool = False, timeout_s: float | None = None
    ) -> int:
        """Write the whole table to a file, some rows at a time; memory here stays flat.

        The columns are those of `to_arrow`. The file is complete when it takes its name: until
        then what was at the path stays, and after an error still is there.

        Returns:
            Rows written.
        Raises:
            OSError: the file cannot be written. ParamServeError: as `to_arrow`.
        """
        return arrow.to_parquet(self, path, state=state, timeout_s=timeout_s)

    def from_arrow(
        self, source: Any, *, state: bool | None = None, timeout_s: float | None = None
    ) -> int:
        """Overwrite or create rows from Arrow data, in order; repeating is safe.

        Args:
            source: a pyarrow.Table, a RecordBatchReader, an iterable of RecordBatch, or what hands
                out an Arrow stream, as frames of pandas and polars. Columns as `to_arrow` has them,
                in any order: keys of any integers, values of any floats, also in lists of no fixed
                size; other columns are let be.
            state: take over the rule's state and update counts: None: if the columns are there;
                False: no, so that rows which are there keep theirs; True: they have to be. Where a
                column `idle_clocks` is there, and the table has `evict`, rows were last used so
                long ago, and those past its `ps.TTL` are left out; else they are used now.
            timeout_s: of each part.
        Returns:
            Rows put, those past the TTL among them.
        Raises:
            TypeError: the source is something else. ValueError: a column is missing, or the state
                is that of another rule. DefineMismatch: a table with labels was written, and this
                one keeps none. Nothing was applied.
            ShapeMismatch, DtypeMismatch, NonFinite: other dims, types or keys than the table's, or
                nulls, NaN or Inf. Nothing was applied where the schema tells it, or the source is a
                pyarrow.Table; else the text says how many rows were put before.
            TableFull: and how many were put before.
        """
        return arrow.from_arrow(self, source, self._putting(timeout_s), state=state)

    def from_parquet(
        self,
        path: str | os.PathLike[str],
        *,
        state: bool | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Overwrite or create rows from a file, some rows at a time; memory here stays flat.

        Everything else as `from_arrow`: the number of servers, and the dtype of rows, may be other
        ones than when it was written.

        Raises:
            OSError: the file cannot be read. ValueError: it is no Parquet file. The rest as
                `from_arrow`, from a stream.
        """
        return arrow.from_parquet(self, path, self._putting(timeout_s), state=state)

    def _putting(self, timeout_s: float | None) -> Callable[[Records], None]:
        return lambda records: self._keyed.put(self.block, records, timeout_s)


def _clocks(idle: npt.ArrayLike, rows: int, table: str) -> Array:
    """Clocks since rows were used, int64 [rows]."""
    clocks = np.asarray(idle)
    if clocks.shape != (rows,) or (rows and clocks.dtype.kind not in "iu"):
        raise ShapeMismatch(
            f"idle {list(clocks.shape)} of {clocks.dtype} came for {rows} rows of table {table!r}, "
            f"expected integers [{rows}]",
            fix="give what scan(state=True) gave",
        )
    if rows and int(clocks.min()) < 0:
        raise ValueError(
            f"idle of a row of table {table!r} is {int(clocks.min())}, below 0. Applied: no. "
            "To fix: give the clocks since its last use"
        )
    return np.ascontiguousarray(clocks, np.int64)

"""Tables as Arrow data and Parquet files: written and read some rows at a time.

Of a table no more than a few parts of `PART_BYTES` are in this process's memory at a time. What a
row is, is the servers' business (`Table.scan`, `Table.put`); this says how it looks in columns:

    key    int64
    value  fixed_size_list<float32>[dim]
    state  fixed_size_list<float32>[width], if asked for and the rule has any
    count  uint32, updates of the row, if the state was asked for; 0 where the rule counts none
    idle_clocks  uint32, clocks since the row was last used, if the state was asked for and the
           table lets rows go
    label  string, what the key was made of, if the table keeps labels; empty where it is not known

Taken over are also strings as keys, columns of other integers and floats, and rows that are lists
of any kind, as pandas and polars make them; columns with other names are ignored. All that a schema
tells is checked before anything is put, and each part before it is put.

pyarrow is imported when it is needed, and need not be there otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.client.string_keys import hashed, is_text
from paramserve.config import RuleSpec
from paramserve.core import differences
from paramserve.core.table.options import BEYOND
from paramserve.core.table.parts import Records
from paramserve.errors import (
    DefineMismatch,
    DtypeMismatch,
    NonFinite,
    ParamServeError,
    ShapeMismatch,
    TableFull,
    rebuild,
)
from paramserve.messages import BlockSpec
from paramserve.rules.layout import WIDE, words_of

if TYPE_CHECKING:
    from paramserve.client.rows import KeyedTable

Array = npt.NDArray[Any]
FLOAT32 = np.dtype(np.float32)
Put = Callable[[Records], None]

FORMAT = 1
"""Version of the columns and the metadata; a reader refuses a later one."""
METADATA = b"paramserve"
"""Key of the schema's metadata: JSON with the format, and the table's name, dim, dtype, seed and
rule."""
IDLE = "idle_clocks"
IDLE_MAX = (1 << 32) - 1
"""What is longer ago is written as this."""
PART_BYTES = 8 << 20
"""Bytes of rows that are read, written or checked at once."""
ROWS_MAX = 65_536
"""The same, in rows; also those of a row group in a file."""
BUFFER_BYTES = 1 << 20
"""Bytes of a file that are buffered for each column that is read."""


class TableMetadata(Struct):
    """What the metadata of a table's columns say of it."""

    format: int
    table: str
    dim: int
    dtype: str
    seed: int
    rule: RuleSpec


def schema_of(block: BlockSpec, width: int, *, idle: bool = False, labels: bool = False) -> Any:
    """The columns of a table.

    Args:
        width: of the state; -1: without it.
        idle: whether to have the clocks since the rows were last used.
        labels: whether to have those of its keys as well.
    """
    pa = pyarrow()
    spec, rule = block.table, block.rule
    assert spec is not None
    assert rule is not None, "a table has one"
    number = pa.from_numpy_dtype(WIDE.get(spec.dtype, np.dtype(np.float32)))
    dim = spec.dim // words_of(spec.dtype)
    columns = [("key", pa.int64()), ("value", pa.list_(number, dim))]
    if width > 0:
        columns.append(("state", pa.list_(pa.float32(), width)))
    if width >= 0:
        columns.append(("count", pa.uint32()))
    metadata = TableMetadata(FORMAT, block.group_name, dim, spec.dtype, spec.seed, rule)
    if idle:
        columns.append((IDLE, pa.uint32()))
    if labels:
        columns.append(("label", pa.string()))
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns]
    return pa.schema(fields, metadata={METADATA: msgspec.json.encode(metadata)})


def batches(table: KeyedTable, schema: Any, width: int, timeout_s: float | None) -> Iterator[Any]:
    """The rows of a table, shard by shard, as record batches."""
    rows, labels = part_rows(table.dim, width), table.known_labels()
    for records in table.scan(rows, state=width >= 0, timeout_s=timeout_s):
        yield batch_of(schema, records, width, None if labels is None else labels.of(records.keys))


def batch_of(schema: Any, records: Records, width: int, labels: list[str] | None = None) -> Any:
    """Some rows as a record batch, with the columns of `schema_of`."""
    pa = pyarrow()
    columns = [pa.array(records.keys), _list_array(pa, records.values)]
    if width > 0:
        columns.append(_list_array(pa, records.state))
    if width >= 0:
        columns.append(pa.array(records.counts))
    if records.idle is not None:
        columns.append(pa.array(np.minimum(records.idle, IDLE_MAX).astype(np.uint32)))
    if labels is not None:
        columns.append(pa.array(labels, pa.string()))
    return pa.record_batch(columns, schema=schema)


def write_parquet(
    path: str | os.PathLike[str], schema: Any, make_batches: Callable[[], Iterable[Any]]
) -> int:
    """Write a table's record batches to a Parquet file; how many rows.

    Args:
        make_batches: gives them, once it is known that the file can be written.
    """
    rows = 0
    # Learnt floats seldom repeat, and no reader filters by their least and greatest.
    options = {"use_dictionary": False, "write_statistics": ["key"]}
    with replacing(path) as file, _parquet().ParquetWriter(file, schema, **options) as writer:
        for batch in make_batches():
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


def to_arrow(table: KeyedTable, *, state: bool, timeout_s: float | None) -> Any:
    """See `Table.to_arrow`."""
    pa = pyarrow()
    width = state_width(table) if state else -1
    schema = _schema_of(table, width)
    return pa.Table.from_batches(batches(table, schema, width, timeout_s), schema)


def to_parquet(
    table: KeyedTable, path: str | os.PathLike[str], *, state: bool, timeout_s: float | None
) -> int:
    """See `Table.to_parquet`."""
    width = state_width(table) if state else -1
    schema = _schema_of(table, width)
    return write_parquet(path, schema, lambda: batches(table, schema, width, timeout_s))


def _schema_of(table: KeyedTable, width: int) -> Any:
    idle = width >= 0 and table.evicts
    return schema_of(table.block.spec, width, idle=idle, labels=table.known_labels() is not None)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A file to write to, which takes the path's place when the block is left without an error.

    Until then it lies beside it under another name. After an error nothing of it is left, and what
    was at the path is as before.

    Raises:
        OSError: the folder is missing, or is not to be written to, or the path is a folder.
    """
    target = os.path.realpath(os.fspath(path))
    if os.path.isdir(target):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), target)
    beside = os.path.join(os.path.dirname(target), f".paramserve-{secrets.token_hex(8)}.part")
    try:
        with _opened(beside, target) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def _opened(beside: str, target: str) -> IO[bytes]:
    try:
        return open(beside, "xb")
    except OSError as error:
        raise saying(
            error,
            f"{target} cannot be written: {_why(error)}, in the folder {os.path.dirname(target)}. "
            "Applied: no. To fix: make the folder, or name one that this process may write to",
        ) from error


def part_rows(dim: int, width: int) -> int:
    return max(1, min(ROWS_MAX, PART_BYTES // (8 + 4 * dim + 4 * max(width, 0) + 4)))


def _list_array(pa: Any, rows: Array | None) -> Any:
    assert rows is not None
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def state_width(table: KeyedTable) -> int:
    return table.reports()[0].width


def pyarrow() -> Any:
    """The library.

    Raises:
        ParamServeError: it is not installed.
    """
    try:
        return import_module("pyarrow")
    except ImportError as error:
        raise ParamServeError(
            "tables are exported and imported by the library pyarrow, which is not installed",
            fix="pip install 'paramserve[arrow]'",
        ) from error


def from_arrow(table: KeyedTable, source: Any, put: Put, *, state: bool | None) -> int:
    """See `Table.from_arrow`; `put` writes some rows to the servers."""
    pa = pyarrow()
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    if not isinstance(source, pa.Table | pa.RecordBatchReader) and hasattr(
        source, "__arrow_c_stream__"
    ):
        source = pa.RecordBatchReader.from_stream(source)
    if isinstance(source, pa.Table):
        whole = Taking(table, source.schema, state)
        for part in whole.parts(source.to_batches()):  # it is all here: see that all of it is good
            whole.records(part)
        return Taking(table, source.schema, state).take(source.to_batches(), put)
    if isinstance(source, pa.RecordBatchReader):
        return Taking(table, source.schema, state).take(source, put)
    stream = iter(_checked_batches(pa, source))
    first = next(stream, None)
    if first is None:
        return 0
    return Taking(table, first.schema, state).take(_and_then(first, stream), put)


def from_parquet(
    table: KeyedTable, path: str | os.PathLike[str], put: Put, *, state: bool | None
) -> int:
    """See `Table.from_parquet`."""
    parquet, name = _parquet(), os.fspath(path)
    schema = _schema(name)
    # Read ahead, the file would end up in memory whole.
    options = {"buffer_size": BUFFER_BYTES, "pre_buffer": False}
    with parquet.ParquetFile(name, **options) as file:
        taking = Taking(table, schema, state, name)
        rows = part_rows(table.dim, taking.width)
        parts = file.iter_batches(batch_size=rows, columns=list(taking.columns))
        return taking.take(parts, put)


def table_of(path: str) -> str | None:
    """The name of the table that a file says it has rows of; None: it does not say.

    Raises:
        OSError, ValueError, ParamServeError: as `check_file`.
    """
    metadata = metadata_of(_schema(path))
    return None if metadata is None else metadata.table


def check_file(path: str) -> None:
    """See that a file has rows of a table, as `to_parquet` writes them.

    Raises:
        OSError: it cannot be read. ValueError: it is no Parquet file, or lacks a column.
        ParamServeError: pyarrow is not installed.
    """
    schema = _schema(path)
    missing = [name for name in ("key", "value") if name not in schema.names]
    if missing:
        raise ValueError(
            f"{path} has no column {missing[0]!r}; columns: {', '.join(schema.names)}. To fix: "
            "name the columns as table.to_parquet(path) does"
        )


def _parquet() -> Any:
    pyarrow()
    return import_module("pyarrow.parquet")


def _schema(path: str) -> Any:
    """The columns of a file.

    Raises:
        OSError: it cannot be read. ValueError: it is no Parquet file.
        ParamServeError: pyarrow is not installed.
    """
    pa = pyarrow()
    try:
        return _parquet().read_schema(path)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path} is no Parquet file: {error}. Applied: no. To fix: give a file that "
            "table.to_parquet(path) or save_tables= wrote; rows of another one, such as CSV, read "
            "into a frame with the columns key and value, and give it to table.from_arrow(frame)"
        ) from error
    except OSError as error:
        raise saying(
            error,
            f"{path} cannot be read: {_why(error)}. Applied: no. To fix: give the path of a "
            "Parquet file with rows of a table, as table.to_parquet(path) writes it",
        ) from error


def saying(error: OSError, text: str) -> OSError:
    """An error of the same class and number, with a text of its own."""
    rewritten = type(error)(text)
    rewritten.errno = error.errno
    return rewritten


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def fill(table: KeyedTable, path: str) -> int:
    """Put the rows of a file into a new table; how many. The rule's state comes with them if the
    file has that of the table's rule.

    Raises:
        ParamServeError: the file cannot be read here. The rest as `Table.from_parquet`.
    """
    try:
        metadata = metadata_of(_schema(path))
        ours = table.block.spec.rule
        assert ours is not None
        same = metadata is None or _kind(metadata.rule) == _kind(ours)
        return table.from_parquet(path, state=None if same else False)
    except OSError as error:
        raise ParamServeError(
            f"table {table.name!r} cannot be loaded from {path} on {socket.gethostname()}: {error}",
            fix="give load_tables a folder that every worker's machine sees under this path",
        ) from error


def metadata_of(schema: Any) -> TableMetadata | None:
    """What the metadata of some columns say, if they are ours.

    Raises:
        ValueError: they are of a later version.
    """
    text = (schema.metadata or {}).get(METADATA)
    if text is None:
        return None
    try:
        metadata = msgspec.json.decode(text, type=TableMetadata)
    except msgspec.MsgspecError:
        metadata = None
    if metadata is None or metadata.format != FORMAT:
        raise ValueError(
            f"the data say of themselves {text[:200]!r}, and this version of paramserve reads "
            f"format {FORMAT}. Applied: no. To fix: use the version that wrote them"
        )
    return metadata


class Taking:
    """Taking over rows from Arrow data into a table.

    Attributes:
        columns: that are read.
        width: of the state that is taken over; -1: none is.
        done: rows that have been put.

    Args:
        schema: of the data.
        state: as `Table.from_arrow` has it.
        path: of the file that they are in, for errors; empty: they are in none.
    Raises:
        ValueError: a column is missing, the state is another rule's, or the format is a later one.
        ShapeMismatch, DtypeMismatch: a column does not fit. DefineMismatch: they have labels, and
            the table keeps none. In all cases nothing was applied.
    """

    def __init__(self, table: KeyedTable, schema: Any, state: bool | None, path: str = "") -> None:
        spec = table.block.table
        assert spec is not None
        self._table = table
        self._of = f" of {path}" if path else ""
        self._below = BEYOND[spec.dtype]
        self._schema = schema
        self.done = 0
        self._column("key", _is_key, "integers or strings")
        self._rows("value", table.dim, "the table's dim")
        metadata = metadata_of(schema)
        self.width = self._state_width(state)
        self.columns: tuple[str, ...] = ("key", "value")
        self._labels = table.known_labels()
        if self._labels is not None and "label" in schema.names:
            self._column("label", _is_text, "strings")
            self.columns += ("label",)
        elif metadata is not None and "label" in schema.names:
            raise _without_labels(table, metadata, path)
        self._idle = table.evicts and IDLE in schema.names
        if self._idle:
            self._column(IDLE, _is_integer, "integers")
            self.columns += (IDLE,)
        if self.width >= 0:
            self._check_rule(metadata)
            self._column("count", _is_integer, "integers")
            self.columns += ("count",)
        if self.width > 0:
            self._rows("state", self.width, "the width of the rule's state")
            self.columns += ("state",)

    def take(self, stream: Iterable[Any], put: Put) -> int:
        """Put all rows; how many.

        Raises:
            ParamServeError: with what was put before it, which stays.
        """
        try:
            for part in self.parts(stream):
                records = self.records(part)
                put(records)
                self._put_labels(part, records.keys)
                self.done += records.keys.size
        except ParamServeError as error:
            failure = (type(error).__name__, error.failed)
            if self.done:
                after = f"; the {self.done} rows before these have been put"
                raise rebuild(failure[0], failure[1] + after, "yes", error.fix) from error
            if isinstance(error, TableFull):  # another server may have had room
                raise rebuild(*failure, "unknown", error.fix) from error
            raise
        except Exception as error:
            error.add_note(f"paramserve: {self.done} rows had been put into {self._table!r}")
            raise
        return self.done

    def _put_labels(self, part: Any, keys: Array) -> None:
        """Keep what the keys were made of, or are said to be named."""
        if self._labels is None:
            return
        if is_text(part.column("key")):
            self._labels.keep(part.column("key"), keys)
        elif "label" in self.columns:
            texts = part.column("label").to_pylist()
            named = [place for place, text in enumerate(texts) if text]
            self._labels.put(keys[named], [texts[place] for place in named])

    def parts(self, stream: Iterable[Any]) -> Iterator[Any]:
        """The batches in pieces of a part's size."""
        rows = part_rows(self._table.dim, self.width)
        for batch in stream:
            for begin in range(0, batch.num_rows, rows):
                yield batch.slice(begin, rows)

    def records(self, part: Any) -> Records:
        """The rows of a part.

        Raises:
            ShapeMismatch, DtypeMismatch, NonFinite: they do not fit. Nothing of them was applied.
        """
        keys = self._keys(part)
        values = self._numbers(part, "value", self._table.dim, self._table.wide or FLOAT32)
        if values.dtype.kind == "f":
            self._check_finite(keys, values)
        values = values.view(FLOAT32)
        idle = self._integers(part, IDLE, np.uint32) if self._idle else None
        if self.width < 0:
            return Records(keys, values, idle=idle)
        counts = self._integers(part, "count", np.uint32).astype(np.uint32)
        state = np.empty((keys.size, 0), np.float32)
        if self.width:
            state = self._numbers(part, "state", self.width, FLOAT32)
        if np.isnan(state).any():
            key = int(keys[np.isnan(state).any(1)][0])
            raise self._non_finite(f"the state of key {key} holds NaN")
        return Records(keys, values, state, counts, idle)

    # --- schema ----------------------------------------------------------------------------------

    def _column(self, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        """The type of a column, which has to be there once."""
        indices = self._schema.get_all_field_indices(name)
        if len(indices) != 1:
            times = f"{len(indices)} times" if indices else "not there"
            raise ValueError(
                f"the column {name!r}{self._of} is {times}; columns: "
                f"{', '.join(self._schema.names)}. "
                f"Applied: no. To fix: name the columns as {self._table!r}.to_arrow() does"
            )
        kind = self._schema.field(indices[0]).type
        if not fits(kind):
            raise self._wrong(name, f"is {kind}, not {expected}")
        return kind

    def _rows(self, name: str, size: int, what: str) -> None:
        whole = name == "value" and self._table.wide == np.int64
        numbers = "integers" if whole else "floating point numbers"
        fits = _is_whole_rows if whole else _is_rows
        kind = self._column(name, fits, f"lists of {size} {numbers}")
        have = getattr(kind, "list_size", size)  # of lists of any length it is looked at later
        if have != size:
            raise self._unlike(name, f"has {have} elements in each row, {what} is {size}", have)

    def _state_width(self, state: bool | None) -> int:
        """Elements of rule state in a row that is taken over, or -1."""
        there = [name for name in ("state", "count") if name in self._schema.names]
        if state is False or (state is None and not there):
            return -1
        width = state_width(self._table)
        needed = ["state", "count"] if width else ["count"]
        if there == needed:
            return width
        raise ValueError(
            f"the state of a row of {self._table!r} stands in the columns {', '.join(needed)}, and "
            f"of these columns there are {', '.join(there) if there else 'none'}. Applied: no. To "
            "fix: write them with state=True from a table with the same rule, or give state=False"
        )

    def _check_rule(self, metadata: TableMetadata | None) -> None:
        """Two rules' states may be of one width and mean different things."""
        theirs, ours = metadata.rule if metadata is not None else None, self._table.block.spec.rule
        assert ours is not None
        if theirs is None or _kind(theirs) == _kind(ours):
            return
        difference = differences.of_rules(theirs, ours)
        raise ValueError(
            f"the state is that of the rule {difference.existing}, and {self._table!r} has "
            f"{difference.incoming}. Applied: no. To fix: use a table with the same rule, or give "
            "state=False"
        )

    # --- rows ------------------------------------------------------------------------------------

    def _filled(self, part: Any, name: str) -> Any:
        """A column of a part, without nulls."""
        place, expected = part.schema.get_field_index(name), self._schema.field(name).type
        if place < 0 or part.schema.field(place).type != expected:
            actual = part.schema.field(place).type if place >= 0 else "not there"
            raise self._wrong(name, f"is {actual}, and was {expected} before")
        column = part.column(place)
        if column.null_count:
            raise self._wrong(name, f"holds {column.null_count} nulls")
        return column

    def _keys(self, part: Any) -> Array:
        column = self._filled(part, "key")
        if is_text(column):
            return hashed(column, f"keys of table {self._table.name!r}")
        return self._integers(part, "key", np.int64)

    def _integers(self, part: Any, name: str, kind: type[np.integer[Any]]) -> Array:
        """A column as int64 [n], all within what `kind` can hold."""
        integers: Array = self._filled(part, name).to_numpy(zero_copy_only=False)
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        for each in (int(integers.min()), int(integers.max())) if integers.size else ():
            if not least <= each <= most:
                raise self._wrong(name, f"holds {each}, which is not within {least} to {most}")
        return integers.astype(np.int64)

    def _numbers(self, part: Any, name: str, size: int, kind: np.dtype[Any]) -> Array:
        """A column of lists as an array [n, size] of this kind."""
        column = self._filled(part, name)
        flat = column.flatten()
        if flat.null_count:
            raise self._wrong(name, f"holds rows with {flat.null_count} nulls")
        if not hasattr(column.type, "list_size"):
            lengths = column.value_lengths().to_numpy()
            other = lengths[lengths != size]
            if other.size:
                have = int(other[0])
                raise self._unlike(name, f"has a row of {have} elements, not {size}", have)
        numbers: Array = flat.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # what overflows is refused as Inf
            return np.array(numbers, kind).reshape(-1, size)

    def _check_finite(self, keys: Array, values: Array) -> None:
        low, high = values.min(initial=0.0), values.max(initial=0.0)
        if -self._below < low and high < self._below:
            return
        row = int(np.flatnonzero(~(np.abs(values) < self._below).all(1))[0])
        value = values[row][~(np.abs(values[row]) < self._below)][0]
        spec = self._table.block.table
        assert spec is not None
        raise self._non_finite(
            f"the row of key {int(keys[row])} holds {value}, which is no finite {spec.dtype}"
        )

    # --- errors ----------------------------------------------------------------------------------

    def _wrong(self, name: str, what: str) -> DtypeMismatch:
        return DtypeMismatch(
            f"the column {name!r}{self._of} for {self._table!r} {what}",
            fix="cast it, and fill or leave out nulls",
        )

    def _unlike(self, name: str, what: str, have: int) -> ShapeMismatch:
        option = f"dim={have}" if name == "value" else "the rule that the rows were trained with"
        return ShapeMismatch(
            f"the column {name!r}{self._of} for {self._table!r} {what}",
            fix=f"make the table with {option}, or load rows of its own size",
        )

    def _non_finite(self, what: str) -> NonFinite:
        return NonFinite(
            f"{what}; it was meant for {self._table!r}", fix="look at where the rows come from"
        )


def _without_labels(table: KeyedTable, metadata: TableMetadata, path: str) -> DefineMismatch:
    """The error for rows with labels that would lose them."""
    read = f"pyarrow.parquet.read_table({path!r})" if path else "data"
    return DefineMismatch(
        f"{path or 'the data'} has labels, the strings behind the keys of table "
        f"{metadata.table!r}, and {table!r} keeps none",
        fix=f"make it with labels=True, as in client.table({table.name!r}, ..., labels=True); to "
        f"load the rows without them, table.from_arrow({read}.drop_columns(['label']))",
    )


def _kind(rule: RuleSpec) -> tuple[str, Any]:
    """What a rule is: its name, and for torch's optimizers which one."""
    return rule.name, rule.options.get("kind")


def _checked_batches(pa: Any, source: Any) -> Iterator[Any]:
    """The elements of an iterable, which have to be record batches."""
    if not isinstance(source, Iterable) or isinstance(source, str | bytes):
        raise TypeError(
            "from_arrow takes a pyarrow.Table, a RecordBatchReader or an iterable of RecordBatch, "
            f"not {type(source).__name__}. Applied: no"
        )
    for number, batch in enumerate(source):
        if not isinstance(batch, pa.RecordBatch):
            raise TypeError(
                f"element {number} of the iterable is {type(batch).__name__}, not a RecordBatch"
            )
        yield batch


def _and_then(first: Any, others: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from others


def _is_integer(kind: Any) -> bool:
    return bool(pyarrow().types.is_integer(kind))


def _is_text(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_key(kind: Any) -> bool:
    return _is_integer(kind) or _is_text(kind)


def _is_list(kind: Any) -> bool:
    types = pyarrow().types
    return bool(types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind))


def _is_rows(kind: Any) -> bool:
    return _is_list(kind) and bool(pyarrow().types.is_floating(kind.value_type))


def _is_whole_rows(kind: Any) -> bool:
    return _is_list(kind) and _is_integer(kind.value_type)

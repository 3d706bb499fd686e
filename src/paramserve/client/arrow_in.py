"""Rows of Arrow data and Parquet files, taken over into a table; `arrow` says what the columns are.

Columns may be of other integers and floats, and rows lists of any kind, as pandas and polars make
them; columns with other names are let be. All that a schema tells is checked before anything is
put, and each part before it is put.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.client.arrow import FORMAT, METADATA, Told, part_rows, pyarrow, state_width
from paramserve.config import RuleSpec
from paramserve.core.table.options import BEYOND
from paramserve.core.table.parts import Records
from paramserve.errors import (
    DtypeMismatch,
    NonFinite,
    ParamServeError,
    ShapeMismatch,
    TableFull,
    rebuild,
)

if TYPE_CHECKING:
    from paramserve.client.table import Table

Array = npt.NDArray[Any]
Put = Callable[[Records], None]

BUFFER_BYTES = 1 << 20
"""Of a file, for each column that is read."""


def from_arrow(table: Table, source: Any, put: Put, *, state: bool | None) -> int:
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
    given = iter(_checked_batches(pa, source))
    first = next(given, None)
    if first is None:
        return 0
    return Taking(table, first.schema, state).take(_and_then(first, given), put)


def from_parquet(
    table: Table, path: str | os.PathLike[str], put: Put, *, state: bool | None
) -> int:
    """See `Table.from_parquet`."""
    pyarrow()
    parquet = import_module("pyarrow.parquet")
    # Read ahead, the file would end up in memory whole.
    options = {"buffer_size": BUFFER_BYTES, "pre_buffer": False}
    with parquet.ParquetFile(os.fspath(path), **options) as file:
        taking = Taking(table, file.schema_arrow, state)
        rows = part_rows(table.dim, taking.width)
        parts = file.iter_batches(batch_size=rows, columns=list(taking.columns))
        return taking.take(parts, put)


class Taking:
    """Taking over rows from Arrow data into a table.

    Attributes:
        columns: that are read.
        width: of the state that is taken over; -1: none is.
        done: rows that have been put.

    Args:
        schema: of the data.
        state: as `Table.from_arrow` has it.
    Raises:
        ValueError: a column is missing, the state is another rule's, or the format is a later one.
        ShapeMismatch, DtypeMismatch: a column does not fit. In all cases nothing was applied.
    """

    def __init__(self, table: Table, schema: Any, state: bool | None) -> None:
        spec = table.block.table
        assert spec is not None
        self._table = table
        self._below = BEYOND[spec.dtype]
        self._schema = schema
        self.done = 0
        self._column("key", _is_integer, "integers")
        self._rows("value", table.dim, "the table's dim")
        told = self._told()
        self.width = self._state_width(state)
        self.columns: tuple[str, ...] = ("key", "value")
        if self.width >= 0:
            self._check_rule(told)
            self._column("count", _is_integer, "integers")
            self.columns += ("count",)
        if self.width > 0:
            self._rows("state", self.width, "the width of the rule's state")
            self.columns += ("state",)

    def take(self, given: Iterable[Any], put: Put) -> int:
        """Put all rows; how many.

        Raises:
            ParamServeError: with what was put before it, which stays.
        """
        try:
            for part in self.parts(given):
                records = self.records(part)
                put(records)
                self.done += records.keys.size
        except ParamServeError as error:
            told = (type(error).__name__, error.failed)
            if self.done:
                after = f"; the {self.done} rows before these have been put"
                raise rebuild(told[0], told[1] + after, "yes", error.fix) from error
            if isinstance(error, TableFull):  # another server may have had room
                raise rebuild(*told, "unknown", error.fix) from error
            raise
        except Exception as error:
            error.add_note(f"paramserve: {self.done} rows had been put into {self._table!r}")
            raise
        return self.done

    def parts(self, given: Iterable[Any]) -> Iterator[Any]:
        """The batches in pieces of a part's size."""
        rows = part_rows(self._table.dim, self.width)
        for batch in given:
            for begin in range(0, batch.num_rows, rows):
                yield batch.slice(begin, rows)

    def records(self, part: Any) -> Records:
        """The rows of a part.

        Raises:
            ShapeMismatch, DtypeMismatch, NonFinite: they do not fit. Nothing of them was applied.
        """
        keys = self._integers(part, "key", np.int64)
        values = self._floats(part, "value", self._table.dim)
        low, high = values.min(initial=0.0), values.max(initial=0.0)
        if not (-self._below < low and high < self._below):
            self._refuse_value(keys, values)
        if self.width < 0:
            return Records(keys, values)
        counts = self._integers(part, "count", np.uint32).astype(np.uint32)
        state = np.empty((keys.size, 0), np.float32)
        if self.width:
            state = self._floats(part, "state", self.width)
        if np.isnan(state).any():
            key = int(keys[np.isnan(state).any(1)][0])
            raise self._non_finite(f"the state of key {key} holds NaN")
        return Records(keys, values, state, counts)

    # --- schema ----------------------------------------------------------------------------------

    def _column(self, name: str, fits: Callable[[Any], bool], wanted: str) -> Any:
        """The type of a column, which has to be there once."""
        found = self._schema.get_all_field_indices(name)
        if len(found) != 1:
            times = f"{len(found)} times" if found else "not there"
            raise ValueError(
                f"the column {name!r} is {times}; columns: {', '.join(self._schema.names)}. "
                f"Applied: no. To fix: name the columns as {self._table!r}.to_arrow() does"
            )
        kind = self._schema.field(found[0]).type
        if not fits(kind):
            raise self._wrong(name, f"is {kind}, not {wanted}")
        return kind

    def _rows(self, name: str, size: int, what: str) -> None:
        kind = self._column(name, _is_rows, f"lists of {size} floating point numbers")
        have = getattr(kind, "list_size", size)  # of lists of any length it is looked at later
        if have != size:
            raise self._unlike(name, f"has {have} elements in each row, {what} is {size}")

    def _told(self) -> Told | None:
        """What the metadata say, if they are ours."""
        text = (self._schema.metadata or {}).get(METADATA)
        if text is None:
            return None
        try:
            told = msgspec.json.decode(text, type=Told)
        except msgspec.MsgspecError:
            told = None
        if told is None or told.format != FORMAT:
            raise ValueError(
                f"the data say of themselves {text[:200]!r}, and this version of paramserve reads "
                f"format {FORMAT}. Applied: no. To fix: use the version that wrote them"
            )
        return told

    def _state_width(self, state: bool | None) -> int:
        """Of the state that is to be taken over, or -1."""
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

    def _check_rule(self, told: Told | None) -> None:
        """Two rules' states may be of one width and mean different things."""
        theirs, ours = told.rule if told is not None else None, self._table.block.spec.rule
        assert ours is not None
        if theirs is None or _kind(theirs) == _kind(ours):
            return
        raise ValueError(
            f"the state is that of the rule {theirs.name} {theirs.options}, and {self._table!r} "
            f"has {ours.name} {ours.options}. Applied: no. To fix: use a table with the same "
            "rule, or give state=False"
        )

    # --- rows ------------------------------------------------------------------------------------

    def _filled(self, part: Any, name: str) -> Any:
        """A column of a part, without nulls."""
        place, wanted = part.schema.get_field_index(name), self._schema.field(name).type
        if place < 0 or part.schema.field(place).type != wanted:
            found = part.schema.field(place).type if place >= 0 else "not there"
            raise self._wrong(name, f"is {found}, and was {wanted} before")
        column = part.column(place)
        if column.null_count:
            raise self._wrong(name, f"holds {column.null_count} nulls")
        return column

    def _integers(self, part: Any, name: str, kind: type[np.integer[Any]]) -> Array:
        """A column as int64 [n], all within what `kind` can hold."""
        found: Array = self._filled(part, name).to_numpy(zero_copy_only=False)
        least, most = np.iinfo(kind).min, np.iinfo(kind).max
        for each in (int(found.min()), int(found.max())) if found.size else ():
            if not least <= each <= most:
                raise self._wrong(name, f"holds {each}, which is not within {least} to {most}")
        return found.astype(np.int64)

    def _floats(self, part: Any, name: str, size: int) -> Array:
        """A column of lists as float32 [n, size]."""
        column = self._filled(part, name)
        flat = column.flatten()
        if flat.null_count:
            raise self._wrong(name, f"holds rows with {flat.null_count} nulls")
        if not hasattr(column.type, "list_size"):
            lengths = column.value_lengths().to_numpy()
            other = lengths[lengths != size]
            if other.size:
                raise self._unlike(name, f"has a row of {int(other[0])} elements, not {size}")
        found: Array = flat.to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):  # what overflows is refused as Inf
            return np.array(found, np.float32).reshape(-1, size)

    def _refuse_value(self, keys: Array, values: Array) -> None:
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
            f"the column {name!r} for {self._table!r} {what}",
            fix="cast it, and fill or leave out nulls",
        )

    def _unlike(self, name: str, what: str) -> ShapeMismatch:
        return ShapeMismatch(
            f"the column {name!r} for {self._table!r} {what}",
            fix="use a table of that size",
        )

    def _non_finite(self, what: str) -> NonFinite:
        return NonFinite(
            f"{what}; it was meant for {self._table!r}", fix="look at where the rows come from"
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


def _is_rows(kind: Any) -> bool:
    types = pyarrow().types
    lists = types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind)
    return bool(lists and types.is_floating(kind.value_type))

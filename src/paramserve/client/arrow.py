"""Tables as Arrow data and Parquet files: written and read some rows at a time.

Of a table no more than a few parts of `PART_BYTES` are in this process's memory at a time. What a
row is, is the servers' business (`Table.scan`, `Table.put`); this says how it looks in columns:

    key    int64
    value  fixed_size_list<float32>[dim]
    state  fixed_size_list<float32>[width], if asked for and the rule has any
    count  uint32, updates of the row, if the state was asked for

pyarrow is imported when it is needed, and need not be there otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt
from msgspec import Struct

from paramserve.config import RuleSpec
from paramserve.errors import ParamServeError

if TYPE_CHECKING:
    from paramserve.client.table import Table

Array = npt.NDArray[Any]

FORMAT = 1
"""Of the columns and the metadata; a reader refuses a later one."""
METADATA = b"paramserve"
"""Key of the schema's metadata: JSON with the format, and the table's name, dim, dtype, seed and
rule."""
PART_BYTES = 8 << 20
"""Of rows that are read, written or checked at once."""
ROWS_MAX = 65_536
"""The same, in rows; also those of a row group in a file."""


class Told(Struct):
    """What the metadata of a table's columns say of it."""

    format: int
    table: str
    dim: int
    dtype: str
    seed: int
    rule: RuleSpec


def schema_of(table: Table, width: int) -> Any:
    """The columns of a table.

    Args:
        width: of the state; -1: without it.
    """
    pa = pyarrow()
    columns = [("key", pa.int64()), ("value", pa.list_(pa.float32(), table.dim))]
    if width > 0:
        columns.append(("state", pa.list_(pa.float32(), width)))
    if width >= 0:
        columns.append(("count", pa.uint32()))
    spec, rule = table.block.table, table.block.spec.rule
    assert spec is not None
    assert rule is not None, "a table has one"
    told = Told(FORMAT, table.name, table.dim, spec.dtype, spec.seed, rule)
    fields = [pa.field(name, kind, nullable=False) for name, kind in columns]
    return pa.schema(fields, metadata={METADATA: msgspec.json.encode(told)})


def batches(table: Table, schema: Any, width: int, timeout_s: float | None) -> Iterator[Any]:
    """The rows of a table, shard by shard, as record batches."""
    pa = pyarrow()
    rows = part_rows(table.dim, width)
    for found in table.scan(rows, state=width >= 0, timeout_s=timeout_s):
        columns = [pa.array(found.keys), _list_array(pa, found.values)]
        if width > 0:
            columns.append(_list_array(pa, found.state))
        if width >= 0:
            columns.append(pa.array(found.counts))
        yield pa.record_batch(columns, schema=schema)


def to_arrow(table: Table, *, state: bool, timeout_s: float | None) -> Any:
    """See `Table.to_arrow`."""
    pa = pyarrow()
    width = state_width(table) if state else -1
    schema = schema_of(table, width)
    return pa.Table.from_batches(batches(table, schema, width, timeout_s), schema)


def to_parquet(
    table: Table, path: str | os.PathLike[str], *, state: bool, timeout_s: float | None
) -> int:
    """See `Table.to_parquet`."""
    pyarrow()
    parquet = import_module("pyarrow.parquet")
    width = state_width(table) if state else -1
    schema = schema_of(table, width)
    rows = 0
    # Floats that are learnt seldom repeat, and their least and greatest tell nobody anything.
    options = {"use_dictionary": False, "write_statistics": ["key"]}
    with replacing(path) as file, parquet.ParquetWriter(file, schema, **options) as writer:
        for batch in batches(table, schema, width, timeout_s):
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows


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
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def part_rows(dim: int, width: int) -> int:
    """Rows of one part."""
    return max(1, min(ROWS_MAX, PART_BYTES // (8 + 4 * dim + 4 * max(width, 0) + 4)))


def _list_array(pa: Any, rows: Array | None) -> Any:
    assert rows is not None
    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def state_width(table: Table) -> int:
    """Elements of the rule's state in a row."""
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

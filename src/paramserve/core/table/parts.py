"""How the parts of a request to a table lie in memory: keys, places, values, one after the other.

Each part begins at a multiple of `ALIGN` bytes and is padded to one. Both ends measure by these
functions.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.table.options import BEYOND
from paramserve.errors import NonFinite, ShapeMismatch
from paramserve.messages import ALIGN, BlockSpec
from paramserve.rules.layout import WIDE
from paramserve.rules.registry import BUILT_IN

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


_LAST = ALIGN - 1


class RowGradient(NamedTuple):
    """Gradients of some rows of one table."""

    keys: Array
    """int64 [n]."""
    values: Array
    """float32 [n, dim]."""


class Records(NamedTuple):
    """Whole rows of a table, as they are read out and put in."""

    keys: Array
    """int64 [n]."""
    values: Array
    """float32 [n, dim]."""
    state: Array | None = None
    """float32 [n, width]: the rule's state arrays side by side."""
    counts: Array | None = None
    """uint32 [n]: updates of each row."""
    idle: Array | None = None
    """int64 [n]: clocks since each row was last used."""

    def first(self, rows: int) -> Records:
        """Copies of the first of them."""
        _, _, state, counts, idle = self
        return Records(
            self.keys[:rows].copy(),
            self.values[:rows].copy(),
            None if state is None else state[:rows].copy(),
            None if counts is None else counts[:rows].copy(),
            None if idle is None else idle[:rows].copy(),
        )

    def at(self, places: Array) -> Records:
        """Some of them, by their numbers or by whether."""
        return Records(*(None if each is None else each[places] for each in self))  # type: ignore[arg-type]


def check_records(records: Records, table: BlockSpec) -> None:
    """Refuse rows that a table cannot hold, before anything is written.

    In the state only a rule of the user's may have Inf: it is a number there that ours cannot go on
    from.

    Raises:
        NonFinite: with the key. Nothing was applied.
    """
    assert table.table is not None
    assert table.rule is not None
    keys, values, state = records[:3]
    name, dtype = table.group_name, table.table.dtype
    if dtype == "int64":
        return  # any bits are a number, and it has no state
    bad = _first_bad(keys, values.view(WIDE.get(dtype, np.float32)), BEYOND[dtype])
    if bad is not None:
        limit = "NaN or Inf" if math.isinf(BEYOND[dtype]) else f"NaN, Inf or {BEYOND[dtype]:g}"
        raise NonFinite(
            f"the values for key {bad[0]} of table {name!r} hold {bad[1]}: {dtype} has no {limit}",
            fix="look at where they come from",
        )
    beyond = math.inf if table.rule.name in BUILT_IN else math.nan
    bad = None if state is None else _first_bad(keys, state, beyond)
    if bad is not None:
        raise NonFinite(
            f"the state for key {bad[0]} of table {name!r} holds {bad[1]}",
            fix="put what scan(state=True) gave, or leave the state out",
        )


def _first_bad(keys: Array, rows: Array, beyond: float) -> tuple[int, float] | None:
    """The first key whose row has NaN, or a number whose size is not below `beyond` (NaN: any may
    be); and that number."""
    good = ~np.isnan(rows) if math.isnan(beyond) else np.abs(rows) < beyond
    if good.all():
        return None
    row = int(np.flatnonzero(~good.all(1))[0])
    return int(keys[row]), float(rows[row][~good[row]][0])


def padded(nbytes: int) -> int:
    """Bytes that a part takes."""
    return nbytes + _LAST & -ALIGN


def gradient_bytes(rows: int, dim: int) -> int:
    """Bytes of the gradients of some rows: keys and values."""
    return (8 * rows + _LAST & -ALIGN) + (4 * rows * dim + _LAST & -ALIGN)


def keys_bytes(rows: int) -> int:
    """Bytes of the keys of a read, and of the places that the rows go to."""
    return (8 * rows + _LAST & -ALIGN) + (4 * rows + _LAST & -ALIGN)


def records_bytes(rows: int, dim: int, width: int | None, idle: bool = False) -> int:
    """Bytes of whole rows, with `width` elements of state and the counts, or without them; with the
    clocks since their last use, or without."""
    state = 0 if width is None else padded(4 * rows * width) + padded(4 * rows)
    return gradient_bytes(rows, dim) + state + (padded(8 * rows) if idle else 0)


def gradient_at(memory: Bytes, offset: int, rows: int, dim: int) -> RowGradient:
    """The gradients that lie there, without a copy."""
    if not rows:  # there may be no memory
        return RowGradient(np.empty(0, np.int64), np.empty((0, dim), np.float32))
    keys = np.frombuffer(memory, np.int64, rows, offset)
    start = offset + (8 * rows + _LAST & -ALIGN)
    values = np.frombuffer(memory, np.float32, rows * dim, start)
    return RowGradient(keys, values.reshape(rows, dim))


def keys_at(memory: Bytes, offset: int, rows: int) -> tuple[Array, Array]:
    """The keys of a read, int64 [rows], and the places, int32 [rows]."""
    if not rows:  # there may be no memory
        return np.empty(0, np.int64), np.empty(0, np.int32)
    start = offset + (8 * rows + _LAST & -ALIGN)
    keys = np.frombuffer(memory, np.int64, rows, offset)
    return keys, np.frombuffer(memory, np.int32, rows, start)


def records_at(
    memory: Bytes, offset: int, rows: int, dim: int, width: int | None, idle: bool = False
) -> Records:
    """The whole rows that lie there."""
    keys, values = gradient_at(memory, offset, rows, dim)
    state = counts = None
    if width is not None:
        cursor = offset + gradient_bytes(rows, dim)
        state = view_at(memory, np.float32, rows * width, cursor).reshape(rows, width)
        counts = view_at(memory, np.uint32, rows, cursor + padded(4 * rows * width))
    clocks = None
    if idle:
        clocks = view_at(memory, np.int64, rows, offset + records_bytes(rows, dim, width))
    return Records(keys, values, state, counts, clocks)


def view_at(memory: Bytes, dtype: Any, count: int, offset: int) -> Array:
    """An array that lies there; where nothing does, there may be no memory."""
    return np.frombuffer(memory, dtype, count, offset) if count else np.empty(0, dtype)


def within(
    memory: Bytes | None,
    offset: int,
    nbytes: int,
    what: str,
    rows: int,
    of: str,
    align: int = ALIGN,
) -> Bytes:
    """The memory of a request, if the part lies in it, aligned.

    Args:
        what, rows, of: for the error, in this order.
        align: of the part, in bytes.
    Raises:
        ShapeMismatch: it does not. Nothing was applied.
    """
    if nbytes == 0:
        return np.empty(0, np.uint8)
    have = 0 if memory is None else memory.size
    if memory is None or offset < 0 or offset % align or nbytes < 0 or offset + nbytes > have:
        raise ShapeMismatch(
            f"{what}{rows}{of} need {nbytes} bytes at offset {offset}, but there are {have}",
            fix="send exactly the rows that are named, at aligned offsets",
        )
    return memory

"""Keys and rows as their users give them, made what the client and its kernels work with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.errors import DtypeMismatch, ShapeMismatch

Array = npt.NDArray[Any]


def as_keys(keys: npt.ArrayLike, table: str) -> tuple[Array, tuple[int, ...]]:
    """Keys as int64 [n], and their shape.

    Raises:
        TypeError: they are no integers. ValueError: one does not fit into 64 bits with a sign.
    """
    array = np.asarray(keys)
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype == np.float64):
        raise TypeError(f"keys of table {table!r} have to be integers, not {array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise ValueError(
            f"key {int(array.max())} of table {table!r} is above 2**63 - 1, the largest one"
        )
    flat = np.ascontiguousarray(array, np.int64).reshape(-1)
    return _writable(flat), array.shape


def as_rows(keys: npt.ArrayLike, rows: npt.ArrayLike, dim: int, table: str) -> tuple[Array, Array]:
    """Keys as int64 [n], and a row for each, float32 [n, dim].

    Raises:
        As `as_keys`. ShapeMismatch, DtypeMismatch: the rows are others than the keys' and floats.
    """
    flat, shape = as_keys(keys, table)
    values = np.asarray(rows)
    if values.shape != (*shape, dim):
        raise ShapeMismatch(
            f"{len(flat)} keys of table {table!r}, {list(shape)}, came with rows of shape "
            f"{list(values.shape)}, expected {[*shape, dim]}",
            fix="give one row of the table's dim for each key",
        )
    if values.dtype.kind != "f":
        raise DtypeMismatch(
            f"rows for table {table!r} are {values.dtype}, not floating point",
            fix="convert them with .astype('float32')",
        )
    with np.errstate(over="ignore"):  # what overflows is found where it is summed
        values = np.ascontiguousarray(values, np.float32)
    return flat, _writable(values).reshape(-1, dim)


def _writable(array: Array) -> Array:
    """The array, or a copy where it is read-only: kernels are compiled for arrays to write to."""
    return array if array.flags.writeable else array.copy()

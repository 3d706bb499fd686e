"""Updates of rows, one after another, by the maths that updates dense blocks.

Imports Numba: import this lazily, and load what is called before the first call, as with
`rules.kernels`. The maths is the rule's own `update`; here is what goes round it: which words of a
row are what, the rows of 16 bits, the row's update count, and memory asked for ahead of its use.

No kernel checks sizes or slots: `rules.rows` does.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np

from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.halves import decode, encode, noise_of
from paramserve.rules.intrinsics import LINE, borrowed, inlined, prefetch_to_write
from paramserve.rules.kernels import FLOAT, kernel, of_rule, tuple_of
from paramserve.rules.layout import LANES, RowView

if TYPE_CHECKING:
    from paramserve.rules.built_in import BuiltIn

AHEAD = 8
"""Rows. Measured with 512 bytes a row, random in 4 GiB."""
LAST_COUNT = 2**32 - 1
"""Largest count of a row, where it stays."""


class Rows(NamedTuple):
    """The rows that one call updates, as kernels take them."""

    floats: Array
    """float32 [capacity, words]"""
    words: Array
    """uint32 [capacity, words], the same memory."""
    slots: Array
    """int64 [n]"""
    keys: Array
    """int64 [n]"""
    gradients: Array
    """float32 [n, dim]"""
    scratch: Array
    """float32 [dim + LANES], overwritten: a kernel that made it would have to hold it."""
    stream: Any
    """uint64"""
    half: int
    count_at: int
    states_at: int
    """Where the first state begins, in words; the others follow."""
    width: int
    """float32 elements of each state of a rule with a kernel: they are alike."""


def rows_of(view: RowView, gradients: Array) -> Rows:
    """What kernels take for a view."""
    layout = view.layout
    return Rows(
        view.floats,
        view.words,
        view.slots,
        view.keys,
        gradients,
        np.empty(layout.dim + LANES, np.float32),
        np.uint64(view.stream),
        layout.half,
        layout.count_at,
        layout.value_words,
        layout.widths[0] if layout.widths else 0,
    )


def _array(kind: Any, ndim: int) -> Any:
    return numba.types.Array(kind, ndim, "C")


_named_tuple: Any = numba.types.NamedTuple
ROWS = _named_tuple(
    (
        _array(numba.float32, 2),
        _array(numba.uint32, 2),
        _array(numba.int64, 1),
        _array(numba.int64, 1),
        _array(numba.float32, 2),
        _array(numba.float32, 1),
        numba.uint64,
        *(numba.intp,) * 4,
    ),
    Rows,
)


def row_types(hyper: int) -> tuple[Any, ...]:
    """What a `row_kernel` is compiled for."""
    return (ROWS, FLOAT, tuple_of(FLOAT, hyper))


def copies() -> Kernels:
    """The kernels for rules that are given copies of rows."""
    values = _array(numba.float32, 2)
    return {gather: (ROWS, values), scatter: (ROWS, values)}


# --- what every driver does for a row ----------------------------------------------------------


@inlined
def fetch(rows: Any, i: int) -> None:
    """Ask for the memory of the row at position i, if there is one."""
    if i < rows.slots.size:
        size = rows.floats.shape[1] * 4
        # As int64: Numba makes float64 of an unsigned and a signed number.
        start = np.int64(rows.floats.ctypes.data) + rows.slots[i] * size
        for line in range(start & -LINE, start + size, LINE):
            prefetch_to_write(line)


@inlined
def borrow_rows(record: Any) -> Any:
    """The rows without counts of references, their dim, and scratch [dim]; the first rows' memory
    is asked for."""
    rows = Rows(
        borrowed(record.floats),
        borrowed(record.words),
        borrowed(record.slots),
        borrowed(record.keys),
        borrowed(record.gradients),
        borrowed(record.scratch),
        record.stream,
        record.half,
        record.count_at,
        record.states_at,
        record.width,
    )
    for i in range(AHEAD):
        fetch(rows, i)
    dim = rows.gradients.shape[1]
    return rows, dim, rows.scratch[:dim]


@inlined
def opened(rows: Any, i: int, scratch: Array) -> Array:
    """The values of a row: in place, or widened to `scratch` [dim]."""
    slot = rows.slots[i]
    fetch(rows, i + AHEAD)
    if rows.half:
        decode(rows.words[slot], rows.half, scratch)
        return scratch
    row: Array = rows.floats[slot, : scratch.size]
    return row


@inlined
def state_of(rows: Any, i: int, number: int) -> Array:
    """A state of a row: [width]."""
    at = rows.states_at + number * rows.width
    state: Array = rows.floats[rows.slots[i], at : at + rows.width]
    return state


@inlined
def count_of(rows: Any, i: int) -> Any:
    """Updates that a row has had, as int64; 1 where they are not counted."""
    return np.int64(rows.words[rows.slots[i], rows.count_at]) if rows.count_at >= 0 else 1


@inlined
def closed(rows: Any, i: int, value: Array) -> None:
    """Count the update of a row, and round its values if they are of 16 bits."""
    if rows.count_at >= 0:
        slot = rows.slots[i]
        count = min(count_of(rows, i) + 1, LAST_COUNT)
        rows.words[slot, rows.count_at] = count
        if rows.half:
            encode(value, rows.half, rows.words[slot], noise_of(rows.stream, rows.keys[i], count))


# --- the kernel of a rule -----------------------------------------------------------------------


def states(number: int) -> Any:
    """What gathers so many states of a row, as a tuple; a kernel knows their number."""
    if not number:

        def gathered(rows: Any, i: int) -> Any:
            return ()

    else:
        fewer, last = states(number - 1), number - 1

        def gathered(rows: Any, i: int) -> Any:
            return (*fewer(rows, i), state_of(rows, i, last))

    return inlined(gathered)


def with_scratch(number: int) -> Any:
    """State arrays (see `states`) and float32 [LANES] of scratch behind them."""
    own = states(number)

    @inlined
    def gathered(rows: Any, i: int) -> Any:
        return (*own(rows, i), rows.scratch[rows.gradients.shape[1] :])

    return gathered


@cache
def row_kernel(rule: type[BuiltIn], number: int) -> Any:
    """The kernel of a rule for rows with so many states."""
    update, coefficients = inlined(rule.update), inlined(rule.coefficients)
    states_of = with_scratch(number) if rule.whole_rows else states(number)

    def row(record: Rows, scale: float, hyper: Any) -> None:
        rows, _, scratch = borrow_rows(record)
        count: Any = np.int64(1)
        numbers = coefficients(hyper, scale, count)
        for i in range(rows.slots.size):
            value = opened(rows, i, scratch)
            now = count_of(rows, i)
            if now != count:  # neighbours often share it, and powers cost as much as the row
                count = now
                numbers = coefficients(hyper, scale, count)
            update(value, rows.gradients[i], states_of(rows, i), numbers)
            closed(rows, i, value)

    return of_rule(rule, number, row)


# --- for rules without a driver -----------------------------------------------------------------


@kernel
def gather(record: Rows, values: Array) -> None:
    """Copy values to float32 [n, dim]."""
    rows, dim, scratch = borrow_rows(record)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        for j in range(dim):
            values[i, j] = value[j]


@kernel
def scatter(record: Rows, values: Array) -> None:
    """Copy values back, as an update: it is counted, and 16-bit values are rounded."""
    rows, dim, scratch = borrow_rows(record)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        for j in range(dim):
            value[j] = values[i, j]
        closed(rows, i, value)

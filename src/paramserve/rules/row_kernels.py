"""Updates of rows, one after another, by the kernels that update dense blocks.

Imports Numba: import this lazily, and load what is called before the first call, as with
`rules.kernels`. The maths of a rule stands there, once; here is what goes round it: which words of
a row are what, the rows of 16 bits, the row's update count, and memory asked for ahead of its use.

No kernel checks sizes or slots: `rules.rows` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numba
import numpy as np

from paramserve.kernel_cache import Kernels
from paramserve.rules import kernels
from paramserve.rules.base import Array
from paramserve.rules.borrowed import borrowed
from paramserve.rules.halves import decode, encode, noise_of
from paramserve.rules.kernels import inlined, kernel
from paramserve.rules.layout import RowView
from paramserve.rules.prefetch import LINE, prefetch_to_write

AHEAD = 8
"""Rows. Measured with 512 bytes a row, random in 4 GiB."""
LANES = 16
"""Sums that are kept side by side, whatever the vector width."""
LAST_COUNT = 2**32 - 1
"""Where a row's count stays."""


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
        numba.intp,
        numba.intp,
    ),
    Rows,
)


def typed(*drivers: Callable[..., Any]) -> Kernels:
    """What kernels of this file are compiled for."""
    types = {
        "Rows": ROWS,
        "Array": _array(numba.float32, 2),
        "int": numba.types.intp,
        "float": numba.types.float64,
    }
    found = {}
    for each in drivers:
        annotations = cast(Any, each).py_func.__annotations__
        found[each] = tuple(types[k] for name, k in annotations.items() if name != "return")
    return found


_add = inlined(kernels.add)
_sgd = inlined(kernels.sgd)
_sgd_momentum = inlined(kernels.sgd_momentum)
_adam = inlined(kernels.adam)
_adagrad = inlined(kernels.adagrad)
_ftrl = inlined(kernels.ftrl)


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
def begun(given: Any) -> Any:
    """The rows without counts of references, their dim, and scratch [dim]; the first rows' memory
    is asked for."""
    rows = Rows(
        borrowed(given.floats),
        borrowed(given.words),
        borrowed(given.slots),
        borrowed(given.keys),
        borrowed(given.gradients),
        borrowed(given.scratch),
        given.stream,
        given.half,
        given.count_at,
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
def state_of(rows: Any, i: int, at: int, width: int) -> Array:
    """A state of a row: [width]."""
    state: Array = rows.floats[rows.slots[i], at : at + width]
    return state


@inlined
def count_of(rows: Any, i: int) -> Any:
    """Updates that a row has had, as int64; 0 where they are not counted."""
    return np.int64(rows.words[rows.slots[i], rows.count_at]) if rows.count_at >= 0 else 0


@inlined
def closed(rows: Any, i: int, value: Array) -> None:
    """Count the update of a row, and round its values if they are of 16 bits."""
    if rows.count_at >= 0:
        slot = rows.slots[i]
        count = min(count_of(rows, i) + 1, LAST_COUNT)
        rows.words[slot, rows.count_at] = count
        if rows.half:
            encode(value, rows.half, rows.words[slot], noise_of(rows.stream, rows.keys[i], count))


# --- one driver for each rule -------------------------------------------------------------------


@kernel
def add(given: Rows, scale: float) -> None:
    """`kernels.add` on each row."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        _add(value, rows.gradients[i], rows.scratch[:0], 0, dim, scale)
        closed(rows, i, value)


@kernel
def sgd(given: Rows, scale: float, decay: float, lr: float) -> None:
    """`kernels.sgd` on each row."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        _sgd(value, rows.gradients[i], rows.scratch[:0], 0, dim, scale, decay, lr)
        closed(rows, i, value)


@kernel
def sgd_momentum(
    given: Rows,
    at: int,
    scale: float,
    decay: float,
    momentum: float,
    dampening: float,
    direct: float,
    through: float,
    lr: float,
) -> None:
    """`kernels.sgd_momentum` on each row. A row that is not counted never has dampening, and then
    its first update is like all others, for a buffer of zeros."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        keep, take = momentum, 1.0 - dampening
        if rows.count_at >= 0 and count_of(rows, i) == 0:
            keep, take = 0.0, 1.0
        _sgd_momentum(
            value, rows.gradients[i], state_of(rows, i, at, dim), rows.scratch[:0], 0, dim,
            scale, decay, keep, take, direct, through, lr,
        )  # fmt: skip
        closed(rows, i, value)


@kernel
def adam(
    given: Rows,
    at: int,
    scale: float,
    decay: float,
    shrink: float,
    beta1: float,
    beta2: float,
    eps: float,
    lr: float,
) -> None:
    """`kernels.adam` on each row, corrected for the row's own start."""
    rows, dim, scratch = begun(given)
    known, root, step = -1, 1.0, lr
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        count = count_of(rows, i)
        if count != known:  # neighbours often share it, and powers cost as much as the row
            known = count
            updates = np.float64(count + 1)
            root = np.sqrt(1.0 - beta2**updates)
            step = lr / (1.0 - beta1**updates)
        _adam(
            value, rows.gradients[i],
            state_of(rows, i, at, dim), state_of(rows, i, at + dim, dim), rows.scratch[:0], 0, dim,
            scale, decay, shrink, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, step,
        )  # fmt: skip
        closed(rows, i, value)


@kernel
def adagrad(
    given: Rows, at: int, scale: float, decay: float, eps: float, lr: float, lr_decay: float
) -> None:
    """`kernels.adagrad` on each row."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        step = lr / (1.0 + np.float64(count_of(rows, i)) * lr_decay)
        _adagrad(
            value, rows.gradients[i], state_of(rows, i, at, dim), rows.scratch[:0], 0, dim,
            scale, decay, eps, step,
        )  # fmt: skip
        closed(rows, i, value)


@kernel
def ftrl(
    given: Rows, at: int, scale: float, alpha: float, beta: float, l1: float, l2: float
) -> None:
    """`kernels.ftrl` on each row."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        _ftrl(
            value, rows.gradients[i],
            state_of(rows, i, at, dim), state_of(rows, i, at + dim, dim), rows.scratch[:0], 0, dim,
            scale, alpha, beta, l1, l2,
        )  # fmt: skip
        closed(rows, i, value)


@inlined
def mean_square(value: Array, gradient: Array, c: Any, wd: Any, sums: Array) -> Any:
    """Mean of (c * gradient + wd * value)**2 over a row, in float32, in an order of addition that
    is the same on every machine.

    Args:
        sums: float32 [LANES], overwritten.
    """
    size = value.size
    whole = size // LANES * LANES
    for lane in range(LANES):
        sums[lane] = 0.0
    for at in range(0, whole, LANES):
        v, g = value[at : at + LANES], gradient[at : at + LANES]
        for lane in range(LANES):
            d = c * g[lane] + wd * v[lane]
            sums[lane] += d * d
    for j in range(whole, size):
        d = c * gradient[j] + wd * value[j]
        sums[j - whole] += d * d
    for width in (8, 4, 2, 1):
        for lane in range(width):
            sums[lane] += sums[lane + width]
    return sums[0] / np.float32(size)


@kernel
def row_adagrad(given: Rows, at: int, scale: float, decay: float, eps: float, lr: float) -> None:
    """g = scale * gradient + decay * value; total += mean of g * g, one number for a row;
    value -= lr / (sqrt(total) + eps) * g
    """
    rows, dim, scratch = begun(given)
    sums = rows.scratch[dim:]
    c, wd, e, rate = np.float32(scale), np.float32(decay), np.float32(eps), np.float32(lr)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        gradient = rows.gradients[i]
        total = state_of(rows, i, at, 1)
        total[0] += mean_square(value, gradient, c, wd, sums)
        step = rate / (np.sqrt(total[0]) + e)
        for j in range(dim):
            value[j] -= step * (c * gradient[j] + wd * value[j])
        closed(rows, i, value)


# --- for rules without a driver -----------------------------------------------------------------


@kernel
def gather(given: Rows, values: Array) -> None:
    """Copy values to float32 [n, dim]."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        for j in range(dim):
            values[i, j] = value[j]


@kernel
def scatter(given: Rows, values: Array) -> None:
    """Copy values back, as an update: it is counted, and 16-bit values are rounded."""
    rows, dim, scratch = begun(given)
    for i in range(rows.slots.size):
        value = opened(rows, i, scratch)
        for j in range(dim):
            value[j] = values[i, j]
        closed(rows, i, value)

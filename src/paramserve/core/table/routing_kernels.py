"""Loops over keys and gradients on their way to the shards. Imported through `compiled` only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paramserve.core.table.kernels import INT, KEYS, hidden_hash, mix
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import (
    LINE,
    borrowed,
    fence,
    inlined,
    prefetch_to_write,
    stream_row,
    streaming_pays,
)
from paramserve.rules.kernels import kernel

FEW = 8
"""One repeated row in so many, at most: such a row is read again soon after it was streamed."""
BLOCK = 64
"""Keys whose places are asked for together."""
NUMBER_BYTES = 4
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@inlined
def shard_of(key: Any, shards: Any) -> Any:
    """The shard that holds a key, as `hashing.shard_of` says."""
    return np.intp(((mix(key) & LOW) * np.uint64(shards)) >> HALF)


@inlined
def padded(nbytes: int, align: int) -> int:
    """Bytes that so many take where each part is a multiple of `align`."""
    return -(-nbytes // align) * align


@inlined
def lay_parts(keys: Array, row_bytes: int, align: int, parts: Array) -> tuple[Array, Array]:
    """Parts that lie one after the other: each shard's keys, and then so many bytes for each.

    Args:
        parts: as for `lay_keys`.
    Returns:
        Where each shard's keys begin, in words of 8 bytes, and where the rest of its part does, in
        words of 4 bytes: int64 [shards].
    """
    shards = parts.shape[0]
    starts, rest = np.empty(shards, np.int64), np.empty(shards, np.int64)
    parts[:, 0] = 0
    for i in range(keys.size):
        parts[shard_of(keys[i], shards), 0] += 1
    at = 0
    for shard in range(shards):
        parts[shard, 1], starts[shard] = at, at // 8
        at += padded(8 * parts[shard, 0], align)
        rest[shard] = at // 4
        at += padded(row_bytes * parts[shard, 0], align)
    return starts, rest


@kernel
def lay_keys(keys: Array, align: int, words: Array, parts: Array) -> None:
    """Write each shard's keys, and the number of each among all, to its part of a memory.

    Args:
        align: each part, and what follows the keys in it, begins at a multiple of so many bytes.
        words: the memory as int64 [m], with room for them.
        parts: int64 [shards, 2], gets how many keys each shard has, and where its part begins, in
            bytes.
    """
    halves = words.view(np.int32)
    starts, places = lay_parts(keys, 4, align, parts)
    for i in range(keys.size):
        shard = shard_of(keys[i], starts.size)
        words[starts[shard]] = keys[i]
        halves[places[shard]] = i
        starts[shard] += 1
        places[shard] += 1


@kernel
def lay_gradient(
    keys: Array, numbers: Array, values: Array, align: int, words: Array, parts: Array
) -> int:
    """Write each shard's keys and the sums of their gradients to its part of a memory.

    Args:
        keys: the distinct ones, int64 [d], in the order in which they first come.
        numbers: int32 [n], which key each row belongs to.
        values: float32 [n, dim].
        align, words, parts: as for `lay_keys`; another process reads this memory.
    Returns:
        As `add_rows`.
    """
    dim = values.shape[1]
    starts, rows = lay_parts(keys, 4 * dim, align, parts)
    targets = np.empty(keys.size, np.int64)
    for i in range(keys.size):
        shard = shard_of(keys[i], starts.size)
        words[starts[shard]] = keys[i]
        targets[i] = rows[shard]
        starts[shard] += 1
        rows[shard] += dim
    return sum_rows(values, numbers, targets, words.view(np.float32), True)


@kernel
def find_distinct(keys: Array, table: Array, distinct: Array, numbers: Array, secret: int) -> int:
    """Number the distinct keys in the order in which they first come.

    Args:
        keys: int64 [n].
        table: int32 [a power of two above 3 n], overwritten.
        distinct: int64 [n], for the distinct keys.
        numbers: int32 [n], for the number of each key.
        secret: of this process; nothing that is written depends on it but `table`.
    Returns:
        How many are distinct.
    """
    table[:] = -1
    base, mask = table.ctypes.data, np.uint64(table.size - 1)
    homes = np.empty(BLOCK, np.intp)
    count = 0
    for begin in range(0, keys.size, BLOCK):
        some = keys[begin : begin + BLOCK]
        for i in range(some.size):  # apart from what follows, so that it is vectorised
            homes[i] = (hidden_hash(some[i], secret) >> HALF) & mask
        for i in range(some.size):
            prefetch_to_write(base + homes[i] * NUMBER_BYTES)
        for i in range(some.size):
            key, at = some[i], homes[i]
            number = table[at]
            while number >= 0 and distinct[number] != key:
                at = np.intp((at + 1) & mask)
                number = table[at]
            if number < 0:
                number = np.int32(count)
                table[at] = number
                distinct[count] = key
                count += 1
            numbers[begin + i] = number
    return count


@inlined
def sum_rows(values: Array, numbers: Array, targets: Array, out: Array, elsewhere: bool) -> int:
    """Add values to the rows of `out` that they belong to, as `add_rows`."""
    values, out = borrowed(values), borrowed(out)
    base, there, row_bytes = values.ctypes.data, out.ctypes.data, values.shape[1] * 4
    few = values.shape[0] - targets.size <= values.shape[0] // FEW
    streamed = elsewhere and few and streaming_pays(there, row_bytes, targets.size)
    bad, started = -1, 0
    for i in range(values.shape[0]):
        number = numbers[i]
        source = values[i]
        target = out[targets[number] : targets[number] + source.size]
        to = there + targets[number] * 4
        good = True
        if number < started:
            for j in range(source.size):
                target[j] += source[j]
                good &= abs(target[j]) < np.inf
        elif streamed and to % LINE == 0:
            stream_row(base + i * row_bytes, to, row_bytes)
            for j in range(source.size):
                good &= abs(source[j]) < np.inf
        else:
            for j in range(source.size):
                target[j] = source[j]
                good &= abs(source[j]) < np.inf
        started = max(started, number + 1)
        if not good and bad < 0:
            bad = i
    if streamed:
        fence()
    return bad


@kernel
def add_rows(values: Array, numbers: Array, targets: Array, out: Array, elsewhere: bool) -> int:
    """Sum rows into their targets, in order, and look for what is not finite.

    Args:
        values: float32 [n, dim].
        numbers: int32 [n], which distinct key each row belongs to: numbered in the order in which
            they first come.
        targets: int64 [distinct], the element of `out` where each one's sum begins.
        out: float32 [m].
        elsewhere: whether another process reads `out`.
    Returns:
        The number of the first row that holds NaN or Inf, or makes its sum so; or -1.
    """
    return sum_rows(values, numbers, targets, out, elsewhere)


_NUMBERS = types.Array(types.int32, 1, "C")
_PARTS = types.Array(types.int64, 2, "C")
_FLOATS = types.Array(types.float32, 1, "C")
_ROWS = types.Array(types.float32, 2, "C")
KERNELS: Kernels = {
    lay_keys: (KEYS, INT, KEYS, _PARTS),
    lay_gradient: (KEYS, _NUMBERS, _ROWS, INT, KEYS, _PARTS),
    find_distinct: (KEYS, _NUMBERS, KEYS, _NUMBERS, INT),
    add_rows: (_ROWS, _NUMBERS, KEYS, _FLOATS, types.boolean),
}
"""All of them, compiled for these arguments."""

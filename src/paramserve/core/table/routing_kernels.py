"""Loops over keys and gradients on their way to the shards. Imported through `compiled` only."""

from __future__ import annotations

import numpy as np
from numba import types

from paramserve.core.table.kernels import INT, KEYS, hidden_hash, mix
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import LINE, borrowed, fence, stream_row, streaming_pays
from paramserve.rules.kernels import kernel

FEW = 8
"""One repeated row in so many, at most: such a row is read again soon after it was streamed."""
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


@kernel
def count_shards(keys: Array, shards: int, counts: Array) -> None:
    """Add to `counts` [shards] how many of the keys each shard holds."""
    many = np.uint64(shards)
    for i in range(keys.size):
        counts[((mix(keys[i]) & LOW) * many) >> HALF] += 1


@kernel
def spread_keys(keys: Array, starts: Array, places: Array, words: Array, halves: Array) -> None:
    """Write each key, and its number among all, to its shard's part of a memory.

    Args:
        starts: int64 [shards], where the parts of the keys begin, in words of 8 bytes; counted up.
        places: int64 [shards], the same of the numbers, in words of 4 bytes.
        words, halves: the memory as int64 and as int32.
    """
    many = np.uint64(starts.size)
    for i in range(keys.size):
        shard = ((mix(keys[i]) & LOW) * many) >> HALF
        words[starts[shard]] = keys[i]
        halves[places[shard]] = i
        starts[shard] += 1
        places[shard] += 1


@kernel
def spread_targets(
    keys: Array, starts: Array, rows: Array, dim: int, words: Array, targets: Array
) -> None:
    """Write each key to its shard's part of a memory, and say where its row is to go.

    Args:
        starts: as for `spread_keys`.
        rows: int64 [shards], where the parts of the rows begin, in words of 4 bytes; counted up.
        targets: int64 [n], for the place of each key's row, in the same words.
    """
    many = np.uint64(starts.size)
    for i in range(keys.size):
        shard = ((mix(keys[i]) & LOW) * many) >> HALF
        words[starts[shard]] = keys[i]
        targets[i] = rows[shard]
        starts[shard] += 1
        rows[shard] += dim


@kernel
def find_distinct(keys: Array, table: Array, distinct: Array, numbers: Array, secret: int) -> int:
    """Number the distinct keys in the order in which they first come.

    Args:
        keys: int64 [n].
        table: int32 [a power of two above 1.5 n], all -1.
        distinct: int64 [n], for the distinct keys.
        numbers: int32 [n], for the number of each key.
        secret: of this process; nothing that is written depends on it but `table`.
    Returns:
        How many are distinct.
    """
    mask = np.uint64(table.size - 1)
    count = 0
    for i in range(keys.size):
        key = keys[i]
        at = (hidden_hash(key, secret) >> HALF) & mask
        while True:
            number = table[at]
            if number < 0:
                table[at] = count
                distinct[count] = key
                numbers[i] = count
                count += 1
                break
            if distinct[number] == key:
                numbers[i] = number
                break
            at = (at + np.uint64(1)) & mask
    return count


@kernel
def add_rows(
    values: Array, numbers: Array, targets: Array, out: Array, seen: Array, elsewhere: bool
) -> int:
    """Sum rows into their targets, in order, and look for what is not finite.

    Args:
        values: float32 [n, dim].
        numbers: int32 [n], which distinct key each row belongs to.
        targets: int64 [distinct], the element of `out` where each one's sum begins.
        out: float32 [m].
        seen: uint8 [distinct], all 0.
        elsewhere: whether another process reads `out`.
    Returns:
        The number of the first row that holds NaN or Inf, or -1.
    """
    values, out = borrowed(values), borrowed(out)
    base, there, row_bytes = values.ctypes.data, out.ctypes.data, values.shape[1] * 4
    few = values.shape[0] - targets.size <= values.shape[0] // FEW
    streamed = elsewhere and few and streaming_pays(there, row_bytes, targets.size)
    bad = -1
    for i in range(values.shape[0]):
        number = numbers[i]
        source = values[i]
        target = out[targets[number] : targets[number] + source.size]
        to = there + targets[number] * 4
        good = True
        if seen[number]:
            for j in range(source.size):
                target[j] += source[j]
                good &= abs(target[j]) < np.inf
        elif streamed and to % LINE == 0:
            seen[number] = 1
            stream_row(base + i * row_bytes, to, row_bytes)
            for j in range(source.size):
                good &= abs(source[j]) < np.inf
        else:
            seen[number] = 1
            for j in range(source.size):
                target[j] = source[j]
                good &= abs(source[j]) < np.inf
        if not good and bad < 0:
            bad = i
    if streamed:
        fence()
    return bad


_NUMBERS = types.Array(types.int32, 1, "C")
_FLOATS = types.Array(types.float32, 1, "C")
_ROWS = types.Array(types.float32, 2, "C")
_SEEN = types.Array(types.uint8, 1, "C")
KERNELS: Kernels = {
    count_shards: (KEYS, INT, KEYS),
    spread_keys: (KEYS, KEYS, KEYS, KEYS, _NUMBERS),
    spread_targets: (KEYS, KEYS, KEYS, INT, KEYS, KEYS),
    find_distinct: (KEYS, _NUMBERS, KEYS, _NUMBERS, INT),
    add_rows: (_ROWS, _NUMBERS, KEYS, _FLOATS, _SEEN, types.boolean),
}
"""All of them, compiled for these arguments."""

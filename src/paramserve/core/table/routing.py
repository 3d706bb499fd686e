"""A table's keys and gradients on their way to the shards: which goes where, and what is summed.

The client writes them straight to where the shards read them; a shard sums what several workers
sent.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.table.hashing import own_secret
from paramserve.core.table.parts import RowGradient, gradient_bytes, keys_bytes, padded

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@cache
def routing_kernels() -> ModuleType:
    """The module `paramserve.core.table.routing_kernels`; `compiling.load_routing` compiles it."""
    from paramserve.core.table import routing_kernels as kernels

    return kernels


def counts_of(keys: Array, shards: int) -> list[int]:
    """How many of the keys, int64 [n], each shard holds."""
    if shards == 1:
        return [keys.size]
    counts = np.zeros(shards, np.int64)
    routing_kernels().count_shards(keys, shards, counts)
    return [int(count) for count in counts]


def distinct(keys: Array) -> tuple[Array, Array]:
    """The distinct keys, int64 [d], in the order in which they first come, and the number of each
    key among them, int32 [n]."""
    keys = np.ascontiguousarray(keys)
    size = 64
    while size < 1.5 * keys.size:
        size *= 2
    found = np.empty(keys.size, np.int64)
    numbers = np.empty(keys.size, np.int32)
    table = np.full(size, -1, np.int32)
    count = routing_kernels().find_distinct(keys, table, found, numbers, own_secret())
    return found[:count], numbers


def key_offsets(counts: list[int]) -> tuple[list[int], int]:
    """Where each shard's keys and places begin, in bytes, and the bytes of all."""
    return _offsets([keys_bytes(count) for count in counts])


def gradient_offsets(counts: list[int], dim: int) -> tuple[list[int], int]:
    """Where each shard's gradients begin, in bytes, and the bytes of all."""
    return _offsets([gradient_bytes(count, dim) for count in counts])


def _offsets(sizes: list[int]) -> tuple[list[int], int]:
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return offsets[:-1], offsets[-1]


def lay_keys(keys: Array, counts: list[int], offsets: list[int], memory: Bytes) -> None:
    """Write each shard's keys, and the number of each among all, to its part of `memory`."""
    starts = np.array(offsets, np.int64)
    places = starts + [padded(8 * count) for count in counts]
    size = memory.size // 8 * 8
    routing_kernels().spread_keys(
        keys, starts // 8, places // 4, memory[:size].view(np.int64), memory[:size].view(np.int32)
    )


def lay_gradient(
    keys: Array,
    numbers: Array,
    values: Array,
    counts: list[int],
    offsets: list[int],
    memory: Bytes,
) -> int:
    """Write each shard's keys and the sums of their gradients to its part of `memory`.

    Args:
        keys: the distinct ones, int64 [d].
        numbers: int32 [n]; which key each row of `values` belongs to.
        values: float32 [n, dim].
    Returns:
        The number of the first row that holds NaN or Inf, or makes its sum so; or -1.
    """
    starts = np.array(offsets, np.int64)
    rows = starts + [padded(8 * count) for count in counts]
    targets = np.empty(keys.size, np.int64)
    size = memory.size // 8 * 8
    kernels = routing_kernels()
    kernels.spread_targets(
        keys, starts // 8, rows // 4, values.shape[1], memory[:size].view(np.int64), targets
    )
    seen = np.zeros(keys.size, np.uint8)
    flat = memory[:size].view(np.float32)
    return int(kernels.add_rows(values, numbers, targets, flat, seen, True))


def summed(keys: Array, values: Array) -> RowGradient:
    """Each key once, with the sum of its rows in the order given.

    Args:
        keys: int64 [n].
        values: float32 [n, dim].
    """
    found, numbers = distinct(keys)
    dim = values.shape[1]
    out = np.empty(found.size * dim, np.float32)
    targets = np.arange(found.size, dtype=np.int64) * dim
    seen = np.zeros(found.size, np.uint8)
    routing_kernels().add_rows(values, numbers, targets, out, seen, False)
    return RowGradient(found, out.reshape(-1, dim))

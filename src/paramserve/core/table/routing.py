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
from paramserve.core.table.parts import RowGradient, gradient_bytes, keys_bytes
from paramserve.messages import ALIGN

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Parts = list[list[int]]
"""Keys of each shard, and the byte at which its part of some memory begins."""


@cache
def routing_kernels() -> ModuleType:
    """The module `paramserve.core.table.routing_kernels`; `compiling.load_routing` compiles it."""
    from paramserve.core.table import routing_kernels as kernels

    return kernels


def keys_bytes_max(keys: int, shards: int) -> int:
    """What the parts of a read take at most, however the keys are spread."""
    return keys_bytes(keys) + 2 * ALIGN * (shards - 1)


def gradient_bytes_max(keys: int, dim: int, shards: int) -> int:
    """What the parts of a gradient take at most, however the keys are spread."""
    return gradient_bytes(keys, dim) + 2 * ALIGN * (shards - 1)


def distinct(keys: Array) -> tuple[Array, Array]:
    """The distinct keys, int64 [d], in the order in which they first come, and the number of each
    key among them, int32 [n]."""
    if not keys.flags.c_contiguous:
        keys = np.ascontiguousarray(keys)
    size = 64
    while size < 3 * keys.size:
        size *= 2
    unique = np.empty(keys.size, np.int64)
    numbers = np.empty(keys.size, np.int32)
    table = np.empty(size, np.int32)
    count = routing_kernels().find_distinct(keys, table, unique, numbers, own_secret())
    return unique[:count], numbers


def lay_keys(keys: Array, shards: int, words: Array) -> Parts:
    """Write each shard's keys, and the number of each among all, to its part of a memory.

    Args:
        words: int64 [m], the memory: at least `keys_bytes_max`.
    """
    parts = np.empty((shards, 2), np.int64)
    routing_kernels().lay_keys(keys, ALIGN, words, parts)
    return parts.tolist()


def lay_gradient(
    keys: Array, numbers: Array, values: Array, shards: int, words: Array
) -> tuple[int, Parts]:
    """Write each shard's keys and the sums of their gradients to its part of a memory.

    Args:
        keys, numbers: of `distinct`.
        values: float32 [n, dim].
        words: int64 [m], the memory: at least `gradient_bytes_max`.
    Returns:
        The number of the first row that holds NaN or Inf, or makes its sum so, or -1; and where
        the parts lie.
    """
    parts = np.empty((shards, 2), np.int64)
    bad = routing_kernels().lay_gradient(keys, numbers, values, ALIGN, words, parts)
    return bad, parts.tolist()


def summed(keys: Array, values: Array) -> RowGradient:
    """Each key once, with the sum of its rows in the order given.

    Args:
        keys: int64 [n].
        values: float32 [n, dim].
    """
    unique, numbers = distinct(keys)
    dim = values.shape[1]
    out = np.empty(unique.size * dim, np.float32)
    targets = np.arange(unique.size, dtype=np.int64) * dim
    routing_kernels().add_rows(values, numbers, targets, out, False)
    return RowGradient(unique, out.reshape(-1, dim))

"""What a step says of a table's rows, and the slots that its keys, gradients and values lie in.

Keys and gradients are written straight to where each shard reads them. A pulled array lies where
the shards have written it; its slot goes back when the last view of it is gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client.links import Links, Slot
from paramserve.core.partition import Block
from paramserve.core.table import routing
from paramserve.messages import Gradient, Keys, ReadTarget
from paramserve.rules.base import Hyper

Array = npt.NDArray[Any]

CLASSES = 8
"""Slots of rows have one of so many sizes between a power of two and the next: batches differ by
some rows, and a slot of the same size is used again without cutting memory anew."""


class RowPush(NamedTuple):
    """Gradients of one table's rows, captured."""

    block: Block
    headers: tuple[Gradient, ...]
    """For each shard."""
    slot: Slot
    bad: int
    """The number of a row that is not finite, or -1."""


class RowPull(NamedTuple):
    """A read of one table's rows."""

    block: Block
    places: tuple[ReadTarget, ...]
    """For each shard."""
    keys: Slot
    values: Slot
    rows: int


class Lent:
    """Memory of a slot as an array that owns it: the slot goes back when the array is gone."""

    def __init__(self, links: Links, slot: Slot, shape: tuple[int, int]) -> None:
        self._links, self._slot = links, slot
        memory = slot.bytes
        self.__array_interface__ = {
            "shape": shape,
            "typestr": "<f4",
            "data": (memory.ctypes.data, False),
            "version": 3,
        }
        self._memory = memory  # The mapping lives as long as this.

    def __del__(self) -> None:
        if "_slot" in self.__dict__:  # else it was not constructed to its end
            self._links.give_back_later(self._slot)


def class_bytes(nbytes: int) -> int:
    """The size of the slot for so many bytes."""
    step = max(64, (1 << max(nbytes - 1, 1).bit_length()) // (2 * CLASSES))
    return -(-nbytes // step) * step


def lay_push(
    links: Links, block: Block, keys: Array, values: Array, hyper: Hyper | None
) -> RowPush:
    """Capture the gradients of some rows; those of equal keys are summed.

    Args:
        keys: int64 [n].
        values: float32 [n, dim].
    """
    assert block.table is not None
    shards = len(links.shards)
    found, numbers = routing.distinct(keys)
    counts = routing.counts_of(found, shards)
    offsets, nbytes = routing.gradient_offsets(counts, block.table.dim)
    slot = links.take(class_bytes(nbytes))
    bad = routing.lay_gradient(found, numbers, values, counts, offsets, slot.bytes)
    headers = tuple(
        Gradient(block.id, slot.arena, slot.offset + offset, None, hyper, count)
        for offset, count in zip(offsets, counts, strict=True)
    )
    return RowPush(block, headers, slot, bad)


def lay_pull(links: Links, block: Block, keys: Array, *, create: bool) -> RowPull:
    """Take memory for a read of some rows, and write the keys for each shard.

    Args:
        keys: int64 [n].
    """
    assert block.table is not None
    dim, total = block.table.dim, keys.size
    counts = routing.counts_of(keys, len(links.shards))
    offsets, nbytes = routing.key_offsets(counts)
    asked = links.take(class_bytes(nbytes))
    try:
        values = links.take(class_bytes(4 * dim * total))
    except BaseException:
        links.give_back([asked])
        raise
    routing.lay_keys(keys, counts, offsets, asked.bytes)
    places = tuple(
        ReadTarget(
            block.id,
            values.arena,
            values.offset,
            Keys(count, asked.arena, asked.offset + offset, total, create),
        )
        for offset, count in zip(offsets, counts, strict=True)
    )
    return RowPull(block, places, asked, values, total)


def owned(links: Links, pull: RowPull) -> Array:
    """The rows of a pull that is answered, float32 [rows, dim]: the caller's to keep."""
    assert pull.block.table is not None
    return np.asarray(Lent(links, pull.values, (pull.rows, pull.block.table.dim)))

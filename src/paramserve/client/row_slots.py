"""What a step says of a table's rows, and the slots that its keys, gradients and values lie in.

Keys and gradients are written straight to where each shard reads them. A pulled array lies where
the shards have written it; its slot goes back when the last view of it is gone.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.client.links import Links, Slot
from paramserve.codecs.keys import order_of
from paramserve.core.partition import Block
from paramserve.core.table import routing, wide
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.parts import keys_at, keys_bytes, padded, view_at
from paramserve.errors import ProtocolError
from paramserve.messages import Contains, Delete, Gradient, Keys, ReadTarget, ShardRequest
from paramserve.rules.base import Hyper
from paramserve.rules.layout import WIDE
from paramserve.transport import forks

Array = npt.NDArray[Any]

CLASSES = 8
"""Slots of rows have one of so many sizes between a power of two and the next: batches differ by
some rows, and a slot of the same size is used again without cutting memory anew."""
SIZES_KEPT_MAX = 1024
"""Most slot sizes that are kept so as not to be computed anew."""


class RowPush(Struct, frozen=True, eq=False):
    """Gradients of one table's rows, captured."""

    block: Block
    headers: tuple[Gradient, ...]
    """Header for each shard."""
    slot: Slot
    bad: int
    """The number of a row that is not finite, or -1."""


class RowPull(Struct, frozen=True, eq=False):
    """A read of one table's rows."""

    block: Block
    places: tuple[ReadTarget, ...]
    """Target for each shard."""
    slot: Slot
    """Memory of the keys, and of the rows behind them."""
    start: int
    """Where in the slot the rows begin, in bytes."""
    shape: tuple[int, int]
    """Rows and elements of a row."""
    encoded: tuple[tuple[int, int, int, int], ...] = ()
    """Shards that write their rows encoded: the first row, how many, and where in the slot the
    bytes begin and end."""


class NamedKeys(Struct, frozen=True, eq=False):
    """Keys of one table that requests name."""

    requests: list[ShardRequest]
    """Request for each shard."""
    slot: Slot
    answers: list[tuple[Array, Array]]
    """Keys asked of each shard, and what it leaves behind them, uint8."""


class Lent(np.ndarray[Any, Any]):
    """Memory of a slot, which goes back when the last array on it is gone.

    Arrays on it are no views of its own base, which NumPy would make of them if that were one as
    well: so that is a `SlotMemory`.
    """

    slot: Slot
    returned: deque[Slot]

    def __del__(self) -> None:
        if "returned" in self.__dict__:  # else it was not made to its end, or is a view of one
            returned, slot = self.returned, self.slot
            if slot in forks.lent:
                del forks.lent[slot]
            returned += [slot]


def class_bytes(nbytes: int) -> int:
    """The size of the slot for so many bytes."""
    if nbytes <= 64 * 2 * CLASSES:
        return -(-nbytes // 64) * 64
    step = (1 << (nbytes - 1).bit_length()) // (2 * CLASSES)
    return -(-nbytes // step) * step


@lru_cache(SIZES_KEPT_MAX)
def push_bytes(keys: int, dim: int, shards: int) -> int:
    """The size of the slot for the gradients of so many keys."""
    return class_bytes(routing.gradient_bytes_max(keys, dim, shards))


@lru_cache(SIZES_KEPT_MAX)
def pull_bytes(keys: int, dim: int, shards: int) -> tuple[int, int]:
    """Where the rows of so many keys begin in their slot, and its size."""
    start = routing.keys_bytes_max(keys, shards)
    return start, class_bytes(start + 4 * dim * keys)


def lay_push(
    links: Links, block: Block, keys: Array, values: Array, hyper: Hyper | None
) -> RowPush:
    """Capture the gradients of some rows; those of equal keys are summed.

    Args:
        keys: int64 [n].
        values: float32 [n, dim].
    """
    assert block.table is not None
    kind, not_finite = WIDE.get(block.table.dtype), -1
    if kind is not None:
        not_finite = wide.first_bad(values.view(kind))
        if not_finite < 0:
            keys, values = wide.summed(keys, values.view(kind))
    distinct, numbers = routing.distinct(keys)
    shards = links.count
    (slot,) = links.take_each([push_bytes(distinct.size, block.table.dim, shards)])
    bad, parts = routing.lay_gradient(distinct, numbers, values, shards, slot.words)
    if kind is not None:
        bad = not_finite  # the kernel has looked at words
    headers: list[Gradient] = []
    for count, at in parts:
        headers += [Gradient(block.id, slot.arena, slot.offset + at, None, hyper, count)]
    return RowPush(block, tuple(headers), slot, bad)


def lay_pull(
    links: Links, block: Block, keys: Array, *, grouped: bool, exact: bool = False
) -> RowPull:
    """Take memory for a read of some rows, and write the keys for each shard.

    What is laid is right over any link. In shared memory each shard best writes its rows to the
    places of their keys, over a network to a place where they lie together.

    Args:
        keys: int64 [n].
        grouped: whether the keys are as `by_shard` gives them, and the rows of a shard are to lie
            together.
        exact: whether the rows come as they are, whatever codec of pulls the table has.
    """
    assert block.table is not None
    if grouped:
        return _lay_by_shard(links, block, keys, exact)
    shards, dim, total = links.count, block.table.dim, keys.size
    start, nbytes = pull_bytes(total, dim, shards)
    (slot,) = links.take_each([nbytes])
    arena, offset = slot.arena, slot.offset
    places: list[ReadTarget] = []
    for count, at in routing.lay_keys(keys, shards, slot.words):
        shard_keys = Keys(count, arena, offset + at, total)
        places += [ReadTarget(block.id, arena, offset + start, shard_keys)]
    return RowPull(block, tuple(places), slot, start, (total, dim))


def by_shard(keys: Array, numbers: Array, shards: int) -> tuple[Array, Array]:
    """Distinct keys, int64 [d], with those of each shard together and rising; and the number of
    each of other keys among them, int32 [n].

    Args:
        keys, numbers: of `routing.distinct`.
    """
    order = order_of(keys)
    order = order[np.argsort(shard_of(keys[order], shards), kind="stable")]
    places = np.empty(order.size, numbers.dtype)
    places[order] = np.arange(order.size, dtype=numbers.dtype)
    return keys[order], places[numbers]


def _lay_by_shard(links: Links, block: Block, keys: Array, exact: bool) -> RowPull:
    """Lay a pull, as `lay_pull`, where each shard writes rows that lie together: encoded if it does
    not map the memory and the table has codecs."""
    assert block.table is not None
    dim, total = block.table.dim, keys.size
    counts = np.bincount(shard_of(keys, links.count), minlength=links.count).tolist()
    codecs = None if exact else block.row_codecs
    parts: list[tuple[Array, bool, int]] = []
    first = start = 0
    for shard, count in zip(links.shards, counts, strict=True):
        own = keys[first : first + count]
        link = shard.link  # another thread may make it anew
        remote = link is None or not link.shared
        encodes = codecs is not None and remote and count > 0
        nbytes = keys_bytes(count)
        if codecs is not None and encodes:
            nbytes = codecs.request_bytes(own)
        parts.append((own, encodes, start))
        first, start = first + count, start + padded(nbytes)
    end = start + padded(4 * dim * total)
    room = 0 if codecs is None else sum(padded(codecs.pull.size(own.size)) for own, _, _ in parts)
    (slot,) = links.take_each([class_bytes(end + room)])
    arena, offset = slot.arena, slot.offset
    places: list[ReadTarget] = []
    encoded: list[tuple[int, int, int, int]] = []
    first = 0
    for own, encodes, at in parts:
        shard_keys = Keys(own.size, arena, offset + at, own.size)
        if codecs is not None and encodes:
            codecs.write_request(own, slot.bytes[at : at + codecs.request_bytes(own)])
            room = codecs.pull.size(own.size)
            places.append(ReadTarget(block.id, arena, offset + end, shard_keys, room))
            encoded.append((first, own.size, end, end + room))
            end += padded(room)
        else:
            lying, numbers = keys_at(slot.bytes, at, own.size)
            lying[...], numbers[...] = own, np.arange(own.size)
            places.append(ReadTarget(block.id, arena, offset + start + 4 * dim * first, shard_keys))
        first += own.size
    return RowPull(block, tuple(places), slot, start, (total, dim), tuple(encoded))


def decode_rows(links: Links, pull: RowPull, *, exact: bool) -> None:
    """Decode the rows of a pull that is answered, or round them as servers on other hosts do.

    Raises:
        ProtocolError: a server has written what is none.
    """
    codecs, dim = pull.block.row_codecs, pull.shape[1]
    assert codecs is not None
    memory = pull.slot.bytes
    for first, count, start, stop in pull.encoded:
        rows = view_at(memory, np.float32, count * dim, pull.start + 4 * dim * first)
        try:
            codecs.read_answer(memory[start:stop], rows)
        except ValueError as error:
            raise ProtocolError(
                f"what a server sent as rows of table {pull.block.group_name!r} is none: {error}",
                fix="run the same version of paramserve everywhere",
            ) from error
        links.decoder.count(pull.block, stop - start, rows.nbytes)
    if not (exact or pull.encoded) and codecs.pull_even_local:
        codecs.round(view_at(memory, np.float32, pull.shape[0] * dim, pull.start))


def lay_named(
    links: Links, kind: type[Delete] | type[Contains], block: Block, keys: Array
) -> NamedKeys:
    """Take memory for requests that name keys of a table, and write those of each shard.

    Args:
        keys: int64 [n].
    """
    owner = shard_of(keys, links.count)
    indices = [np.flatnonzero(owner == shard) for shard in range(links.count)]
    sizes = [padded(8 * own.size) + padded(own.size) for own in indices]
    (slot,) = links.take_each([class_bytes(sum(sizes))])
    requests: list[ShardRequest] = []
    answers: list[tuple[Array, Array]] = []
    offset = 0
    for own, size in zip(indices, sizes, strict=True):
        view_at(slot.bytes, np.int64, own.size, offset)[...] = keys[own]
        behind = view_at(slot.bytes, np.uint8, own.size, offset + padded(8 * own.size))
        answers.append((own, behind))
        requests.append(kind(0, block.id, own.size, slot.arena, slot.offset + offset))
        offset += size
    return NamedKeys(requests, slot, answers)


def owned(links: Links, pull: RowPull) -> Array:
    """The rows of a pull that is answered, float32 [rows, dim]: the caller's to keep."""
    slot = pull.slot
    lent = Lent(pull.shape, np.float32, slot.memory, pull.start)
    lent.slot, lent.returned = slot, links.returned
    forks.lent[slot] = None
    return lent.view(np.ndarray)

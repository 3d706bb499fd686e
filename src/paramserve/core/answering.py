"""Where a request's parts lie, and the answers that carry values: pulls, fetches, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.shard_session import Answer, Memory
from paramserve.errors import ParamServeError, ShapeMismatch, UnknownName
from paramserve.messages import ALIGN, Done, Fetch, Place, Step, TakeSnapshot

if TYPE_CHECKING:
    from paramserve.core.shard_members import ShardMembers

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def padded(nbytes: int) -> int:
    """Bytes that a part takes in a payload."""
    return -(-nbytes // ALIGN) * ALIGN


def view(memory: Memory, arena: int, offset: int, block: ShardBlock) -> Array:
    """The block's part of a request's memory, [elements on this shard].

    Raises:
        ShapeMismatch: the memory does not hold that many bytes there. Nothing was applied.
    """
    if block.size == 0:
        return np.empty(0, block.dtype)
    whole = memory.get(arena)
    wrong = offset < 0 or offset % block.alignment
    if whole is None or wrong or offset + block.nbytes > whole.size:
        raise ShapeMismatch(
            f"{block.nbytes} bytes at offset {offset} of arena {arena} for block "
            f"{block.spec.block}, but there are {0 if whole is None else whole.size} bytes",
            fix="send exactly the elements that this shard holds, at aligned offsets",
        )
    return np.frombuffer(whole, block.dtype, block.size, offset)


def one(block: ShardBlock, arena: int, offset: int, memory: Memory) -> Array:
    """The single part of a request that has one."""
    if arena == 0:
        check_payload(memory, padded(block.nbytes))
        offset = 0
    return view(memory, arena, offset, block)


def check_payload(memory: Memory, expected: int) -> None:
    payload = memory.get(0)
    have = 0 if payload is None else payload.size
    if have != expected:
        raise ShapeMismatch(
            f"the request's payload has {have} bytes, its parts need {expected}",
            fix="send exactly the elements that this shard holds",
        )


def with_values(
    shard: ShardMembers, step: Step, memory: Memory, done: Done, written: Collection[int] = ()
) -> Answer:
    """Write the values that a step pulls to their places; the answer says where they are.

    Args:
        written: blocks whose values a rule has left at their place already, in its own pass.
    """
    inline = []
    for place in step.pull:
        block = shard.blocks[place.block]
        if place.arena == 0:
            inline.append(block.value)
        elif place.block not in written:
            np.copyto(view(memory, place.arena, place.offset, block), block.value)
    return Answer(done, gathered(inline, shard.allocate) if inline else None)


def fresh(size: int) -> Bytes:
    """New memory [size] of any content."""
    return np.empty(size, np.uint8)


def gathered(arrays: list[Array], allocate: Callable[[int], Bytes] = fresh) -> Bytes:
    """Arrays one after the other, each padded to `ALIGN`, as the bytes of a payload.

    Args:
        allocate: gives memory of a size; that of large payloads is worth using again.
    """
    out = allocate(sum(padded(array.nbytes) for array in arrays))
    cursor = 0
    for array in arrays:
        end = cursor + array.nbytes
        out[cursor:end] = array.view(np.uint8)
        cursor += padded(array.nbytes)
        out[end:cursor] = 0  # what the memory held before is nobody's business
    return out


def fetch(shard: ShardMembers, message: Fetch, memory: Memory) -> Answer:
    """Read one field of a block."""
    block = shard.block(message.block)
    source = block.field(message.field)
    version = shard.groups[block.spec.group].version
    done = Done(message.seq, version, counts=tuple(block.counts))
    if message.arena == 0:
        return Answer(done, gathered([source], shard.allocate))
    np.copyto(view(memory, message.arena, message.offset, block), source)
    return Answer(done)


def take_snapshot(
    shard: ShardMembers, client: int, message: TakeSnapshot, memory: Memory
) -> Answer:
    """Read the oldest kept snapshot past `after`; older ones are let go."""
    group = shard.group(message.group)
    watching = group.watching.get(client)
    if watching is None:
        raise ParamServeError(
            f"client {client} does not watch group {group.name!r}", fix="send watch() first"
        )
    while watching.kept and watching.kept[0][0] <= message.after:
        watching.kept.popleft()
    done = Done(message.seq, group.version, group.slowest, dropped=watching.dropped)
    if not watching.kept:
        return Answer(done)
    version, values = watching.kept[0]
    taken = Done(message.seq, group.version, group.slowest, taken=version, dropped=watching.dropped)
    inline = []
    for place in message.pull:
        value = _snapshot_of(values, place)
        if place.arena == 0:
            inline.append(value)
        else:
            np.copyto(view(memory, place.arena, place.offset, shard.block(place.block)), value)
    return Answer(taken, gathered(inline, shard.allocate) if inline else None)


def _snapshot_of(values: dict[int, Array], place: Place) -> Array:
    value = values.get(place.block)
    if value is None:
        raise UnknownName(
            f"block {place.block} was not defined when the snapshot was taken",
            fix="take a newer snapshot",
        )
    return value

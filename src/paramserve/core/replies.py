"""The answers that carry values (of steps, fetches, scans, snapshots), and refusals."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.group_state import GroupState
from paramserve.core.shard_sessions import Answer, Memory, Request
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.parts import padded
from paramserve.errors import Applied, Overloaded, ParamServeError, ShapeMismatch, UnknownName
from paramserve.messages import (
    Assign,
    Done,
    Fetch,
    Put,
    ReadTarget,
    Refused,
    Scan,
    Step,
    TakeSnapshot,
)

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Blocks = Mapping[int, ShardBlock | KeyedBlock]


def inline_keys(place: ReadTarget) -> int:
    """Bytes that the keys of a read take in its request's payload."""
    keys = place.keys
    return padded(8 * keys.rows) if keys is not None and keys.arena == 0 else 0


def one(block: ShardBlock, arena: int, offset: int, memory: Memory) -> Array:
    """The single part of a request that has one."""
    if arena == 0:
        check_payload(memory, padded(block.nbytes))
        offset = 0
    return block.at(memory, arena, offset)


def check_payload(memory: Memory, expected: int) -> None:
    payload = memory.get(0)
    have = 0 if payload is None else payload.size
    if have != expected:
        raise ShapeMismatch(
            f"the request's payload has {have} bytes, its parts need {expected}",
            fix="send exactly the elements that this shard holds",
        )


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
        out[end:cursor] = 0  # what the memory held before goes to no client
    return out


class Replies:
    """Makes the answers of one shard.

    Args:
        shard: its number.
        payload_bytes_max: of one answer.
        allocate: gives memory [bytes] for the values of an answer that travel in it.
    """

    def __init__(
        self, shard: int, payload_bytes_max: int, allocate: Callable[[int], Bytes]
    ) -> None:
        self._shard = shard
        self._payload_bytes_max = payload_bytes_max
        self._allocate = allocate

    def with_values(
        self,
        blocks: Blocks,
        request: Request,
        done: Done,
        written: Collection[int] = (),
        exact: bool = False,
    ) -> Answer:
        """Write the values that a step pulls to their places; the answer says where they are.

        Args:
            written: blocks whose values a rule has left at their place already, in its own pass.
            exact: whether no newer values may replace these if the answer is lost: of a
                synchronous clock, whose worker may have sent the next step before it reads them.
        Returns:
            The answer; a refusal if there is no memory for them.
        """
        step = request.message
        assert isinstance(step, Step)
        try:
            return Answer(done, self._values(blocks, step, request.memory, written), exact)
        except MemoryError:
            applied: Applied = "yes" if step.push and not done.skipped else "no"
            return Answer(refusal(step.seq, no_memory(self._shard, "the values read", applied)))

    def _values(
        self, blocks: Blocks, step: Step, memory: Memory, written: Collection[int]
    ) -> Bytes | None:
        inline: list[Array] = []
        for place in step.pull:
            block = blocks[place.block]
            if isinstance(block, KeyedBlock):
                inline += _rows(blocks, block, place, step, memory)
            elif place.arena == 0:
                inline.append(block.value)
            elif place.block not in written:
                np.copyto(block.at(memory, place.arena, place.offset), block.value)
        return gathered(inline, self._allocate) if inline else None

    def fetch(self, state: GroupState, message: Fetch, memory: Memory) -> Answer:
        """Read one field of a block."""
        block = state.block(message.block)
        if isinstance(block, KeyedBlock):
            raise _no_array(block)
        source = block.field(message.field)
        done = Done(message.seq, state.version, counts=tuple(block.counts))
        if message.arena == 0:
            return Answer(done, gathered([source], self._allocate))
        np.copyto(block.at(memory, message.arena, message.offset), source)
        return Answer(done)

    def _scanned(self, block: KeyedBlock, message: Scan) -> Bytes:
        """Memory for the whole rows that a scan asks for, zeros."""
        nbytes, most = block.records_bytes(message), self._payload_bytes_max
        if nbytes > most:
            raise Overloaded(
                f"{message.rows} whole rows of table {block.spec.group_name!r} need {nbytes} "
                f"bytes, payload_bytes_max is {most}",
                fix="ask for fewer rows at once, or raise payload_bytes_max",
            )
        payload = self._allocate(nbytes)
        payload.fill(0)  # what the memory held before goes to no client
        return payload

    def scan(self, state: GroupState, message: Scan, memory: Memory) -> Answer:
        """Read whole rows of a table."""
        block = _table(state.block(message.block))
        payload = None
        if message.arena == 0:
            payload = self._scanned(block, message)
            into = block.records(payload, message, 0)
        else:
            into = block.records(memory.get(message.arena), message, message.offset)
        counts = block.scan(message, into)
        return Answer(Done(message.seq, state.version, counts=counts), payload)

    def take_snapshot(
        self, state: GroupState, client: int, message: TakeSnapshot, memory: Memory
    ) -> Answer:
        """Read the oldest kept snapshot past `after`; older ones are let go."""
        watching = state.watching.get(client)
        if watching is None:
            raise ParamServeError(
                f"client {client} does not watch group {state.name!r}", fix="send watch() first"
            )
        while watching.kept and watching.kept[0][0] <= message.after:
            watching.kept.popleft()
        done = Done(message.seq, state.version, state.members.slowest, dropped=watching.dropped)
        if not watching.kept:
            return Answer(done)
        version, values = watching.kept[0]
        taken = Done(
            message.seq,
            state.version,
            state.members.slowest,
            taken=version,
            dropped=watching.dropped,
        )
        inline = []
        for place in message.pull:
            value = _snapshot_of(values, place)
            if place.arena == 0:
                inline.append(value)
            else:
                block = state.block(place.block)
                assert isinstance(block, ShardBlock), "a table has no snapshots"
                np.copyto(block.at(memory, place.arena, place.offset), value)
        return Answer(taken, gathered(inline, self._allocate) if inline else None)


def _rows(
    blocks: Blocks, block: KeyedBlock, place: ReadTarget, step: Step, memory: Memory
) -> list[Array]:
    """Write the rows that are asked for to their places, or give them as one part."""
    cursor = 0
    if place.arena == 0:  # its keys lie behind all gradients, and those of the reads before it
        pushed = (g for g in step.push if g.arena == 0)
        cursor = sum(blocks[g.block].gradient_bytes(g) for g in pushed)
        for before in step.pull:
            if before is place:
                break
            cursor += inline_keys(before)
    if place.arena != 0 or place.keys is None:
        block.read(memory, place, cursor, None)
        return []
    rows = np.empty(place.keys.rows * block.dim, np.float32)
    block.read(memory, place, cursor, rows)
    return [rows]


def assign(state: GroupState, message: Assign, memory: Memory) -> Answer:
    """Overwrite one field of a block."""
    block = state.block(message.block)
    if isinstance(block, KeyedBlock):
        raise _no_array(block)
    source = one(block, message.arena, message.offset, memory)
    block.assign(message.field, source, message.active, message.counts)
    state.collect.prepared = None  # it was computed from what is overwritten now
    return Answer(Done(message.seq, state.version))


def put(state: GroupState, message: Put, memory: Memory) -> Answer:
    """Overwrite or create whole rows of a table."""
    block = _table(state.block(message.block))
    if message.arena == 0:
        check_payload(memory, block.records_bytes(message))
    offset = message.offset if message.arena else 0
    block.clock = state.members.slowest
    block.put(block.records(memory.get(message.arena), message, offset))
    state.collect.prepared = None  # it was computed from what is overwritten now
    return Answer(Done(message.seq, state.version))


def _no_array(block: KeyedBlock) -> ParamServeError:
    name = block.spec.group_name
    return ParamServeError(
        f"{name!r} is a table: it has rows, and no arrays to read or to overwrite",
        fix="use the methods of the table",
    )


def _table(block: ShardBlock | KeyedBlock) -> KeyedBlock:
    if not isinstance(block, KeyedBlock):
        raise UnknownName(f"block {block.spec.block} is no table", fix="name a table")
    return block


def _snapshot_of(values: dict[int, Array], place: ReadTarget) -> Array:
    value = values.get(place.block)
    if value is None:
        raise UnknownName(
            f"block {place.block} was not defined when the snapshot was taken",
            fix="take a newer snapshot",
        )
    return value


def refusal(seq: int, error: ParamServeError) -> Refused:
    """An error as the reply that carries it."""
    return Refused(seq, type(error).__name__, error.failed, error.applied, error.fix)


def no_memory(shard: int, what: str, applied: Applied) -> Overloaded:
    """The system has no memory for something that a client asked of a shard."""
    return Overloaded(
        f"shard {shard} has no memory for {what}",
        applied=applied,
        fix="use more servers on more machines, smaller parameters, or max_bytes of tables",
    )

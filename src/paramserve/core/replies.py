"""The answers that carry values (of steps, fetches, scans, snapshots), and refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.core.block import BlockUpdate, ShardBlock
from paramserve.core.group_state import GroupState
from paramserve.core.request_memory import Memory
from paramserve.core.shard_sessions import Answer, ReadRequest, Request
from paramserve.core.shard_storage import Keep
from paramserve.core.table.block import KeyedBlock, RowUpdate
from paramserve.core.table.parts import padded
from paramserve.errors import (
    Applied,
    Overloaded,
    ParamServeError,
    UnknownName,
)
from paramserve.messages import (
    Assign,
    Contains,
    Delete,
    Done,
    Fetch,
    NotRead,
    Put,
    Read,
    ReadTarget,
    Refused,
    Run,
    Scan,
    ShardRequest,
    Step,
    TakeSnapshot,
)

Array = npt.NDArray[Any]
Blocks = Mapping[int, ShardBlock | KeyedBlock]


class Fields(Protocol):
    """A block's arrays, or a copy of them."""

    @property
    def counts(self) -> Sequence[int]: ...
    def field(self, number: int) -> Array: ...


class BlocksOfCut(Protocol):
    """This shard's part of a cut; `paramserve.core.cut_parts.ShardCut` is one."""

    @property
    def versions(self) -> Mapping[int, int]: ...
    def block(self, number: int) -> Fields: ...


class Replies:
    """Makes the answers of one shard.

    Args:
        shard: its number.
    """

    def __init__(self, shard: int) -> None:
        self._shard = shard

    def with_values(
        self,
        blocks: Blocks,
        request: Request | ReadRequest,
        done: Done,
        written: Collection[int] = (),
    ) -> Answer:
        """Write the values that a step or read asks for to their places.

        Args:
            written: blocks whose values a rule has left at their place already, in its own pass.
        Returns:
            The answer; a refusal if there is no memory for them, a user's codec fails, or its
            client has replaced the arena meanwhile.
        """
        message, memory = request.message, request.memory
        assert type(message) is Step or type(message) is Read
        runs: list[Run] = []
        try:
            for place in message.pull:
                block = blocks[place.block]
                if type(block) is KeyedBlock:
                    runs += block.read(memory, place)
                    continue
                if place.room:
                    nbytes = block.write_encoded(memory, place)
                else:
                    nbytes = block.sent.nbytes
                    if block.rounds:
                        if block.pull_codec is not None or place.block not in written:
                            block.write_rounded(memory.at(place.arena, place.offset, block.sent))
                    elif place.block not in written:
                        np.copyto(memory.at(place.arena, place.offset, block), block.value)
                runs += [(place.arena, place.offset, nbytes)]
            return Answer(done, tuple(runs), memory) if memory.mirrored else Answer(done)
        except (MemoryError, ParamServeError) as error:
            pushed = type(message) is Step and message.push and not done.skipped
            applied: Applied = "yes" if pushed else "no"
            if isinstance(error, ParamServeError):
                error.applied = applied
                return Answer(refusal_of(message, error))
            no_room = no_memory(self._shard, "the values read", applied)
            return Answer(refusal_of(message, no_room))

    def fetch(
        self, state: GroupState, message: Fetch, memory: Memory, part: BlocksOfCut | None = None
    ) -> Answer:
        """Read one field of a block, as it is now or in this shard's part of a cut."""
        block = state.block(message.block)
        if isinstance(block, KeyedBlock):
            raise _no_array(block)
        read: Fields = block if part is None else part.block(message.block)
        version = state.version if part is None else part.versions[state.id]
        source = read.field(message.field)
        done = Done(message.seq, version, counts=tuple(read.counts))
        np.copyto(memory.at(message.arena, message.offset, block), source)
        return _answer(done, memory, (message.arena, message.offset, source.nbytes))

    def scan(self, state: GroupState, message: Scan, memory: Memory) -> Answer:
        """Read whole rows of a table."""
        block = _table(state.block(message.block))
        block.clock = state.members.slowest
        into = block.records(memory.get(message.arena), message, message.offset)
        counts = block.scan(message, into)
        written = (message.arena, message.offset, block.records_bytes(message))
        return _answer(Done(message.seq, state.version, counts=counts), memory, written)

    def contains(self, state: GroupState, message: Contains, memory: Memory) -> Answer:
        """Say which keys of a table have a row."""
        block = _table(state.block(message.block))
        block.clock = state.members.slowest
        keys, answer = block.named(memory.get(message.arena), message)
        answer[...] = block.contains(keys)
        written = (message.arena, message.offset + padded(keys.nbytes), answer.nbytes)
        return _answer(Done(message.seq, state.version), memory, written)

    def take_snapshot(
        self, state: GroupState, client: int, message: TakeSnapshot, memory: Memory
    ) -> Answer:
        """Read the oldest kept snapshot past `after`; older ones are released."""
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
        reply = Done(
            message.seq,
            state.version,
            state.members.slowest,
            snapshot=version,
            dropped=watching.dropped,
        )
        written = []
        for place in message.pull:
            value = _snapshot_of(values, place)
            block = state.block(place.block)
            assert isinstance(block, ShardBlock), "a table has no snapshots"
            np.copyto(memory.at(place.arena, place.offset, block), value)
            written.append((place.arena, place.offset, value.nbytes))
        return _answer(reply, memory, *written)


def _answer(done: Done, memory: Memory, *written: Run) -> Answer:
    return Answer(done, written, memory) if memory.mirrored else Answer(done)


def assign(state: GroupState, message: Assign, memory: Memory) -> Answer:
    """Overwrite one field of a block."""
    block = state.block(message.block)
    if isinstance(block, KeyedBlock):
        raise _no_array(block)
    source = memory.at(message.arena, message.offset, block)
    block.assign(message.field, source, message.active, message.counts)
    update = _under_vote(state, block)
    if isinstance(update, BlockUpdate):
        update.leave_out(message.field, message.active, counts=message.counts is not None)
    return Answer(Done(message.seq, state.version))


def put(state: GroupState, message: Put, memory: Memory) -> Answer:
    """Overwrite or create whole rows of a table."""
    block = _table(state.block(message.block))
    block.clock = state.members.slowest
    keys = block.put(block.records(memory.get(message.arena), message, message.offset))
    update = _under_vote(state, block)
    if isinstance(update, RowUpdate):
        update.leave_out(keys)
    return Answer(Done(message.seq, state.version))


def delete(state: GroupState, message: Delete, memory: Memory) -> Answer:
    """Remove rows of a table."""
    block = _table(state.block(message.block))
    block.clock = state.members.slowest
    keys, _ = block.named(memory.get(message.arena), message)
    removed = block.delete(keys)
    if block in state.collect.reserved:  # the clock may make any of these rows again
        block.hold(removed)
    update = _under_vote(state, block)
    if isinstance(update, RowUpdate):
        update.leave_out(keys)
    return Answer(Done(message.seq, state.version, counts=(removed,)))


def _under_vote(state: GroupState, block: ShardBlock | KeyedBlock) -> Keep | None:
    """The update of a block that a rule has computed for a clock under vote. What is overwritten or
    removed meanwhile is ordered behind that clock: no rule runs again when it is decided, where it
    might fail on this shard alone."""
    prepared = state.collect.prepared
    return None if prepared is None else prepared.keep.get(block.spec.block)


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


def refusal_of(message: ShardRequest, error: ParamServeError) -> Refused:
    """Refusal of a request, which may be a read, with its error."""
    if type(message) is Read:
        return NotRead(message.seq, type(error).__name__, error.failed, error.applied, error.fix)
    return refusal(message.seq, error)


def no_memory(shard: int, what: str, applied: Applied) -> Overloaded:
    """The system has no memory for something that a client asked of a shard."""
    return Overloaded(
        f"shard {shard} has no memory for {what}",
        applied=applied,
        fix="use more servers on more machines, smaller parameters, or max_bytes of tables",
    )

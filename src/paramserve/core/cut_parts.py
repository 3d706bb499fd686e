"""A shard's part of a cut: copies that are finished before what they are of changes.

Nothing is copied when the cut is taken. A block is copied before the first write to it after that;
until then the cut reads the block itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.flush import ranks_left
from paramserve.core.group import GroupMachine
from paramserve.core.group_state import GroupRecord
from paramserve.core.shard_sessions import Sessions, SessionsRecord
from paramserve.core.sums import RowSum, Sum
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.cut import RowsCopy
from paramserve.errors import Overloaded, UnknownName
from paramserve.messages import VALUE, BlockSpec, CutAsk

Array = npt.NDArray[Any]

COPIED_PIECES = 8
"""Pieces of a copied field that are read at once: nothing waits for them."""


class CutMemory:
    """Where a shard's copies for cuts lie. A server derives from it, to have memory ready."""

    def prepare(self, sizes: Iterable[int]) -> list[Any]:
        """Memory for copies of arrays of these sizes in bytes, for `add`. It takes long, and may
        run in any thread."""
        return []

    def add(self, prepared: Iterable[Any]) -> None:
        """Use this memory for the next copies."""

    def give_back(self) -> None:
        """Release what was not used."""

    def copy(self, array: Array) -> Array:
        """A copy of an array that is about to change.

        Raises:
            MemoryError: there is no memory for it.
        """
        return np.copy(array)

    def now(self) -> float:
        """Seconds on any clock, to tell how long something took."""
        return 0.0


class BlockCopy:
    """A dense block as it was at a cut.

    Args:
        whole: with the rule's state, else only values.
    """

    def __init__(self, block: ShardBlock, whole: bool, memory: CutMemory) -> None:
        self.spec: BlockSpec = block.spec
        self.attempt = block.attempt
        self.low, self.size = block.low, block.size
        self.counts = block.counts
        self._arrays = (block.value, *block.state) if whole else (block.value,)
        self.states = block.states
        """Arrays of rule state, if the block is whole."""
        self._block: ShardBlock | None = block
        """Block whose arrays this copy still shares; None once they are copied."""
        self._memory = memory
        self.pause_s = 0.0
        """Seconds that the shard took to copy the block."""
        self._lost = False
        block.unsaved.append(self)

    def finish(self) -> None:
        """Copy the block's arrays, which are about to change."""
        self._block, began = None, self._memory.now()
        try:
            self._arrays = tuple(self._memory.copy(each) for each in self._arrays)
        except MemoryError:  # the update goes on, the cut does not
            self._arrays, self._lost = (), True
        self.pause_s = self._memory.now() - began

    def field(self, number: int) -> Array:
        """Values (0) or a state array (1, 2, ...), good until the next event of the shard.

        Raises:
            Overloaded: there was no memory for a copy. UnknownName: the cut does not have it.
        """
        if self._lost:
            raise Overloaded(
                f"the cut is lost: there was no memory to copy block {self.spec.block} of group "
                f"{self.spec.group_name!r} before it changed",
                fix="use more servers on more machines",
            )
        if not VALUE <= number < len(self._arrays):
            raise UnknownName(
                f"the cut has {len(self._arrays)} arrays of block {self.spec.block}, number "
                f"{number} was asked for",
                fix="take a whole cut to read the rule's state",
            )
        return self._arrays[number]

    def piece(self, number: int, start: int, buffer: Array) -> Array:
        """Some elements of a field from `start` on, at least one if there are any left.

        They stay as they are: they lie in `buffer`. If the cut has copied the field already, they
        lie there, and are more. Raises what `field` raises.
        """
        rest = self.field(number)[start:]
        if self._block is None:
            return rest[: COPIED_PIECES * buffer.size]
        elements = rest[: buffer.size]
        into = buffer[: elements.size]
        np.copyto(into, elements)
        return into

    def own_values(self) -> Array:
        """The values, in memory that nothing else changes. Raises what `field` raises."""
        if self._block is not None:
            self._block.unsaved.remove(self)
            self.finish()
        return self.field(VALUE)

    def read(self, number: int, into: Array) -> None:
        """Copy what `field` gives. Raises what that raises."""
        np.copyto(into, self.field(number))

    @property
    def fields(self) -> int:
        """How many arrays it has: values, and each of the rule's state."""
        return len(self._arrays)

    def close(self) -> None:
        """Release the copy: the cut is not needed any more."""
        if self._block is not None and self in self._block.unsaved:
            self._block.unsaved.remove(self)
        self._arrays, self._block = (), None


class TableCopy(RowsCopy):
    """A table on one shard as it was at a cut.

    Args:
        ask: for the cut. For a checkpoint that is not full it has the rows that have changed.
    """

    def __init__(self, block: KeyedBlock, ask: CutAsk) -> None:
        changed = block.begin_checkpoint(ask.checkpoint) if ask.checkpoint else None
        super().__init__(block.store, None if ask.full else changed)
        self.spec: BlockSpec = block.spec
        self.attempt = block.attempt
        self.states = block.states
        self.used_at = block.clock
        """The clock of the group's slowest worker."""
        self.unadmitted = block.unadmitted


class ShardCut:
    """One shard's part of a cut.

    Attributes:
        clients: by client, the number of the last request that is in it.
        versions: by group.
        clocks: by group, the first that is not committed.
        starts: by the group's name, the clock that a worker begins with that comes now.
        blocks: dense blocks by number.
        tables, sums, groups, sessions: of a whole cut, all else that the shard is rebuilt from:
            rows by block; by group what its buffer has, by block; and records.
        left_out: of a whole cut, ranks that keep something that was left out of their gradients.
        begun: (client, lease, samples): how much of its leased samples is in it with a call that is
            not over.
        snapshot: whether it is for clients that watch the group.
        checkpoint: the number of the one that it is for, or 0.
        complete: whether every shard has its part.
        torn: clients that ended while they were sending, whom the shards have up to different
            numbers.
        keep_until: when it is released if it is not read.
    """

    def __init__(
        self,
        shard: int,
        ask: CutAsk,
        clients: Mapping[int, int],
        groups: Mapping[int, GroupMachine],
        sessions: Sessions,
        memory: CutMemory | None = None,
    ) -> None:
        memory = memory if memory is not None else CutMemory()
        began = memory.now()
        self.shard = shard
        self.number = ask.number
        self.owner = ask.owner
        self.snapshot = ask.snapshot
        self.checkpoint = ask.checkpoint
        self.clients = dict(clients)
        self.complete = False
        self.torn: tuple[int, ...] = ()
        self.keep_until = 0.0
        machines = [groups[each] for each in groups if not ask.groups or each in ask.groups]
        states = [machine.state for machine in machines]
        self.versions = {state.id: state.version for state in states}
        self.clocks = {state.id: state.committed for state in states}
        self.starts = {state.name: state.start for state in states}
        self.blocks: dict[int, BlockCopy] = {
            number: BlockCopy(block, ask.whole, memory)
            for state in states
            for number, block in state.blocks.items()
            if isinstance(block, ShardBlock)
        }
        self.tables: dict[int, TableCopy] = {}
        self.sums: dict[int, dict[int, Any]] = {}
        self.groups: tuple[GroupRecord, ...] = ()
        self.sessions = SessionsRecord()
        self.begun: tuple[tuple[int, int, int], ...] = ()
        self.left_out: tuple[int, ...] = ()
        if ask.whole:
            self.tables = {
                state.table.spec.block: TableCopy(state.table, ask)
                for state in states
                if state.table is not None
            }
            self.sums = {state.id: state.buffer.share() for state in states if state.buffer.count}
            unfinished, self.begun = (
                sessions.unfinished(clients),
                sessions.unfinished_marks(clients),
            )
            self.groups = tuple(each.record(unfinished.get(each.state.id, {})) for each in machines)
            self.sessions = sessions.record(clients)
            self.left_out = ranks_left(sessions)
        self.stopped_s = memory.now() - began
        """Seconds that the shard stopped for this cut."""

    @property
    def pause_s(self) -> float:
        """The longest so far that the shard executed nothing for it: until it was taken, or for the
        copies that were finished before a write."""
        return max(self.stopped_s, sum(each.pause_s for each in self.blocks.values()))

    def sums_of(
        self, group: int, blocks: Mapping[int, ShardBlock | KeyedBlock]
    ) -> dict[int, Sum | RowSum]:
        """What the buffer of a group has, by block, for a shard that goes on from it."""
        sums = dict[int, Sum | RowSum]()
        for number, each in self.sums.get(group, {}).items():
            own = sums[number] = each.share()
            if isinstance(own, RowSum):
                block = blocks[number]
                assert isinstance(block, KeyedBlock)
                own.block = block
        return sums

    def values(self) -> dict[int, Array]:
        """The values of all dense blocks, in memory that nothing else changes.

        Raises:
            Overloaded: there was no memory for them.
        """
        return {number: each.own_values() for number, each in self.blocks.items()}

    def block(self, number: int) -> BlockCopy:
        """The copy of a block.

        Raises:
            UnknownName: the cut does not have it.
        """
        copy = self.blocks.get(number)
        if copy is None:
            raise UnknownName(
                f"cut {self.number} has no block {number}", fix="take another cut, of its group"
            )
        return copy

    def close(self) -> None:
        """Release all copies: the cut is not needed any more."""
        for each in self.blocks.values():
            each.close()
        for rows in self.tables.values():
            rows.close()
        self.blocks, self.tables, self.sums = {}, {}, {}

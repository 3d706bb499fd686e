"""A shard that goes on from its part of a cut, as it was then.

Groups are there with their clocks, sessions with their numbers and outcomes. What the coordinator
knows it tells: which workers live. To a worker it is as if its last incarnation had died at the
cut: a step that the shard already has is answered, and not applied again. So is the first part of
a call that steps several groups, where the cut lies before its last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.group_state import GroupRecord
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import SessionsRecord
from paramserve.core.sums import RowSum, Sum
from paramserve.core.table.admission import Waiting
from paramserve.core.table.block import KeyedBlock, RowStates
from paramserve.core.table.cut import CutRows
from paramserve.core.table.hashing import Keys
from paramserve.errors import CheckpointError, ParamServeError
from paramserve.messages import BlockSpec
from paramserve.rules.layout import RowLayout

Array = npt.NDArray[Any]
Block = ShardBlock | KeyedBlock

TOLD_MAX = 5
"""Blocks that an error names."""
NAMED_MAX = 3
"""Tensors of each that it names."""


class SavedBlock(Protocol):
    """A dense block of a cut."""

    @property
    def spec(self) -> BlockSpec: ...

    @property
    def attempt(self) -> int: ...

    @property
    def counts(self) -> list[int]:
        """Updates that each piece has had."""

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the rule's state arrays, in order."""

    def read(self, number: int, into: Array) -> None:
        """Values (0) or a state array (1, 2, ...), [elements on this shard]."""


class SavedTable(Protocol):
    """A table of a cut on one shard; of its fields, `core.table.cut` tells."""

    @property
    def spec(self) -> BlockSpec: ...

    @property
    def attempt(self) -> int: ...

    @property
    def states(self) -> RowStates: ...

    @property
    def used_at(self) -> int: ...

    @property
    def unadmitted(self) -> int: ...

    @property
    def clock(self) -> int: ...

    @property
    def created(self) -> int: ...

    @property
    def evicted(self) -> int: ...

    @property
    def deleted(self) -> int: ...

    @property
    def candidates(self) -> Waiting | None: ...

    def batches(self, layout: RowLayout) -> Iterator[CutRows]:
        """All rows, some at a time."""

    def uses(self) -> tuple[Keys, Keys] | None:
        """All keys with the clocks of their last use, the one first whose use is longest ago; None:
        the table lets no rows go. Asked for behind `batches`."""


class SavedShard(Protocol):
    """A shard's part of a whole cut: as it was taken (`ShardCut`), or as it is read from files."""

    @property
    def shard(self) -> int: ...

    @property
    def number(self) -> int:
        """Number of the cut."""

    @property
    def groups(self) -> tuple[GroupRecord, ...]: ...

    @property
    def sessions(self) -> SessionsRecord: ...

    @property
    def blocks(self) -> Mapping[int, SavedBlock]: ...

    @property
    def tables(self) -> Mapping[int, SavedTable]: ...

    def sums_of(self, group: int, blocks: Mapping[int, Block]) -> dict[int, Sum | RowSum]:
        """What the buffer of a group has, by block."""


def restore(shard: Shard, part: SavedShard, now: float) -> None:
    """Let a new shard go on from its part of a whole cut.

    Args:
        shard: of the same number, before its first event.
        now: as `Shard.step`.
    Raises:
        ParamServeError: the shard cannot hold it: a rule or a policy is not registered, or there is
            no memory. It is not to be used. CheckpointError: a rule keeps other states now.
    """
    if part.shard != shard.number or shard.groups:
        raise ParamServeError(
            f"shard {shard.number} has {len(shard.groups)} groups and was to go on from shard "
            f"{part.shard}'s part of cut {part.number}",
            fix="restore each part to a new shard of its number",
        )
    shard.sessions.restore(part.sessions, now)
    for record in part.groups:
        machine = shard.groups[record.id] = shard.new_group(record.id, record.name, shard.policy)
        machine.restore(record, shard.policies, now)
    every: list[SavedBlock | SavedTable] = [*part.blocks.values(), *part.tables.values()]
    blocks = {each.spec.block: shard.new_block(each.spec, each.attempt) for each in every}
    _check_states(every, blocks)
    for dense in part.blocks.values():
        _fill_block(shard, blocks[dense.spec.block], dense)
    for table in part.tables.values():
        _fill_table(shard, blocks[table.spec.block], table)
    for machine in shard.groups.values():
        state = machine.state
        state.buffer.sums = part.sums_of(state.id, state.blocks)
    shard.cuts.go_on_from(part.number)
    for machine in shard.groups.values():
        machine.policies.begin()


def change_policy(shard: Shard, frontiers: Mapping[int, int]) -> None:
    """Let groups go by the cluster's policy, which has changed since the checkpoint.

    Args:
        shard: just restored.
        frontiers: by group that went by the cluster's policy, the first clock that no worker has
            executed, the same for all shards.
    Raises:
        CheckpointError: workers would have to step otherwise. It is not to be used.
    """
    for number, machine in shard.groups.items():
        machine.policies.replace_cluster_policy(shard.policy, frontiers.get(number))


def _check_states(every: Sequence[SavedBlock | SavedTable], blocks: Mapping[int, Block]) -> None:
    """Refuse rules that keep other states than those that the checkpoint was written with.

    Raises:
        CheckpointError: each difference is named. Nothing was read.
    """
    wrong = []
    for saved in every:
        rule, block, saved_states = saved.spec.rule, saved.spec, saved.states
        own = blocks[block.block].states
        if rule is not None and saved_states != own:
            names = ", ".join(repr(each.name) for each in block.pieces[:NAMED_MAX])
            group = repr(block.group_name)
            what = f"table {group}" if block.table is not None else f"{names} in {group}"
            wrong.append(
                f"{rule.name} of {what} kept {_states_text(saved_states)}, now {_states_text(own)}"
            )
    if wrong:
        more = [f"{len(wrong) - TOLD_MAX} more"] if len(wrong) > TOLD_MAX else []
        raise CheckpointError(
            f"another rule than the checkpoint's: {'; '.join((*wrong[:TOLD_MAX], *more))}",
            applied="no",
            fix="give the rules with the states that the checkpoint was written with, or begin "
            "anew in another folder",
        )


def _states_text(states: RowStates | tuple[str, ...]) -> str:
    if not isinstance(states, RowStates):
        return f"the states {', '.join(states)}" if states else "no state"
    pairs = zip(states.names, states.widths, strict=True)
    names = [f"{name} ({width} a row)" for name, width in pairs]
    names += ["a count"] if states.counted else []
    return f"the states {', '.join(names)}" if names else "no state"


def _fill_block(shard: Shard, block: Block, saved: SavedBlock) -> None:
    assert isinstance(block, ShardBlock)
    for number in range(1 + len(block.state)):
        saved.read(number, block.field(number))
    block.set_counts(saved.counts)
    shard.blocks[block.spec.block] = block
    shard.groups[block.spec.group].state.blocks[block.spec.block] = block


def _fill_table(shard: Shard, block: Block, saved: SavedTable) -> None:
    assert isinstance(block, KeyedBlock)
    for rows in saved.batches(block.layout):
        numbers = block.store.put_new(rows.keys)
        block.store.write_raw(numbers, rows.raw)
    uses = saved.uses()
    if uses is not None:
        block.store.set_uses(*uses)
    block.store.restore(saved.clock, saved.created, saved.evicted, saved.deleted, saved.candidates)
    block.clock, block.unadmitted = saved.used_at, saved.unadmitted
    shard.blocks[block.spec.block] = block
    state = shard.groups[block.spec.group].state
    state.blocks[block.spec.block] = state.table = block

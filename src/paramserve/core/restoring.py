"""A shard that goes on from its part of a cut, as it was then.

Groups are there with their clocks, sessions with their numbers and outcomes. What the coordinator
knows it tells: which workers live. To a worker it is as if its last incarnation had died at the
cut: a step that the shard already has is answered, and not applied again. So is the first part of
a call that steps several groups, where the cut lies before its last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from paramserve.core.block import SavedBlock, ShardBlock
from paramserve.core.group_state import GroupRecord
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import SessionsRecord
from paramserve.core.sums import RowSum, Sum
from paramserve.core.table.block import KeyedBlock, RowStates, SavedTable
from paramserve.errors import CheckpointError, ParamServeError

Block = ShardBlock | KeyedBlock

TOLD_MAX = 5
"""Blocks that an error names."""
NAMED_MAX = 3
"""Tensors of each that it names."""


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
    for number, block in blocks.items():
        if isinstance(block, ShardBlock):
            block.restore(part.blocks[number])
        else:
            block.restore(part.tables[number])
        shard.add_block(block)
    for machine in shard.groups.values():
        state = machine.state
        state.buffer.sums = part.sums_of(state.id, state.blocks)
    shard.cuts.restore(part.number)
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
        CheckpointError: each difference is named. No values were read; the shard is not to be used.
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

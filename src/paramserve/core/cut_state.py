"""What a shard is rebuilt from besides its arrays: plain records, as of one moment.

They hold numbers, bytes and other records only: msgspec writes and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.core.group import GroupMachine
from paramserve.core.group_members import MembersRecord
from paramserve.core.policy_epochs import ChangesRecord
from paramserve.messages import SavedAt


class GroupRecord(Struct, frozen=True):
    """A group on one shard, without its values.

    Attributes:
        committed: the first clock that is not committed.
        changing: what `PolicyAgreement.record` gave.
        staleness: (rank, pushes, total, largest).
        marks: (client, lease, samples): how much of its leased samples is in the values.
        notes: (rank, clock, note).
        sent_by: (rank, client that sent its last step), where gradients are collected.
        buffered: gradients in the buffer; `large`: whether they may be large.
        saved: by rank, what it saved, as of its last two steps that told some.
        ahead: (rank, clock of a step of it that is in the values), of calls that are not over.
        unapplied: why a buffer was lost, if no step was refused with it yet: (kind, failed, fix).
    """

    id: int
    name: str
    version: int
    committed: int
    changes: ChangesRecord
    changing: tuple[int, ConsistencySpec] | None
    members: MembersRecord
    staleness: tuple[tuple[int, int, int, int], ...]
    skipped: int
    dropped: tuple[tuple[int, int], ...]
    marks: tuple[tuple[int, int, int], ...]
    notes: tuple[tuple[int, int, bytes], ...]
    sent_by: tuple[tuple[int, int], ...]
    buffered: int
    large: bool
    saved: dict[int, tuple[SavedAt, ...]] = {}
    ahead: tuple[tuple[int, int], ...] = ()
    unapplied: tuple[str, str, str] | None = None


def group_record(machine: GroupMachine, unfinished: Mapping[int, int]) -> GroupRecord:
    """A group as it is now.

    Args:
        unfinished: by rank, the clock of a step that is in the values, of a call that is not over.
    """
    state, failure = machine.state, machine.state.unapplied
    return GroupRecord(
        state.id,
        state.name,
        state.version,
        state.committed,
        state.changes.record(),
        machine.policies.record(),
        state.members.record(),
        tuple((r, s.pushes, s.total, s.largest) for r, s in sorted(state.staleness.items())),
        state.skipped,
        tuple(sorted(state.dropped.items())),
        tuple((client, *mark) for client, mark in state.marks.items()),
        tuple((rank, *note) for rank, both in sorted(state.notes.items()) for note in both),
        tuple(sorted(state.last_sender.items())),
        state.buffer.count,
        state.buffer.large,
        dict(state.saved.by_rank),
        tuple(sorted({**state.already_applied, **unfinished}.items())),
        None if failure is None else (type(failure).__name__, failure.failed, failure.fix),
    )

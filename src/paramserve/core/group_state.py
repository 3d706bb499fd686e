"""What one shard holds of one group: blocks, clocks, versions, collected gradients, snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.core.block import ShardBlock
from paramserve.core.commit import Collect
from paramserve.core.group_members import GroupMembers, MembersRecord
from paramserve.core.policy_epochs import Changes, ChangesRecord, PolicyEpoch, epoch_from
from paramserve.core.sums import BufferRecord, GradientBuffer
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import Overloaded, ParamServeError, UnknownName, rebuild
from paramserve.messages import (
    SAVED_BYTES_MAX,
    SAVED_NAMES_MAX,
    GroupReport,
    Member,
    Saved,
    SavedAt,
    Step,
)

Array = npt.NDArray[Any]

TIMES_KEPT = 33
"""Most times of late steps that are kept, for their median."""
MARKS_MAX = 4096
"""Clients whose marks are kept; the oldest go first."""
SAVED_KEPT = 2
"""Steps kept of each rank: the last reported one may be repeated by the next incarnation."""
READS_MAX = 10
"""Most reads that are kept of one worker. Its next gradient comes from the newest read that was
answered; with `overlap` one more is on its way, as many reads by themselves as steps may be, and
after a lost connection each is read again, at a version of its own. Older reads, and those of a
client that only looks, are not needed."""


@dataclass
class Staleness:
    """Staleness of one rank's pushes."""

    pushes: int = 0
    total: int = 0
    largest: int = 0


@dataclass
class Watching:
    """Snapshots kept for one reader: (version, values by block), oldest first."""

    every: int
    keep: int
    kept: deque[tuple[int, dict[int, Array]]] = field(default_factory=deque)
    dropped: int = 0
    last: int = 0
    """Version of the newest snapshot."""


class SavedStates:
    """What workers save for their next incarnations: by rank, as of its last two steps that told
    some, the older first."""

    def __init__(self) -> None:
        self.by_rank: dict[int, tuple[SavedAt, ...]] = {}

    def record(self) -> dict[int, tuple[SavedAt, ...]]:
        """What each rank has saved, as it is now."""
        return dict(self.by_rank)

    def restore(self, record: Mapping[int, tuple[SavedAt, ...]]) -> None:
        """Have what ranks had saved before."""
        self.by_rank = dict(record)

    def before(self, rank: int, clock: int) -> tuple[Saved, ...]:
        """What a rank has saved, as of the newest step before a clock."""
        found = [each.values for each in self.by_rank.get(rank, ()) if each.clock < clock]
        return found[-1] if found else ()

    def step(self, rank: int, step: Step) -> None:
        """Take what a step tells. What an older incarnation told with a step that this one takes
        again, or with a later one, is forgotten.

        A step that ends no clock tells what was saved after the clock before.

        Raises:
            Overloaded: it is too much. Nothing was taken.
        """
        kept = self.by_rank.get(rank, ())
        if step.tick:
            kept = tuple(each for each in kept if each.clock < step.clock)
        if step.saved:
            clock = step.clock if step.tick else step.clock - 1
            values = {each.name: each for each in kept[-1].values} if kept else {}
            values |= {each.name: each for each in step.saved}
            self._check(rank, values)
            before = [each for each in kept if each.clock < clock]
            kept = (*before[1 - SAVED_KEPT :], SavedAt(clock, tuple(values.values())))
        self.by_rank[rank] = kept

    def _check(self, rank: int, values: dict[str, Saved]) -> None:
        size = sum(len(each.data) for each in values.values())
        if len(values) > SAVED_NAMES_MAX or size > SAVED_BYTES_MAX:
            raise Overloaded(
                f"rank {rank} saved {size} bytes under {len(values)} names, the most are "
                f"{SAVED_BYTES_MAX} and {SAVED_NAMES_MAX}",
                fix="save less",
            )


class Reads:
    """Copies of a group's values, for policies that ask how these changed: per rank, those of its
    last reads by their version.

    A worker's next gradient names the version that it was computed from: older copies are released
    then, and their memory is used again.
    """

    def __init__(self) -> None:
        self.by_rank: dict[int, deque[tuple[int, dict[int, Array]]]] = {}
        """Version and copies by block, for each rank, oldest first."""
        self._spare: list[dict[int, Array]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        arrays = [copies for each in self.by_rank.values() for _, copies in each]
        return sum(array.nbytes for copies in (*arrays, *self._spare) for array in copies.values())

    def keep(self, rank: int, version: int, blocks: Iterable[ShardBlock]) -> None:
        """A worker reads these values now, and has those of the other blocks from before."""
        reads = self.by_rank.setdefault(rank, deque())
        now = {block.spec.block: block.value for block in blocks}
        if reads and reads[-1][0] == version:
            copies = reads[-1][1]
        else:
            now = (reads[-1][1] | now) if reads else now
            if len(reads) >= READS_MAX:
                self._spare.append(reads.popleft()[1])
            copies = self._spare.pop() if self._spare else {}
            for number in copies.keys() - now.keys():
                del copies[number]
            reads.append((version, copies))
        for number, value in now.items():
            copy = copies.get(number)
            if copy is None:
                copies[number] = value.copy()
            else:
                np.copyto(copy, value)

    def of(self, rank: int, version: int) -> dict[int, Array]:
        """Copies by block of what a worker read at this version; empty if it did not."""
        reads = self.by_rank.get(rank)
        if not reads:
            return {}
        while len(reads) > 1 and reads[0][0] < version:  # the last one goes into the next
            self._spare.append(reads.popleft()[1])
        return reads[0][1] if reads[0][0] == version else {}

    def keep_only(self, ranks: Iterable[int]) -> None:
        """Forget all other ranks."""
        others = set(self.by_rank).difference(ranks)
        for rank in sorted(others):
            del self.by_rank[rank]
        if others:
            self._spare.clear()

    def forget(self, rank: int) -> None:
        """This worker goes by a policy that needs no copies."""
        if self.by_rank.pop(rank, None) is not None:
            self._spare.clear()


class GroupRecord(Struct, frozen=True):
    """A group on one shard, as of one moment, without its values.

    Attributes:
        staleness: by rank: pushes, total, largest.
        marks: (client, lease, samples): how much of its leased samples is in the values.
        saved: by rank, what it saved, as of its last two steps that told some.
        already_applied: by rank, the clock of a step that is in the values, of a call that is not
            over.
        unapplied: why a buffer was lost, if no step was refused with it yet: (kind, failed, fix).
        undecided: as `PolicyAgreement.record` gives it.
    """

    id: int
    name: str
    version: int
    committed: int
    changes: ChangesRecord
    members: MembersRecord
    buffer: BufferRecord
    staleness: dict[int, tuple[int, int, int]]
    skipped: int
    dropped: dict[int, int]
    marks: tuple[tuple[int, int, int], ...]
    notes: dict[int, tuple[tuple[int, bytes], ...]]
    last_sender: dict[int, int]
    saved: dict[int, tuple[SavedAt, ...]]
    already_applied: dict[int, int]
    unapplied: tuple[str, str, str] | None
    undecided: tuple[int, ConsistencySpec] | None = None


class GroupState:
    """A group's whole state on one shard; to its policy it is a `GroupView`.

    `version` counts the updates that the group has had here. `committed` is the first clock that is
    not committed yet, of those whose policy collects.

    Args:
        ranks: members from the beginning; others join.
        live: of the cluster, those that clocks wait for.
    """

    def __init__(
        self,
        number: int,
        name: str,
        policy: Policy,
        ranks: Iterable[int] = (),
        live: Sequence[int] = (),
    ) -> None:
        self.id = number
        self.name = name
        self.changes = Changes(epoch_from(0, policy))
        self.version = 0
        self.committed = 0
        self.now = 0.0
        """Seconds on the shard's clock, as of the present event."""
        self.members = GroupMembers(ranks, live)
        self.last_sender: dict[int, int] = {}
        """Client that sent the last step of each rank, in Sync."""
        self.blocks: dict[int, ShardBlock | KeyedBlock] = {}
        self.table: KeyedBlock | None = None
        """Block of the group, if it is a table; None: the group is dense."""
        self.collect = Collect()
        self.buffer = GradientBuffer()
        self.reads = Reads()
        self.staleness: dict[int, Staleness] = {}
        self.skipped = 0
        self.unapplied: ParamServeError | None = None
        """Error of a buffer that could not be flushed, until a step is refused with it."""
        self.buffer_lost: Callable[[ParamServeError], None] | None = None
        """Called with `unapplied` when it is set: no later step may push."""
        self.dropped: dict[int, int] = {}
        """Gradients by rank that came too late, were too stale, or were left out alone for NaN."""
        self.marks: dict[int, tuple[int, int]] = {}
        """Newest mark of each client's steps whose outcome is decided."""
        self.notes: dict[int, tuple[tuple[int, bytes], ...]] = {}
        """Clock and note, by rank, of the last two steps that had one, the older first. The last
        step may be one that the next incarnation takes again."""
        self.saved = SavedStates()
        self.already_applied: dict[int, int] = {}
        """Clock, by rank, of a step that the values have since before this shard was restored from
        a cut, while the call of that step was not complete in the cut. The rank repeats that
        call."""
        self.watching: dict[int, Watching] = {}
        """Snapshots kept for each client that watches the group."""
        self.snapshot_due: Callable[[], None] | None = None
        """Called in place of keeping a snapshot where gradients do not wait for a commit: then a
        version has other pushes on each shard. None: there is one shard."""
        self._committed_at: float | None = None
        self._times: deque[float] = deque(maxlen=TIMES_KEPT)
        self._median = 0.0

    def record(self, unfinished: Mapping[int, int]) -> GroupRecord:
        """The group as it is now.

        Args:
            unfinished: by rank, the clock of a step that is in the values, of a call that is not
                over.
        """
        failure = self.unapplied
        return GroupRecord(
            self.id,
            self.name,
            self.version,
            self.committed,
            self.changes.record(),
            self.members.record(),
            self.buffer.record(),
            {rank: (s.pushes, s.total, s.largest) for rank, s in self.staleness.items()},
            self.skipped,
            dict(self.dropped),
            tuple((client, *mark) for client, mark in self.marks.items()),
            dict(self.notes),
            dict(self.last_sender),
            self.saved.record(),
            {**self.already_applied, **unfinished},
            None if failure is None else (type(failure).__name__, failure.failed, failure.fix),
        )

    def restore(self, record: GroupRecord, policies: Mapping[str, Any]) -> None:
        """Go on from a cut, without blocks.

        Args:
            policies: classes by name that the owner registered, besides the built-in ones.
        Raises:
            UnknownRule: a policy is not registered. The group is not to be used.
        """
        self.changes.restore(record.changes, policies)
        self.version, self.committed = record.version, record.committed
        self.members.restore(record.members)
        self.buffer.restore(record.buffer)
        self.staleness = {rank: Staleness(*each) for rank, each in record.staleness.items()}
        self.skipped, self.dropped = record.skipped, dict(record.dropped)
        self.marks = {client: (lease, samples) for client, lease, samples in record.marks}
        self.notes, self.last_sender = dict(record.notes), dict(record.last_sender)
        self.saved.restore(record.saved)
        applied, live = record.already_applied, self.members.live
        self.already_applied = {rank: applied[rank] for rank in applied if rank in live}
        if record.unapplied is not None:
            kind, failed, fix = record.unapplied
            self.unapplied = rebuild(kind, failed, "no", fix)

    # --- what a policy sees ----------------------------------------------------------------------

    @property
    def clocks(self) -> Mapping[int, int]:
        """Steps that each rank has finished, of those that are live or waited for."""
        return self.members.clocks

    @property
    def slowest(self) -> int:
        """The smallest clock of the live workers; without any, what it was last."""
        return self.members.slowest

    @property
    def buffered(self) -> int:
        """Gradients in the buffer."""
        return self.buffer.count

    @property
    def arrived(self) -> Collection[int]:
        """Ranks whose gradients of the present clock are here, of those that count already."""
        clocks = self.members.clocks
        return {rank for rank in self.collect.pending if rank in clocks}

    @property
    def waited_s(self) -> float:
        """Seconds since the first of these came."""
        since = self.collect.since
        return self.now - since if since is not None and self.arrived else 0.0

    @property
    def step_s(self) -> float:
        """Median time of late from a commit until a worker sent its next gradients."""
        return self._median

    def block(self, number: int) -> ShardBlock | KeyedBlock:
        """The group's block of this number.

        Raises:
            UnknownName: the group has none. Nothing was applied.
        """
        block = self.blocks.get(number)
        if block is None:
            raise UnknownName(
                f"group {self.name!r} has no block {number} here",
                fix="define it first, and send one step for each group",
            )
        return block

    # --- policies --------------------------------------------------------------------------------

    def at(self, clock: int) -> PolicyEpoch:
        """The policy of steps of a clock."""
        return self.changes.at(clock) if self.changes.later else self.changes.first

    def of(self, rank: int, clock: int) -> PolicyEpoch:
        """The policy of a client's step. One without a rank has no clock: it goes with the slowest
        worker, and where there is none, by the newest policy."""
        if rank >= 0:
            return self.at(clock)
        return self.at(self.members.slowest) if self.members.clocks else self.changes.newest

    @property
    def collects(self) -> bool:
        """Whether gradients of the slowest worker wait for a commit."""
        return self.at(self.start).policy.collects

    @property
    def waits(self) -> bool:
        """Whether a worker may wait for members that are slower."""
        policy = self.at(self.start).policy
        return policy.collects or type(policy).on_pull is not Policy.on_pull

    @property
    def start(self) -> int:
        """The clock at which a worker that comes now begins."""
        present = self.at(self.members.slowest).policy
        return (
            max(self.members.slowest, self.committed) if present.collects else self.members.slowest
        )

    def frontier(self) -> int:
        """The first clock of which no worker's step has been executed here."""
        fastest = self.members.fastest()
        if self.at(self.committed).policy.collects:
            fastest = max(fastest, self.committed + bool(self.collect.pending))
        return fastest

    def settle(self) -> None:
        """Let `committed` skip clocks whose policy does not collect."""
        self.committed = self.changes.next_collecting(self.committed)

    # --- what happens ----------------------------------------------------------------------------

    def members_changed(self, members: Mapping[int, Member], live: Sequence[int]) -> None:
        """Workers have come or gone.

        Args:
            members: of the cluster, by rank.
            live: ranks that clocks wait for, in order.
        """
        self.members.update(live, self.start)
        self.reads.keep_only(live)
        if any(rank in self.notes for rank in live):
            # A worker that comes later goes by the notes of a live one.
            for rank, member in members.items():
                if member.state == "left":
                    self.notes.pop(rank, None)

    def on_contribution(self, rank: int) -> None:
        """A worker has sent its gradients for the present clock. One that is no member yet
        tells nothing of how long a step takes."""
        if rank not in self.members.clocks:
            return
        if self.collect.since is None:
            self.collect.since = self.now
        if self._committed_at is not None:
            self._times.append(self.now - self._committed_at)

    def commit(self) -> None:
        """The present clock is decided."""
        self.committed += 1
        later = bool(self.changes.later)
        self.members.commit(self.committed, together=not later)
        if later:
            self.settle()
        self._committed_at = self.now
        if self._times:
            self._median = median(self._times)

    def count_staleness(self, rank: int, staleness: int) -> None:
        """A gradient of a rank was applied, or will be."""
        if rank not in self.staleness:
            self.staleness[rank] = Staleness()
        counts = self.staleness[rank]
        counts.pushes += 1
        counts.total += staleness
        if staleness > counts.largest:
            counts.largest = staleness

    def drop(self, rank: int) -> None:
        """A gradient came too late, or was too stale."""
        self.dropped[rank] = self.dropped.get(rank, 0) + 1

    def mark(self, client: int, mark: tuple[int, int] | None) -> None:
        """A step's outcome is decided: its samples will not be used again."""
        if mark is not None:
            self.marks.pop(client, None)
            self.marks[client] = mark
            if len(self.marks) > MARKS_MAX:
                del self.marks[next(iter(self.marks))]

    def has_step(self, rank: int, step: Step) -> bool:
        """Whether this step, the first one of a rank that is ahead, is in the values already. The
        rank is not ahead any more."""
        del self.already_applied[rank]
        return step.clock < self.committed or not (
            step.tick and self.at(step.clock).policy.collects
        )

    def keep_note(self, rank: int, clock: int, note: bytes) -> None:
        """Keep the note of a rank's step for the next incarnation of the rank, unless there is one
        of a later step: then the next incarnation goes on behind that."""
        notes = self.notes.get(rank, ())
        if notes and clock < notes[-1][0]:
            return
        before = [each for each in notes if each[0] < clock]
        self.notes[rank] = (*before[-1:], (clock, note))

    def advance(self) -> None:
        """Count an update, and keep a snapshot for readers that asked for one at this version."""
        self.version += 1
        for client in self.watching:
            if self.version % self.watching[client].every == 0:
                if self.snapshot_due is not None and not self.collects:
                    self.snapshot_due()
                else:
                    self._keep(self.watching[client], self.version, self._copied)

    def _copied(self) -> dict[int, Array]:
        return {
            number: np.copy(block.value)
            for number, block in self.blocks.items()
            if isinstance(block, ShardBlock)
        }

    def keep_snapshot(self, version: int, values: Callable[[], dict[int, Array]]) -> None:
        """Keep the values of a cut for the readers that asked for one since their last.

        Args:
            version: what it is called on all shards.
            values: gives the values by block.
        """
        for watching in self.watching.values():
            if version // watching.every > watching.last // watching.every:
                self._keep(watching, version, values)

    def _keep(
        self, watching: Watching, version: int, values: Callable[[], dict[int, Array]]
    ) -> None:
        """Keep a snapshot for a reader; the oldest one goes if it has too many."""
        if len(watching.kept) >= watching.keep:
            watching.kept.popleft()
            watching.dropped += 1
        watching.last = version
        try:
            watching.kept.append((version, values()))
        except (
            MemoryError,
            Overloaded,
        ):  # the reader lacks one; the update is applied all the same
            watching.dropped += 1

    def report(self, *, notes: bool = False) -> GroupReport:
        """What this shard has done for the group; with `notes`, those of the ranks as well."""
        present, members = self.at(self.start).policy, self.members
        clocks: Mapping[int, int] = members.clocks
        if self.already_applied:  # those ranks begin with the call that was not over
            clocks = {
                rank: min(clocks[rank], self.already_applied.get(rank, clocks[rank]))
                for rank in clocks
            }
        return GroupReport(
            self.name,
            self.version,
            tuple(sorted(clocks.items())),
            self.skipped,
            tuple((r, s.pushes, s.total, s.largest) for r, s in sorted(self.staleness.items())),
            tuple((r, each.session.client) for r, each in sorted(self.collect.pending.items())),
            self.start,
            type(present).__name__,
            tuple(self.changes.history),
            present.collects,
            tuple(sorted(self.dropped.items())),
            self.buffered,
            self.reads.nbytes,
            tuple((client, *mark) for client, mark in sorted(self.marks.items())),
            None if self.table is None else self.table.report(),
            tuple((r, *note) for r, both in sorted(self.notes.items()) for note in both)
            if notes
            else (),
            members.left(),
            passed=members.passed(),
        )


class Proposed:
    """A group as it would stand if only some had sent their gradients."""

    def __init__(self, group: GroupState, arrived: Collection[int]) -> None:
        self._group = group
        self.arrived = arrived

    @property
    def clocks(self) -> Mapping[int, int]:
        return self._group.clocks

    @property
    def slowest(self) -> int:
        return self._group.slowest

    @property
    def version(self) -> int:
        return self._group.version

    @property
    def buffered(self) -> int:
        return self._group.buffered

    @property
    def waited_s(self) -> float:
        return self._group.waited_s

    @property
    def step_s(self) -> float:
        return self._group.step_s

"""When checkpoints of a run are taken, and how far the one under way is: one at a time.

    due, or asked for    BeginCheckpoint to all servers      shard 0 takes a cut of all shards
    CutTaken             MakeFolder
    FolderMade           WriteCut to all servers             each writes its part
    all CutWritten       CommitFiles                         cluster.msgpack, manifest
    FilesCommitted       CheckpointOver(committed=True)

What fails gives that one checkpoint up: `CheckpointOver(committed=False)`, and `Discard` of its
files. Training goes on, and the next one is tried later. Work on files is done elsewhere, in the
order in which it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import NamedTuple

import msgspec
from msgspec import structs

from paramserve.config import CheckpointPlan, is_trained
from paramserve.core.cluster_state import ClusterState
from paramserve.core.decisions import LEAD
from paramserve.core.flush import FLUSH_LIMIT_MAX_S
from paramserve.core.leases import Marks
from paramserve.errors import CheckpointError, shown
from paramserve.messages import (
    AskCheckpoint,
    BeginCheckpoint,
    Checkpointed,
    CheckpointOver,
    CheckpointReport,
    CutTaken,
    CutWritten,
    ServerBeat,
    ServerNotice,
    WriteCut,
)

TAKE_LIMIT_S = FLUSH_LIMIT_MAX_S + 300.0
"""Longest time for memory, a flush and the cut: the servers touch 1 GB of memory in a second, and
shard 0 gives a cut up 30 s after its flush."""
WRITE_LIMIT_S = 300.0
"""A checkpoint is given up when no server has written anything for this long. What the system has
not written to the disk by the end of a file, its sync waits for: a part of the memory."""
RETRY_S = 30.0
"""Longest time until the next checkpoint is tried after one that failed."""
LOOK_AT_SERVERS = "look at the output of the servers and of the coordinator"


class MakeFolder(NamedTuple):
    """Work: make the folder of a checkpoint, named after this clock."""

    checkpoint: int
    step: int


class CommitFiles(NamedTuple):
    """Work: write the coordinator's part, then the manifest, and prune."""

    checkpoint: int
    name: str
    step: int
    cut: CutTaken
    files: tuple[bytes, ...]
    """Files of each server; see `CutWritten.files`."""
    cluster: bytes
    """`ClusterRecord`, in msgpack."""
    pause_s: float
    lost_residuals: tuple[int, ...] = ()
    """Ranks that had left something out of their gradients before the cut."""


class Discard(NamedTuple):
    """Work: remove the files of a checkpoint that is given up."""

    checkpoint: int
    name: str


class SeeServers(NamedTuple):
    """Work: look whether every server has answered the probe."""


FileWork = MakeFolder | CommitFiles | Discard | SeeServers


class FolderMade(NamedTuple):
    """The folder of a checkpoint is there."""

    checkpoint: int
    name: str


class FilesCommitted(NamedTuple):
    """A checkpoint is there; `nbytes`: of the files that were written for it."""

    checkpoint: int
    nbytes: int
    path: str


class ServersSeen(NamedTuple):
    """All servers see the folder."""


class FilesFailed(NamedTuple):
    """Work for a checkpoint, or of the probe (0), failed."""

    checkpoint: int
    failed: str
    fix: str


FileEvent = FolderMade | FilesCommitted | ServersSeen | FilesFailed


class _Stage(Enum):
    CUTTING = "its cut is taken"
    NAMING = "its folder is made"
    WRITING = "its parts are written"
    COMMITTING = "it is committed"


@dataclass
class _UnderWay:
    """The checkpoint that is being taken."""

    number: int
    full: bool
    """Whether it is to have all rows of tables."""
    began: float
    progress: float
    """When something of it was done last."""
    stage: _Stage = _Stage.CUTTING
    cut: CutTaken | None = None
    blocks: tuple[int, ...] = ()
    """Blocks that are saved."""
    name: str = ""
    parts: dict[int, CutWritten] = field(default_factory=dict)
    bytes_written: dict[int, int] = field(default_factory=dict)
    """Bytes by server, as it has reported last."""


class _Call(NamedTuple):
    """A call for a checkpoint.

    Attributes:
        number: of the checkpoint that is to answer it.
        flush_by: when half of its time is over: a flush takes no longer, the files have the rest.
    """

    number: int
    flush_by: float


class Checkpointing:
    """The schedule of checkpoints, and the one under way.

    Args:
        state: what the coordinator saves with each.
    """

    def __init__(self, plan: CheckpointPlan, servers: int, state: ClusterState) -> None:
        self.notices: list[tuple[int, ServerNotice]] = []
        """What to tell which shard's server."""
        self.work: list[FileWork] = []
        """Work on files, to be done in this order."""
        self.ended: list[CheckpointReport] = []
        """How things stand after each checkpoint that is over."""
        self._plan = plan
        self._servers = servers
        self._state = state
        self._under_way: _UnderWay | None = None
        self._number = 0
        """Checkpoints that were begun."""
        self._over: CheckpointOver | None = None
        """Result of the last checkpoint."""
        self._report = CheckpointReport(folder=shown(plan.folder))
        self._committed_at: float | None = None
        """When the last one was; None: this run has committed none."""
        if plan.resumed is not None:
            self._report = structs.replace(
                self._report,
                name=plan.resume,
                clocks=plan.resumed.clocks,
                nbytes=plan.resumed.nbytes,
                pause_s=plan.resumed.pause_s,
            )
        self._path = ""
        self._saved = frozenset[int]()
        """The blocks that the last one has that was committed."""
        self._failed: tuple[str, str] = "", ""
        """What failed of the last one, and what to do; empty: nothing."""
        self._since: float | None = None
        """The schedule's last beginning; None: there has been nothing to save yet."""
        self._clock = self._at_clock = 0
        """The clock of the slowest worker, as told last, and then."""
        self._retry_at: float | None = None
        self._calls: dict[tuple[int, int], _Call] = {}
        """Calls by connection and number."""
        self._last_event: FilesFailed | ServersSeen | None = None
        """Whether the servers see the folder; None: that is not known yet."""
        self._looks = False

    # --- schedule --------------------------------------------------------------------------------

    def look(self, now: float, ready: Callable[[], bool]) -> None:
        """Begin a checkpoint that is due; give up what takes too long.

        Args:
            ready: whether all servers are there, and have something to save.
        """
        if self._committed_at is None and self._plan.resumed is not None:
            self._committed_at = now - self._plan.resumed.age_s
        under_way = self._under_way
        if under_way is not None:
            self._limit(under_way, now)
            return
        if self._since is None:
            if self._calls and not self._looks and ready():  # before any client has joined
                self._look_for_servers()
            if not (isinstance(self._last_event, ServersSeen) and ready()):
                return
            self._since, self._at_clock = now, self._clock
        if self._due(now, self._since):
            self._begin(now)

    def _due(self, now: float, since: float) -> bool:
        """Whether a checkpoint is to begin now: it was asked for, is tried again, or it is time by
        seconds or steps."""
        plan = self._plan
        return (
            any(each.number > self._number for each in self._calls.values())
            or (self._retry_at is not None and self._retry_at <= now)
            or (plan.every_s > 0 and now - since >= plan.every_s)
            or (plan.every_steps > 0 and self._clock - self._at_clock >= plan.every_steps)
        )

    def _begin(self, now: float) -> None:
        self._number += 1
        self._since, self._at_clock, self._retry_at = now, self._clock, None
        full = self._report.committed % self._plan.full_every == 0 or self._lacks_base()
        self._under_way = _UnderWay(self._number, full, now, now)
        self._state.begin()
        self._tell_all(self._notice(self._under_way, now))

    def _notice(self, under_way: _UnderWay, now: float) -> BeginCheckpoint:
        flush_by = min((each.flush_by for each in self._calls.values()), default=inf)
        return BeginCheckpoint(under_way.number, under_way.full, max(0.0, flush_by - now))

    def _lacks_base(self) -> bool:
        """Whether changes of a table may have nothing to go on from: it was not known as defined at
        the cut of the last checkpoint, which the shards count as its base; or that one failed."""
        failed = self._over is not None and not self._over.committed
        return failed or not self._state.tables() <= self._saved

    def _limit(self, under_way: _UnderWay, now: float) -> None:
        """Give the checkpoint up if its stage has seen no progress for too long."""
        silent_s = now - under_way.progress
        if under_way.stage is _Stage.CUTTING and silent_s > TAKE_LIMIT_S:
            self._give_up(f"shard {LEAD} told of no cut in {TAKE_LIMIT_S:.0f} s", now)
        elif under_way.stage is _Stage.WRITING and silent_s > WRITE_LIMIT_S:
            missing = [each for each in range(self._servers) if each not in under_way.parts]
            self._give_up(
                f"the servers of shards {missing} have written nothing for {WRITE_LIMIT_S:.0f} s",
                now,
            )
        elif under_way.stage is _Stage.NAMING and silent_s > WRITE_LIMIT_S:
            self._give_up(f"its folder was not made in {WRITE_LIMIT_S:.0f} s", now)

    def paused(self, seconds: float) -> None:
        """Nothing could be heard for so long."""
        if self._under_way is not None:
            self._under_way.progress += seconds

    # --- requests ---------------------------------------------------------------------------------

    def ask(self, connection: int, message: AskCheckpoint, now: float) -> Checkpointed | None:
        """Answer a call for a checkpoint that begins after it; asking again changes nothing.

        Returns:
            None: it is not over.
        Raises:
            CheckpointError: it failed, or a server does not see the folder.
        """
        key = connection, message.call
        if isinstance(self._last_event, FilesFailed):
            self._calls.pop(key, None)
            raise CheckpointError(self._last_event.failed, fix=self._last_event.fix)
        if key not in self._calls:
            self._calls[key] = _Call(self._number + 1, now + message.wait_s / 2)
            if self._under_way is not None and self._under_way.stage is _Stage.CUTTING:
                self.notices.append((LEAD, self._notice(self._under_way, now)))
        number = self._calls[key].number
        if self._over is None or self._over.checkpoint < number:
            return None
        del self._calls[key]
        if not self._over.committed:
            failed, fix = self._failed
            raise CheckpointError(failed, fix=fix)
        report = self._report
        return Checkpointed(
            message.call,
            self._path,
            report.clocks,
            report.nbytes,
            report.pause_s,
            report.seconds,
        )

    def asked_too_long(self, connection: int, message: AskCheckpoint) -> CheckpointError:
        """Why a call is refused that has waited for as long as it may."""
        self._calls.pop((connection, message.call), None)
        under_way = self._under_way
        none = "no block is defined, or a server is missing"
        why = under_way.stage.value if under_way is not None else none
        return CheckpointError(
            f"no checkpoint was committed in {message.wait_s:.1f} s: {why}",
            applied="unknown",
            fix=f"wait longer, or {LOOK_AT_SERVERS}",
        )

    def on_disconnect(self, connection: int) -> None:
        """A connection has ended: its calls are not answered."""
        for key in [each for each in self._calls if each[0] == connection]:
            del self._calls[key]

    def report(self, now: float) -> CheckpointReport:
        """How checkpoints stand."""
        age_s = now - self._committed_at if self._committed_at is not None else 0.0
        return structs.replace(self._report, age_s=age_s, writes=self._under_way is not None)

    # --- servers ---------------------------------------------------------------------------------

    def servers_seen(self) -> bool:
        """Whether all servers are known to see the folder; the first call has that looked at.

        Raises:
            CheckpointError: one of them does not.
        """
        self._look_for_servers()
        if isinstance(self._last_event, FilesFailed):
            raise CheckpointError(self._last_event.failed, fix=self._last_event.fix)
        return self._last_event is not None

    def _look_for_servers(self) -> None:
        if not self._looks:
            self._looks = True
            self.work.append(SeeServers())

    def cut_taken(self, message: CutTaken, now: float) -> None:
        """Shard 0 has the cut, or has none."""
        under_way = self._at(message.checkpoint, _Stage.CUTTING)
        if under_way is None:
            if self._over is not None and message.checkpoint <= self._over.checkpoint:
                self._tell_all(CheckpointOver(message.checkpoint, message.cut, False))
            return
        under_way.cut, under_way.progress = message, now
        if message.failed:
            self._give_up(message.failed, now, message.fix)
            return
        if not under_way.full and self._lacks_base():  # a table is known since it began
            self._tell_all(CheckpointOver(message.checkpoint, message.cut, False))
            self._begin(now)
            return
        under_way.blocks = self._state.cut_taken(message.blocks)
        under_way.stage = _Stage.NAMING
        self.work.append(MakeFolder(under_way.number, _furthest(message.clocks)))

    def cut_written(self, message: CutWritten, now: float) -> None:
        """A server has written its part, or could not."""
        under_way = self._at(message.checkpoint, _Stage.WRITING)
        if under_way is None:
            if self._over is not None and message.checkpoint == self._over.checkpoint:
                self.notices.append((message.shard, self._over))
            return
        if message.failed:
            self._give_up(message.failed, now)
            return
        under_way.parts[message.shard], under_way.progress = message, now
        if len(under_way.parts) == self._servers:
            self._commit(under_way)

    def on_beat(self, beat: ServerBeat, beats: Iterable[ServerBeat], now: float) -> None:
        """A server's heartbeat: it may have written more; the clocks are told by the last ones of
        all."""
        if self._plan.every_steps and beat.shard == LEAD:  # once in each round of them
            self._clock = slowest_clock(beats)
        under_way = self._under_way
        if under_way is not None and under_way.bytes_written.get(beat.shard) != beat.written:
            under_way.bytes_written[beat.shard] = beat.written
            under_way.progress = max(under_way.progress, now)

    def server_lost(self, shard: int, now: float) -> None:
        """A server is gone, with its part of the cut if it has not written it."""
        under_way = self._under_way
        if under_way is not None and under_way.stage is not _Stage.COMMITTING:
            self._give_up(f"the server of shard {shard} is gone", now)

    def repeat_notice(self, shard: int, now: float) -> None:
        """A server has connected again: what it was told may be lost."""
        under_way = self._under_way
        if self._over is not None:
            self.notices.append((shard, self._over))
        if under_way is None:
            return
        if under_way.stage is _Stage.CUTTING:
            self.notices.append((shard, self._notice(under_way, now)))
        elif under_way.stage is _Stage.WRITING and shard not in under_way.parts:
            self.notices.append((shard, _write(under_way)))

    # --- files -----------------------------------------------------------------------------------

    def worked(self, event: FileEvent, now: float) -> None:
        """Work on files is done, or has failed."""
        match event:
            case FolderMade():
                under_way = self._at(event.checkpoint, _Stage.NAMING)
                if under_way is None:
                    self.work.append(Discard(*event))
                    return
                under_way.name, under_way.stage = event.name, _Stage.WRITING
                under_way.progress = now
                self._tell_all(_write(under_way))
            case FilesCommitted():
                under_way = self._at(event.checkpoint, _Stage.COMMITTING)
                assert under_way is not None, "it is not given up meanwhile"
                self._path = event.path
                self._committed(under_way, event.nbytes, now)
            case ServersSeen():
                self._last_event = event
            case FilesFailed(checkpoint=0):
                self._last_event = event
            case FilesFailed():
                if self._under_way is not None and self._under_way.number == event.checkpoint:
                    self._fail(event.failed, now, event.fix)

    def _commit(self, under_way: _UnderWay) -> None:
        """Have the checkpoint's last files written: all servers have written their parts."""
        assert under_way.cut is not None
        under_way.stage = _Stage.COMMITTING
        parts = [part for _, part in sorted(under_way.parts.items())]
        marks = Marks([part.marks for part in parts], [part.begun for part in parts])
        record = self._state.record(marks)
        self.work.append(
            CommitFiles(
                under_way.number,
                under_way.name,
                _furthest(under_way.cut.clocks),
                under_way.cut,
                tuple(part.files for part in parts),
                msgspec.msgpack.encode(record),
                _pause_s(under_way),
                tuple(sorted({rank for part in parts for rank in part.left_out})),
            )
        )

    def _committed(self, under_way: _UnderWay, nbytes: int, now: float) -> None:
        """Report the checkpoint as the newest one, and have servers release what is left of the
        cut."""
        assert under_way.cut is not None
        self._committed_at = now
        self._saved = frozenset(under_way.blocks)
        self._report = structs.replace(
            self._report,
            name=under_way.name,
            clocks=under_way.cut.clocks,
            nbytes=nbytes,
            pause_s=_pause_s(under_way),
            seconds=now - under_way.began,
            committed=self._report.committed + 1,
            left_out=under_way.cut.left_out,
        )
        self._end(under_way, committed=True)

    def _give_up(self, why: str, now: float, fix: str = "") -> None:
        assert self._under_way is not None
        what = self._under_way.name or f"number {self._under_way.number}"
        self._fail(f"checkpoint {what} was given up: {why}", now, fix or LOOK_AT_SERVERS)

    def _fail(self, failed: str, now: float, fix: str) -> None:
        """Count a failed checkpoint, remove its folder, and try again later if they are taken by
        themselves."""
        under_way = self._under_way
        assert under_way is not None
        if under_way.name:
            self.work.append(Discard(under_way.number, under_way.name))
        if self._plan.every_s or self._plan.every_steps:
            self._retry_at = now + RETRY_S
        self._failed = failed, fix
        self._report = structs.replace(self._report, failed=self._report.failed + 1, why=failed)
        self._end(under_way, committed=False)

    def _end(self, under_way: _UnderWay, *, committed: bool) -> None:
        self._under_way = None
        self._state.let_go()
        cut = under_way.cut.cut if under_way.cut is not None else 0
        self._over = CheckpointOver(under_way.number, cut, committed)
        self._tell_all(self._over)
        self.ended.append(self._report)

    def _at(self, checkpoint: int, stage: _Stage) -> _UnderWay | None:
        """The checkpoint of this number, if it is at this stage."""
        under_way = self._under_way
        if under_way is None or (under_way.number, under_way.stage) != (checkpoint, stage):
            return None
        return under_way

    def _tell_all(self, notice: ServerNotice) -> None:
        self.notices += [(shard, notice) for shard in range(self._servers)]


def _write(under_way: _UnderWay) -> WriteCut:
    assert under_way.cut is not None
    cut, name = under_way.cut.cut, under_way.name
    return WriteCut(under_way.number, cut, name, under_way.blocks)


def _pause_s(under_way: _UnderWay) -> float:
    return max((part.pause_s for part in under_way.parts.values()), default=0.0)


def _furthest(clocks: Mapping[str, int]) -> int:
    """The clock that a checkpoint is named after: of the trained group with most steps."""
    return max((clock for name, clock in clocks.items() if is_trained(name)), default=0)


def slowest_clock(beats: Iterable[ServerBeat]) -> int:
    """The clock of the slowest worker on the group with most steps, by the last heartbeats."""
    clocks: dict[str, int] = {}
    for beat in beats:
        for group in beat.groups:
            if group.clocks:
                slowest = min(clock for _, clock in group.clocks)
                clocks[group.name] = min(slowest, clocks.get(group.name, slowest))
    return _furthest(clocks)

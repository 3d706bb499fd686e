"""A server's part in checkpoints: it writes its part of a cut, and begins with what one has.

The loop copies a piece of the cut, a thread hashes and writes it, and so on in turns
(`checkpoint.shard_writer`): so no request waits for the disk.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import msgspec

from paramserve.checkpoint.committing import read_cluster
from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.locations import storage_at
from paramserve.checkpoint.manifest import Written, residual_loss
from paramserve.checkpoint.reader import Checkpoint
from paramserve.checkpoint.shard_reader import LoadedShard
from paramserve.checkpoint.shard_writer import Job, write_shard
from paramserve.checkpoint.storage import Storage
from paramserve.checkpoint.writer import Writer
from paramserve.compiling import needed
from paramserve.config import CheckpointPlan
from paramserve.consistency.registry import spec as policy_spec
from paramserve.core import differences
from paramserve.core.block import ShardBlock
from paramserve.core.cluster_state import blocks_for
from paramserve.core.cut_parts import ShardCut
from paramserve.core.decisions import LEAD
from paramserve.core.restoring import change_policy, restore
from paramserve.core.shard import Shard
from paramserve.errors import ParamServeError
from paramserve.logs import event
from paramserve.messages import BeginCheckpoint, CheckpointOver, CutWritten, WriteCut
from paramserve.transport.timing import Loop, Pending

logger = logging.getLogger("paramserve")


class _Writing:
    """A part that is being written."""

    def __init__(self, notice: WriteCut, writer: Writer) -> None:
        self.notice = notice
        self.writer = writer
        self.turns: Generator[Job, Any, tuple[Written, ...]] | None = None
        self.part: ShardCut | None = None
        self.pause_s = 0.0
        """The longest turn so far, in which the shard executed nothing."""


class PartWriter:
    """Writes a server's part of each checkpoint, one at a time.

    Args:
        shard: decides; it has the cuts.
        storage: of the run's checkpoints; None: the run writes none.
        report: sends a message to the coordinator.
        cut: has the shard take a cut for a checkpoint.
    """

    def __init__(
        self,
        shard: Shard,
        loop: Loop,
        storage: Storage | None,
        report: Callable[[CutWritten], None],
        cut: Callable[[BeginCheckpoint], None],
    ) -> None:
        self._shard = shard
        self._loop = loop
        self._storage = storage
        self._report = report
        self._cut = cut
        self._prepares: BeginCheckpoint | None = None
        """The checkpoint that memory is prepared for, as told last."""
        self._prepared = False
        self._writing: _Writing | None = None
        self._closed = False
        self._last_report: CutWritten | None = None
        """Outcome of the last one."""

    def prepare(self, notice: BeginCheckpoint) -> None:
        """Have the memory of copies; then, on shard 0, take the cut."""
        before, self._prepares = self._prepares, notice
        if before is not None and before.checkpoint == notice.checkpoint:
            if self._prepared:
                self._take(notice)
            return
        self._prepared = False
        memory = self._shard.cut_memory
        blocks = [each for each in self._shard.blocks.values() if isinstance(each, ShardBlock)]
        sizes = [array.nbytes for each in blocks for array in (each.value, *each.state)]
        preparing = self._loop.run_in_executor(None, partial(memory.prepare, sizes))
        preparing.add_done_callback(partial(self._have_prepared, notice.checkpoint))

    def _have_prepared(self, checkpoint: int, done: Pending[list[Any]]) -> None:
        notice = self._prepares
        if notice is None or notice.checkpoint != checkpoint or self._closed:
            return
        self._prepared = True
        if done.exception() is None:
            self._shard.cut_memory.add(done.result())
        self._take(notice)

    def _take(self, notice: BeginCheckpoint) -> None:
        if self._shard.number == LEAD:
            self._cut(notice)

    def write(self, notice: WriteCut) -> None:
        """Write this server's part; or report its outcome again."""
        last_report, writing = self._last_report, self._writing
        if last_report is not None and last_report.checkpoint == notice.checkpoint:
            self._report(last_report)
        elif writing is None or writing.notice.checkpoint != notice.checkpoint:
            self._give_up()  # the coordinator has done so with the one before
            self._begin(notice)

    def _begin(self, notice: WriteCut) -> None:
        if self._storage is None:
            self._refuse(notice, "the server was started without a folder for checkpoints")
            return
        writing = self._writing = _Writing(notice, Writer(self._storage, notice.name))
        try:
            part = writing.part = self._shard.cuts.hold(notice.cut, self._loop.time())
        except ParamServeError as error:
            self._fail(writing, error)
            return
        writing.turns = write_shard(part, self._shard.shards, notice.blocks, writing.writer)
        self._turn(writing, None)

    def _turn(self, writing: _Writing, result: Any) -> None:
        """Take the next turn, with the result of the job before."""
        assert writing.turns is not None
        began = self._loop.time()
        try:
            self._shard.cuts.part(writing.notice.cut, began)  # a newer one has not replaced it
            job = writing.turns.send(result)
        except StopIteration as done:
            self._close_files(writing)
            self._end(writing.notice, self._written(writing, done.value))
        except Exception as error:  # a bug of ours ends this checkpoint only
            self._fail(writing, error)
        else:
            writing.pause_s = max(writing.pause_s, self._loop.time() - began)
            self._loop.run_in_executor(None, job).add_done_callback(partial(self._next, writing))

    def _written(self, writing: _Writing, files: tuple[Written, ...]) -> CutWritten:
        part = writing.part
        assert part is not None
        return CutWritten(
            writing.notice.checkpoint,
            self._shard.number,
            files=msgspec.msgpack.encode(files),
            pause_s=max(writing.pause_s, part.pause_s),
            marks=tuple(mark for group in part.groups for mark in group.marks),
            begun=part.begun,
            left_out=part.left_out,
        )

    def _next(self, writing: _Writing, done: Pending[Any]) -> None:
        """A job has ended."""
        error = done.exception()
        if writing is not self._writing:  # it was given up meanwhile
            self._close_files(writing)
        elif error is None:
            self._turn(writing, done.result())
        else:
            self._fail(writing, error)

    def _fail(self, writing: _Writing, error: BaseException) -> None:
        if not isinstance(error, ParamServeError):
            extra = event("bug", role="server", server=self._shard.number)
            logger.error("a checkpoint could not be written", exc_info=error, extra=extra)
        self._close_files(writing)
        reason = str(error) or type(error).__name__
        self._refuse(writing.notice, reason, pause_s=writing.pause_s)

    def _refuse(self, notice: WriteCut, why: str, pause_s: float = 0.0) -> None:
        shard = self._shard.number
        failed = f"server {shard}: {why}"
        self._end(notice, CutWritten(notice.checkpoint, shard, pause_s=pause_s, failed=failed))

    def _end(self, notice: WriteCut, report: CutWritten) -> None:
        self._writing = None
        self._last_report = report
        self._shard.cuts.let_go(notice.cut)
        self._shard.cut_memory.give_back()
        self._report(report)

    @property
    def nbytes(self) -> int:
        """Bytes that are written so far of the part under way."""
        return 0 if self._writing is None else self._writing.writer.nbytes

    def over(self, notice: CheckpointOver) -> None:
        """A checkpoint is committed or given up."""
        writing = self._writing
        if writing is not None and writing.notice.checkpoint == notice.checkpoint:
            self._give_up()
        if self._prepares is not None and self._prepares.checkpoint == notice.checkpoint:
            self._prepares = None
            self._shard.cut_memory.give_back()

    def close(self) -> None:
        """Write no more; a job that is under way ends first, and nothing is begun behind it: the
        loop ends, and takes no jobs any more."""
        self._closed = True
        self._give_up()

    def _close_files(self, writing: _Writing) -> None:
        if not self._closed:
            self._loop.run_in_executor(None, writing.writer.close)
            return
        with contextlib.suppress(OSError):  # it counts for nothing
            writing.writer.close()

    def _give_up(self) -> None:
        if self._writing is not None:
            self._shard.cuts.let_go(self._writing.notice.cut)
        self._writing = None


def restore_from_checkpoint(
    shard: Shard, plan: CheckpointPlan, now: float, storage: Storage | None = None
) -> None:
    """Restore a new shard from its part of a checkpoint.

    Args:
        now: as `Shard.step`.
        storage: where it is; None: the plan's folder.
    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged, or its rules or its policy
            are others. ParamServeError: the shard cannot hold it. The shard is not to be used.
    """
    where = storage if storage is not None else storage_at(plan.resume_folder)
    cluster, policy = read_cluster(where, plan.resume), policy_spec(shard.policy)
    specs = blocks_for(cluster, shard.shards)
    with Checkpoint(where, Folder(where).named(plan.resume)) as saved:
        if shard.number == LEAD and (loss := residual_loss(saved.manifest)):
            extra = event("residuals-lost", role="server", server=shard.number)
            logger.warning("%s", loss, extra=extra)
        workers = len(shard.sessions.first)
        part = LoadedShard(saved, specs, shard.number, shard.shards, workers)
        for spec in specs:
            load = needed(spec, shard.rules)
            if load is not None:
                load()
        restore(shard, part, now)
        if policy != cluster.consistency:
            frontiers = part.frontiers(cluster.consistency, workers)
            change_policy(shard, frontiers)
            if shard.number == LEAD and frontiers:
                existing, incoming = differences.of_policies(cluster.consistency, policy)[1:]
                extra = event("policy-changed", role="server", server=shard.number)
                text = "the run goes on under %s; the checkpoint's was %s"
                logger.warning(text, incoming, existing, extra=extra)

"""`Job`: a run that has been started, as the driver follows and steers it.

`starting.py` starts it, `supervisor.py` watches it, `result.py` makes its result.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from paramserve.client import Client, Table
from paramserve.client.timeouts import ranks
from paramserve.config import NO_RANK, check_count
from paramserve.consistency.built_in import Async
from paramserve.consistency.registry import terms as policy_terms
from paramserve.engine.base import Engine
from paramserve.errors import (
    CheckpointError,
    ClientClosed,
    ParamServeError,
    RunTimeout,
    WorkerFailed,
    rebuild,
    warn_user,
)
from paramserve.launch.attempt import Attempt, Readout
from paramserve.launch.checkpoints import Recovery
from paramserve.launch.connect import Handle
from paramserve.launch.plan import Plan
from paramserve.launch.reading import (
    SNAPSHOT_POLL_S,
    Reader,
    Snapshot,
    Watching,
    as_state_dict,
    is_extra,
)
from paramserve.launch.result import Result, result_of, returns_of, steps_of, unpickled
from paramserve.launch.supervisor import PREPARE_S, Supervisor
from paramserve.logs import write_line
from paramserve.messages import AskCheckpoint, Checkpointed, ServerBeat
from paramserve.observe.amounts import trained_only
from paramserve.observe.status import (
    GroupStatus,
    RunStatus,
    by_group,
    server_loads,
    worker_loads,
)
from paramserve.reporters import Feed, RunInfo
from paramserve.training.notices import TRAINED_ALONE, TRAINS_ALONE, UNTRAINED

logger = logging.getLogger("paramserve")

GOES_ON = "; the run goes on until job.stop() or the end of this process"
RESULT_NOTE = "paramserve: the attribute `result` of this error has what was done until then"
END_S = 2.0
"""How much longer than `stop_s` and `exit_s` the end of a run may take to be known."""


T = TypeVar("T")


class SavedCheckpoint(NamedTuple):
    """A checkpoint that `Job.checkpoint` has had written.

    `path` is what `resume=` takes. `clocks`: by group, the steps that each worker has in it.
    `bytes`: of the files that were written for it. `pause_s`: the longest that a server executed
    nothing for it. `seconds`: from the call until it was complete.
    """

    path: str
    clocks: dict[str, int]
    bytes: int
    pause_s: float
    seconds: float


class Job:
    """A run that has been started. All methods may be called from any thread.

    It does not outlive the process that started it: at the interpreter's exit it is ended. In a
    `with` block it is stopped where the block ends, however it does, unless it has ended by then;
    its values are kept, as by `stop`:

        with ps.start(train, workers=4) as job:
            for snapshot in job.snapshots(every=100):
                plot(snapshot)  # an exception here ends the run as well

    Args:
        save_tables: folder for the tables at the end; empty: they are not written.
        load_tables: names of those that begin with rows of a file.
        recovery: the checkpoints that it writes and may go on from; None: none.
        feed: its reporters, which are ready.
        run: what it is started with, for the result.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        seed: int,
        save_tables: str = "",
        load_tables: Collection[str] = (),
        recovery: Recovery | None = None,
        feed: Feed | None = None,
        run: RunInfo | None = None,
    ) -> None:
        self._run = run
        self._feed = feed if feed is not None else Feed((), write_line)
        self._seed = seed
        self._save_tables = save_tables
        self._load_tables = load_tables
        self._strict = recovery is not None and recovery.strict
        self._watching: list[Watching] = []
        self._reader_lock = threading.Lock()
        self._result_lock = threading.Lock()
        self._reader: Reader | None = None
        self._outcome: tuple[Result | None, BaseException | None] | None = None
        self._unpickled: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self._ends_with_block = False
        self._supervisor = Supervisor(
            plan, engine, self._collect, self._forget, self._prepare, recovery
        )
        self._supervisor.overview.followers.append(self._feed.extend)

    def __repr__(self) -> str:
        return f"Job({self._supervisor.state}, {self._supervisor.seconds:.1f} s)"

    def __enter__(self) -> Job:
        self._ends_with_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start its processes, once; `start` and `run` have done so. Raises as
        `Supervisor.start`."""
        try:
            self._supervisor.start()
        except BaseException:
            self._feed.close()
            raise
        self._feed.start(self, steps=lambda: steps_of(self._supervisor))

    def wait(self) -> Result:
        """Wait for the end of the run.

        Ctrl-C here interrupts this wait and not the run: it says in one line how far the run is,
        and goes on as `KeyboardInterrupt`. In a `with` block of the job that ends the run, too.

        An error of a run whose servers still lived has the `Result` of what was done until then as
        its attribute `result`: `error.result.state_dict()` are the values of that moment. Where
        they could not be read it is None.

        Raises:
            WorkerFailed: a training function raised, or its process ended.
            ServerGone, CoordinatorGone: that process ended; the values are lost.
            RunTimeout: `timeout_s` was over.
            ConnectTimeout: the servers did not come up.
        """
        with self._telling_interrupt():
            self._supervisor.ended.wait()
        self._feed.close()
        first = self._outcome is None
        result = self._completed()
        if first:
            status = self._supervisor.overview.status
            kinds = {kind for _, kind, _ in self._supervisor.reports}
            silent = status is None or not status.collectives
            if TRAINS_ALONE not in kinds and (silent or TRAINED_ALONE in kinds):
                _warn_if_untrained(result)
            for name, group in result.groups.items():
                _warn_if_unapplied(name, group)
            if unused := sorted({*self._load_tables}.difference(result.tables)):
                logger.warning(
                    "load_tables was not loaded for %s: the run has defined no table of that name",
                    ", ".join(map(repr, unused)),
                )
            _warn_if_never_stepped(result)
        return result

    def stop(self) -> None:
        """End the run early, as if all workers had returned; returns when it has ended.

        The values of this moment are kept: `wait` gives them. Worker processes get `stop_s` to
        end in order, then they are killed. An exception that comes meanwhile, such as a second
        Ctrl-C, ends everything at once, and the values are lost.
        """
        try:
            self._supervisor.stop()
            self._supervisor.ended.wait()
        except BaseException:
            self._supervisor.abandon()
            raise
        finally:
            self._feed.close()

    def scale(self, workers: int) -> None:
        """Have this many workers from now on, while those that stay go on with the training.

        Returns when it is agreed upon and new processes are launched, not when they are up. New
        ranks follow the present ones. Each runs the training function and takes part from its
        first step on; no worker waits for it before (for a rank that comes back: before it has
        connected). Those with the highest ranks retire:
        `worker.retiring` is True, loops over `worker.loader` end, and the function has
        `Deadlines.retire_s` to return; then its process is ended. Neither that nor any other end
        of it is a failure. A rank that comes back starts as a new incarnation when its old process
        has ended. Calls from several threads take place one after the other.

        Args:
            workers: how many, at least 1.
        Raises:
            ValueError, TypeError: no such number, or the policy that the run was started with
                cannot work with so few. Nothing was changed. (A later one, or a group's own, is not
                asked: with a `backup` that is too large, each clock is decided by one worker.)
            CannotPlace: the engine has no room for more, after waiting for it as at the start. The
                run goes on with as many as before.
            Timeout: the coordinator has not answered in `Deadlines.request_s`. Applied: unknown.
            ParamServeError: the run has ended or is about to, or a process could not be started.
                Nothing was changed.
        """
        check_count("workers", workers)
        policy = policy_terms(self._supervisor.plan.consistency).policy
        if policy is not None:
            policy.check(workers)
        self._supervisor.scale(workers)

    def status(self) -> RunStatus:
        """How the run stands, as of the servers' last heartbeat. Never waits.

        So it may be behind what `state_dict` and `snapshots` read, by `Deadlines.heartbeat_s` and
        a quarter of a second; `job.handle().status()` asks the servers.
        """
        supervisor = self._supervisor
        overview = supervisor.overview
        return RunStatus(
            state=supervisor.state,
            seconds=supervisor.seconds,
            workers=supervisor.roster.worker_states(),
            groups=by_group(self._beats(), overview.sent, overview.speeds),
            metrics=dict(overview.latest),
            checkpoints=supervisor.checkpoints,
            rollbacks=tuple(supervisor.rollbacks),
            loads=worker_loads(overview.usage),
            servers=server_loads(self._beats()),
            logged={rank: dict(each) for rank, each in list(overview.logged.items())},
        )

    def checkpoint(self, timeout_s: float | None = None) -> SavedCheckpoint:
        """Write a checkpoint now, while training goes on; returns when it is complete.

        It has every step that was answered before the call, but those that are lost where the run
        goes back to an earlier checkpoint meanwhile. Where one is being written, it follows that
        one.

        Args:
            timeout_s: how long at most; None: `Deadlines.busy_s`.
        Raises:
            CheckpointError: the run was not told where to, or it could not be written, or not in
                time. The one before is as it was, and training goes on.
            ParamServeError: the run has ended.
        """
        plan = self._supervisor.plan
        if not plan.checkpoints.folder:
            raise CheckpointError(
                "the run writes no checkpoints",
                fix="tell it where to: ps.start(..., checkpoint=path)",
            )
        limit_s = timeout_s if timeout_s is not None else plan.deadlines.busy_s
        report = self._ask_each_attempt(limit_s)
        clocks = trained_only(report.clocks)
        return SavedCheckpoint(report.path, clocks, report.nbytes, report.pause_s, report.seconds)

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """A group's present values; after the end, its last ones, also of a run that failed.

        They are those of one moment: on every server exactly the same pushes of each worker are in
        them, under every policy, while training goes on.

        While the run goes on, frozen parameters and the extra state of modules (`get_extra_state`)
        are what rank 0 told last: at the start, and when it let parameters require gradients.

        Returns:
            Tensors by name if torch is imported, otherwise arrays.
        Raises:
            UnknownName: nothing is defined in this group (yet), or it is a table. Of a run that
                failed and kept no values of it, what `wait` raises.
            Overloaded: no such moment was found in 20 s, as where pushes take longer than 8 s to
                arrive or to be applied.
        """
        try:
            return self._extra_state(name) | self._read(lambda reader: reader.state_dict(name))
        except (ClientClosed, WorkerFailed, RunTimeout):  # it has ended, or is about to
            try:
                return self.wait().state_dict(name)
            except ParamServeError as error:
                if error.result is None or name not in error.result.values:
                    raise
                values: dict[str, Any] = error.result.state_dict(name)
                return values

    def table(self, name: str) -> Table:
        """A keyed table, to be read and written from here while the run goes on.

        Waits until the servers are up. With the run it ends: what is to be kept of it is written
        before, by `table.to_parquet`, or by the run itself (`save_tables=`).

        Raises:
            UnknownName: there is no such table (yet).
            ClientClosed: the run has ended. Else as `handle`.
        """
        try:
            return self._read(lambda reader: reader.table(name))
        except ClientClosed as error:
            raise ClientClosed(
                f"table {name!r} cannot be read: the run has ended, and its servers with it",
                fix="have tables written at its end by ps.start(..., save_tables=folder)",
            ) from error

    def snapshots(
        self, every: int = 10, *, name: str = "model", keep: int = 8
    ) -> Iterator[Snapshot]:
        """Consistent copies of a group's values while it is trained, until the run ends.

        The servers keep one at every `every`-th version, at most `keep` of them; the oldest is
        dropped when they are not taken in time, so a slow reader never slows the training.
        If the run fails, the iteration ends and `wait` says why.

        Of each worker, the same pushes are in all of one's parameters, on all servers. Where the
        workers have no common clock, several servers agree on that moment first, and a version
        may be one or a few past the `every`-th. Buffers (BatchNorm) and what is not trained
        are those of when it was read: rank 0 assigns buffers every ten steps.

        Where the run goes back to a checkpoint, the next ones have the versions of then again.

        A group may be defined later. Where others are, and this one is not after 10 s, the
        iteration warns once with their names, and goes on to wait.

        Raises:
            UnknownName: the run has ended, not by an error, and had no such group.
            ValueError: it is a table: `table` reads it.
        """
        for option, value in (("every", every), ("keep", keep)):
            check_count(option, value)
        watching = Watching(name, every, keep, lambda: self._supervisor.seconds)
        self._watching.append(watching)
        return self._follow(watching)

    def handle(self) -> Handle:
        """Handle for other clients, here or in any process that it is sent to; waits until the
        servers are up.

        Raises:
            ParamServeError: the run has ended, or ended before it was up.
        """
        return handle_of(self._supervisor, self._seed)

    # --- inside ----------------------------------------------------------------------------------

    def _follow(self, watching: Watching) -> Iterator[Snapshot]:
        supervisor = self._supervisor
        while True:
            over = supervisor.ended.is_set()
            snapshot = self._next_snapshot(watching)
            if snapshot is not None:
                yield snapshot._replace(state=self._extra_state(watching.group) | snapshot.state)
            elif over:
                self._require_group(watching)
                return
            else:
                with self._telling_interrupt():
                    supervisor.ended.wait(SNAPSHOT_POLL_S)

    def _next_snapshot(self, watching: Watching) -> Snapshot | None:
        """Take the next snapshot, if there is one. Where the servers are gone, wait for the run's
        end, which says why."""
        supervisor = self._supervisor
        attempt = supervisor.attempt
        try:
            with self._telling_interrupt():
                return watching.take(supervisor.connect)
        except ParamServeError:
            if supervisor.goes_on(attempt):
                return None
            # The servers are gone; the run's own end, which is near, says why.
            deadlines = supervisor.plan.deadlines
            if not supervisor.ended.wait(deadlines.stop_s + deadlines.exit_s + END_S):
                raise
            return watching.take_kept()

    def _require_group(self, watching: Watching) -> None:
        """Raise `UnknownName` where the run has ended and never had the group; not where an error
        ended it, which `wait` tells, or where it was stopped before it had any."""
        values = self._readout.values or {}
        defined = values or by_group(self._beats())
        stopped = self._supervisor.ended_early and not defined
        if self._supervisor.error is None and not stopped and not watching.group_exists:
            tables = [n for n, group in by_group(self._beats()).items() if group.table is not None]
            as_state_dict(values, watching.group, tables)

    def _prepare(self) -> None:
        """Connect when the servers are up, and not when the values are wanted: the folder of the
        sockets may have been removed by then."""
        with contextlib.suppress(ParamServeError, OSError):  # the end tries again, and tells
            self._connected(PREPARE_S)

    @property
    def _readout(self) -> Readout:
        """What was read of the present servers; that of earlier ones counts no more."""
        return self._supervisor.attempt.readout

    def _collect(self, attempt: Attempt) -> None:
        """Read everything before the servers end: called when all workers are done. All of it ends
        when the attempt's clients are closed, because the run goes on from a checkpoint."""
        for watching in self._watching:
            watching.drain()
        readout, reader = attempt.readout, self._connected()
        try:
            readout.values = reader.read_all()
        except ParamServeError:  # its connection may have ended long ago
            reader = self._reader = Reader(attempt.connect())
            readout.values = reader.read_all()
        readout.beats = reader.client.connection.reports()
        try:
            if self._save_tables:
                readout.table_files = reader.save_tables(self._save_tables)
        finally:  # each is written whether or not the other can be
            if readout.values or reader.tables():
                self._checkpoint_at_end(attempt)
        for watching in self._watching:
            watching.drain()  # the snapshot of the last version, which the servers agreed on since

    def _ask_each_attempt(self, limit_s: float) -> Checkpointed:
        """Ask for a checkpoint; where the run goes back to an earlier one meanwhile, ask the
        processes of the next attempt."""
        until = time.monotonic() + limit_s
        while True:
            attempt = self._supervisor.attempt
            try:
                left_s = max(until - time.monotonic(), 0.0)
                return self._ask_checkpoint(self._supervisor.connect, left_s)
            except CheckpointError:
                raise
            except ParamServeError as error:
                left_s = max(until - time.monotonic(), 0.0)
                if self._supervisor.goes_on(attempt, left_s):
                    continue
                if self._supervisor.state != "resuming":
                    raise
                raise CheckpointError(
                    f"no checkpoint was written in {limit_s:g} s, in which the run went back to "
                    "an earlier one",
                    fix="ask again when the workers run, or give more time: timeout_s",
                ) from error

    def _ask_checkpoint(self, connect: Callable[[], Client], limit_s: float) -> Checkpointed:
        client = connect()  # of its own: one that waits keeps others waiting
        try:
            control = client.connection.control
            return control.call(AskCheckpoint(0, limit_s), Checkpointed, timeout_s=limit_s)
        finally:
            client.close()

    def _checkpoint_at_end(self, attempt: Attempt) -> None:
        """Write the last checkpoint of a run that has ended in order, or was stopped: `resume` goes
        on from where it was.

        Raises:
            CheckpointError: it could not be written, and the run is strict about that.
        """
        supervisor = self._supervisor
        if not supervisor.plan.checkpoints.folder or supervisor.failing:
            return
        try:
            self._ask_checkpoint(attempt.connect, supervisor.plan.deadlines.busy_s)
        except CheckpointError:  # which the coordinator tells, and the result
            if self._strict:
                raise

    def _forget(self) -> None:
        self._reader = None
        for watching in self._watching:
            watching.forget()

    def _connected(self, start_s: float | None = None) -> Reader:
        with self._reader_lock:
            reader = self._reader
            if reader is None:
                reader = self._reader = Reader(self._supervisor.connect(start_s=start_s))
            return reader

    def _read(self, read: Callable[[Reader], T]) -> T:
        """What is read of the servers; of others, where the run went back to a checkpoint."""
        while True:
            attempt = self._supervisor.attempt
            try:
                return read(self._connected())
            except ParamServeError:
                if not self._supervisor.goes_on(attempt):
                    raise

    def _extra_state(self, group: str) -> dict[str, Any]:
        """What rank 0 told last; its tensors are the same ones until it tells anew, while what
        modules gave is a copy each time, because they may change what they are given."""
        pickled = self._supervisor.extra_states.get(group)
        if pickled is None:
            return {}
        entry = self._unpickled.get(group)
        if entry is None or entry[0] is not pickled:
            entry = self._unpickled[group] = pickled, unpickled({group: pickled}, group)
        return {
            name: copy.deepcopy(value) if is_extra(name) else value
            for name, value in entry[1].items()
        }

    def _beats(self) -> list[ServerBeat]:
        """What each server said when all workers were done, or its last heartbeat."""
        return self._readout.beats or list(self._supervisor.overview.beats)

    def _completed(self) -> Result:
        """The result of a run that has ended; raises the error that ended it, with what was kept
        as its `result`."""
        with self._result_lock:
            if self._outcome is None:
                self._outcome = self._find_outcome()
            result, error = self._outcome
        if isinstance(error, ParamServeError):
            error = rebuild(type(error).__name__, error.failed, error.applied, error.fix)
            error.result = result
            if result is not None and result.values:
                error.add_note(RESULT_NOTE)
        if error is not None:
            raise error
        assert result is not None
        return result

    def _find_outcome(self) -> tuple[Result | None, BaseException | None]:
        """What was done, if it could be read, and what went wrong, if anything did."""
        supervisor = self._supervisor
        if supervisor.error is not None and self._readout.values is None:
            return None, supervisor.error
        returns, unread = returns_of(supervisor.roster.workers())
        result = result_of(
            supervisor,
            seed=self._seed,
            returns=returns,
            values=self._readout.values or {},
            beats=self._beats(),
            table_files=self._readout.table_files,
            run=self._run,
        )
        return result, supervisor.error if supervisor.error is not None else unread

    @contextlib.contextmanager
    def _telling_interrupt(self) -> Iterator[None]:
        """Say on Ctrl-C in one line how far the run is."""
        try:
            yield
        except KeyboardInterrupt:
            then = "" if self._ends_with_block else GOES_ON
            write_line(f"interrupted, last heard {self.status().progress()}{then}")
            raise


def _warn(words: str) -> None:
    """Warn; where warnings are errors, on stderr: the run has a result."""
    try:
        warn_user(words)
    except UserWarning:
        write_line(words)


def _warn_if_unapplied(name: str, group: GroupStatus) -> None:
    """Warn of a group that was sent gradients of which none was applied; under `Async`, whose
    `drop_after` is for what is late now and then, of a rank as well."""
    if group.version == 0 and group.skipped:
        _warn(
            f"group {name!r} was not trained: {group.skipped} steps were left out, because their "
            "gradients held NaN or Inf (on_nonfinite='skip'), and none was applied. To fix: lower "
            "the learning rate, or look for NaN in the data and the loss"
        )
    dropped = {
        rank: count
        for rank, count in group.dropped_by_rank.items()
        if rank != NO_RANK and rank not in group.staleness_by_rank
    }
    if dropped and (group.version == 0 or group.policy == Async.__name__):
        _warn(
            f"no gradient of {ranks(sorted(dropped))} to group {name!r} was applied: "
            f"{group.policy} dropped all {sum(dropped.values())} as too late or too stale. To fix: "
            "raise drop_after of ps.Async, or let on_push of your own policy return Apply(...)"
        )


def _warn_if_untrained(result: Result) -> None:
    """Warn of a run that ended by itself, and of which the servers have heard nothing."""
    if not result.returns or result.groups or result.stopped:
        return
    _warn(f"the run {UNTRAINED}")


def _warn_if_never_stepped(result: Result) -> None:
    """Warn of optimizers that `worker.optimizer` has returned, where the run has made no step."""
    groups = result.groups
    if not result.returns or result.stopped or any(each.steps for each in groups.values()):
        return
    for name in result.steps:  # told of each such optimizer, also of one without a step
        if name in groups and groups[name].version == 0 and not any(result.steps[name].values()):
            _warn(
                f"group {name!r} was not trained: no rank has made a step of the optimizer that "
                "worker.optimizer(...) returned, so the result has the values that it began with. "
                "To fix: call optimizer.step() of that optimizer after each backward(); a run that "
                "only evaluates needs none"
            )


def handle_of(supervisor: Supervisor, seed: int) -> Handle:
    """A handle of what a supervisor runs, once its servers are up.

    Raises:
        ParamServeError: it has ended, or ended before it was up.
    """
    supervisor.wait_until_serving()
    return Handle.of(
        supervisor.addresses,
        supervisor.credentials,
        seed=seed,
        limits=supervisor.plan.limits,
        deadlines=supervisor.plan.deadlines,
        connect=supervisor.connect,
        require=supervisor.wait_until_serving,
    )

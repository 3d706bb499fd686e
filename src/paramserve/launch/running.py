"""`Job`: a run that has been started, as the driver follows and steers it.

`starting.py` starts it, `supervisor.py` watches it, `result.py` makes its result.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
import threading
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from paramserve.client import Table
from paramserve.config import check_count
from paramserve.consistency.registry import terms as policy_terms
from paramserve.engine.base import Engine
from paramserve.errors import ClientClosed, ParamServeError, rebuild
from paramserve.launch.connect import Handle
from paramserve.launch.plan import Plan
from paramserve.launch.reading import SNAPSHOT_POLL_S, Reader, Snapshot, State, Watching, is_extra
from paramserve.launch.result import Result, result_of, unpickled
from paramserve.launch.supervisor import PREPARE_S, Supervisor
from paramserve.messages import ServerBeat
from paramserve.observe.status import RunStatus, by_group

logger = logging.getLogger("paramserve")

GOES_ON = "; the run goes on until job.stop() or the end of this process"
END_S = 2.0
"""How much longer than `stop_s` and `exit_s` the end of a run may take to be known."""


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
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        seed: int,
        save_tables: str = "",
        load_tables: Collection[str] = (),
    ) -> None:
        self._seed = seed
        self._save_tables = save_tables
        self._load_tables = load_tables
        self._table_files: dict[str, str] = {}
        self._watching: list[Watching] = []
        self._values: dict[str, State] = {}
        self._reader_lock = threading.Lock()
        self._result_lock = threading.Lock()
        self._reader: Reader | None = None
        self._last_beats: list[ServerBeat] = []
        self._result: Result | None = None
        self._unpickled: dict[str, tuple[bytes, dict[str, Any]]] = {}
        self._ends_with_block = False
        self._supervisor = Supervisor(plan, engine, self._collect, self._forget, self._prepare)

    def __repr__(self) -> str:
        return f"Job({self._supervisor.state}, {self._supervisor.seconds:.1f} s)"

    def __enter__(self) -> Job:
        self._ends_with_block = True
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def wait(self) -> Result:
        """Wait for the end of the run.

        Ctrl-C here interrupts this wait and not the run: it says in one line how far the run is,
        and goes on as `KeyboardInterrupt`. In a `with` block of the job that ends the run, too.

        Raises:
            WorkerFailed: a training function raised, or its process ended.
            ServerGone, CoordinatorGone: that process ended; the values are lost.
            RunTimeout: `timeout_s` was over.
            ConnectTimeout: the servers did not come up.
        """
        with self._telling_interrupt():
            self._supervisor.ended.wait()
        self._raise_error()
        with self._result_lock:
            if self._result is None:
                self._result = result_of(
                    self._supervisor,
                    seed=self._seed,
                    values=self._values,
                    beats=self._beats(),
                    table_files=self._table_files,
                )
                told = self._supervisor.overview.status
                if told is None or not told.collectives:
                    _warn_if_untrained(self._result)
            return self._result

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
        """How the run stands, as of the servers' last heartbeat. Never waits."""
        supervisor = self._supervisor
        return RunStatus(
            state=supervisor.state,
            seconds=supervisor.seconds,
            workers=supervisor.roster.worker_states(),
            groups=by_group(self._beats()),
            metrics=dict(supervisor.overview.latest),
        )

    def state_dict(self, name: str = "model") -> dict[str, Any]:
        """A group's present values; after the end, its last ones.

        While the run goes on, the extra state of modules (`get_extra_state`) is that of the start.

        Returns:
            Tensors by name if torch is imported, otherwise arrays.
        Raises:
            UnknownName: nothing is defined in this group (yet), or it is a table.
        """
        try:
            return self._extra_state(name) | self._connected().state_dict(name)
        except ClientClosed:  # it has ended
            return self.wait().state_dict(name)

    def table(self, name: str) -> Table:
        """A keyed table, to be read and written from here while the run goes on.

        Waits until the servers are up. With the run it ends: what is to be kept of it is written
        before, by `table.to_parquet`, or by the run itself (`save_tables=`).

        Raises:
            UnknownName: there is no such table (yet).
            ClientClosed: the run has ended. Else as `handle`.
        """
        try:
            return self._connected().client.table(name)
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
        """
        for option, value in (("every", every), ("keep", keep)):
            check_count(option, value)
        watching = Watching(name, every, keep, lambda: self._supervisor.seconds)
        self._watching.append(watching)
        return self._follow(watching)

    def handle(self) -> Handle:
        """For other clients, here or in any process that it is sent to; waits until the servers
        are up.

        Raises:
            ParamServeError: the run has ended, or ended before it was up.
        """
        return handle_of(self._supervisor, self._seed)

    # --- inside ----------------------------------------------------------------------------------

    def _follow(self, watching: Watching) -> Iterator[Snapshot]:
        supervisor = self._supervisor
        while True:
            over = supervisor.ended.is_set()
            found = self._next_snapshot(watching)
            if found is not None:
                yield found._replace(state=self._extra_state(watching.group) | found.state)
            elif over:
                return
            else:
                with self._telling_interrupt():
                    supervisor.ended.wait(SNAPSHOT_POLL_S)

    def _next_snapshot(self, watching: Watching) -> Snapshot | None:
        supervisor = self._supervisor
        try:
            with self._telling_interrupt():
                return watching.take(supervisor.connect)
        except ParamServeError:
            # The servers are gone; the run's own end, which is near, says why.
            deadlines = supervisor.plan.deadlines
            supervisor.ended.wait(deadlines.stop_s + deadlines.exit_s + END_S)
            if not supervisor.ended.is_set():
                raise
            return watching.take_kept()

    def _prepare(self) -> None:
        """Connect when the servers are up, and not when the values are wanted: the folder of the
        sockets may have been removed by then."""
        with contextlib.suppress(ParamServeError, OSError):  # the end tries again, and tells
            self._connected(PREPARE_S)

    def _collect(self) -> None:
        """Read everything before the servers end: called when all workers are done."""
        for watching in self._watching:
            watching.drain()
        reader = self._connected()
        try:
            self._values = reader.read_all()
        except ParamServeError:  # its connection may have ended long ago
            self._reader = None
            reader = self._connected()
            self._values = reader.read_all()
        self._last_beats = reader.client.connection.reports()
        if unused := sorted({*self._load_tables}.difference(reader.tables())):
            logger.warning(
                "load_tables was not loaded for %s: the run has defined no table of that name",
                ", ".join(map(repr, unused)),
            )
        if self._save_tables:
            self._table_files = reader.save_tables(self._save_tables)

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

    def _extra_state(self, group: str) -> dict[str, Any]:
        """What rank 0 told last; its tensors are the same ones until it tells anew, while what
        modules gave is a copy each time, because they may change what they are given."""
        told = self._supervisor.extra_states.get(group)
        if told is None:
            return {}
        known = self._unpickled.get(group)
        if known is None or known[0] is not told:
            known = self._unpickled[group] = told, unpickled({group: told}, group)
        return {
            name: copy.deepcopy(value) if is_extra(name) else value
            for name, value in known[1].items()
        }

    def _beats(self) -> list[ServerBeat]:
        """What each server said when all workers were done, or its last heartbeat."""
        return self._last_beats or list(self._supervisor.overview.beats)

    def _raise_error(self) -> None:
        error = self._supervisor.error
        if isinstance(error, ParamServeError):
            raise rebuild(type(error).__name__, error.failed, error.applied, error.fix)
        if error is not None:
            raise error

    @contextlib.contextmanager
    def _telling_interrupt(self) -> Iterator[None]:
        """On Ctrl-C say in one line how far the run is."""
        try:
            yield
        except KeyboardInterrupt:
            then = "" if self._ends_with_block else GOES_ON
            told = f"paramserve: interrupted {self.status().progress()}{then}"
            print(told, file=sys.stderr, flush=True)
            raise


def _warn_if_untrained(result: Result) -> None:
    """Warn of a run that ended by itself, and of which the servers have heard nothing.

    Where warnings are errors, it stands on stderr: the run has a result.
    """
    if not result.returns or result.groups or result.stopped:
        return
    words = (
        "the run trained nothing on the servers: no worker has called worker.optimizer(...), "
        "client.define(...) or client.table(...), so each has trained a copy of its own, if "
        "any. To fix: optimizer = worker.optimizer(model, optimizer) in the training function"
    )
    try:
        warnings.warn(words, stacklevel=4)
    except UserWarning:
        print(f"paramserve: {words}", file=sys.stderr, flush=True)


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
    )

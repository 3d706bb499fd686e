"""Starts the processes of a run, watches them in one thread, and ends them.

What their fate means is decided in `roster.py`; this acts on it, by way of `processes.py` and, for
another number of workers, of `scaling.py`. Everything that it owns (the processes, the run
directory, its threads, its connections) is gone when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from paramserve.checkpoint.manifest import Cut
from paramserve.client import Client
from paramserve.config import Credentials
from paramserve.engine.base import Ended, Engine, Event, Process
from paramserve.errors import (
    CheckpointDamaged,
    CheckpointError,
    ClientClosed,
    CoordinatorGone,
    ParamServeError,
    ServerGone,
)
from paramserve.launch.attempt import Attempt
from paramserve.launch.checkpoints import SAME_MAX, Recovery
from paramserve.launch.entries import (
    COORDINATOR,
    Entry,
    Key,
    ends_despite_checkpoints,
    over,
    started_again,
    stopped,
    timed_out,
    worker_failed,
)
from paramserve.launch.overview import Overview
from paramserve.launch.plan import KERNELS, Plan, directory_path
from paramserve.launch.processes import Processes
from paramserve.launch.roster import Decision, Restart, Roster
from paramserve.launch.waiting import Latch
from paramserve.logs import write_line
from paramserve.observe.amounts import trained_only
from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.status import by_group
from paramserve.training.notices import TRAINS_ALONE, alone_so_far
from paramserve.worker import ExtraState

logger = logging.getLogger("paramserve")

TICK_S = 0.1
"""How often the thread looks up while nothing happens."""
QUICK_TICK_S = 0.005
"""The same while it waits for something that is no event of a process."""
LAST_STATUS_S = 0.5
LAST_BEATS_S = 0.1
"""The same for a coordinator that lives, whose servers do not."""
ABANDON_S = 1.0
"""How long processes that are abandoned may take to end in order, if `stop_s` is longer."""
PREPARE_S = 2.0
"""How long each attempt to connect may take that nothing waits for yet."""
PREPARE_END_S = 10.0
"""How long the end waits for such an attempt: the servers are gone, and it fails by itself."""
TOKEN_BYTES = 32
KILL_S = 10.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a debugger)."""
OWN_REPORTS = ("ready", "failed", "returned")

State = Literal["starting", "running", "resuming", "finishing", "finished", "stopped", "failed"]


class Supervisor:
    """One coordinator, its servers and workers, from start to end; all of them anew where the run
    goes on from a checkpoint.

    Attributes:
        state: where it stands.
        error: why it ended, if not in order, or what went wrong while it ended; final once `ended`
            is set.
        ended: set when nothing of it runs any more.
        overview: what the coordinator has told.
        attempt: the processes that count now.
        rollbacks: of each time that it went on from a checkpoint because a process had ended.
        failures: of workers that the run went on without, by rank.
        restarts: of each restart, how the worker had ended.
        reports: all other reports of processes, as (key, kind, body), in order.
        extra_states: of each group, what was told last, pickled.
        addresses: the coordinator's; empty: not known yet.
        credentials: what opens them.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        collect: Callable[[Attempt], None] | None = None,
        forget: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        """Make room for everything; `start` launches it.

        Args:
            collect: called in a thread of its own when all workers are done or the run has failed,
                while the servers still run: what it reads of them is this attempt's.
            forget: called at the very end, and when the servers are started anew, to release
                clients.
            prepare: called in a thread of its own when the servers are up.
            recovery: the checkpoints that it may go on from; None: there are none.
        Raises:
            ParamServeError: the engine has no room, or cannot be used.
        """
        self.plan = plan
        self.state: State = "starting"
        self.error: BaseException | None = None
        self.ended = Latch()
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.restarts: list[Entry] = []
        self.rollbacks: list[Rollback] = []
        self.failures: dict[int, ParamServeError] = {}
        self.reports: list[tuple[Key, str, bytes]] = []
        self.extra_states: dict[str, bytes] = {}
        self._collect = collect
        self._forget = forget
        self._prepare = prepare
        self._recovery = recovery
        self._fell_at: float | None = None
        self._updates = 0
        """Known of when it fell."""
        """When a process ended whose end the run goes on from; None: workers run (again)."""
        self._preparing: threading.Thread | None = None
        self._failed: BaseException | None = None
        """Why the run has failed while its servers live: it ends when they have been read."""
        self._stop_at: float | None = None
        self._abandoned = False
        self._watched = False
        """The thread that watches has been started."""
        self._may_end = threading.Lock()
        """Taken by what ends it: that thread, or `_end_unwatched` in its place."""
        self._start_latch = Latch()
        """Everything is launched that can be, or nothing will be."""
        self._over = False
        """Nothing is begun any more."""
        self._ending = False
        self._workers_asked_to_end = False
        self._directory = ""
        """For sockets; empty: there is none."""
        self._pid = os.getpid()
        self._fleet = engine.open([str(key) for key in plan.keys], plan.environment)
        self.credentials = Credentials(secrets.token_bytes(TOKEN_BYTES), self._fleet.tls)
        self.overview = Overview((), self.credentials, plan.limits, plan.deadlines)
        self.attempt = self._new_attempt(plan)

    # --- for any thread -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the start; stands still once it has ended."""
        until = self.ended_at if self.ended_at is not None else time.monotonic()
        return until - self.started_at

    @property
    def ended_early(self) -> bool:
        """Whether its workers were told to end before they were done."""
        return self.state == "stopped" or self._workers_asked_to_end

    @property
    def failing(self) -> bool:
        """Whether it ends because of an error."""
        return self._failed is not None

    @property
    def checkpoints(self) -> CheckpointStatus | None:
        """How its checkpoints stand; None: it writes none."""
        return self._recovery.status(self.overview.status) if self._recovery is not None else None

    @property
    def roster(self) -> Roster:
        return self.attempt.roster

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._processes.addresses

    @property
    def _processes(self) -> Processes:
        return self.attempt.processes

    def wait_until_serving(self) -> None:
        """Wait until coordinator and servers are up.

        Raises:
            ParamServeError: it has ended, or ended before it was up.
        """
        self._serving()

    def connect(self, rank: int = -1, workers: int = 0, *, start_s: float | None = None) -> Client:
        """A new client, once the servers are up; it is closed when all this ends.

        Args:
            workers: how many there should be; 0: not checked.
            start_s: in place of that of the run's deadlines.
        Raises:
            ParamServeError: it has ended, or ended before it was up.
        """
        while True:
            attempt = self._serving()
            try:
                return attempt.connect(rank, workers, start_s)
            except ParamServeError:
                if attempt is self.attempt:
                    raise

    def _serving(self) -> Attempt:
        """The attempt whose servers are up, waited for. Raises as `wait_until_serving`."""
        while True:
            attempt = self.attempt
            attempt.wait_until_serving()
            if self._ending:
                raise self._why_ended()
            if attempt is self.attempt:
                return attempt

    def goes_on(self, attempt: Attempt) -> bool:
        """Whether the run has other processes than these by now; waits for them where it is about
        to start them."""
        while self.state == "resuming" and attempt is self.attempt:
            self.ended.wait(QUICK_TICK_S)
        return attempt is not self.attempt

    def scale(self, workers: int) -> None:
        """As `Scaling.scale`, once the servers are there. Raises what that raises."""
        self.attempt.scaling.require_open(workers)
        self._serving().scaling.scale(workers)

    def stop(self) -> None:
        """End the workers now, then everything else in order; returns at once."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self.plan.deadlines.stop_s
        if not self._watched:
            self._end_unwatched()

    def abandon(self) -> None:
        """End everything now, without waiting for values; returns when it has ended."""
        if os.getpid() != self._pid:
            return  # a fork of the driver exits: none of this is its own
        self._abandoned = True
        self._start_latch.set()
        if not self._watched:
            self._end_unwatched()
        self.ended.wait()

    # --- the start --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that watches, and launch everything; returns without waiting for it to
        be up. Once.

        Raises:
            OSError, ParamServeError: a process could not be started. None is left.
        """
        watch = threading.Thread(target=self._run, name="paramserve-supervisor", daemon=True)
        try:
            atexit.register(self.abandon)
            watch.start()
            self._watched = True
            if self._recovery is not None and (begins := self._recovery.line()):
                write_line(begins)
            self._begin()
            self._start_latch.set()
        except BaseException:
            self.abandon()
            raise

    def _end_unwatched(self) -> None:
        """End it here, unless the thread that watches was started all the same and does so."""
        if not self._may_end.acquire(blocking=False):
            return
        self._abandoned = True
        self.error = self._stopped()
        self._over = True
        try:
            self._release()
        finally:
            self._conclude()
            atexit.unregister(self.abandon)

    def _new_attempt(self, plan: Plan) -> Attempt:
        return Attempt(plan, self._fleet, self.credentials, self.overview, self._why_fixed)

    def _begin(self) -> None:
        """Start what can be started before anything is up."""
        if self._fleet.shares_host:
            self._make_directory()
        self.attempt.launch(self._directory)

    def _make_directory(self) -> None:
        """Make the folder (0700) for sockets. `_release` knows of it before it is there."""
        self._directory = path = directory_path()
        try:
            os.mkdir(path, 0o700)
        except OSError:
            self._directory = ""  # what is there is another one's
            raise

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        if not self._may_end.acquire(blocking=False):
            return
        error: BaseException | None = None
        self._start_latch.wait()
        try:
            error = self._watch()
        except BaseException as unexpected:
            error = unexpected
        self.error = error  # from here on, for clients
        self._over = True
        self.attempt.scaling.refuse()
        try:
            for do in (self._end, self._release, self._let_go):
                try:
                    do()
                except BaseException as unexpected:
                    self.error = self.error if self.error is not None else unexpected
        finally:
            self._conclude()

    def _conclude(self) -> None:
        """It has ended, whatever happened: the driver waits for this without a limit."""
        self.ended_at = time.monotonic()
        if self._abandoned or (self.error is None and self._stop_at is not None):
            self.state = "stopped"
        else:
            self.state = "failed" if self.error is not None else "finished"
        self.ended.set()
        self.attempt.served.set()

    def _watch(self) -> BaseException | None:
        """Until it is over: returns why it failed, or None for an end in order."""
        while True:
            waits = self.attempt.collecting is not None or self._stop_at is not None
            quick = waits or self.attempt.scaling.under_way
            self._take(self._processes.events(QUICK_TICK_S if quick else TICK_S))
            now = time.monotonic()
            if self._abandoned:
                return self._failed if self._failed is not None else self._stopped()
            self.attempt.scaling.go_on(now)
            decision = self.roster.decide(now)
            error = decision.error if decision.error is not None else self._limit_error(now)
            if error is not None and self._roll_back(error, now):
                continue
            if error is not None and not self._collect_before_failing(error):
                return self._failed if self._failed is not None else error
            self._act(decision)
            if self.roster.serving:
                self._poll_health(now)
            collecting = self.attempt.collecting
            if collecting is not None:
                if not collecting.is_alive():
                    return self._failed if self._failed is not None else self.attempt.collect_error
            elif decision.finished or self._stop_workers(now):
                if not self.roster.serving or self._collect is None:
                    return None
                self._begin_collecting()

    def _limit_error(self, now: float) -> ParamServeError | None:
        """The error of a run that takes longer than it may, or whose checkpoints must not fail,
        unless it ends already."""
        if self.attempt.collecting is not None or self._stop_at is not None:
            return None
        limit_s = self.plan.timeout_s
        if limit_s is not None and now > self.started_at + limit_s:
            return timed_out(limit_s, self.roster.workers())
        status, recovery = self.overview.status, self._recovery
        report = status.checkpoints if status is not None else None
        if recovery is None or report is None or not (recovery.strict and report.failed):
            return None
        return CheckpointError(
            f"a checkpoint was not written: {report.why}",
            applied="unknown",
            fix="look at the folder's storage, or train on without it: ps.Checkpoint(strict=False)",
        )

    def _collect_before_failing(self, error: ParamServeError) -> bool:
        """Whether the end for this error waits until the workers are told to end and the servers
        are read, as after a `stop`; not where they are gone, or where it did so for another."""
        if self._failed is not None or self._collect is None or not self.roster.readable:
            return False
        self._failed = error
        self.stop()
        return True

    def _take(self, events: Iterable[tuple[Key, Event]]) -> None:
        now = time.monotonic()
        for key, event in events:
            if isinstance(event, Ended):
                self.roster.on_end(key, event.status, now, event.process.why)
            else:
                self.roster.on_report(key, event.kind, event.body, now)
                if key.kind == "worker" and event.kind == "ready":
                    self._note_resumed(now)
                if key == COORDINATOR and event.kind == "ready" and not self.addresses:
                    self.attempt.launch_rest(
                        msgspec.msgpack.decode(event.body, type=tuple[str, ...])
                    )
                if event.kind == "extra state":
                    state = msgspec.msgpack.decode(event.body, type=ExtraState)
                    self.extra_states[state.group] = state.pickled
                elif event.kind not in OWN_REPORTS:
                    if event.kind == TRAINS_ALONE and not self._heard_of(TRAINS_ALONE):
                        write_line(alone_so_far(key.number))
                    self.reports.append((key, event.kind, event.body))

    def _heard_of(self, kind: str) -> bool:
        return any(each == kind for _, each, _ in self.reports)

    def _act(self, decision: Decision) -> None:
        """Do what was decided, and keep what the result tells of it."""
        for rank in decision.dead:
            dead = self.roster.entries[Key("worker", rank)]
            self.failures[rank] = worker_failed(dead)
            self.overview.mark_dead(rank, incarnation=dead.incarnation)
        allowed = self.plan.on_worker_death
        if isinstance(allowed, Restart):
            for entry in decision.restart:
                write_line(started_again(entry, allowed.times))
        self.restarts.extend(decision.restart)
        self._processes.carry_out(decision)

    def _poll_health(self, now: float) -> None:
        if not self.attempt.served.is_set():
            self.state = "running"
            self.attempt.served.set()
            if self._prepare is not None:
                self._preparing = threading.Thread(
                    target=self._prepare, name="paramserve-prepare", daemon=True
                )
                self._preparing.start()
        self.overview.tick(now)
        silent = self.overview.silent(now)
        for process, key in self._processes.items():
            if key in silent:
                self.roster.on_silence(key, now, silent[key])
                if self.roster.entries[key].silent and key.kind == "worker":
                    process.kill()  # it is fenced off already, and must not stay behind

    def _why_fixed(self) -> str:
        """Why the number of workers can no longer be changed; empty: it can."""
        trains = self.state in ("starting", "running")
        if trains and not (self._over or self._abandoned or self._stop_at is not None):
            return ""
        why = "it ends" if trains else f"it is {self.state}"
        if isinstance(self.error, ParamServeError):
            why += f" ({self.error.failed.splitlines()[0]})"
        return why

    def _stop_workers(self, now: float) -> bool:
        """If a stop is wanted: whether the workers have ended; those that are slow are killed."""
        if self._stop_at is None or self.state == "resuming":
            return False
        workers = self._processes.workers()
        if not self._workers_asked_to_end:
            self._workers_asked_to_end = True
            self.roster.dismiss_workers()
            for process in workers:
                process.interrupt()
        if now > self._stop_at:
            for process in workers:
                process.kill()
        return all(process.exit_status is not None for process in workers)

    def _begin_collecting(self) -> None:
        assert self._collect is not None
        collect, attempt = self._collect, self.attempt

        def run() -> None:
            try:
                collect(attempt)
            except BaseException as error:
                attempt.collect_error = error
                if self._failed is not None:
                    logger.warning("not all values of the run that failed were kept: %s", error)

        self.state = "finishing"
        collecting = threading.Thread(target=run, name="paramserve-collect", daemon=True)
        attempt.collecting = collecting
        collecting.start()

    # --- going on from a checkpoint ---------------------------------------------------------------

    def _roll_back(self, error: ParamServeError, now: float) -> bool:
        """Whether the run goes on from a checkpoint and does not end for this error. Everything is
        started anew then, as if all processes had ended at the cut.

        Raises:
            OSError, ParamServeError: it cannot.
        """
        recovery, attempt = self._recovery, self.attempt
        if recovery is None or self._failed is not None or self._stop_at is not None:
            return False
        if isinstance(error, CheckpointDamaged) and not attempt.served.is_set():
            if not recovery.refuse(error):
                return False
            if self._fell_at is not None:  # it was told that the run goes on from the damaged one
                last = self.rollbacks.pop()
                self._note_rollback(last.error, last.clocks_before, self._updates, self._fell_at)
            return self._begin_again(error)
        if not isinstance(error, ServerGone | CoordinatorGone):
            return False
        up = attempt.served.is_set() or bool(self.rollbacks)
        if not (up and recovery.resumes):
            ends_despite_checkpoints(error, 0)
            return False
        self.state = "resuming"
        if isinstance(error, ServerGone) and self.overview.error is None:
            self.overview.ask_now(now, LAST_BEATS_S)
        attempt.processes.kill_all()
        try:
            goes_on = recovery.choose_after_death(self.overview.status)
        except CheckpointError as none_left:
            raise none_left from error
        if not goes_on:
            write_line(
                f"the run went back to the same checkpoint {SAME_MAX} times in a row: it ends"
            )
            ends_despite_checkpoints(error, SAME_MAX + 1)
            return False
        groups = trained_only(by_group(self.overview.beats))
        clocks = {name: group.clock for name, group in groups.items()}
        self._updates = sum(group.version for group in groups.values())
        self._note_rollback(error, clocks, self._updates, now)
        return self._begin_again(error)

    def _begin_again(self, why: ParamServeError) -> bool:
        """Start everything anew, from what `recovery` has chosen; whether that was done."""
        assert self._recovery is not None
        self.state, old = "resuming", self.attempt
        old.processes.kill_all()
        old.scaling.refuse()
        old.close_clients(why)
        until = time.monotonic() + KILL_S
        while any(process.exit_status is None for process in old.processes):
            old.processes.events(QUICK_TICK_S)
            if self._abandoned or time.monotonic() > until:
                return False
        if old.collecting is not None:  # its clients are closed
            old.collecting.join(PREPARE_END_S)
        if self._forget is not None:
            self._forget()
        for name in os.listdir(self._directory) if self._directory else ():
            if name != KERNELS:  # sockets of the old processes
                os.unlink(os.path.join(self._directory, name))
        self.failures.clear()  # these ranks are started again
        self.reports.clear()  # of steps that are made again
        self._recovery.attempt_over(self.overview.status)
        self.overview.begin_anew()
        checkpoints = self._recovery.plan(self.plan.checkpoints.seed)
        self.attempt = self._new_attempt(self.plan.again(old.roster.target, checkpoints))
        old.served.set()
        self.attempt.launch(self._directory)
        return True

    def _note_rollback(
        self, error: ParamServeError, before: Mapping[str, int], updates: int, now: float
    ) -> None:
        """Tell from where the run goes back to what `recovery` has chosen."""
        source = self._recovery.resume_point if self._recovery is not None else None
        cut = source.manifest.cut if source is not None else Cut(step=0, shards=self.plan.servers)
        clocks = trained_only(cut.clocks)
        names = before.keys() | clocks.keys()  # a heartbeat may be older than the cut
        back = Rollback(
            error,
            source.path if source is not None else "",
            {name: max(before.get(name, 0), clocks.get(name, 0)) for name in names},
            clocks,
            max(updates - cut.updates, 0),
            0.0,
        )
        self.rollbacks.append(back)
        self._fell_at = now
        write_line(back.line())

    def _note_resumed(self, now: float) -> None:
        if self._fell_at is None:
            return
        seconds, self._fell_at = now - self._fell_at, None
        self.rollbacks[-1] = self.rollbacks[-1]._replace(seconds=seconds)
        write_line(f"the workers run again, {seconds:.1f} s after that")

    # --- the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Ask all processes to end and wait `stop_s` for it. Workers that have returned end by
        themselves, within `exit_s`; what they still report is taken."""
        if self.error is None or self._failed is not None:
            if self.roster.serving:
                self.overview.ask_now(time.monotonic(), LAST_STATUS_S)
            self._close_clients()
        self.roster.stop_workers()
        stopped = self._stop_at is not None and self._failed is None
        exiting = [] if self._abandoned or stopped else self._exiting()
        others = [process for process in self._processes if process not in exiting]
        for process in reversed(others):  # the coordinator last: a server that loses it reconnects
            process.interrupt()
        now = time.monotonic()
        self._await_ends(others, now + self.plan.deadlines.stop_s)
        self._await_ends(exiting, now + self.plan.deadlines.exit_s)
        self._take(self._processes.events(0.0))
        for process in exiting:
            if process.exit_status is None and not self._abandoned:
                self._tell_cut(process)

    def _exiting(self) -> list[Process]:
        """Workers whose function has returned and that have yet to end."""
        entries = self.roster.entries
        workers = [process for process in self._processes.workers() if process.exit_status is None]
        return [each for each in workers if entries[self._processes[each]].returned is not None]

    def _await_ends(self, processes: Sequence[Process], end_by: float) -> None:
        """Until these processes have ended, or until then; what is told meanwhile is taken."""
        while any(process.exit_status is None for process in processes):
            now = time.monotonic()
            if self._abandoned:
                end_by = min(end_by, now + ABANDON_S)
            if now >= end_by:
                return
            self._take(self._processes.events(min(end_by - now, TICK_S)))

    def _tell_cut(self, process: Process) -> None:
        exit_s = self.plan.deadlines.exit_s
        text = (
            f"{process.name} still ran {exit_s:g} s after the end of its function and "
            "is killed: exit handlers are cut short. To fix: shorten them, end threads that are no "
            "daemons, or raise deadlines=ps.Deadlines(exit_s=...) of the engine"
        )
        write_line(text)

    def _close_clients(self) -> None:
        self._ending = True
        self.attempt.close_clients(self._why_ended())

    def _release(self) -> None:
        with contextlib.ExitStack() as steps:  # from the last to the first, each in any case
            if self._directory:
                steps.callback(shutil.rmtree, self._directory, ignore_errors=True)
            steps.callback(self.overview.close)
            steps.callback(self._close_clients)
            steps.callback(self._fleet.close)

    def _let_go(self) -> None:
        atexit.unregister(self.abandon)
        if self._preparing is not None:
            self._preparing.join(PREPARE_END_S)
        if self._forget is not None:
            self._forget()

    def _why_ended(self) -> BaseException:
        if self.error is not None:
            return self.error
        stopped = self._abandoned or self._stop_at is not None
        return over(self.seconds, workers=self.plan.workers > 0, stopped=stopped)

    def _stopped(self) -> ClientClosed:
        return stopped(self.seconds, workers=self.plan.workers > 0)

"""Starts the processes of a run, watches them in one thread, and ends them.

What is to be done, `life.py` decides; this does it, by way of `processes.py` and, for another
number of workers, of `scaling.py`. Everything that it owns (the processes, the run directory, its
threads, its connections) is gone when it has ended.
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
from collections.abc import Callable, Mapping
from math import inf

import msgspec

from paramserve.checkpoint.manifest import Cut
from paramserve.client import Client
from paramserve.config import Credentials
from paramserve.engine.base import Ended, Engine, Process, Reported
from paramserve.errors import ParamServeError, ServerGone
from paramserve.launch import life, roster
from paramserve.launch.attempt import Attempt
from paramserve.launch.checkpoints import Recovery
from paramserve.launch.entries import COORDINATOR, Entry, Key, over, started_again, worker_failed
from paramserve.launch.life import Life, State, Terms
from paramserve.launch.overview import Overview
from paramserve.launch.plan import KERNELS, Plan, directory_path
from paramserve.launch.processes import Processes
from paramserve.launch.roster import Restart, Roster
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
"""Seconds between two looks while it waits for something that is no event of a process."""
LAST_STATUS_S = 0.5
LAST_BEATS_S = 0.1
"""How long the last status is waited for where the coordinator lives and its servers do not."""
PREPARE_S = 2.0
"""How long each attempt to connect may take that nothing waits for yet."""
PREPARE_END_S = 10.0
"""How long the end waits for such an attempt: the servers are gone, and it fails by itself."""
TOKEN_BYTES = 32
OWN_REPORTS = ("ready", "failed", "returned")


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
        self._selected_at = 0.0
        """When a checkpoint to go on from was last looked for because a process had ended."""
        self._fell_at: float | None = None
        """When a process ended whose end the run goes on from; None: workers run (again)."""
        self._updates = 0
        """Known of when it fell."""
        self._preparing: threading.Thread | None = None
        self._stops = self._abandoned = False
        """It was told to, by any thread."""
        self._watched = False
        """The thread that watches has been started."""
        self._may_end = threading.Lock()
        """Taken by what ends it: that thread, or `abandon` in its place."""
        self._start_latch = Latch()
        """Everything is launched that can be, or nothing will be."""
        self._ending = False
        self._directory = ""
        """Folder for sockets; empty: there is none."""
        self._pid = os.getpid()
        self._fleet = engine.open([str(key) for key in plan.keys], plan.environment)
        self.credentials = Credentials(secrets.token_bytes(TOKEN_BYTES), self._fleet.tls)
        self.overview = Overview((), self.credentials, plan.limits, plan.deadlines)
        point = recovery.resume_point if recovery is not None else None
        terms = Terms(
            servers=plan.servers,
            workers=plan.workers,
            on_worker_death=plan.on_worker_death,
            deadlines=plan.deadlines,
            start_s=plan.deadlines.start_s,
            restore_s=plan.checkpoints.restore_s,
            timeout_s=plan.timeout_s,
            shares_host=self._fleet.shares_host,
            collects=collect is not None,
            resumes=recovery.resumes if recovery is not None else None,
            strict=recovery is not None and recovery.strict,
            checkpoint=point.path if point is not None else "",
        )
        self._life = Life(terms, time.monotonic())
        self.attempt = self._new_attempt(plan)

    # --- for any thread -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Seconds since the start; stands still once it has ended."""
        until = self.ended_at if self.ended_at is not None else time.monotonic()
        return until - self._life.started_at

    @property
    def ended_early(self) -> bool:
        """Whether its workers were told to end before they were done."""
        return self.state == "stopped" or self._life.dismissed

    @property
    def failing(self) -> bool:
        """Whether it ends because of an error."""
        return self._life.failure is not None

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

    def goes_on(self, attempt: Attempt, timeout_s: float = inf) -> bool:
        """Whether the run has other processes than these by now; waits for them, at most so long,
        where it is about to start them."""
        until = time.monotonic() + timeout_s
        while self.state == "resuming" and attempt is self.attempt and time.monotonic() < until:
            self.ended.wait(QUICK_TICK_S)
        return attempt is not self.attempt

    def scale(self, workers: int) -> None:
        """Change the number of workers once the servers are up. Raises as `Scaling.scale`."""
        self.attempt.scaling.require_open(workers)
        self._serving().scaling.scale(workers)

    def stop(self) -> None:
        """End the workers now, then everything else in order; returns at once."""
        self._stops = True
        if not self._watched:
            self.abandon()

    def abandon(self) -> None:
        """End everything now, without waiting for values; returns when it has ended."""
        if os.getpid() != self._pid:
            return  # a fork of the driver exits: none of this is its own
        self._abandoned = True
        self._start_latch.set()
        if not self._watched:
            # Here, unless the thread that watches was started all the same.
            self._watch_until_over()
        self.ended.wait()

    # --- the start --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that watches, and launch everything; returns without waiting for it to
        be up. Once.

        Raises:
            OSError, ParamServeError: a process could not be started. None is left.
        """
        watch = threading.Thread(
            target=self._watch_until_over, name="paramserve-supervisor", daemon=True
        )
        try:
            atexit.register(self.abandon)
            watch.start()
            self._watched = True
            if self._recovery is not None and (begins := self._recovery.line()):
                write_line(begins)
            if self._fleet.shares_host:
                self._make_directory()
            # Elsewhere the coordinator says where it listens, when it does.
            for effect in self._life.begin(time.monotonic()):
                self._act(effect)
            self._start_latch.set()
        except BaseException:
            self.abandon()
            raise

    def _new_attempt(self, plan: Plan) -> Attempt:
        roster, line = self._life.roster, (self.credentials, self.overview)
        return Attempt(plan, self._fleet, roster, *line, self._why_fixed)

    def _make_directory(self) -> None:
        """Make the folder (0700) for sockets. `_release` knows of it before it is there."""
        self._directory = path = directory_path()
        try:
            os.mkdir(path, 0o700)
        except OSError:
            self._directory = ""  # what is there is another one's
            raise
        self.attempt.use_directory(path)

    # --- the thread -------------------------------------------------------------------------------

    def _watch_until_over(self) -> None:
        """Watch until the life is over, then release everything and record the end. Once."""
        if not self._may_end.acquire(blocking=False):
            return
        self._start_latch.wait()
        while not self._life.over:
            try:
                self._watch()
            except BaseException as unexpected:
                self._break_down(unexpected)
        try:
            for do in (self._release, self._let_go):
                try:
                    do()
                except BaseException as unexpected:
                    self._break_down(unexpected)
        finally:
            self._conclude()

    def _break_down(self, error: BaseException) -> None:
        """What was decided could not be done: it ends."""
        with contextlib.suppress(BaseException):
            self._happen(life.Breakdown(error))

    def _conclude(self) -> None:
        """Record the end, whatever happened: the driver waits for this without a limit."""
        self.ended_at = time.monotonic()
        self.error, self.state = self._life.error, self._life.outcome
        self.ended.set()
        self.attempt.served.set()

    def _watch(self) -> None:
        """Pass on what has happened since the last call; waits a little if nothing has."""
        attempt = self.attempt
        quick = attempt.collecting is not None or self._stops or attempt.scaling.under_way
        wait_s = QUICK_TICK_S if quick else TICK_S
        if self._life.wake_at is not None:
            wait_s = min(wait_s, max(self._life.wake_at - time.monotonic(), 0.0))
        events = [self._take(*each) for each in attempt.processes.events(wait_s)]
        if self._abandoned:
            events.append(life.Abandon())
        elif self._stops:
            events.append(life.Stop())
        if not self._life.ending:
            attempt.scaling.go_on(time.monotonic())
        if attempt.collecting is not None and not attempt.collecting.is_alive():
            events.append(life.Collected(attempt.collect_error))
        if attempt.served.is_set() and not self._life.ending and self.state != "resuming":
            events += self._health(time.monotonic())
        self._happen(*events)

    def _take(self, key: Key, event: Ended | Reported) -> life.Event:
        """A process has reported or ended."""
        if isinstance(event, Ended):
            return life.ProcessEnd(key, event.status, event.process.why)
        kind, body = event.kind, event.body
        if key == COORDINATOR and kind == "ready" and not self.addresses:
            self.attempt.use_addresses(msgspec.msgpack.decode(body, type=tuple[str, ...]))
        if key.kind == "worker" and kind == "ready":
            self._note_resumed(time.monotonic())
        elif kind == "extra state":
            state = msgspec.msgpack.decode(body, type=ExtraState)
            self.extra_states[state.group] = state.pickled
        elif kind not in OWN_REPORTS:
            if kind == TRAINS_ALONE and not self._heard_of(TRAINS_ALONE):
                write_line(alone_so_far(key.number))
            self.reports.append((key, kind, body))
        return life.Report(key, kind, body)

    def _heard_of(self, kind: str) -> bool:
        return any(each == kind for _, each, _ in self.reports)

    def _health(self, now: float) -> list[life.Event]:
        """What the coordinator knows of the processes, and of checkpoints that failed."""
        self.overview.tick(now)
        status, keys = self.overview.status, set(self._processes.values())
        silent = self.overview.silent(now)
        events: list[life.Event] = [life.Silence(key, silent[key]) for key in silent if key in keys]
        report = status.checkpoints if status is not None else None
        if self._recovery is not None and report is not None and report.failed:
            events.append(life.CheckpointFailed(report.why))
        return events

    def _happen(self, *events: life.Event) -> None:
        """Have it decided what these events mean, and do that."""
        effects = self._life.step(events, time.monotonic())
        self.state = self._life.state
        for effect in effects:
            self._act(effect)

    def _act(self, effect: life.Effect) -> None:
        processes = self._processes
        match effect:
            case roster.Launch(keys):
                processes.launch(keys)
            case roster.Interrupt(keys):
                for process in processes.of(keys):
                    process.interrupt()
            case roster.Kill(keys):
                for process in processes.of(keys):
                    process.kill()
            case roster.Exclude(entry):
                self.failures[entry.key.number] = worker_failed(entry)
                self._mark_dead(entry)
            case roster.Replace(entry):
                allowed = self.plan.on_worker_death
                assert isinstance(allowed, Restart)
                write_line(started_again(entry, allowed.times))
                self.restarts.append(entry)
                self._mark_dead(entry, final=False)
            case roster.Retire(entry):  # most have left, killed ones have not
                self._mark_dead(entry)
                if entry.key.number >= self.roster.target:
                    processes.give_back([entry.key])
            case life.Serving():
                self._begin_serving()
            case life.Collect():
                self._begin_collecting()
            case life.Ask(cause, damaged):
                self._ask(cause, damaged)
            case life.Select(cause, damaged):
                assert self._recovery is not None
                self._happen(self._recovery.select(cause, damaged, self.overview.status))
            case life.Begin(cause, damaged, workers):
                self._prepare_attempt(cause, damaged, workers)
            case life.End(error, serving):
                self._begin_end(error, serving)
            case life.Close(keys):
                for process in processes.of(keys):
                    self._tell_cut(process)

    def _mark_dead(self, entry: Entry, *, final: bool = True) -> None:
        rank, incarnation = entry.key.number, entry.incarnation
        self.overview.mark_dead(rank, final=final, incarnation=incarnation)

    def _begin_serving(self) -> None:
        self.attempt.served.set()
        if self._prepare is not None:
            self._preparing = threading.Thread(
                target=self._prepare, name="paramserve-prepare", daemon=True
            )
            self._preparing.start()

    def _why_fixed(self) -> str:
        """Why the number of workers can no longer be changed; empty: it can."""
        trains = self.state in ("starting", "running")
        ends = self._life.ending or self._life.stopped or self._abandoned or self._stops
        if trains and not ends:
            return ""
        why = "it ends" if trains else f"it is {self.state}"
        if isinstance(self.error, ParamServeError):
            why += f" ({self.error.failed.splitlines()[0]})"
        return why

    def _begin_collecting(self) -> None:
        assert self._collect is not None
        collect, attempt = self._collect, self.attempt

        def run() -> None:
            try:
                collect(attempt)
            except BaseException as error:
                attempt.collect_error = error
                if self.failing:
                    logger.warning("not all values of the run that failed were kept: %s", error)

        collecting = threading.Thread(target=run, name="paramserve-collect", daemon=True)
        attempt.collecting = collecting
        collecting.start()

    # --- going on from a checkpoint ---------------------------------------------------------------

    def _ask(self, cause: ParamServeError, damaged: bool) -> None:
        """Ask the coordinator for its last status, where it may live."""
        if not damaged:
            self._selected_at = time.monotonic()
        if isinstance(cause, ServerGone) and self.overview.error is None:
            self.overview.ask_now(time.monotonic(), LAST_BEATS_S)

    def _prepare_attempt(self, cause: ParamServeError, damaged: bool, workers: int) -> None:
        """Prepare the next attempt, from the checkpoint that `recovery` has chosen."""
        assert self._recovery is not None
        self._note_rollback(cause, damaged)
        old = self.attempt
        old.scaling.refuse()
        old.close_clients(cause)
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
        self.attempt = self._new_attempt(self.plan.again(workers, checkpoints))
        if self._directory:
            self.attempt.use_directory(self._directory)
        old.served.set()

    def _note_rollback(self, cause: ParamServeError, damaged: bool) -> None:
        """Tell from where the run goes back to what `recovery` has chosen."""
        if not damaged:
            groups = trained_only(by_group(self.overview.beats))
            before = {name: group.clock for name, group in groups.items()}
            self._updates = sum(group.version for group in groups.values())
            self._fell_at = self._selected_at
            self._tell_rollback(cause, before)
        elif self._fell_at is not None:  # it was told that the run goes on from the damaged one
            last = self.rollbacks.pop()
            self._tell_rollback(last.error, last.clocks_before)

    def _tell_rollback(self, cause: ParamServeError, before: Mapping[str, int]) -> None:
        source = self._recovery.resume_point if self._recovery is not None else None
        cut = source.manifest.cut if source is not None else Cut(step=0, shards=self.plan.servers)
        clocks = trained_only(cut.clocks)
        names = before.keys() | clocks.keys()  # a heartbeat may be older than the cut
        back = Rollback(
            cause,
            source.path if source is not None else "",
            {name: max(before.get(name, 0), clocks.get(name, 0)) for name in names},
            clocks,
            max(self._updates - cut.updates, 0),
            0.0,
        )
        self.rollbacks.append(back)
        write_line(back.line())

    def _note_resumed(self, now: float) -> None:
        if self._fell_at is None:
            return
        seconds, self._fell_at = now - self._fell_at, None
        self.rollbacks[-1] = self.rollbacks[-1]._replace(seconds=seconds)
        write_line(f"the workers run again, {seconds:.1f} s after that")

    # --- the end ----------------------------------------------------------------------------------

    def _begin_end(self, error: BaseException | None, serving: bool) -> None:
        self.error = error  # from here on, for clients
        self.attempt.scaling.refuse()
        if serving:
            self.overview.ask_now(time.monotonic(), LAST_STATUS_S)
        if error is None or self.failing:
            self._close_clients()

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
        stopped = self._abandoned or self._stops
        return over(self.seconds, workers=self.plan.workers > 0, stopped=stopped)

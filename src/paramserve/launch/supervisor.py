"""Starts the processes of a run, watches them in one thread, and ends them.

What their fate means is decided in `roster.py`; this acts on it, by way of `processes.py` and, for
another number of workers, of `scaling.py`. Everything that it owns (the processes, the run
directory, its threads, its connections) is gone when it has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec.structs import replace

from paramserve.client import Client, Connection
from paramserve.config import Credentials
from paramserve.engine.base import Ended, Engine, Event, Process
from paramserve.errors import ClientClosed, ConnectTimeout, ParamServeError
from paramserve.launch.entries import COORDINATOR, Entry, Key, stopped, timed_out, worker_failed
from paramserve.launch.overview import Overview
from paramserve.launch.plan import Plan, addresses_in, make_directory
from paramserve.launch.processes import Processes
from paramserve.launch.roster import Decision, Roster
from paramserve.launch.scaling import Scaling
from paramserve.worker import ExtraState

TICK_S = 0.1
"""How often the thread looks up while nothing happens."""
QUICK_TICK_S = 0.005
"""The same while it waits for something that is no event of a process."""
LAST_STATUS_S = 0.5
ABANDON_S = 1.0
"""How long processes that are abandoned may take to end in order, if `stop_s` is longer."""
PREPARE_S = 2.0
"""How long each attempt to connect may take that nothing waits for yet."""
PREPARE_END_S = 10.0
"""How long the end waits for such an attempt: the servers are gone, and it fails by itself."""
TOKEN_BYTES = 32
OWN_REPORTS = ("ready", "failed", "returned")

State = Literal["starting", "running", "finishing", "finished", "stopped", "failed"]


class Supervisor:
    """One coordinator, its servers and workers, from start to end.

    Attributes:
        state: where it stands.
        error: why it ended, if not in order, or what went wrong while it ended; final once `ended`
            is set.
        ended: set when nothing of it runs any more.
        overview: what the coordinator has told.
        roster: what is known of each process.
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
        collect: Callable[[], None] | None = None,
        forget: Callable[[], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Launch everything; returns without waiting for it to be up.

        Args:
            collect: called in a thread of its own when all workers are done, while the servers
                still run.
            forget: called at the very end, to release clients.
            prepare: called in a thread of its own when the servers are up.
        Raises:
            OSError, ParamServeError: a process could not be started. None is left.
        """
        self.plan = plan
        self.state: State = "starting"
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.started_at = time.monotonic()
        self.ended_at: float | None = None
        self.restarts: list[Entry] = []
        self.failures: dict[int, ParamServeError] = {}
        self.reports: list[tuple[Key, str, bytes]] = []
        self.extra_states: dict[str, bytes] = {}
        self._collect = collect
        self._forget = forget
        self._prepare = prepare
        self._preparing: threading.Thread | None = None
        self._collecting: threading.Thread | None = None
        self._collect_error: BaseException | None = None
        self._served = threading.Event()
        self._stop_at: float | None = None
        self._abandoned = False
        self._begun = threading.Event()
        """Everything is launched that can be, or nothing will be."""
        self._over = False
        """Nothing is begun any more."""
        self._ending = False
        self._workers_asked_to_end = False
        self._clients: list[Client] = []
        self._clients_lock = threading.Lock()
        self._pid = os.getpid()
        self._fleet = engine.open([str(key) for key in plan.keys], plan.environment)
        self.credentials = Credentials(secrets.token_bytes(TOKEN_BYTES), self._fleet.tls)
        self._up_by = time.monotonic() + plan.deadlines.start_s
        self.roster = Roster(
            plan.servers, plan.workers, plan.on_worker_death, self._up_by, plan.deadlines
        )
        self.overview = Overview((), self.credentials, plan.limits, plan.deadlines)
        self._processes = Processes(plan, self._fleet, self.credentials, self.roster, self.overview)
        self._scaling = Scaling(
            self._processes, self.roster, self.overview, plan.deadlines.request_s, self._why_fixed
        )
        self._start()

    # --- for any thread -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the start; stands still once it has ended."""
        until = self.ended_at if self.ended_at is not None else time.monotonic()
        return until - self.started_at

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._processes.addresses

    def wait_until_serving(self) -> None:
        """Wait until coordinator and servers are up.

        Raises:
            ParamServeError: it has ended, or ended before it was up.
        """
        deadlines = self.plan.deadlines
        while not self._served.wait(max(self._up_by - time.monotonic(), 0.0) + deadlines.stop_s):
            if time.monotonic() < self._up_by:  # it was put off: the coordinator came late
                continue
            raise ConnectTimeout(
                f"coordinator and servers were not up {deadlines.start_s} s after their start",
                fix="look at their output, or raise it with deadlines=ps.Deadlines(start_s=...)",
            )
        if self._ending:
            raise self._why_ended()

    def connect(self, rank: int = -1, workers: int = 0, *, start_s: float | None = None) -> Client:
        """A new client, once the servers are up; it is closed when all this ends.

        Args:
            workers: how many there should be; 0: not checked.
            start_s: in place of that of the run's deadlines.
        Raises:
            ParamServeError: it has ended, or ended before it was up.
        """
        self.wait_until_serving()
        deadlines = self.plan.deadlines
        if start_s is not None:
            deadlines = replace(deadlines, start_s=start_s)
        connection = Connection.join(
            self.addresses,
            self.credentials,
            rank=rank,
            workers=workers,
            limits=self.plan.limits,
            deadlines=deadlines,
        )
        client = Client(connection)
        with self._clients_lock:
            if not self._ending:
                self._clients.append(client)
                return client
        client.close()
        raise self._why_ended()

    def scale(self, workers: int) -> None:
        """As `Scaling.scale`, once the servers are there. Raises what that raises."""
        self._scaling.require_open(workers)
        self.wait_until_serving()
        self._scaling.scale(workers)

    def stop(self) -> None:
        """End the workers now, then everything else in order; returns at once."""
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self.plan.deadlines.stop_s

    def abandon(self) -> None:
        """End everything now, without waiting for values; returns when it has ended."""
        if os.getpid() != self._pid:
            return  # a fork of the driver exits: none of this is its own
        self._abandoned = True
        self.ended.wait()

    # --- the start --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread that watches, then the processes."""
        watch = threading.Thread(target=self._run, name="paramserve-supervisor", daemon=True)
        try:
            watch.start()
        except BaseException:
            self._abandoned = True
            self._begun.set()  # it may run all the same
            self._fleet.close()
            raise
        try:
            self._begin()
            atexit.register(self.abandon)
            self._begun.set()
        except BaseException:
            self._abandoned = True
            self._begun.set()
            self.ended.wait()
            raise

    def _begin(self) -> None:
        """Start what can be started before anything is up."""
        first = self.plan.keys[:1]
        if self._fleet.shares_host:
            self._processes.directory = make_directory()
            self._processes.launch(first)
            self._launch_rest(addresses_in(self._processes.directory))
        else:  # where the coordinator listens is known when it does
            self._processes.launch(first)

    def _launch_rest(self, addresses: tuple[str, ...]) -> None:
        """Start all that have to know where the coordinator listens."""
        self._processes.addresses = self.overview.addresses = addresses
        self._up_by = time.monotonic() + self.plan.deadlines.start_s
        self.roster.start_by = self._up_by  # each of these may have to wait for room, too
        self._processes.launch(self.plan.keys[1:])

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        self._begun.wait()
        try:
            error = self._watch()
        except BaseException as unexpected:
            error = unexpected
        self.error = error  # from here on, for clients
        self._over = True
        self._scaling.refuse()
        try:
            for do in (self._end, self._release, self._let_go):
                try:
                    do()
                except BaseException as unexpected:
                    self.error = self.error if self.error is not None else unexpected
        finally:  # Whatever happened: the driver waits for these without a limit.
            self.ended_at = time.monotonic()
            if self._abandoned or (self.error is None and self._stop_at is not None):
                self.state = "stopped"
            else:
                self.state = "failed" if self.error is not None else "finished"
            self.ended.set()
            self._served.set()

    def _watch(self) -> BaseException | None:
        """Until it is over: returns why it failed, or None for an end in order."""
        while True:
            waits = self._collecting is not None or self._stop_at is not None
            quick = waits or self._scaling.under_way
            self._take(self._processes.events(QUICK_TICK_S if quick else TICK_S))
            now = time.monotonic()
            if self._abandoned:
                return self._stopped()
            self._scaling.go_on(now)
            decision = self.roster.decide(now)
            if decision.error is not None:
                return decision.error
            self._act(decision)
            if self.roster.serving:
                self._look_around(now)
            if self._collecting is not None:
                if not self._collecting.is_alive():
                    return self._collect_error
            elif decision.finished or self._stop_workers(now):
                if not self.roster.serving or self._collect is None:
                    return None
                self._begin_collecting()
            elif self.plan.timeout_s is not None and now > self.started_at + self.plan.timeout_s:
                return timed_out(self.plan.timeout_s, self.roster.workers())

    def _take(self, events: Iterable[tuple[Key, Event]]) -> None:
        now = time.monotonic()
        for key, event in events:
            if isinstance(event, Ended):
                self.roster.on_end(key, event.status, now, event.process.why)
            else:
                self.roster.on_report(key, event.kind, event.body, now)
                if key == COORDINATOR and event.kind == "ready" and not self.addresses:
                    self._launch_rest(msgspec.msgpack.decode(event.body, type=tuple[str, ...]))
                if event.kind == "extra state":
                    told = msgspec.msgpack.decode(event.body, type=ExtraState)
                    self.extra_states[told.group] = told.pickled
                elif event.kind not in OWN_REPORTS:
                    self.reports.append((key, event.kind, event.body))

    def _act(self, decision: Decision) -> None:
        """Do what was decided, and keep what the result tells of it."""
        for rank in decision.dead:
            dead = self.roster.entries[Key("worker", rank)]
            self.failures[rank] = worker_failed(dead)
            self.overview.mark_dead(rank, incarnation=dead.incarnation)
        self.restarts.extend(decision.restart)
        self._processes.carry_out(decision)

    def _look_around(self, now: float) -> None:
        if not self._served.is_set():
            self.state = "running"
            self._served.set()
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
        if self._stop_at is None:
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
        collect = self._collect

        def run() -> None:
            try:
                collect()
            except BaseException as error:
                self._collect_error = error

        self.state = "finishing"
        self._collecting = threading.Thread(target=run, name="paramserve-collect", daemon=True)
        self._collecting.start()

    # --- the end ----------------------------------------------------------------------------------

    def _end(self) -> None:
        """Ask all processes to end and wait `stop_s` for it. Workers that have returned end by
        themselves, within `exit_s`; what they still report is taken."""
        if self.error is None:
            if self.roster.serving:
                self.overview.ask_now(time.monotonic(), LAST_STATUS_S)
            self._close_clients()
        self.roster.stop_workers()
        exiting = [] if self._abandoned or self._stop_at is not None else self._exiting()
        others = [process for process in self._processes if process not in exiting]
        for process in others:
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
        told = (
            f"paramserve: {process.name} still ran {exit_s:g} s after the end of its function and "
            "is killed: exit handlers are cut short. To fix: shorten them, end threads that are no "
            "daemons, or raise deadlines=ps.Deadlines(exit_s=...)"
        )
        print(told, file=sys.stderr, flush=True)

    def _close_clients(self) -> None:
        with self._clients_lock:
            self._ending = True
            clients, self._clients = self._clients, []
        reason = self.error if isinstance(self.error, ParamServeError) else None
        for client in clients:
            with contextlib.suppress(ParamServeError, ConnectionError):
                client.close(reason)

    def _release(self) -> None:
        with contextlib.ExitStack() as steps:  # from the last to the first, each in any case
            if self._processes.directory:
                steps.callback(shutil.rmtree, self._processes.directory, ignore_errors=True)
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
        return self.error if self.error is not None else self._stopped()

    def _stopped(self) -> ClientClosed:
        return stopped(self.seconds, workers=self.plan.workers > 0)

"""Starts the processes of a run, watches them in one thread, and ends them.

What their fate means is decided in `roster.py`; this acts on it. Everything that it owns (the
processes, the run directory, its threads, its connections) is gone when it has ended.

The number of workers changes in three parts: the caller's thread waits for room, then the one that
watches asks the coordinator, and starts or dismisses processes when that has agreed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from paramserve.client import Client
from paramserve.config import Credentials
from paramserve.engine.base import Ended, Engine, Event, Process, Role
from paramserve.errors import (
    ClientClosed,
    ConnectTimeout,
    CoordinatorGone,
    ParamServeError,
    RunTimeout,
    Timeout,
    rebuild,
)
from paramserve.job.overview import Overview
from paramserve.job.plan import Plan, addresses_in, make_directory
from paramserve.job.roster import COORDINATOR, Decision, Entry, Key, Roster, worker_failed
from paramserve.messages import Failed

TICK_S = 0.1
"""How often the thread looks up while nothing happens."""
QUICK_TICK_S = 0.005
"""The same while it waits for something that is no event of a process."""
LAST_STATUS_S = 0.5
TOKEN_BYTES = 32
OWN_REPORTS = ("ready", "failed", "returned")

State = Literal["starting", "running", "finishing", "finished", "stopped", "failed"]


@dataclass
class _Scaling:
    """A change of the number of workers that somebody waits for."""

    workers: int
    done: Future[None] = field(default_factory=Future)
    call: int | None = None
    """To the coordinator; None: not made yet."""
    answer_by: float = 0.0


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
        plain: whether nothing that processes report may be unpickled.
        restarts: of each restart, how the worker had ended.
        reports: what processes told besides, as (who, kind, body), in order.
        addresses: the coordinator's; empty: not known yet.
        credentials: what opens them.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        collect: Callable[[], None] | None = None,
        forget: Callable[[], None] | None = None,
    ) -> None:
        """Launch everything; returns without waiting for it to be up.

        Args:
            collect: called in a thread of its own when all workers are done, while the servers
                still run.
            forget: called at the very end, to let go of clients.
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
        self.plain = False
        self.failures: dict[int, ParamServeError] = {}
        self.reports: list[tuple[Key, str, bytes]] = []
        self._collect = collect
        self._forget = forget
        self._collecting: threading.Thread | None = None
        self._collect_error: BaseException | None = None
        self._served = threading.Event()
        self._stop_at: float | None = None
        self._abandoned = False
        self._ending = False
        self._workers_asked_to_end = False
        self._clients: list[Client] = []
        self._clients_lock = threading.Lock()
        self._scalings: deque[_Scaling] = deque()
        """More than one only where a caller has given up waiting."""
        self._over = False
        """No further one is taken."""
        self._scaling_lock = threading.Lock()
        """For these two."""
        self._scale_lock = threading.Lock()
        """One change of the number of workers at a time."""
        self._pid = os.getpid()
        self._fleet = engine.open([str(key) for key in plan.keys])
        self.plain = self._fleet.plain
        self._up_by = time.monotonic() + self._fleet.room_s + plan.deadlines.start_s
        self.roster = Roster(
            plan.servers, plan.workers, plan.on_worker_death, self._up_by, plan.deadlines
        )
        self._processes: dict[Process, Key] = {}
        self._directory = ""
        self.addresses: tuple[str, ...] = ()
        self.credentials = Credentials(secrets.token_bytes(TOKEN_BYTES), self._fleet.tls)
        self.overview = Overview((), self.credentials, plan.limits, plan.deadlines)
        try:
            if self._fleet.shares_host:
                self._directory = make_directory()
                self._launch(plan.keys[:1])
                self._launch_rest(addresses_in(self._directory))
            else:  # where the coordinator listens is known when it does
                self._launch(plan.keys[:1])
        except BaseException:
            self._release()
            raise
        atexit.register(self.abandon)
        threading.Thread(target=self._run, name="paramserve-supervisor", daemon=True).start()

    # --- for any thread -------------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """Since the start; stands still once it has ended."""
        until = self.ended_at if self.ended_at is not None else time.monotonic()
        return until - self.started_at

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

    def connect(self, rank: int = -1, workers: int = 0) -> Client:
        """A new client, once the servers are up; it is closed when all this ends.

        Args:
            workers: how many there should be; 0: not checked.
        Raises:
            ParamServeError: it has ended, or ended before it was up.
        """
        self.wait_until_serving()
        client = Client.connect(
            self.addresses,
            self.credentials,
            rank=rank,
            workers=workers,
            limits=self.plan.limits,
            deadlines=self.plan.deadlines,
        )
        with self._clients_lock:
            if not self._ending:
                self._clients.append(client)
                return client
        client.close()
        raise self._why_ended()

    def scale(self, workers: int) -> None:
        """Have this many workers from now on; returns when the coordinator has agreed and the
        processes of new ranks are launched.

        Raises:
            CannotPlace: the engine has no room for more. All is as before.
            Timeout: the coordinator has not answered; it may have agreed.
            ParamServeError: the run is over or ends, or a process could not be started. All is as
                before.
        """
        with self._scale_lock:
            self._require_running(workers)
            self.wait_until_serving()
            added = [Key("worker", rank) for rank in range(self.roster.wanted, workers)]
            names = [str(key) for key in added]
            try:
                self._fleet.make_room([self._role(key) for key in added])
            except RuntimeError:  # it was closed meanwhile
                self._require_running(workers)
                raise
            scaling = _Scaling(workers)
            try:
                with self._scaling_lock:
                    self._require_running(workers)
                    self._scalings.append(scaling)
                scaling.done.result()
            except ParamServeError:
                self._fleet.give_back(names)
                raise

    def _require_running(self, workers: int) -> None:
        """Raise unless the number of workers can still be changed."""
        ends = self._over or self._abandoned or self._stop_at is not None
        if not ends and self.state in ("starting", "running"):
            return
        why = "it ends" if self.state in ("starting", "running") else f"it is {self.state}"
        if isinstance(self.error, ParamServeError):
            why += f" ({self.error.failed.splitlines()[0]})"
        raise ParamServeError(
            f"the run was not scaled to {workers} workers: {why}",
            fix="scale a run while it trains, or start another one",
        )

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

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            error = self._watch()
        except BaseException as unexpected:
            error = unexpected
        self.error = error  # from here on, for clients
        self._refuse_scaling()
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
            quick = self._collecting is not None or self._stop_at is not None
            quick = quick or bool(self._scalings)
            self._take(self._fleet.events(QUICK_TICK_S if quick else TICK_S))
            now = time.monotonic()
            if self._abandoned:
                return self._stopped()
            self._go_on_scaling(now)
            decision = self.roster.decide(now)
            if decision.error is not None:
                return decision.error
            for rank in decision.dead:
                dead = self.roster.entries[Key("worker", rank)]
                self.failures[rank] = worker_failed(dead)
                self.overview.mark_dead(rank, incarnation=dead.incarnation)
            for entry in decision.restart:
                self._restart(entry)
            self._retire(decision)
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
                return self._timed_out()

    def _take(self, events: Iterable[Event]) -> None:
        now = time.monotonic()
        for event in events:
            key = self._processes.get(event.process)
            if key is None:  # another process has taken its place
                continue
            if isinstance(event, Ended):
                self.roster.on_end(key, event.status, now, event.process.why)
            else:
                self.roster.on_report(key, event.kind, event.body, now)
                if key == COORDINATOR and event.kind == "ready" and not self.addresses:
                    self._launch_rest(msgspec.msgpack.decode(event.body, type=tuple[str, ...]))
                if event.kind not in OWN_REPORTS:
                    self.reports.append((key, event.kind, event.body))

    def _look_around(self, now: float) -> None:
        if not self._served.is_set():
            self.state = "running"
            self._served.set()
        self.overview.tick(now)
        silent = self.overview.silent(now)
        for process, key in self._processes.items():
            if key in silent:
                self.roster.on_silence(key, now, silent[key])
                if self.roster.entries[key].silent and key.kind == "worker":
                    process.kill()  # it is fenced off already, and must not stay behind

    def _role(self, key: Key) -> Role:
        return self.plan.role(key, self._directory, self.addresses, self.credentials)

    def _launch(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._processes[self._fleet.launch(self._role(key))] = key

    def _launch_rest(self, addresses: tuple[str, ...]) -> None:
        """Start all that have to know where the coordinator listens."""
        self.addresses = self.overview.addresses = addresses
        self._up_by = time.monotonic() + self._fleet.room_s + self.plan.deadlines.start_s
        self.roster.start_by = self._up_by  # each of these may have to wait for room, too
        self._launch(self.plan.keys[1:])

    def _restart(self, entry: Entry) -> None:
        """Start a worker that has died again; nothing of the old process counts any more."""
        self.restarts.append(entry)
        number, incarnation = entry.key.number, entry.incarnation
        self.overview.mark_dead(number, final=False, incarnation=incarnation)
        self._kill([entry.key])
        self._launch([entry.key])

    def _kill(self, keys: Iterable[Key]) -> None:
        """End the processes of workers at once, and hear of them no more."""
        wanted = set(keys)
        for process in [each for each, key in self._processes.items() if key in wanted]:
            process.kill()
            del self._processes[process]

    def _retire(self, decision: Decision) -> None:
        """End who is to go and does not; start anew in the places of those who went."""
        for process, key in self._processes.items():
            if key in decision.interrupt:
                process.interrupt()
            elif key in decision.kill:
                process.kill()
                incarnation = self.roster.entries[key].incarnation
                self.overview.mark_dead(key.number, incarnation=incarnation)
        for entry in decision.gone:  # most have left; those who were killed have not
            self.overview.mark_dead(entry.key.number, incarnation=entry.incarnation)
            if entry.key.number >= self.roster.wanted:
                self._fleet.give_back([str(entry.key)])
        self._kill(decision.launch)
        self._launch(decision.launch)

    def _go_on_scaling(self, now: float) -> None:
        """One step of the change of the number of workers that somebody waits for."""
        if not self._scalings:
            return
        scaling = self._scalings[0]
        try:
            agreed = self._agreed(scaling, now)
            if agreed:
                self._scale(scaling.workers, now)
        except Exception as error:
            self._scalings.popleft()
            scaling.done.set_exception(error)
            return
        if agreed:
            self._scalings.popleft()
            scaling.done.set_result(None)

    def _agreed(self, scaling: _Scaling, now: float) -> bool:
        """Whether the coordinator has agreed; it is asked first."""
        self._require_running(scaling.workers)
        overview = self.overview
        try:
            if scaling.call is None:
                scaling.call = overview.scale(scaling.workers)
                scaling.answer_by = now + self.plan.deadlines.request_s
            answer = overview.answer(scaling.call)
        except ConnectionError as error:
            raise CoordinatorGone(
                f"the run was not scaled to {scaling.workers} workers: the coordinator is gone",
                applied="unknown",
                fix="the run ends, and tells why",
            ) from error
        if answer is None and now > scaling.answer_by:
            overview.forget(scaling.call)
            raise Timeout(
                f"the coordinator has not agreed to {scaling.workers} workers in "
                f"{self.plan.deadlines.request_s} s",
                applied="unknown",
                fix="scale again: the last number holds",
            )
        if isinstance(answer, Failed):
            raise rebuild(answer.kind, answer.failed, answer.applied, answer.fix)
        return answer is not None

    def _scale(self, workers: int, now: float) -> None:
        before = self.roster.wanted
        keys = self.roster.scale(workers, now)
        self._kill(keys)  # they have ended
        try:
            self._launch(keys)
        except (OSError, ParamServeError) as error:
            self._kill(keys)
            self.roster.take_back()
            with contextlib.suppress(ConnectionError, ParamServeError):
                self.overview.forget(self.overview.scale(before))
            raise ParamServeError(
                f"the run was not scaled to {workers} workers: a process could not be started: "
                f"{error}",
                fix="look at what the machine is short of, and scale again",
            ) from error
        self._fleet.give_back([f"worker {rank}" for rank in range(workers, before)])

    def _refuse_scaling(self) -> None:
        """Nobody may wait for a run that is over."""
        with self._scaling_lock:
            self._over = True
        for scaling in self._scalings:
            try:
                self._require_running(scaling.workers)
            except ParamServeError as error:
                scaling.done.set_exception(error)

    def _stop_workers(self, now: float) -> bool:
        """If a stop is wanted: whether the workers have ended; those that are slow are killed."""
        if self._stop_at is None:
            return False
        workers = [process for process, key in self._processes.items() if key.kind == "worker"]
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
        """Ask all processes to end and wait `stop_s` for it; what they still report is taken."""
        if self.error is None:
            if self.roster.serving:
                self.overview.ask_now(time.monotonic(), LAST_STATUS_S)
            self._close_clients()
        deadline = time.monotonic() + self.plan.deadlines.stop_s
        for process in self._processes:
            process.interrupt()
        while any(process.exit_status is None for process in self._processes):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            self._take(self._fleet.events(left_s))
        self._take(self._fleet.events(0.0))

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
            if self._directory:
                steps.callback(shutil.rmtree, self._directory, ignore_errors=True)
            steps.callback(self.overview.close)
            steps.callback(self._close_clients)
            steps.callback(self._fleet.close)

    def _let_go(self) -> None:
        atexit.unregister(self.abandon)
        if self._forget is not None:
            self._forget()

    def _why_ended(self) -> BaseException:
        return self.error if self.error is not None else self._stopped()

    def _stopped(self) -> ClientClosed:
        what = "run was stopped" if self.plan.workers else "cluster was closed"
        return ClientClosed(
            f"the {what} after {self.seconds:.1f} s",
            applied="unknown",
            fix="start it again",
        )

    def _timed_out(self) -> RunTimeout:
        workers = [entry for entry in self.roster.workers() if not entry.retired]
        running = [str(entry.key.number) for entry in workers if entry.returned is None]
        return RunTimeout(
            f"the run took longer than timeout_s={self.plan.timeout_s}; "
            f"not done: {'worker' if len(running) == 1 else 'workers'} {', '.join(running)}",
            applied="unknown",
            fix="raise timeout_s, or give the workers less to do",
        )

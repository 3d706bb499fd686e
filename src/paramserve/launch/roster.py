"""Decides what the driver does when its processes report, fail and end.

Pure: events and the time are arguments, decisions come back. `life.py` asks it for the processes of
one attempt. When several processes end at nearly the same time the cause is told, not its
consequences: the death of a server also makes every worker raise `ServerGone`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

from paramserve.config import Deadlines, check_count
from paramserve.core.membership import DEAD, LEFT, LIVE, RETIRING
from paramserve.engine.base import Failure
from paramserve.errors import ConnectTimeout, ParamServeError
from paramserve.launch.entries import (
    COORDINATOR,
    Entry,
    Key,
    Kind,
    process_failure,
    timed_out,
    worker_failed,
)
from paramserve.messages import Member


@dataclass(frozen=True)
class Restart:
    """Restart a worker that died, each rank up to `times` times; after that the run fails.

    It gets a new incarnation and begins its function anew, with `worker.clock` where its
    predecessor's steps ended. In Async the others never stop; in Sync they wait for it, up to
    `Deadlines.restart_s`. A function that was refused what it asks for, as with a wrong argument or
    another model than the checkpoint's, would be refused again: then the run fails at once.

    Raises:
        ValueError, TypeError: `times` is no int of at least 1.
    """

    times: int = 3

    def __post_init__(self) -> None:
        check_count("times of Restart", self.times)


OnWorkerDeath = Literal["stop", "continue"] | Restart

INSTEAD_OF_STOPPING = (
    "use on_worker_death='continue' to go on without it, or ps.Restart() to start it again"
)


class Launch(NamedTuple):
    """Start a process for each of these keys; an older process of the same key counts no more."""

    keys: tuple[Key, ...]
    """Keys of workers, of servers or of the coordinator."""


class Interrupt(NamedTuple):
    """Ask these processes to end."""

    keys: tuple[Key, ...]


class Kill(NamedTuple):
    """End these processes at once; their ends are reported as any other."""

    keys: tuple[Key, ...]


class Exclude(NamedTuple):
    """The others go on without this worker, which died: the coordinator must know."""

    entry: Entry


class Replace(NamedTuple):
    """This worker died, and is launched again as a new incarnation: the coordinator must know."""

    entry: Entry


class Retire(NamedTuple):
    """This worker was to retire, and its process has ended: the coordinator must know."""

    entry: Entry


ProcessEffect = Launch | Interrupt | Kill | Exclude | Replace | Retire


@dataclass(frozen=True)
class Errors:
    """How the errors are told that a life ends for.

    Attributes:
        process: of a coordinator or server that has ended.
        worker: of a worker that has, and what could be done instead of failing; empty: nothing.
        time: of a time limit, with all workers.
    """

    process: Callable[[Entry], ParamServeError] = process_failure
    worker: Callable[[Entry, str], ParamServeError] = worker_failed
    time: Callable[[float, Iterable[Entry]], ParamServeError] = timed_out


class Decision(NamedTuple):
    """What the fate of the processes means now.

    Attributes:
        error: stop everything and raise it.
        effects: what is to be done, in this order.
        finished: every worker that is wanted has returned or is counted as dead, and the others
            have ended.
        look_again_at: when this may change without an event; None: it does not.
    """

    error: ParamServeError | None = None
    effects: tuple[ProcessEffect, ...] = ()
    finished: bool = False
    look_again_at: float | None = None


class Roster:
    """All processes of a run, and what their fate means for it.

    Args:
        on_worker_death: "stop": the first worker that fails fails the run; "continue": the run
            goes on while one worker lives; `Restart`: see there.
        start_by: when coordinator and servers must be ready.
        deadlines: how long a worker may take to retire.
        errors: how its errors are told.

    Attributes:
        target: how many workers there are to be.
    """

    def __init__(
        self,
        servers: int,
        workers: int,
        on_worker_death: OnWorkerDeath,
        start_by: float,
        deadlines: Deadlines | None = None,
        errors: Errors | None = None,
    ) -> None:
        # In the order in which they are started.
        keys = [COORDINATOR, *(Key("server", i) for i in range(servers))]
        keys += [Key("worker", i) for i in range(workers)]
        self.entries = {key: Entry(key) for key in keys}
        self._on_worker_death = on_worker_death
        self.start_by = start_by
        self.target = workers
        self._deadlines = deadlines if deadlines is not None else Deadlines()
        self._errors = errors if errors is not None else Errors()
        self._again: set[Key] = set()
        """Ranks that are wanted again when their present process has ended."""
        self._before_scale = (workers, self.entries)
        self._standings: dict[Key, tuple[str, int]] = {}
        """State and incarnation, for the coordinator, of workers that other processes start."""

    @property
    def serving(self) -> bool:
        """Whether the coordinator and all servers are ready."""
        return all(entry.ready for entry in self._of("coordinator", "server"))

    @property
    def readable(self) -> bool:
        """Whether coordinator and servers are ready, and none of them has fallen."""
        return self.serving and all(e.fell_at is None for e in self._of("coordinator", "server"))

    def workers(self) -> list[Entry]:
        return self._of("worker")

    @property
    def running(self) -> list[Entry]:
        """Entries whose processes have been started and have not ended, in the order of their
        start."""
        return [e for e in self.entries.values() if e.launched and e.status is None]

    def worker_states(self) -> dict[int, str]:
        """State of each rank: "starting", "running", "returned", "stopped", "dead", "retiring" or
        "retired"."""
        return {entry.key.number: entry.state for entry in self.workers()}

    def on_launch(self, key: Key) -> None:
        """The process has been started: its end will be reported."""
        self.entries[key].launched = True

    def on_report(self, key: Key, kind: str, body: bytes, now: float) -> None:
        """A process reported; kinds that mean nothing here are left to others."""
        entry = self.entries[key]
        if kind == "ready":
            entry.ready = True
            if key.kind == "worker":
                entry.incarnation = msgspec.msgpack.decode(body, type=int)
        elif kind == "returned":
            entry.returned = body
        elif kind == "resumed":
            entry.resumed = body
        elif kind == "failed":
            entry.failure = msgspec.msgpack.decode(body, type=Failure)
            entry.fell_at = entry.fell_at if entry.fell_at is not None else now

    def on_end(self, key: Key, status: int, now: float, why: str = "") -> None:
        """A process ended. A worker that has returned may end as it likes."""
        entry = self.entries[key]
        entry.status, entry.why = status, why
        if entry.returned is None and entry.fell_at is None:
            entry.fell_at = now

    def on_silence(self, key: Key, now: float, incarnation: int = 0) -> bool:
        """A process runs but has not been heard of for too long; whether it counts as dead from
        now on.

        Args:
            incarnation: of a worker; one that was replaced since means nothing.
        """
        entry = self.entries[key]
        over = entry.status is not None or entry.returned is not None or entry.silent
        if over or entry.incarnation != incarnation:
            return False
        entry.silent = True
        entry.fell_at = entry.fell_at if entry.fell_at is not None else now
        return True

    def on_members(self, members: Iterable[Member], workers: int, now: float) -> None:
        """Workers are processes of others: so they stand for their coordinator now, which wants
        this many."""
        self.target = workers
        for key in [Key("worker", rank) for rank in range(workers)]:
            self.entries.setdefault(key, Entry(key))
        for entry in self.workers():  # scaled away before it has ever come
            if entry.key.number >= workers and entry.key not in self._standings:
                del self.entries[entry.key]
        for each in members:
            key, standing = Key("worker", each.rank), (each.state, each.incarnation)
            if self._standings.get(key) == standing:
                continue
            self._standings[key] = standing
            self.entries[key] = Entry(
                key,
                ready=each.state in (LIVE, RETIRING),
                returned=b"" if each.state == LEFT else None,
                fell_at=now if each.state == DEAD else None,
                incarnation=each.incarnation,
            )

    def scale(self, workers: int, now: float) -> tuple[Key, ...]:
        """Change how many workers are wanted from now on; those with the highest ranks retire.

        A worker that retires has `retire_s` to end by itself; one that is still starting is ended
        at once. A rank that comes back while its process still runs is launched again when that
        has ended (a `Launch` among `Decision.effects`).

        Returns:
            Ranks whose processes are to be started now.
        """
        self._before_scale = before, entries = self.target, self.entries
        self.target = workers
        for entry in self.workers():
            if entry.key.number < workers:
                continue
            self._again.discard(entry.key)
            if entry.status is None and entry.retire_by is None:
                entry.retire_by = now + (self._deadlines.retire_s if entry.ready else 0.0)
        added = [Key("worker", rank) for rank in range(before, workers)]
        free = [key for key in added if self._is_free(key)]
        self._again.update(set(added) - set(free))
        # A new dict: others may be reading this one.
        self.entries = {**entries, **{key: Entry(key) for key in free}}
        return tuple(free)

    def _is_free(self, key: Key) -> bool:
        entry = self.entries.get(key)
        return entry is None or entry.status is not None

    def take_back(self) -> None:
        """The processes that the last `scale` wanted could not be started; all is as before it."""
        self.target, self.entries = self._before_scale
        self._again = {key for key in self._again if key.number < self.target}

    def dismiss_workers(self) -> None:
        """Let the ends of workers mean nothing from now on: they are about to be stopped."""
        self._again.clear()
        self.stop_workers()
        for entry in self.workers():
            entry.counted = True

    def stop_workers(self) -> None:
        """Note that the workers that still train are told to end."""
        for entry in self.workers():
            entry.stopped |= entry.returned is None and entry.fell_at is None

    def decide(self, now: float, *, ends: bool = False) -> Decision:
        """What all that is known by now means.

        Args:
            ends: the workers are about to be stopped: none is launched again.
        """
        decision = self._decide_fallen(now, ends)
        return decision if decision.error is not None else self._retire(decision, now, ends)

    def _decide_fallen(self, now: float, ends: bool) -> Decision:
        """Decide what the end of processes means: the run's error, other processes in their place,
        or to go on without them."""
        fallen = [
            entry
            for entry in self.entries.values()
            if entry.fell_at is not None and not entry.counted and entry.retire_by is None
        ]
        if not fallen:
            return self._decide_standing(now)
        settled = [entry for entry in fallen if now >= entry.settled_at]
        waits = [entry.settled_at for entry in fallen if now < entry.settled_at]
        look_again_at = min(waits, default=None)
        if not settled:
            return Decision(look_again_at=look_again_at)
        cause = min(settled, key=_rank_as_cause)
        if cause.key.kind != "worker":
            return Decision(error=self._errors.process(cause))
        if self._on_worker_death == "stop":
            return Decision(error=self._errors.worker(cause, INSTEAD_OF_STOPPING))
        if isinstance(self._on_worker_death, Restart):
            decision = self._replace(settled, self._on_worker_death.times, ends)
            return decision._replace(look_again_at=look_again_at)
        for entry in settled:
            entry.counted = True
        if all(e.counted for e in self.workers() if e.retire_by is None) and not self._again:
            return Decision(error=self._errors.worker(cause, ""))
        return Decision(None, tuple(map(Exclude, settled)), self._finished(), look_again_at)

    def _replace(self, settled: list[Entry], times: int, ends: bool) -> Decision:
        for entry in settled:
            if entry.refused:
                return Decision(error=worker_failed(entry))
            if entry.restarts >= times:
                return Decision(error=worker_failed(entry, f"allow more than ps.Restart({times})"))
        if ends:
            for entry in settled:
                entry.counted = True
            return Decision(effects=tuple(map(Exclude, settled)))
        for entry in settled:
            self.entries[entry.key] = Entry(entry.key, restarts=entry.restarts + 1)
        launch = Launch(tuple(entry.key for entry in settled))
        return Decision(effects=(*map(Replace, settled), launch))

    def _retire(self, decision: Decision, now: float, ends: bool) -> Decision:
        """Add what the workers that are to end make necessary."""
        effects = list(decision.effects)
        looks = [decision.look_again_at] if decision.look_again_at is not None else []
        if not self.serving:
            looks.append(self.start_by)
        for entry in self.workers():
            if entry.retire_by is None:
                continue
            if entry.status is not None:
                if not entry.counted:
                    entry.counted = True
                    effects.append(Retire(entry))
                continue
            if entry.kill_at is None and now >= entry.retire_by:
                entry.kill_at = now + self._deadlines.stop_s
                effects.append(Interrupt((entry.key,)))
            elif entry.kill_at is not None and now >= entry.kill_at:
                entry.kill_at = math.inf
                effects.append(Kill((entry.key,)))
            looks.append(entry.kill_at if entry.kill_at is not None else entry.retire_by)
        again = tuple(key for key in sorted(self._again) if self._is_free(key) and not ends)
        if again:
            self._again.difference_update(again)
            self.entries.update((key, Entry(key)) for key in again)
            effects.append(Launch(again))
        return decision._replace(
            effects=tuple(effects),
            look_again_at=min((at for at in looks if at < math.inf), default=None),
        )

    def _decide_standing(self, now: float) -> Decision:
        """Decide where no process has fallen: whether all have finished, or were not up in time."""
        if self.serving:
            return Decision(finished=self._finished())
        if now < self.start_by:
            return Decision()
        missing = [str(e.key) for e in self._of("coordinator", "server") if not e.ready]
        return Decision(
            error=ConnectTimeout(
                f"the run did not start: {', '.join(missing)} not ready in time",
                fix="look at the messages of that process; where the machine is slow, raise "
                "deadlines=ps.Deadlines(start_s=...) of the engine",
            )
        )

    def _finished(self) -> bool:
        workers = self.workers()
        if not workers or self._again:
            return False
        return all(e.returned is not None or e.counted or e.retired for e in workers)

    def _of(self, *kinds: Kind) -> list[Entry]:
        return [entry for entry in self.entries.values() if entry.key.kind in kinds]


def _rank_as_cause(entry: Entry) -> tuple[bool, int, float]:
    order = ("coordinator", "server", "worker").index(entry.key.kind)
    return entry.complains, order, entry.settled_at

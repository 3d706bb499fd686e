"""Decides the life of a cluster: who is missing, what is restarted, which checkpoint is next, why
it ends.

Pure: `step(events, now)` returns what is to be done, and a driver does it: `supervisor.py` for a
run whose processes are its children, `serve.py` for a cluster whose processes others start. One
attempt is one start of all processes; `roster.py` decides what the fate of each means for its
attempt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from paramserve.config import Deadlines
from paramserve.errors import (
    CheckpointDamaged,
    CheckpointError,
    CoordinatorGone,
    ParamServeError,
    ServerGone,
)
from paramserve.launch.entries import (
    COORDINATOR,
    Entry,
    Key,
    ends_despite_checkpoints,
    stopped,
)
from paramserve.launch.roster import (
    Errors,
    Interrupt,
    Kill,
    Launch,
    OnWorkerDeath,
    ProcessEffect,
    Roster,
)
from paramserve.messages import Member

SAME_MAX = 5
"""So often in a row a run goes back to the same checkpoint: then what ends its servers will do so
again."""
KILL_S = 10.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a debugger)."""
ABANDON_S = 1.0
"""How long processes that are abandoned may take to end in order, if `stop_s` is longer."""

State = Literal["starting", "running", "resuming", "finishing", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Terms:
    """What a life is for, and how long each wait in it may take.

    Attributes:
        start_s: how long coordinator and servers may take to be up, besides `restore_s`.
        timeout_s: of all of it; None: no limit.
        shares_host: every process knows where the coordinator listens before that is up.
        collects: its values are read before its servers end.
        resumes: it goes on from a checkpoint when a server or the coordinator has ended; None: it
            has no checkpoints.
        strict: it ends where a checkpoint cannot be written.
        checkpoint: the path of the one that it begins with; empty: none.
        restore_s: how much longer servers that read that one may take to be up.
        errors: how its errors are told.
    """

    servers: int
    workers: int
    on_worker_death: OnWorkerDeath
    deadlines: Deadlines
    start_s: float
    timeout_s: float | None = None
    shares_host: bool = True
    collects: bool = False
    resumes: bool | None = None
    strict: bool = False
    checkpoint: str = ""
    restore_s: float = 0.0
    errors: Errors = field(default_factory=Errors)


class Report(NamedTuple):
    """A process reported."""

    key: Key
    kind: str
    body: bytes


class ProcessEnd(NamedTuple):
    """A process of the present attempt ended. `why`: where the engine knows more than `status`."""

    key: Key
    status: int
    why: str = ""


class Silence(NamedTuple):
    """A process has not been heard of for too long."""

    key: Key
    incarnation: int = 0


class Standing(NamedTuple):
    """Workers that others start stand so for the coordinator, which wants `workers` of them."""

    members: tuple[Member, ...]
    workers: int


class Done(NamedTuple):
    """What it was for is done, as its coordinator has told before it ended."""


class Request(NamedTuple):
    """It is to end for this error, in order."""

    error: ParamServeError


class CheckpointFailed(NamedTuple):
    """A checkpoint could not be written."""

    why: str


class Selection(NamedTuple):
    """The answer to `Select`: the path of the newest checkpoint that can be used; empty: none has
    been written yet. `restore_s`: how much longer servers that read it may take. `error`: none can
    be used."""

    path: str = ""
    restore_s: float = 0.0
    error: CheckpointError | None = None


class Collected(NamedTuple):
    """The answer to `Collect`: the values have been read, or `error` says why not."""

    error: BaseException | None = None


class Stop(NamedTuple):
    """It is to end early, in order."""


class Abandon(NamedTuple):
    """It is to end at once, without its values."""


class Breakdown(NamedTuple):
    """The driver could not do what was decided."""

    error: BaseException


Event = (
    Report
    | ProcessEnd
    | Silence
    | Standing
    | Done
    | Request
    | CheckpointFailed
    | Selection
    | Collected
    | Stop
    | Abandon
    | Breakdown
)


class Serving(NamedTuple):
    """Coordinator and servers are up."""


class Collect(NamedTuple):
    """Read the values while the servers run; answered by `Collected`."""


class Ask(NamedTuple):
    """The present attempt has ended for this: ask now what is left of it how it stands. All its
    processes are killed next."""

    cause: ParamServeError
    damaged: bool


class Select(NamedTuple):
    """All processes of the attempt have ended, and none writes any more: find the newest
    checkpoint; answered at once by `Selection`.

    Attributes:
        cause: why the present attempt has ended.
        damaged: `cause` says that the present checkpoint is: it is to be left out.
    """

    cause: ParamServeError
    damaged: bool


class Begin(NamedTuple):
    """All processes of the attempt before have ended: prepare another one, which goes on from the
    checkpoint of the last `Selection`. Fields as of `Select`."""

    cause: ParamServeError
    damaged: bool
    workers: int


class End(NamedTuple):
    """It ends. `serving`: the servers can still be asked for their last status."""

    error: BaseException | None
    serving: bool


class Close(NamedTuple):
    """It has ended. `late`: workers whose function had returned and that still run."""

    late: tuple[Key, ...] = ()


Effect = ProcessEffect | Serving | Collect | Ask | Select | Begin | End | Close


@dataclass
class _Return:
    """A return to a checkpoint that is under way: all processes are killed."""

    cause: ParamServeError
    damaged: bool
    end_by: float
    """When the last process must have ended."""
    selects: bool = False
    selection: Selection | None = None


@dataclass
class _End:
    """The end that is under way: the processes were asked to end, or end by themselves."""

    exiting: frozenset[Key]
    end_by: float
    exit_by: float


class Life:
    """A coordinator, its servers and workers, from start to end; all of them anew where the life
    goes on from a checkpoint.

    Attributes:
        state: where it stands.
        roster: the processes of the present attempt.
        error: why it ends, once that is decided; None: it ends in order.
        failure: why it fails, while its values are still read.
        dismissed: its workers were told to end before they were done.
        ending: its end has been decided.
        over: it has ended.
        wake_at: when something may be due without an event; None: nothing is.
    """

    def __init__(self, terms: Terms, now: float) -> None:
        self.terms = terms
        self.started_at = now
        self.state: State = "starting"
        self.error: BaseException | None = None
        self.failure: BaseException | None = None
        self.dismissed = False
        self.over = False
        self.wake_at: float | None = None
        self.roster = self._new_roster(terms.workers, now)
        self._start_s = terms.start_s + terms.restore_s
        self._checkpoint = terms.checkpoint
        self._rest: tuple[Key, ...] = ()
        """Processes that are started when the coordinator is up."""
        self._refused: set[str] = set()
        self._same = 0
        """How often in a row the same checkpoint was chosen after a death."""
        self._done = False
        self._request: ParamServeError | None = None
        self._unread: BaseException | None = None
        """Why the values could not be read, unless a death that is told just now is the cause."""
        self._unwritten: ParamServeError | None = None
        """Why a checkpoint could not be written, in a life that is strict about that."""
        self._stop_at: float | None = None
        self._abandoned = False
        self._return: _Return | None = None
        self._end: _End | None = None
        self._effects: list[Effect] = []

    @property
    def ending(self) -> bool:
        return self._end is not None or self.over

    @property
    def stopped(self) -> bool:
        """Whether it was told to end."""
        return self._abandoned or self._stop_at is not None

    @property
    def outcome(self) -> State:
        """What `state` is when it is over."""
        if self._abandoned or (self.error is None and self._stop_at is not None):
            return "stopped"
        return "failed" if self.error is not None else "finished"

    def begin(self, now: float) -> list[Effect]:
        """Start what can be started before anything is up. Once."""
        self._effects = []
        self._launch(now)
        return self._effects

    def step(self, events: Iterable[Event], now: float) -> list[Effect]:
        """What is to be done now, in this order. Events that came together are judged together: so
        a cause is found among its consequences. No events: time has passed."""
        self._effects = []
        for event in events:
            if not self.over:
                self._apply(event, now)
            elif isinstance(event, Breakdown) and self.error is None:
                self.error = event.error
        if not self.over:
            self._advance(now)
        return self._effects

    def _apply(self, event: Event, now: float) -> None:
        roster = self.roster
        match event:
            case Report(key, kind, body):
                roster.on_report(key, kind, body, now)
            case ProcessEnd(key, status, why):
                roster.on_end(key, status, now, why)
            case Silence(key, incarnation):
                if roster.on_silence(key, now, incarnation) and key.kind == "worker":
                    self._effects.append(Kill((key,)))  # the cluster has fenced it off
            case Standing(members, workers):
                roster.on_members(members, workers, now)
            case Done():
                self._done = True
            case Request(error):
                self._request = error
            case CheckpointFailed(why) if self.terms.strict:
                self._unwritten = CheckpointError(
                    f"a checkpoint was not written: {why}",
                    applied="unknown",
                    fix="look at the folder's storage, or train on without it: "
                    "ps.Checkpoint(strict=False)",
                )
            case Selection() if self._return is not None:
                self._select(self._return, event, now)
            case Collected(None) if self.state == "finishing":
                self._begin_end(None, now)
            case Collected(error) if self.state == "finishing":
                self._unread = error
            case Stop():
                if self._stop_at is None:
                    self._stop_at = now + self.terms.deadlines.stop_s
                if self.failure is self._request:  # what it was asked for, it is told now
                    self.failure = None
            case Abandon():
                self._abandoned = True
                seconds = now - self.started_at
                self._begin_end(stopped(seconds, workers=self.terms.workers > 0), now)
            case Breakdown(error) if not self.ending:
                self._begin_end(error, now)
            case Breakdown(error):
                self.error = self.error if self.error is not None else error
                self._close(())

    def _advance(self, now: float) -> None:
        """Decide what is due."""
        self.wake_at = None
        if self._end is None and self._return is not None:
            self._go_on_returning(self._return, now)
        elif self._end is None:
            self._go_on(now)
        if self._end is not None:
            self.wake_at = None
            self._go_on_ending(self._end, now)

    def _go_on(self, now: float) -> None:
        limit_error = self._limit_error(now)
        ends = self._stop_at is not None or limit_error is not None
        decision = self.roster.decide(now, ends=ends)
        error = decision.error if decision.error is not None else limit_error
        self._wake(decision.look_again_at)
        if error is not None:
            if self._go_back(error, now):
                return
            # A failure waits until the values are read, where the servers are there for that.
            reads = self.terms.collects and self.failure is None and self.roster.readable
            if not reads:
                self._begin_end(error, now)
                return
            self.failure = error
            if self._stop_at is None:
                self._stop_at = now + self.terms.deadlines.stop_s
        if self._unread is not None:
            self._begin_end(self._unread, now)
            return
        self._effects += decision.effects
        serving = self.roster.serving
        if serving and self.state in ("starting", "resuming"):
            self.state = "running"
            self._effects.append(Serving())
        stopped = self._workers_have_stopped(now)
        finished = stopped or self._done or (decision.finished and not self.dismissed)
        if self._rest and not finished and self.roster.entries[COORDINATOR].ready:
            self._launch(now)
        if self.state != "finishing" and finished:
            if serving and self.terms.collects:
                self.state = "finishing"
                self._effects.append(Collect())
            else:
                self._begin_end(None, now)

    def _limit_error(self, now: float) -> ParamServeError | None:
        """The error of a life that takes longer than it may, or is to end for one, unless it ends
        already."""
        if self.state == "finishing" or self._stop_at is not None:
            return None
        limit_s = self.terms.timeout_s
        if limit_s is not None and now >= self.started_at + limit_s:
            return self.terms.errors.time(limit_s, self.roster.workers())
        self._wake(self.started_at + limit_s if limit_s is not None else None)
        return self._unwritten if self._unwritten is not None else self._request

    def _workers_have_stopped(self, now: float) -> bool:
        """If a stop is wanted: whether the workers' functions have ended; slow ones are killed. The
        values of a checkpoint are waited for, unless others start the processes: these have no
        limit."""
        if self._stop_at is None or self.state == "finishing":
            return False
        launched = self.roster.running
        if self.state == "resuming" and launched:
            return False
        running = _keys(
            entry for entry in launched if entry.key.kind == "worker" and entry.returned is None
        )
        if not self.dismissed:
            self.dismissed = True
            self.roster.dismiss_workers()
            self._effects.append(Interrupt(running))
        if now < self._stop_at:
            self._wake(self._stop_at)
        elif running:
            self._effects.append(Kill(running))
        return not running

    def _launch(self, now: float) -> None:
        """Start the coordinator first, and those that have to know where it listens when it does;
        each of these may have to wait for room, too."""
        keys = tuple(self.roster.entries)
        if self._rest:
            keys, self._rest = self._rest, ()
        elif not self.terms.shares_host:
            keys, self._rest = keys[:1], keys[1:]
        self.roster.start_by = now + self._start_s
        self._wake(self.roster.start_by)
        self._effects.append(Launch(keys))

    def _new_roster(self, workers: int, start_by: float) -> Roster:
        terms = self.terms
        return Roster(
            terms.servers, workers, terms.on_worker_death, start_by, terms.deadlines, terms.errors
        )

    # --- going on from a checkpoint ---------------------------------------------------------------

    def _go_back(self, error: ParamServeError, now: float) -> bool:
        """Whether the life goes on from a checkpoint and does not end for this error. Everything
        is started anew then, as if all processes had ended at the cut."""
        resumes, up = self.terms.resumes, self.state not in ("starting", "resuming")
        if resumes is None or self.failure is not None or self._stop_at is not None:
            return False
        damaged = isinstance(error, CheckpointDamaged) and not up
        if damaged and not self._checkpoint:
            return False
        if damaged:
            self._refused.add(self._checkpoint)
        elif not isinstance(error, ServerGone | CoordinatorGone):
            return False
        elif not (resumes and (up or self._same)):
            ends_despite_checkpoints(error, 0)
            return False
        self.state, self._unread = "resuming", None
        self._return = _Return(error, damaged, now + KILL_S)
        self._effects += [Ask(error, damaged), Kill(_keys(self.roster.running))]
        self._go_on_returning(self._return, now)
        return True

    def _select(self, under_way: _Return, selection: Selection, now: float) -> None:
        """Take up a checkpoint, unless it was refused or what ends the servers will do so again."""
        cause, damaged = under_way.cause, under_way.damaged
        if selection.error is not None or selection.path in self._refused:
            if selection.error is not None and not damaged:
                selection.error.__cause__ = cause
            self._begin_end(selection.error if selection.error is not None else cause, now)
            return
        if not damaged:
            self._same = self._same + 1 if selection.path == self._checkpoint else 1
        if self._same > SAME_MAX:
            ends_despite_checkpoints(cause, self._same)
            self._begin_end(cause, now)
            return
        self._checkpoint, under_way.selection = selection.path, selection

    def _go_on_returning(self, under_way: _Return, now: float) -> None:
        """Begin another attempt, once all processes of the one before have ended and a checkpoint
        is found: however long that takes, as in a large folder of an object store."""
        if self.roster.running:
            self._wake(under_way.end_by)
            if now >= under_way.end_by:
                self._begin_end(under_way.cause, now)
            return
        if under_way.selection is None:
            if not under_way.selects:
                under_way.selects = True
                self._effects.append(Select(under_way.cause, under_way.damaged))
            return
        workers = self.roster.target
        self._return, self._rest = None, ()
        self._start_s = self.terms.start_s + under_way.selection.restore_s
        self.roster = self._new_roster(workers, now)
        self._effects.append(Begin(under_way.cause, under_way.damaged, workers))
        self._launch(now)

    # --- the end ----------------------------------------------------------------------------------

    def _begin_end(self, error: BaseException | None, now: float) -> None:
        """Ask all processes to end. Workers that have returned end by themselves, within `exit_s`.
        Once: the first reason counts."""
        if self._end is not None:
            return
        self.error = self.failure if self.failure is not None else error
        in_order = self.error is None or self.failure is not None
        self.roster.stop_workers()
        running, deadlines = self.roster.running, self.terms.deadlines
        waits = not self._abandoned and (self._stop_at is None or self.failure is not None)
        exiting = _keys(entry for entry in running if entry.returned is not None and waits)
        others = [entry.key for entry in running if entry.key not in exiting]
        self._end = _End(frozenset(exiting), now + deadlines.stop_s, now + deadlines.exit_s)
        self._effects += [
            End(self.error, in_order and self.roster.serving),
            Interrupt(tuple(reversed(others))),  # the coordinator last: servers would reconnect
        ]

    def _go_on_ending(self, end: _End, now: float) -> None:
        if self._abandoned:
            end.end_by = min(end.end_by, now + ABANDON_S)
            end.exit_by = min(end.exit_by, end.end_by)
        running = _keys(self.roster.running)
        others = [key for key in running if key not in end.exiting]
        late = tuple(key for key in running if key in end.exiting)
        if others and now < end.end_by:
            self._wake(end.end_by)
        elif late and now < end.exit_by:
            self._wake(end.exit_by)
        else:
            self._close(() if self._abandoned else late)

    def _close(self, late: tuple[Key, ...]) -> None:
        self.over = True
        self._effects.append(Close(late))

    def _wake(self, at: float | None) -> None:
        if at is not None and at < math.inf:
            self.wake_at = min(at, self.wake_at) if self.wake_at is not None else at


def _keys(entries: Iterable[Entry]) -> tuple[Key, ...]:
    return tuple(entry.key for entry in entries)

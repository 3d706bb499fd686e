"""What the driver knows of each process of a run, and the errors that a run raises for its end.

`roster.py` decides which end is the cause.
"""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from paramserve.engine.base import Failure
from paramserve.errors import (
    KINDS,
    CannotPlace,
    CheckpointError,
    ClientClosed,
    CollectiveMismatch,
    CoordinatorGone,
    DefineMismatch,
    ParamServeError,
    RunTimeout,
    ServerGone,
    UnknownCodec,
    UnknownRule,
    WorkerFailed,
    applied_of,
    rebuild,
)

Kind = Literal["coordinator", "server", "worker"]

CAUSE_S = 0.5
"""How long after a process that complains of another one's end that end may still show."""
_OF_CHECKPOINTS = (CheckpointError, UnknownRule)
"""Why a coordinator or server cannot begin: the error is told as it is."""
COMPLAINTS = frozenset({"ServerGone", "CoordinatorGone", "ClientClosed", "ConnectTimeout"})
"""Errors that tell of another process's end."""
_LASTING = (DefineMismatch, CollectiveMismatch, UnknownRule, UnknownCodec)
"""Refusals that the same function would meet again."""
_OF_ARGUMENTS = ("ValueError", "TypeError")
"""Error classes of arguments; ours say that nothing was applied and what to correct."""


class Key(NamedTuple):
    """Process: what it is, and which one of them."""

    kind: Kind
    number: int

    def __str__(self) -> str:
        return self.kind if self.kind == "coordinator" else f"{self.kind} {self.number}"


COORDINATOR = Key("coordinator", 0)


@dataclass
class Entry:
    """What is known of one process."""

    key: Key
    launched: bool = False
    ready: bool = False
    returned: bytes | None = None
    failure: Failure | None = None
    status: int | None = None
    why: str = ""
    """Why it has ended, where the engine knows more than the status."""
    fell_at: float | None = None
    """When its failure or unexpected end was seen."""
    silent: bool = False
    """True: it ran when it was counted as dead."""
    counted: bool = False
    """True: it is dead, and that has been decided upon."""
    stopped: bool = False
    """True: a worker that was told to end, because the run ends before it is done."""
    incarnation: int = 0
    """Incarnation of a worker, as the cluster counts; 0 before it is ready."""
    restarts: int = 0
    """How often it was started anew."""
    resumed: bytes | None = None
    """Where the worker resumed, as it reported; None: it has not, or was the first of its rank."""
    retire_by: float | None = None
    """The run is to do without it: however it ends, from now on that is no failure, and it is ended
    when it still runs then. None: it is wanted."""
    kill_at: float | None = None
    """Time to kill it; None: it was not asked to end by `retire_by`."""

    @property
    def retired(self) -> bool:
        """Whether the run does without it and it has ended, or as good as that."""
        return self.retire_by is not None and (self.returned is not None or self.status is not None)

    @property
    def state(self) -> str:
        """State in one word."""
        if self.retire_by is not None:
            return "retired" if self.retired else "retiring"
        if self.returned is not None:
            return "returned"
        if self.stopped:
            return "stopped"
        if self.fell_at is not None:
            return "dead"
        return "running" if self.ready else "starting"

    @property
    def complains(self) -> bool:
        """Whether it fell because another process is gone.

        It says so, or it is a server that ended in order without being asked to: that is what
        one does when the coordinator is gone.
        """
        if self.failure is not None:
            return self.failure.kind in COMPLAINTS
        return self.key.kind == "server" and self.status == 0

    @property
    def refused(self) -> bool:
        """Whether its function would fail again if it were started again: what it asks for was
        refused, and nothing of that applied."""
        if self.failure is None:
            return False
        if self.failure.kind in _OF_ARGUMENTS:
            return "Applied: no. To fix: " in self.failure.text
        return issubclass(KINDS.get(self.failure.kind, Exception), _LASTING)

    @property
    def settled_at(self) -> float:
        """Time from which its own fall counts as the cause."""
        assert self.fell_at is not None
        return self.fell_at + (CAUSE_S if self.complains else 0.0)


def how_it_ended(entry: Entry) -> str:
    """End of a process in words: it raised, a signal killed it, or it exited with a code."""
    if entry.failure is not None:
        return f"raised {entry.failure.kind}: {entry.failure.failed or entry.failure.text}"
    if entry.silent:
        return "gave no sign of life for too long (it was stopped, or hangs)"
    if entry.status is None:
        return "does not answer"
    end = f"exited with code {entry.status}"
    if entry.status < 0:
        end = f"was killed by {_signal_name(-entry.status)}"
    first, *_ = entry.why.splitlines() or [""]
    return f"{end} ({first})" if first else end


def started_again(entry: Entry, times: int) -> str:
    """Restart in one line: how the replaced worker ended, and how often it may be."""
    ended, *_ = how_it_ended(entry).splitlines()
    return f"{entry.key} {ended}; it is started again ({entry.restarts + 1} of {times})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"signal {number}"


def _describe_end(entry: Entry) -> str:
    """How a process ended, with its traceback if it has one."""
    text = f"{entry.key} {how_it_ended(entry)}"
    if entry.key.kind == "worker" and entry.failure is None:
        text += " before its function returned"
    if entry.restarts:
        times = "once" if entry.restarts == 1 else f"{entry.restarts} times"
        text += f" (it had been restarted {times})"
    traceback = entry.failure.traceback.rstrip() if entry.failure is not None else ""
    return f"{text}\n\n{traceback}" if traceback else text


def _without_a_place(entry: Entry) -> CannotPlace | None:
    """The engine's own error, if there was no room for the process; else None."""
    failure = entry.failure
    if failure is None or failure.kind != CannotPlace.__name__:
        return None
    return CannotPlace(failure.failed, applied="no", fix=failure.fix)


AGAIN_WITH_CHECKPOINTS = (
    "start the run again, with ps.run(..., checkpoint=path): then it goes on by itself"
)
"""What a lost server needs, in a run without checkpoints."""
KILLED = "A kill without a message is often the system short of memory"


def ends_despite_checkpoints(error: ParamServeError, times: int) -> None:
    """Say in the error of a lost coordinator or server how a run goes on that has a folder of
    checkpoints, and does not go on by itself.

    Args:
        times: that it has gone back to one checkpoint; 0: it never goes back.
    """
    again = "start the run again with resume=True: it goes on from its newest checkpoint"
    if times:
        again = f"look why processes have ended {times} times since that checkpoint, then {again}"
    error.fix = error.fix.replace(AGAIN_WITH_CHECKPOINTS, again)


def process_failure(entry: Entry) -> ParamServeError:
    """The error for a coordinator or server that has ended."""
    unplaced = _without_a_place(entry)
    if unplaced is not None:
        return unplaced
    failure = entry.failure
    if failure is not None and issubclass(KINDS.get(failure.kind, Exception), _OF_CHECKPOINTS):
        return rebuild(failure.kind, failure.failed, failure.applied, failure.fix)
    fix = f"{AGAIN_WITH_CHECKPOINTS}. {KILLED}"
    if entry.failure is not None and entry.failure.fix:
        fix = entry.failure.fix
    kind = CoordinatorGone if entry.key.kind == "coordinator" else ServerGone
    return kind(_describe_end(entry), applied="unknown", fix=fix)


def worker_failed(entry: Entry, instead: str = "") -> WorkerFailed | CannotPlace:
    """The error for a worker that ended before its function returned, or never began.

    Args:
        instead: what the run could do about such an end than to fail; empty: nothing more.
    """
    unplaced = _without_a_place(entry)
    if unplaced is not None:
        return unplaced
    text, failure = _describe_end(entry), entry.failure
    if failure is not None and failure.fix:
        return WorkerFailed(text, applied=applied_of(failure.applied), fix=failure.fix)
    if failure is not None and "Applied: " in failure.text:  # ours, as a ValueError
        head, _, rest = failure.text.partition("Applied: ")
        applied, _, fix = rest.partition(". To fix: ")
        if fix:
            short = replace(failure, failed=head.rstrip().removesuffix("."), fix=fix)
            text = _describe_end(dataclasses.replace(entry, failure=short))
            return WorkerFailed(text, applied=applied_of(applied), fix=fix)
    if failure is not None:
        fix = "fix the training function"
    elif entry.silent:
        fix = (
            "look for what stood still: a stopped process, swapping, a C call that holds the GIL "
            "for long; where that is in order, raise "
            "deadlines=ps.Deadlines(stall_s=...) of the engine"
        )
    else:
        fix = "look for what ended the process (the system short of memory, sys.exit)"
    return WorkerFailed(text, applied="unknown", fix=f"{fix}, or {instead}" if instead else fix)


def stopped(seconds: float, *, workers: bool) -> ClientClosed:
    """The error for the users of a run, or of a cluster without workers, that was stopped."""
    what = "run was stopped" if workers else "cluster was closed"
    return ClientClosed(
        f"the {what} after {seconds:.1f} s",
        applied="unknown",
        fix="start it again",
    )


def over(seconds: float, *, workers: bool, stopped: bool) -> ClientClosed:
    """The error for what is asked of a run, or of a cluster without workers, that has ended."""
    what = "run was stopped" if stopped else "run has finished"
    fix = (
        "read what it has left by job.wait() and its result, or by job.state_dict(); its servers "
        "have ended with it, and tables are kept only by "
        "checkpoint=ps.Checkpoint(save_tables=folder)"
    )
    if not workers:
        what, fix = "cluster was closed", "start it again"
    return ClientClosed(f"the {what} after {seconds:.1f} s", applied="no", fix=fix)


def timed_out(timeout_s: float, workers: Iterable[Entry]) -> RunTimeout:
    """The error for a run that took too long, with those of its workers that are not done."""
    running = [
        str(entry.key.number) for entry in workers if not entry.retired and entry.returned is None
    ]
    return RunTimeout(
        f"the run took longer than timeout_s={timeout_s}; "
        f"not done: {'worker' if len(running) == 1 else 'workers'} {', '.join(running)}",
        applied="unknown",
        fix="raise timeout_s, or give the workers less to do",
    )

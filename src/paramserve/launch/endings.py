"""How processes and runs end, put into words: the errors that a run raises for it.

Which end is the cause, `roster.py` decides.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from paramserve.errors import (
    CannotPlace,
    ClientClosed,
    CoordinatorGone,
    ParamServeError,
    RunTimeout,
    ServerGone,
    WorkerFailed,
)
from paramserve.launch.entries import Entry


def how_it_ended(entry: Entry) -> str:
    """In words: it raised, a signal killed it, or it exited with a code."""
    if entry.failure is not None:
        return f"raised {entry.failure.kind}: {entry.failure.text}"
    if entry.silent:
        return "gave no sign of life for too long (it was stopped, or hangs)"
    if entry.status is None:
        return "does not answer"
    told = f"exited with code {entry.status}"
    if entry.status < 0:
        told = f"was killed by {_signal_name(-entry.status)}"
    first, *_ = entry.why.splitlines() or [""]
    return f"{told} ({first})" if first else told


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal between the first and the last has no name
        return f"signal {number}"


def _with_traceback(entry: Entry) -> str:
    told = f"{entry.key} {how_it_ended(entry)}"
    if entry.failure is None:
        return told
    return f"{told}\n\n{entry.failure.traceback.rstrip()}"


def _without_a_place(entry: Entry) -> CannotPlace | None:
    """The engine's own error, if there was no room for the process; else None."""
    failure = entry.failure
    if failure is None or failure.kind != CannotPlace.__name__:
        return None
    return CannotPlace(failure.failed, applied="no", fix=failure.fix)


def gone(entry: Entry) -> ParamServeError:
    """The error for a coordinator or server that is no more."""
    unplaced = _without_a_place(entry)
    if unplaced is not None:
        return unplaced
    fix = "start the run again; a kill without a message is often the system short of memory"
    kind = CoordinatorGone if entry.key.kind == "coordinator" else ServerGone
    return kind(_with_traceback(entry), applied="unknown", fix=fix)


def worker_failed(entry: Entry) -> WorkerFailed | CannotPlace:
    """The error for a worker that ended before its function returned, or never began."""
    unplaced = _without_a_place(entry)
    if unplaced is not None:
        return unplaced
    fix = (
        "mend the training function, or use on_worker_death='continue' to go on without it, or "
        "ps.Restart() to start it again"
    )
    if entry.failure is None and entry.silent:
        fix = (
            "look for what stood still: a stopped process, swapping, a C call that holds the GIL "
            "for long; where that is in order, raise deadlines=ps.Deadlines(stall_s=...), or use "
            "on_worker_death='continue' to go on without it"
        )
    elif entry.failure is None:
        fix = (
            "look for what ended the process (the system short of memory, sys.exit), or use "
            "on_worker_death='continue' to go on without it"
        )
    told = _with_traceback(entry)
    if entry.failure is None:
        told += " before its function returned"
    if entry.restarts:
        told += f" (it had been restarted {entry.restarts} times)"
    return WorkerFailed(told, applied="unknown", fix=fix)


def stopped(seconds: float, *, workers: bool) -> ClientClosed:
    """The error for whoever uses a run, or a cluster without workers, that was ended by wish."""
    what = "run was stopped" if workers else "cluster was closed"
    return ClientClosed(
        f"the {what} after {seconds:.1f} s",
        applied="unknown",
        fix="start it again",
    )


def timed_out(timeout_s: float | None, workers: Iterable[Entry]) -> RunTimeout:
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

"""The error of a wait that has timed out: what was waited for, and which ranks are missing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paramserve.client.exchange import Exchange
from paramserve.config import NO_RANK
from paramserve.core.collectives import call_of
from paramserve.errors import (
    DefineTimeout,
    ParamServeError,
    PullTimeout,
    PushTimeout,
    Timeout,
)
from paramserve.messages import OpenCollective

INQUIRE_S = 1.0
"""How long a wait that has failed may take to find out who is missing."""
SAY_S = 10.0
"""Seconds after which a wait says once for whom it is, and for how long."""
LOOK_S = 5.0
"""Seconds between two looks whether those that a step waits for wait for this rank: longer than a
call of theirs stands at the coordinator after it was interrupted."""
RANKS_SHOWN_MAX = 8
"""Most ranks in one line."""
READS = ("pull", "fetch", "snapshot")
TIMEOUTS: dict[str, type[Timeout]] = {"define": DefineTimeout} | dict.fromkeys(READS, PullTimeout)
"""What is raised when an answer is late; for all else `PushTimeout`."""


KNOBS = {
    "call": "timeout_s",
    "busy": "deadlines=ps.Deadlines(busy_s=...) of the engine or ps.connect, if such a step takes "
    "longer",
    "request": "deadlines=ps.Deadlines(request_s=...) of the engine or ps.connect",
}


def ranks(numbers: Sequence[int]) -> str:
    """Ranks in words, such as "rank 0, rank 3"."""
    more = len(numbers) - RANKS_SHOWN_MAX
    listed = ", ".join(f"rank {each}" for each in numbers[:RANKS_SHOWN_MAX])
    return f"{listed} and {more} more" if more > 0 else listed


def cannot_end(
    rank: int, what: str, collective: OpenCollective, waited_s: float
) -> ParamServeError:
    """The error of a wait for ranks that wait in a collective for this one."""
    call, verb = call_of(collective.op), "wait" if len(collective.waiting) > 1 else "waits"
    return TIMEOUTS.get(what, PushTimeout)(
        f"{what} cannot end: rank {rank} has waited {waited_s:.1f} s for "
        f"{ranks(collective.waiting)}, which {verb} in {call} for {ranks(collective.missing)}",
        applied="no" if what in READS else "unknown",
        fix=f"call {call} at the same point on all ranks, after the same number of steps; in a "
        "loop that begins at worker.clock ask for it behind the calls of the setup",
    )


def knob_of(busy: bool) -> str:
    """What limits a wait whose call names no limit: for ranks that live and are busy, or not."""
    field = "busy_s" if busy else "request_s"
    return f"deadlines=ps.Deadlines({field}=...) of the engine or ps.connect"


def up_to(limit_s: float, knob: str) -> str:
    """How long a wait may last, for a warning, and what changes it."""
    return f"waits up to {limit_s:.0f} s (change it with {knob})"


def _knob(busy: Collection[int] | None) -> str:
    """What has limited a wait."""
    if busy is None:
        return "call"
    return "busy" if busy else "request"


def timed_out(
    exchange: Exchange,
    rank: int,
    what: str,
    group: int | None,
    waited_s: float,
    busy: Collection[int] | None = None,
) -> ParamServeError:
    """The error of a wait that has failed; asks the shards who is missing.

    Args:
        busy: where no call has said how long: the ranks that were waited for.
    """
    reasons = []
    if group is not None:
        for waiting in exchange.inquire(group, INQUIRE_S):
            who = ", ".join(f"worker {rank} (at clock {c})" for rank, c in waiting.missing)
            reasons.append(f"{waiting.reason}: {who}" if who else waiting.reason)
    why = "; ".join(dict.fromkeys(reasons)) or "the servers did not answer"
    who = f"rank {rank}" if rank != NO_RANK else "the client"
    return TIMEOUTS.get(what, PushTimeout)(
        f"{what} timed out: {who} waited {waited_s:.1f} s; {why}",
        applied="no" if what in READS else "unknown",
        fix=f"look at the workers or servers named, or raise {KNOBS[_knob(busy)]}; calling "
        "result() of a ticket again waits on and repeats nothing",
    )

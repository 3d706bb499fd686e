"""Why a client's request waits in a group, and for which ranks: what a shard answers to `Inquire`.

It decides nothing and changes nothing.
"""

from __future__ import annotations

from paramserve.consistency.base import Pull, Wait
from paramserve.core import policy_calls
from paramserve.core.decisions import LEAD
from paramserve.core.group_state import GroupState
from paramserve.core.shard_sessions import ReadRequest, Request, ShardSession
from paramserve.errors import PolicyFailed
from paramserve.messages import Read, Step, Waiting


def waiting(
    state: GroupState,
    session: ShardSession | None,
    request: Request | ReadRequest | None,
    *,
    shard: int,
) -> Waiting:
    """What a client waits for on one shard.

    Args:
        session: the client's, if something of it waits for the group and is not collected.
        request: that, or the first read of it.
        shard: number of this shard.
    """
    reason, ranks = _why(state, session, request, shard)
    clocks = state.members.clocks
    missing = tuple((rank, clocks[rank]) for rank in ranks if rank in clocks)
    holds = bool(state.collect.pending) or request is not None
    holds = holds and bool(missing) and not state.at(state.committed).policy.partial
    return Waiting(state.id, state.members.slowest, missing, reason, holds)


def _why(
    state: GroupState,
    session: ShardSession | None,
    request: Request | ReadRequest | None,
    shard: int,
) -> tuple[str, tuple[int, ...]]:
    """The reason in words, and the ranks that are waited for."""
    if session is not None and request is not None:
        step = request.message
        if not isinstance(step, Step | Read):
            return (
                f"shard {shard} waits for the decision of shard {LEAD} whether "
                f"rank {session.rank} is a member",
                (),
            )
        if state.changes.paused is not None:
            return (
                f"shard {shard} waits for the change of policy on shard {LEAD}",
                (),
            )
        clock = step.clock + (isinstance(step, Step) and step.tick)
        epoch = state.at(clock)
        try:
            answer = policy_calls.on_pull(epoch, Pull(session.rank, clock), state)
        except PolicyFailed as error:
            return error.failed, ()
        name = type(epoch.policy).__name__
        return f"{name} does not let worker {session.rank} read at clock {clock} yet", (
            answer.workers if isinstance(answer, Wait) else ()
        )
    collect = state.collect
    if collect.last_vote is not None:
        return f"shard {shard} waits for the decision of shard {LEAD}", ()
    if collect.pending:
        absent = tuple(rank for rank in sorted(state.members.clocks) if rank not in collect.pending)
        return "the clock waits for its slowest workers", collect.missing or absent
    slow = tuple(r for r, c in sorted(state.members.clocks.items()) if c == state.members.slowest)
    return "nothing is held here", slow

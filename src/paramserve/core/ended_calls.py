"""What a shard does with the calls of ranks that have ended: whole where it has begun to collect.

A worker may end while the first step of a call is collected, and the others wait behind it in its
session. Its next incarnation goes on behind the steps that all shards have collected. So the shard
collects the rest of that call at once, and refuses all further requests of the session.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserve.core.group import GroupMachine
from paramserve.core.group_state import GroupState
from paramserve.core.shard_sessions import Request, ShardSession
from paramserve.messages import Step


class EndedCalls:
    """The calls of the ranks that have ended, on one shard.

    Args:
        groups: of the shard, by number.
    """

    def __init__(self, groups: Mapping[int, GroupMachine]) -> None:
        self._groups = groups

    def collect(self, session: ShardSession, now: float) -> None:
        """A session is fenced: where the step that it holds is collected, collect what it has sent
        of the same call for other clocks."""
        last = session.held
        if last is None or type(last.message) is not Step or not self._has(last.message):
            return
        step = last.message
        for request in session.queue:
            following = request.message
            if step.more is None or type(following) is not Step:
                return
            step, machine = following, self._groups.get(following.group)
            if machine is None or not (step.tick and machine.state.at(step.clock).policy.collects):
                continue  # it is made again
            if not can_collect(machine.state, session.rank, step):
                return
            answer = machine.step(session, request, now)
            assert answer is None, "a step that is collected is answered by its commit"
            session.held = last

    def hold(self, session: ShardSession, request: Request) -> Step:
        """The turn of a request of a fenced session has come: hold it, if it is a step that is
        collected.

        Raises:
            WorkerFenced: it is not. It says whether a clock has had it.
        """
        step = request.message
        if type(step) is not Step or not self._has(step):
            error = session.fenced()
            error.applied = "yes" if step.seq in session.counted else "no"
            raise error
        if step.push and (step.leaves or session.left_out):
            session.pushed = step
        session.held = request
        return step

    def _has(self, step: Step) -> bool:
        machine = self._groups.get(step.group)
        return machine is not None and machine.state.collect.has_step(step)


def can_collect(state: GroupState, rank: int, step: Step) -> bool:
    """Whether a step for a clock of a group can be collected now."""
    collects = rank in state.members.clocks and rank not in state.collect.pending
    return collects and step.clock == state.committed and state.changes.paused is None

"""What clients have left out of their gradients is flushed before the cut for a checkpoint.

A client adds its residual (`client.encoding`) to a gradient that goes whole: then a residual of
zero remains, and nothing of it has to be in a checkpoint. Shard 0 asks for that in its answers
(`Done.flush`), and takes the cut when it is done, or after `limit_s` without.

Where gradients are collected, the request names a clock that no member has sent yet as far as shard
0 knows (a later one where that proves wrong). It stops behind it when all whose gradients it has
were flushed: since no clock is decided without the vote of every shard, the cut has no step behind
the flush. Elsewhere a client goes on, and what it leaves out between its flush and the cut is lost
for a run that goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserve.core.group import GroupMachine
from paramserve.core.shard_sessions import Answer, Sessions, ShardSession
from paramserve.messages import Done, Step

FLUSH_LIMIT_S = 30.0
"""A cut waits for a flush no longer where steps are fast: a worker may be between two loops."""
FLUSH_STEPS = 6
"""Steps that a slow cluster waits for: a flush is made in the second one, or in the sixth where
workers send four ahead."""
FLUSH_LIMIT_MAX_S = 240.0
"""And no longer, however slow they are: one that stands still keeps no checkpoint from its run."""
AHEAD_LIMIT_S = 0.5
"""Shard 0, which has stopped behind a flush, begins the cut by then."""
NO_GROUP = -1
"""Number instead of a group's: the next step of each client is flushed."""


def feeding_back(sessions: Sessions) -> list[ShardSession]:
    """Sessions of workers that may still step and have left something out of their gradients."""
    own = sessions.workers.values()
    return [each for each in own if each.live and each.fenced_by is None and groups_left(each)]


def groups_left(session: ShardSession) -> set[int]:
    """Groups whose gradients lack something, also by an applied step that waits to read."""
    pushed, applied = session.pushed, session.applied
    if pushed is None or not pushed.leaves or applied is None or applied.skipped:
        return session.left_out
    return session.left_out | {pushed.group}


def limit_s(sessions: Sessions) -> float:
    """How long a cut waits for a flush, at the pace of the slowest that is to make one."""
    slowest_s = max((each.step_s for each in feeding_back(sessions)), default=0.0)
    return min(max(FLUSH_LIMIT_S, FLUSH_STEPS * slowest_s), FLUSH_LIMIT_MAX_S)


def ranks_left(sessions: Sessions) -> tuple[int, ...]:
    """The ranks that have, also of workers that have ended and not come again."""
    here = {rank for rank, each in sessions.workers.items() if groups_left(each)}
    return tuple(sorted(here | sessions.left_behind))


class Flush:
    """Shard 0's side of one.

    Args:
        number: higher than of all before.
        until: when the cut is taken without it.
    """

    def __init__(
        self, number: int, until: float, sessions: Sessions, groups: Mapping[int, GroupMachine]
    ) -> None:
        self.number = number
        self.until = until
        self.request = (number, NO_GROUP, 0)
        """Flush as answers carry it; see `Done.flush`."""
        self._sessions = sessions
        self._groups = groups
        self._clocks_before: dict[int, int] = {}
        """Clock of each group when a request was last made."""
        self._ask(1)

    def _ask(self, ahead: int) -> None:
        """Name the group that collects, has something left out and has stepped most since the last
        request, and a clock so far ahead."""
        clocks, before = self._clocks(), self._clocks_before
        self._clocks_before = clocks
        if clocks:
            group = max(sorted(clocks), key=lambda n: clocks[n] - before.get(n, clocks[n]))
            self.request = self.number, group, clocks[group] + ahead
        else:
            self.request = self.number, NO_GROUP, 0

    def _clocks(self) -> dict[int, int]:
        """Clocks of the groups that collect and have something left out."""
        having = {group for each in feeding_back(self._sessions) for group in groups_left(each)}
        states = [self._groups[number].state for number in having & self._groups.keys()]
        return {state.id: state.committed for state in states if state.collects}

    def _is_passed_over(self, group: int) -> bool:
        """Whether another group steps, and this one does not: no worker may step it any more."""
        clocks, before = self._clocks(), self._clocks_before
        moved = any(clocks[n] > before.get(n, clocks[n]) + 1 for n in clocks)
        return moved and clocks.get(group) == before.get(group)

    def is_over(self) -> bool:
        """Whether there is nothing to wait for, outside of a commit that stops the shard. Where the
        clock has passed without that, as a member had sent it before it heard, a later one is
        named.
        """
        feeding = feeding_back(self._sessions)
        _, group, clock = self.request
        if group == NO_GROUP:
            return all(each.flushed == self.number for each in feeding)
        if not feeding or group not in self._groups:
            return True
        state = self._groups[group].state
        if not state.collects or state.committed > clock or self._is_passed_over(group):
            self._ask(self._sessions.window())
        return False


def note(session: ShardSession, step: Step, answer: Answer, now: float) -> None:
    """Remember of a step that is answered whether its client keeps something that is left out, and
    how long it took: the longest, of which one that was long ago counts less."""
    took_s, session.stepped_at = now - session.stepped_at, now
    session.step_s = max(took_s, session.step_s - took_s / 2)
    done = answer.message
    if type(done) is Done and done.seq == step.seq and not done.skipped:
        session.flushed = step.flush or session.flushed
        if step.leaves:
            session.left_out.add(step.group)
        else:
            session.left_out.discard(step.group)

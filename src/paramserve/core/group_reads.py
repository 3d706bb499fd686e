"""Reads of one group on one shard: which wait for its policy, and what is kept of others."""

from __future__ import annotations

from collections.abc import Sequence

from paramserve.consistency.base import ADMIT, Wait, new_pull
from paramserve.core import policy_calls, stepping
from paramserve.core.block import ShardBlock
from paramserve.core.group_state import GroupState
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.replies import Replies
from paramserve.core.shard_sessions import Answer, ReadRequest, ShardSession
from paramserve.messages import ReadTarget, Values


class GroupReads:
    """The reads of one group.

    Attributes:
        waiting: by client, sessions with reads that wait for this group.
    """

    def __init__(self, state: GroupState, replies: Replies) -> None:
        self.waiting: dict[int, ShardSession] = {}
        self._state = state
        self._replies = replies

    def answer(self, session: ShardSession, request: ReadRequest) -> Answer | None:
        """Answer a read; None: the group's policy lets it wait.

        Raises:
            ParamServeError, ValueError, TypeError, MemoryError: why it is refused.
        """
        state, rank, message = self._state, session.rank, request.message
        if state.table is not None:
            state.table.clock = state.members.slowest
        stepping.check_reads(state, message.pull, request.memory)
        clock, changes = message.clock, state.changes
        waits = changes.paused is not None and rank >= 0 and clock >= changes.paused.clock
        if not waits and rank in state.members.clocks:
            epoch = state.at(clock) if changes.later else changes.first
            admission = policy_calls.on_pull(epoch, new_pull((rank, clock)), state)
            waits = admission is not ADMIT and isinstance(admission, Wait)
            if not waits and (epoch.policy.keeps_reads or state.reads.by_rank):
                self.keep(epoch, rank, message.pull)
        if waits:
            self.waiting[session.client] = session
            return None
        values = Values(message.seq, state.version, state.members.slowest)
        return self._replies.with_values(state.blocks, request, values)

    def keep(self, epoch: PolicyEpoch, rank: int, pull: Sequence[ReadTarget]) -> None:
        """Keep copies of what a worker reads now, if its policy asks for them."""
        state = self._state
        if epoch.policy.keeps_reads:
            blocks = [state.blocks[place.block] for place in pull]
            dense = [block for block in blocks if isinstance(block, ShardBlock)]
            state.reads.keep(rank, state.version, dense)
        else:
            state.reads.forget(rank)

    def take_waiting(self) -> list[ShardSession]:
        """The sessions whose reads are to be tried again."""
        waiting = list(self.waiting.values())
        self.waiting = {}
        return waiting

    def first_of(self, client: int) -> tuple[ShardSession, ReadRequest] | None:
        """The oldest read of a client that waits for this group."""
        session = self.waiting.get(client)
        for each in () if session is None else session.reads:
            if each.message.group == self._state.id:
                return self.waiting[client], each
        return None

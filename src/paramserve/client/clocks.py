"""A client's clocks: how far it is in each group, and by which policy it steps there.

Its own steps say so, and what the shards' answers say besides. Nothing is sent from here.
"""

from __future__ import annotations

import threading
from collections import deque

from paramserve.consistency.registry import PolicyTraits
from paramserve.core.client_membership import ClientMembership
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.messages import GroupPolicy


class ClientClocks:
    """The part of `steps.Steps` that knows how far this client is.

    `clocks` counts the ended steps by group name; `membership` says where its rank is a member.

    What answers say besides counts as soon as they are read, by whichever thread: a clock with
    which the worker goes on, another policy, that it is to end.
    """

    def __init__(self, terms: GroupTraits) -> None:
        self.clocks: dict[str, int] = {}
        self.membership = ClientMembership(self.collects_now, self.waits_now)
        self.missed_by: dict[str, int] = {}
        """Clocks of each group that the others ended without this client."""
        self.retiring = False
        """Whether the run wants this worker to end."""
        self.clock_read = False
        """Whether the program has asked how far its rank is: it can go on from there."""
        self._groups_reported_pending = deque[str]()
        """Groups where a shard has said that this rank is no member; taken before the next step, by
        the thread that holds the client's lock."""
        self._terms = terms
        self._reply_lock = threading.Lock()
        """Guards clocks and terms: a thread that reads an answer lacks the client's lock."""

    @property
    def missed(self) -> int:
        """Clocks that this client had no part in, of all groups."""
        return sum(self.missed_by.values())

    def _apply_reply_state(self, operation: Operation, group: str | None, after: int) -> None:
        """Take what the answers say besides; of a step (`group`) also where it goes on.

        Args:
            after: the clock after it, as this client knows.
        """
        replies = operation.replies.values()
        with self._reply_lock:
            for reply in replies:
                self.retiring = self.retiring or reply.retire
                for news in reply.news:
                    self._terms.changed(news)
            if group is None:
                return
            own = max(self.clocks.get(group, 0), after)
            at = max((reply.at for reply in replies), default=-1)
            if any(reply.pending for reply in replies):
                self._groups_reported_pending.append(group)
            if at > own and any(reply.skipped for reply in replies):
                self.missed_by[group] = self.missed_by.get(group, 0) + at - own
            self.clocks[group] = max(own, at)

    def _take_reported_pending(self) -> None:
        while self._groups_reported_pending:
            self.membership.mark_pending(self._groups_reported_pending.popleft())

    def _join_at(self, block: Block, clock: int, late: bool) -> None:
        """Go on at the clock at which the shards say that this rank joins. Where gradients are
        collected it may be an earlier one than this client has counted: a step of it was in none.

        Args:
            late: whether it was no member.
        """
        with self._reply_lock:
            own = self.clocks.get(block.group_name, 0)
            exact = late and self._terms.at(block.group, clock).collects
            self.clocks[block.group_name] = clock if exact else max(own, clock)

    def advance_to(self, group: str, clock: int) -> None:
        """Advance this client's clock of a group to this one, unless it is there or further."""
        with self._reply_lock:
            if clock > self.clocks.get(group, 0):
                self.clocks[group] = clock

    def learn(self, news: GroupPolicy) -> None:
        """Take over a group's policy that has changed, as a shard has told."""
        with self._reply_lock:
            self._terms.changed(news)

    def traits_of(self, block: Block) -> PolicyTraits:
        """What holds for this client's next step of a block's group."""
        return self._terms.at(block.group, self.clocks.get(block.group_name, 0))

    def collects_now(self, block: Block) -> bool:
        """Whether the gradients of this client's next step of a block's group are collected."""
        return self.traits_of(block).collects

    def waits_now(self, block: Block) -> bool:
        """Whether members of a block's group may be waited for, in this client's next step."""
        return self.traits_of(block).waits

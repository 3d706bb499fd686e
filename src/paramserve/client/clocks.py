"""A client's clocks: how far it is in each group, by whose terms it steps there, who waits for it.

Its own steps say so, and what the shards' answers say besides. Nothing is sent from here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from paramserve.consistency.registry import PolicyTraits
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.session import Operation
from paramserve.messages import CURRENT_CLOCK, GroupPolicy


class ClientClocks:
    """The part of `steps.Steps` that knows how far this client is.

    `clocks` counts the ended steps by group name.

    What answers say besides counts as soon as they are read, by whichever thread: a clock with
    which the worker goes on, another policy, that it is to end.
    """

    def __init__(self, terms: GroupTraits) -> None:
        self.clocks: dict[str, int] = {}
        self.missed = 0
        """Clocks that this client had no part in, because the others went on without it."""
        self.retiring = False
        """Whether the run wants this worker to end."""
        self._came_late: set[str] = set()
        """Groups that were there before this worker, which has not entered them yet."""
        self._came_back: set[str] = set()
        """Groups that went on without this worker's rank, which counts there again, before its
        first step."""
        self._resting: dict[str, int] = {}
        """The groups where it rests, and since which of its rests: those that follow each other
        without a step in between are one."""
        self._rests = 0
        self._rested = False
        """Whether nothing was stepped since the last rest."""
        self._asking: dict[str, int] = {}
        """By group where this client does not know its clock: its steps that are on their way, and
        whose answers say it."""
        self._stepped: dict[str, int] = {}
        """Groups that collect and that this client has ended a step of, numbered in the order in
        which they first came."""
        self._terms = terms
        self._heard_lock = threading.Lock()
        """Of clocks and terms: a thread that reads an answer does not hold the client's lock."""

    def is_pending(self, group: str) -> bool:
        """Whether nobody waits for this worker in a group: it came late there, or rests."""
        return group in self._resting or group in self._came_late

    @property
    def _may_be_pending(self) -> bool:
        return bool(self._came_late or self._resting)

    def came_late(self, group: str) -> None:
        """The others were in a group first: nobody waits for this worker until it enters."""
        self._came_late.add(group)

    def came_back(self, group: str) -> None:
        """The rank counts again where the others went on without it: a clock may be under way that
        is decided without it."""
        self._came_back.add(group)

    def _ask_first_clocks(self, blocks: Sequence[Block]) -> None:
        """Before the first steps of a rank that has come back: where a policy waits for all, their
        clock is what the shards say, and none of them is too late."""
        for each in blocks:
            if each.group_name in self._came_back:
                self._came_back.discard(each.group_name)
                policy = self.traits_of(each).policy
                if policy is not None and policy.collects and not policy.partial:
                    self._ask_clock(each.group_name)

    def rests(self, group: str) -> None:
        """The shards have been told that this worker rests in a group, until it enters again."""
        self._rests += not self._rested
        self._rested = True
        self._resting[group] = self._rests

    def _entered(self, group: str) -> None:
        """This worker is waited for in a group from now on."""
        self._came_late.discard(group)
        self._resting.pop(group, None)

    def _ask_clock(self, group: str) -> None:
        """This worker's clock of a group is what the shards say: it does not know."""
        with self._heard_lock:
            self._asking.setdefault(group, 0)

    def _clock_of_step(self, group: str, tick: bool) -> int:
        """What a step that is about to be sent says of its clock."""
        if not tick or group not in self._asking:
            return self.clocks.get(group, 0)
        with self._heard_lock:
            self._asking[group] = self._asking.get(group, 0) + 1
        return CURRENT_CLOCK

    def _hear(self, operation: Operation, group: str | None, after: int) -> None:
        """Take what the answers say besides; of a step (`group`) also where it goes on.

        Args:
            after: the clock after it, as this client knows; or `CURRENT_CLOCK`.
        """
        replies = operation.replies.values()
        with self._heard_lock:
            for reply in replies:
                self.retiring = self.retiring or reply.retire
                for news in reply.news:
                    self._terms.changed(news)
            if group is None:
                return
            own = max(self.clocks.get(group, 0), after)
            at = max((reply.at for reply in replies), default=-1)
            if at > own:
                self.clocks[group] = at
                known = group not in self._asking and not self.is_pending(group)
                if any(reply.skipped for reply in replies) and known:
                    self.missed += at - own
            if after == CURRENT_CLOCK and group in self._asking:
                self._asking[group] -= 1
                if not self._asking[group] and at >= 0:
                    del self._asking[group]

    def go_on(self, group: str, clock: int) -> None:
        """This client's clock of a group is at least this from now on."""
        with self._heard_lock:
            if clock > self.clocks.get(group, 0):
                self.clocks[group] = clock

    def learn(self, news: GroupPolicy) -> None:
        """A group's policy has changed, as a shard has told."""
        with self._heard_lock:
            self._terms.changed(news)

    def traits_of(self, block: Block) -> PolicyTraits:
        """What holds for this client's next step of a block's group."""
        return self._terms.at(block.group, self.clocks.get(block.group_name, 0))

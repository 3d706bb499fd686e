"""The cluster's log of decisions: shard 0 appends, every shard applies in order.

What shards have to agree on is a numbered entry: a clock's commit, a group's members, a group's
policy. Shard 0, the lead, appends the entry, applies it and sends it to the others (`LogEntry`).
They apply entries in the order of the numbers, so that whatever an entry presumes, such as the
clock before it or the members by whose votes it was decided, is the same on every shard.

Messages may be lost, repeated or overtake each other. Each shard acknowledges the highest entry
that it has applied: in its votes, and by `Acknowledge` where no vote is due. After `resend_s` the
lead repeats the entries that a shard has not acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from paramserve.core.events import GroupEffect, Send
from paramserve.messages import Acknowledge, Commit, Decision, LogEntry

LEAD = 0
"""The shard that decides."""
EARLY_MAX = 256
"""A shard keeps entries that overtook others up to so many numbers ahead; the lead sends the others
again."""


class DecisionLog:
    """The log on one shard.

    What the lead keeps is bounded by the time after which the coordinator gives a silent server up:
    until then a shard lacks at most one commit of each group, and a change of the members for each
    rank that comes or goes.

    Args:
        shard: number of this shard, of `shards`.
        resend_s: after which an entry that a shard does not acknowledge is sent again.
        outbox: takes what the shard is to send.
        allows: whether an entry may be applied now.
        apply: applies an entry.
    """

    def __init__(
        self,
        shard: int,
        shards: int,
        resend_s: float,
        outbox: deque[GroupEffect],
        *,
        allows: Callable[[Decision], bool],
        apply: Callable[[Decision], None],
    ) -> None:
        self.leads = shard == LEAD
        self.number = 0
        """Number of the last entry that was applied here."""
        self.deadline: float | None = None
        """When `deadline_reached` is to be called on the lead."""
        self._shard = shard
        self._resend_s = resend_s
        self._outbox = outbox
        self._allows = allows
        self._apply = apply
        self._highest = {each: 0 for each in range(shards) if self.leads and each != LEAD}
        """Highest entry that each shard is known to have applied, on the lead."""
        self._pending: dict[int, tuple[Decision, float]] = {}
        """Entries that some shard has not acknowledged, in order, on the lead, and when each is to
        be sent again."""
        self._early: dict[int, Decision] = {}
        """Entries that have arrived and are not applied, on the other shards."""

    def append(self, decision: Decision, now: float) -> None:
        """Decide for all shards, on the lead."""
        self.number += 1
        if self._highest:
            repeat_at = now + self._resend_s
            self._pending[self.number] = decision, repeat_at
            message = LogEntry(self.number, decision)
            self._outbox.extend([Send(shard, message) for shard in self._highest])
            if self.deadline is None:
                self.deadline = repeat_at
        self._apply(decision)

    def on_acknowledge(self, shard: int, number: int) -> None:
        """Note on the lead that a shard has applied the entries up to this one."""
        highest = self._highest.get(shard)
        if highest is None or not highest < number <= self.number:
            return
        self._highest[shard] = number
        least = min(self._highest.values())
        while self._pending and (first := next(iter(self._pending))) <= least:
            del self._pending[first]

    def on_entry(self, message: LogEntry) -> None:
        """Take an entry, on another shard than the lead.

        Raises:
            ProtocolError: this shard cannot apply it. It applies none behind it.
        """
        if self.leads:
            return
        if message.number <= self.number:
            self._acknowledge()
        elif message.number <= self.number + EARLY_MAX:
            self._early[message.number] = message.decision
            self.go_on()

    def go_on(self) -> None:
        """Apply the entries whose turn it is, and that are allowed now.

        Raises:
            ProtocolError: as `on_entry`.
        """
        early, number = self._early, self.number
        votes = True
        while (entry := early.get(self.number + 1)) is not None and self._allows(entry):
            self.number += 1
            del early[self.number]
            votes = votes and type(entry) is Commit
            self._apply(entry)
        if self.number > number and not votes:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self._outbox.append(Send(LEAD, Acknowledge(self._shard, self.number)))

    def deadline_reached(self, now: float) -> None:
        """Repeat on the lead what shards have not acknowledged."""
        if self.deadline is None or self.deadline > now:
            return
        for number, (decision, repeat_at) in self._pending.items():
            if repeat_at <= now:
                self._pending[number] = decision, now + self._resend_s
                behind = [each for each, highest in self._highest.items() if highest < number]
                self._outbox.extend([Send(shard, LogEntry(number, decision)) for shard in behind])
        times = [repeat_at for _, repeat_at in self._pending.values()]
        self.deadline = min(times, default=None)

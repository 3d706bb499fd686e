from __future__ import annotations

from collections import deque

import pytest
from tests.suites import each_case

from paramserve.core.decisions import EARLY_MAX, LEAD, DecisionLog
from paramserve.core.events import GroupEffect, Send
from paramserve.messages import (
    Acknowledge,
    Commit,
    Decision,
    GroupMembership,
    LogEntry,
    PeerMessage,
)

RESEND_S = 0.5


def commit(clock: int) -> Commit:
    return Commit(0, clock, (1,), 1.0)


MEMBERS = GroupMembership(0, ((0, 1, 1, 0),))


class Logs:
    """The logs of some shards, and what is on its way between them."""

    def __init__(self, shards: int = 2) -> None:
        self.now = 0.0
        self.wire: list[tuple[int, PeerMessage]] = []
        self.applied: list[list[Decision]] = [[] for _ in range(shards)]
        self.stops: set[int] = set()
        """Shards that may apply nothing."""
        self.logs = [self._log(shard, shards) for shard in range(shards)]

    def _log(self, shard: int, shards: int) -> DecisionLog:
        self._outbox = deque[GroupEffect]()
        return DecisionLog(
            shard,
            shards,
            RESEND_S,
            self._outbox,
            allows=lambda decision: shard not in self.stops,
            apply=self.applied[shard].append,
        )

    def send(self) -> list[tuple[int, PeerMessage]]:
        """What the logs send."""
        for log in self.logs:
            for effect in log._outbox:
                assert isinstance(effect, Send)
                self.wire.append((effect.shard, effect.message))
            log._outbox.clear()
        return self.wire

    def append(self, decision: Decision) -> None:
        self.logs[LEAD].append(decision, self.now)
        self.send()

    def deliver(self) -> None:
        while self.wire:
            shard, message = self.wire.pop(0)
            if isinstance(message, LogEntry):
                self.logs[shard].on_entry(message)
            else:
                assert isinstance(message, Acknowledge)
                self.logs[shard].on_acknowledge(message.shard, message.number)
            self.send()

    def wait(self) -> None:
        """Let the lead's deadline pass."""
        self.now += RESEND_S
        self.logs[LEAD].deadline_reached(self.now)
        self.send()


def test_every_shard_applies_all_decisions_in_their_order() -> None:
    one = Logs(3)
    decisions = [commit(0), MEMBERS, commit(1)]
    for each in decisions:
        one.append(each)
    one.wire.reverse()
    one.deliver()
    assert one.applied == [decisions] * 3


def test_decision_that_comes_twice_is_applied_once_and_acknowledged_again() -> None:
    one = Logs()
    one.append(commit(0))
    one.wire *= 2
    one.deliver()
    assert one.applied[1] == [commit(0)]
    one.wait()
    assert one.wire == [], "the second one was acknowledged"
    assert one.logs[LEAD].deadline is None


def test_lost_decisions_are_repeated_until_they_are_acknowledged() -> None:
    one = Logs(3)
    first, second = MEMBERS, GroupMembership(0, ())
    one.append(first)
    one.append(second)
    one.wire = [each for each in one.wire if each[0] == 1]
    one.deliver()
    one.wait()
    assert one.wire == [(2, LogEntry(1, first)), (2, LogEntry(2, second))]
    one.wire.pop()
    one.deliver()
    one.wait()
    assert one.wire == [(2, LogEntry(2, second))]
    one.deliver()
    assert one.applied == [[first, second]] * 3
    one.wait()
    assert (one.wire, one.logs[LEAD].deadline) == ([], None)


def test_commit_is_acknowledged_by_the_next_vote_other_decisions_at_once() -> None:
    one = Logs()
    one.append(commit(0))
    one.logs[1].on_entry(LogEntry(1, commit(0)))
    assert not one.logs[1]._outbox
    one.logs[1].on_entry(LogEntry(2, MEMBERS))
    assert list(one.logs[1]._outbox) == [Send(LEAD, Acknowledge(1, 2))]


def test_decision_is_not_repeated_before_its_time() -> None:
    one = Logs()
    one.append(commit(0))
    one.now = RESEND_S - 0.1
    one.append(commit(1))
    one.wire = []
    one.now = RESEND_S
    one.logs[LEAD].deadline_reached(one.now)
    assert one.send() == [(1, LogEntry(1, commit(0)))]


def test_shard_that_stops_applies_what_has_come_when_it_goes_on() -> None:
    one = Logs()
    one.stops.add(1)
    one.append(MEMBERS)
    one.append(commit(0))
    one.deliver()
    assert one.applied[1] == []
    one.wait()
    assert one.wire, "it is not acknowledged"
    one.deliver()
    one.stops.clear()
    one.logs[1].go_on()
    assert one.applied[1] == [MEMBERS, commit(0)]
    assert one.send() == [(LEAD, Acknowledge(1, 2))]


def test_decisions_far_ahead_are_not_kept() -> None:
    one = Logs()
    one.logs[1].on_entry(LogEntry(EARLY_MAX + 1, MEMBERS))
    assert not one.logs[1]._early
    one.logs[1].on_entry(LogEntry(EARLY_MAX, MEMBERS))
    assert one.logs[1]._early
    assert one.applied[1] == []


@each_case(("shard", "number"), [(1, 5), (7, 1), (LEAD, 1), (-1, 1)])
def test_acknowledgement_of_what_is_not_there_changes_nothing(shard: int, number: int) -> None:
    one = Logs()
    one.append(commit(0))
    one.wire = []
    one.logs[LEAD].on_acknowledge(shard, number)
    one.wait()
    assert one.wire == [(1, LogEntry(1, commit(0)))]


def test_lead_takes_no_decision_from_another_shard() -> None:
    one = Logs()
    one.logs[LEAD].on_entry(LogEntry(1, MEMBERS))
    assert (one.applied[LEAD], one.logs[LEAD].number, one.send()) == ([], 0, [])


def test_only_shard_keeps_nothing() -> None:
    one = Logs(1)
    one.append(commit(0))
    assert one.applied == [[commit(0)]]
    assert (one.wire, one.logs[LEAD].deadline) == ([], None)


def test_decision_that_cannot_be_applied_holds_those_behind_it() -> None:
    one = Logs()
    log = one.logs[1]

    def refuse(decision: Decision) -> bool:
        raise ValueError("no such policy")

    log._allows = refuse
    for number in (1, 2):
        with pytest.raises(ValueError, match="no such policy"):
            log.on_entry(LogEntry(number, MEMBERS))
    assert (log.number, one.applied[1]) == (0, [])

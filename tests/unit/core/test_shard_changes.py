"""How all shards change a group's policy, at one clock."""

from __future__ import annotations

from dataclasses import dataclass

from tests.suites import each_case
from tests.unit.core.group_rig import SUM, A, B, change, push, rig, switched
from tests.unit.core.rig import RESEND_S, Rig, block_spec, done, refused

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.consistency.registry import spec
from paramserve.core.events import ClientBye, CutWanted, DeadlineReached, FromShard
from paramserve.messages import Done, LogEntry, Pause, SetPolicy, Switch


@dataclass(frozen=True)
class Unregistered(Policy):
    """Policy that no server has registered."""


@each_case("shards", [1, 2])
def test_change_from_async_to_sync_holds_from_one_clock_on_on_all_shards(shards: int) -> None:
    one = rig(Async(), shards=shards, workers=2)
    push(one, A)
    push(one, A, 1, 0)
    change(one, SUM)
    assert switched(one) == [6] * shards, "clock 2 was not begun, and 4 steps may be on the way"
    if shards > 1:
        push(one, A, 1, 1)
    for clock in range(2, 6):
        push(one, A, clock)
    assert one.value() == [6.0], "A goes on as before"
    push(one, A, 6)
    for clock in range(6):
        push(one, B, clock)
    one.deliver()
    assert [one.value(shard=shard) for shard in range(shards)] == [[12.0]] * shards
    push(one, B, 6)
    one.deliver()
    assert [one.value(shard=shard) for shard in range(shards)] == [[14.0]] * shards
    assert one.shards[0].groups[0].state.committed == 7


def test_change_in_the_middle_of_a_synchronous_clock_waits_for_its_end() -> None:
    one = rig(SUM, shards=2, workers=2)
    push(one, A, 0, 0)
    change(one, Async())
    (clock,) = set(switched(one))
    assert clock == 5
    push(one, A, 0, 1)
    push(one, B)
    one.deliver()
    for number in range(1, clock):
        push(one, A, number)
        assert one.value() == [2.0 * number]
        push(one, B, number)
        one.deliver()
    push(one, A, clock)
    assert [one.value(shard=shard) for shard in (0, 1)] == [[11.0], [11.0]]


def test_change_is_told_once_to_each_client_before_its_clock() -> None:
    one = rig(Async(), workers=2)
    change(one, BoundedStaleness(0))
    push(one, A)
    push(one, A, 1)
    told = [message.news for message in one.answers(A) if isinstance(message, Done)]
    assert [len(news) for news in told[-2:]] == [1, 0]
    assert told[-2][0].clock == 4
    assert told[-2][0].policy.name == "BoundedStaleness"


def test_change_lost_messages_are_repeated_until_all_shards_know() -> None:
    one = rig(Async(), shards=2, workers=1)
    one.join(9)
    for shard in (0, 1):
        done(one.send(9, SetPolicy(0, 0, spec(SUM)), shard))
    for _ in range(3):
        one.wire.clear()  # all is lost
        one.now += RESEND_S
        for shard in (0, 1):
            one.happen(DeadlineReached(), shard)
    one.deliver()
    assert switched(one) == [4, 4]


def test_change_steps_of_the_pause_wait_and_are_executed_after_it() -> None:
    one = rig(Async(), shards=2, workers=1)
    one.join(9)
    for shard in (0, 1):
        one.send(9, SetPolicy(0, 0, spec(SUM)), shard)
    kept, one.wire = one.wire, []
    assert one.step(A, {0: [1.0]}).replies == [], "the lead has paused"
    one.wire = kept
    one.deliver()
    assert one.value() == [1.0]


def test_cut_that_a_change_overtakes_on_one_shard_is_taken_again() -> None:
    one = rig(Async(), shards=2, workers=2)
    one.join(9)
    one.send(9, SetPolicy(0, 0, spec(SUM)), 1)
    push(one, B, 0, 1)
    one.happen(CutWanted(1))
    one.deliver()
    assert one.shards[1].cuts.parts_here.keys() == {1}, "shard 0 has not executed what is in it"
    one.send(9, SetPolicy(0, 0, spec(SUM)), 0)
    one.deliver()
    assert switched(one)[0] > 0
    push(one, B, 0, 0)
    one.deliver()
    assert one.shards[0].cuts.parts_here == {}
    for _ in range(10):
        one.now += RESEND_S
        for shard in (0, 1):
            one.happen(DeadlineReached(), shard)
        one.deliver()
    first, second = (shard.cuts.parts_here[2] for shard in one.shards)
    assert first.clocks == second.clocks


def test_change_that_is_under_way_lets_no_second_one_begin() -> None:
    one = rig(Async(), workers=2)
    change(one, SUM)
    error = refused(one.send(9, SetPolicy(0, 0, spec(Async()))))
    assert "about to change its policy to Sync" in str(error)
    for clock in range(5):
        push(one, A, clock)
        push(one, B, clock)
    done(one.send(9, SetPolicy(0, 0, spec(Async()))))


def test_change_to_what_cannot_be_is_refused() -> None:
    one = rig(Async(), workers=2)
    one.join(9)
    assert "backup" in str(refused(one.send(9, SetPolicy(0, 0, spec(Sync(backup=2))))))
    unknown = refused(one.send(9, SetPolicy(0, 0, spec(Unregistered()))))
    assert type(unknown).__name__ == "UnknownRule"
    push(one, A)
    assert one.value() == [1.0]


@each_case("shards", [1, 2])
def test_change_without_workers_holds_at_once(shards: int) -> None:
    one = Rig(Async(), shards=shards, workers=0)
    one.join(9)
    one.define(9, block_spec(*[(1,)] * shards, cuts=range(shards + 1)))
    change(one, Async(drop_after=0), client=8)
    push(one, 9)
    push(one, 9)
    assert one.value() == [1.0], "the second one is stale"
    change(one, Async(), client=7)
    push(one, 9)
    assert one.value() == [2.0]


def test_change_after_all_workers_have_left_holds_at_once() -> None:
    one = rig(Async(), workers=2)
    push(one, A)
    for client in (A, B):
        one.happen(ClientBye(client))
    change(one, Async(drop_after=0))
    one.join(8)
    push(one, 8)
    assert one.value() == [1.0]


def test_shard_that_has_missed_a_change_hears_of_it_although_another_has_begun() -> None:
    one = rig(Async(), shards=2, workers=1)
    one.join(9)
    for shard in (0, 1):
        done(one.send(9, SetPolicy(0, 0, spec(SUM)), shard))
    kept = []
    while one.wire:  # what the lead has decided is lost on its way to shard 1
        kept = [
            (to, message)
            for to, message in one.wire
            if to == 1 and isinstance(message, LogEntry) and isinstance(message.decision, Switch)
        ]
        one.wire = [each for each in one.wire if each not in kept]
        if one.wire:
            shard, message = one.wire.pop(0)
            one.happen(FromShard(message), shard)
    assert switched(one) == [4, -1]
    for clock in range(5):
        push(one, A, clock, 0)
    done(one.send(9, SetPolicy(0, 0, spec(Async()))))
    done(one.send(9, SetPolicy(0, 0, spec(Async())), 1))
    for _ in range(2):
        one.deliver()
        one.now += RESEND_S
        for shard in (0, 1):
            one.happen(DeadlineReached(), shard)
    one.deliver()
    assert len(set(switched(one))) == 1
    assert switched(one)[0] > 4


def test_pause_waits_for_a_cut_of_which_shard_0_may_have_its_part() -> None:
    one = rig(Async(), shards=2, workers=1)
    one.happen(CutWanted())
    one.deliver_one()
    assert one.shards[1].cuts.stops
    one.happen(FromShard(LogEntry(1, Pause(0, 1))), 1)
    changes = one.shards[1].groups[0].state.changes
    assert changes.paused is None
    one.deliver()
    assert not one.shards[1].cuts.stops
    assert changes.paused is not None

"""Who may still change something: incarnations, deaths, and news that come late."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import structs
from tests.suites import each_case
from tests.unit.core.rig import RESEND_S, Rig, block_spec, done, gathered, refused

from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.events import (
    ClientBye,
    ClientGone,
    ClientHere,
    CutWanted,
    DeadlineReached,
    FromShard,
    Inquired,
)
from paramserve.core.resumption import clocks_to_resume
from paramserve.core.shard_sessions import SESSION_KEEP_S
from paramserve.messages import (
    Commit,
    CutAt,
    Define,
    Done,
    GroupReport,
    Inquire,
    JoinGroup,
    LogEntry,
    Refused,
    SuspendMembership,
)

FIRST, OTHER, SECOND = 1, 2, 3
"""Clients: rank 0, rank 1, and rank 0 again."""


def rig(policy: object = None) -> Rig:
    one = Rig(policy if policy is not None else Async())
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    one.tell(one.members((FIRST, 1, "live"), (OTHER, 1, "live")))
    one.define(OTHER, block_spec((1,)))
    return one


@each_case("state", ["dead", "left", "restarting"])
def test_worker_that_has_ended_is_fenced(state: str) -> None:
    one = rig()
    one.tell(one.members((FIRST, 1, state), (OTHER, 1, "live")))
    error = refused(one.step(FIRST, {0: [1.0]}))
    assert type(error).__name__ == "WorkerFenced"
    assert one.value() == [0.0]
    effects = one.happen(ClientHere(FIRST, 1, 0, 4))
    assert type(effects.refused).__name__ == "WorkerFenced"
    done(one.step(OTHER, {0: [1.0]}))


def test_older_news_change_nothing() -> None:
    one = rig()
    older = one.members((FIRST, 1, "dead"), (OTHER, 1, "live"))
    one.tell(one.members((FIRST, 1, "live"), (OTHER, 1, "live")))
    one.tell(older)
    done(one.step(FIRST, {0: [1.0]}))


def test_newer_incarnation_fences_the_older_at_once() -> None:
    one = rig()
    one.join(SECOND, 0, incarnation=2)
    assert type(refused(one.step(FIRST, {0: [1.0]}))).__name__ == "WorkerFenced"
    assert one.happen(ClientHere(FIRST, 1, 0, 4)).refused is not None
    done(one.step(SECOND, {0: [1.0]}))


def test_news_from_before_a_newer_incarnation_do_not_end_it() -> None:
    one = rig()
    dead = one.members((FIRST, 1, "dead"), (OTHER, 1, "live"))
    one.join(SECOND, 0, incarnation=2)
    one.tell(dead)
    assert one.shards[0].sessions.live() == [0, 1]
    done(one.step(SECOND, {0: [1.0]}))
    one.tell(one.members((SECOND, 2, "live"), (OTHER, 1, "live")))
    done(one.step(SECOND, {0: [1.0]}, clock=1))


def test_rank_that_had_ended_joins_the_clock_under_way() -> None:
    one = rig(Sync(reduce="sum"))
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    assert done(one.send(SECOND, JoinGroup(0, 0))).at == 0
    assert one.step(SECOND, {0: [1.0]}).replies == []
    assert len(one.step(OTHER, {0: [1.0]}).replies) == 2
    assert one.value() == [2.0]


def test_join_that_reached_the_lead_holds_for_all_shards() -> None:
    one = Rig(Sync(reduce="sum"), shards=2, workers=1)
    one.join(FIRST, 0)
    one.define(FIRST, block_spec((1,), (1,), cuts=(0, 1, 2)))
    one.join(8, 7)
    both(one, FIRST, 1.0)
    assert done(one.send(8, JoinGroup(0, 0))).at == 0, "shard 0 leads"
    assert values(one) == [0.0, 0.0], "the vote of shard 1 was without rank 7"
    assert done(one.send(8, JoinGroup(0, 0), 1)).at == 0
    both(one, 8, 10.0)
    assert values(one) == [11.0, 11.0]
    assert [set(shard.groups[0].state.clocks) for shard in one.shards] == [{0, 7}, {0, 7}]


def test_join_waits_on_other_shards_for_the_decision_of_the_lead() -> None:
    one = pair()
    one.join(8, 7)
    assert one.send(8, JoinGroup(0, 0), 1).replies == []
    asked = one.happen(Inquired(8, Inquire(0)), 1).replies[0][1].message
    assert "shard 0" in asked.reason
    one.send(8, JoinGroup(0, 0), 0)
    one.deliver()
    assert one.answers(8, 1)[-1].at == 0


def test_decision_that_was_lost_is_repeated() -> None:
    one = pair()
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0), 0)
    one.wire = []
    one.send(8, JoinGroup(0, 0), 1)
    one.now += RESEND_S
    one.happen(DeadlineReached(), 0)
    one.deliver()
    assert one.answers(8, 1)[-1].at == 0
    one.now += RESEND_S
    one.happen(DeadlineReached(), 0)
    assert one.wire == [], "shard 1 has said that it knows"


def test_decision_holds_on_no_shard_before_its_clock() -> None:
    """The commit of the clock before is on its way to shard 1 when it is made."""
    one = pair()
    both(one, FIRST, 1.0)
    both(one, OTHER, 10.0)
    decide_on_one_shard(one)
    commits, one.wire = one.wire, []
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0), 0)
    one.send(8, JoinGroup(0, 0), 1)
    one.deliver()
    assert one.answers(8, 1) == [], "it is at the clock before"
    one.wire = commits
    one.deliver()
    assert one.answers(8, 1)[-1].at == 1
    assert values(one) == [11.0, 11.0]


def test_member_of_a_first_group_is_one_of_the_others_when_its_clock_is_decided() -> None:
    one = Rig(Sync(reduce="sum"), workers=1)
    one.join(FIRST, 0)
    for group in (0, 1):
        one.define(FIRST, block_spec((1,), number=group, group=group))
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0, others=(1,)))
    one.step(FIRST, {0: [1.0]})
    one.step(8, {0: [1.0]})
    one.step(FIRST, {1: [1.0]}, group=1)
    assert one.value(1) == [0.0], "it is waited for in the second group, too"
    assert done(one.send(8, JoinGroup(0, 1))).at == 0
    one.step(8, {1: [1.0]}, group=1)
    assert one.value(1) == [2.0]


def test_step_that_waits_behind_the_entrys_clock_finds_the_joiner_a_member() -> None:
    one = Rig(Sync(reduce="sum"), workers=1)
    one.join(FIRST, 0)
    for group in (0, 1):
        one.define(FIRST, block_spec((1,), number=group, group=group))
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0, others=(1,)))
    for group in (0, 1):
        one.step(FIRST, {group: [1.0]}, group=group)
    one.step(8, {0: [1.0]})
    assert one.value(1) == [0.0], "the clock of the second group waits for it"
    assert done(one.send(8, JoinGroup(0, 1))).at == 0
    one.step(8, {1: [1.0]}, group=1)
    assert one.value(1) == [2.0]


def test_rank_that_joins_is_waited_for_in_no_other_group_meanwhile() -> None:
    one = rig(Sync(reduce="sum"))
    one.define(OTHER, block_spec((1,), number=1, group=1))
    one.send(OTHER, SuspendMembership(0, 0))
    one.step(FIRST, {0: [1.0]})
    assert one.step(FIRST, {1: [1.0]}, group=1).replies == [], "it waits for the other rank"
    assert len(one.send(OTHER, JoinGroup(0, 0, others=(1,))).replies) == 2
    one.step(FIRST, {0: [1.0]}, clock=1)
    one.step(OTHER, {0: [1.0]}, clock=1)
    one.step(FIRST, {1: [1.0]}, group=1, clock=1)
    assert done(one.send(OTHER, JoinGroup(0, 1))).at == 1
    one.step(OTHER, {1: [1.0]}, group=1, clock=1)
    assert one.value(1) == [3.0]


def test_suspension_that_comes_after_the_decision_to_join_again_is_answered() -> None:
    """The lead has had both requests before the other shard has the first."""
    one = pair()
    one.send(OTHER, SuspendMembership(0, 0))
    one.send(OTHER, JoinGroup(0, 0))
    one.wire.reverse()  # the newer decision overtakes the first
    one.deliver()
    one.send(OTHER, SuspendMembership(0, 0), 1)
    one.send(OTHER, JoinGroup(0, 0), 1)
    assert [answer.at for answer in one.answers(OTHER, 1)[-2:]] == [-1, 0]


def test_rank_joins_when_every_shard_knows_that_it_is_no_member_of_what_follows() -> None:
    """Else a shard takes its step of a group that follows by its membership of before."""
    one = Rig(SUM, shards=3, workers=2)
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    entry, follows = 2, 1
    for group in (entry, follows):
        spec = block_spec((3,), number=group, group=group, cuts=(0, 1, 2, 3))
        one.define(FIRST, spec)
    for shard in range(3):
        one.send(OTHER, SuspendMembership(0, entry), shard)
    one.deliver()
    for shard in range(3):
        one.send(FIRST, JoinGroup(0, entry, others=(follows,)), shard)
    late = [
        (to, message)
        for to, message in one.wire
        if to == 1 and isinstance(message, LogEntry) and message.decision.group == follows
    ]
    assert late
    one.wire = [each for each in one.wire if each not in late]
    one.deliver()
    assert one.answers(FIRST, 1)[-1].at == -1, "it is held: the last answer is that to the define"
    one.wire = late
    one.deliver()
    assert [one.answers(FIRST, shard)[-1].at for shard in range(3)] == [0, 0, 0]


def test_what_follows_waits_for_the_ranks_own_step_where_a_clock_does_not() -> None:
    """A shard hears of the request when the lead has decided a clock without the rank."""
    one = Rig(Sync(reduce="sum", backup=1), workers=2)
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    one.define(FIRST, block_spec((1,)))
    one.define(FIRST, block_spec((1,), number=1, group=1))
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0, others=(1,)))
    for client in (FIRST, OTHER):
        one.step(client, {0: [1.0]})
    assert one.shards[0].groups[0].state.committed == 1, "without rank 7"
    assert set(one.shards[0].groups[1].state.clocks) == {0, 1}
    assert done(one.step(8, {0: [1.0]})).skipped
    assert set(one.shards[0].groups[1].state.clocks) == {0, 1, 7}


def test_step_of_a_rank_that_has_not_joined_uses_no_samples() -> None:
    one = rig()
    one.join(8, 7)
    one.step(8, {0: [1.0]}, mark=(3, 5))
    assert one.shards[0].report()[0].marks == ()


def test_join_that_is_held_when_its_rank_ends_is_refused_and_not_applied() -> None:
    one = pair()
    one.join(8, 7)
    one.send(8, JoinGroup(0, 0), 1)
    one.join(9, 7, incarnation=2)
    told = one.answers(8, 1)[-1]
    assert (told.kind, told.applied) == ("WorkerFenced", "no")


def test_client_without_a_rank_cannot_join() -> None:
    one = rig()
    one.join(9)
    assert type(refused(one.send(9, JoinGroup(0, 0)))).__name__ == "NotAMember"


def test_joiner_begins_on_all_shards_where_the_lead_has_said() -> None:
    """Though the others are further on one of them, behind the step with which it joins."""
    one = Rig(BoundedStaleness(1), shards=2, workers=1)
    one.join(FIRST, 0)
    one.define(FIRST, block_spec((1,), (1,), cuts=(0, 1, 2)))
    one.join(8, 7)
    for shard in (0, 1):
        one.send(8, JoinGroup(0, 0), shard)
    one.step(FIRST, {1: [1.0]}, shard=1)
    one.deliver()
    assert [shard.groups[0].state.clocks[7] for shard in one.shards] == [0, 0]


def test_step_of_a_rank_that_has_not_joined_changes_nothing() -> None:
    one = rig(Sync(reduce="sum"))
    for clock in range(3):
        one.step(FIRST, {0: [1.0]}, clock=clock)
        one.step(OTHER, {0: [1.0]}, clock=clock)
    one.join(8, 7)
    answer = done(one.step(8, {0: [1.0]}))
    assert (answer.skipped, answer.pending) == (True, True)
    assert one.value() == [6.0]
    assert one.shards[0].report()[0].dropped == ((7, 1),)


def test_worker_that_says_goodbye_is_waited_for_no_more() -> None:
    one = rig(Sync(reduce="sum"))
    one.step(FIRST, {0: [1.0]})
    one.happen(ClientBye(OTHER))
    assert one.value() == [1.0]
    one.tell(one.members((FIRST, 1, "live"), (OTHER, 1, "live")))
    assert one.shards[0].sessions.live() == [0], "an older membership does not restore it"


def test_fenced_session_is_forgotten_when_its_connection_has_been_gone_for_long() -> None:
    one = rig()
    one.happen(ClientGone(FIRST))
    one.join(SECOND, 0, incarnation=2)
    one.now = SESSION_KEEP_S
    one.happen(DeadlineReached())
    assert set(one.shards[0].sessions.by_client) == {OTHER, SECOND}
    assert one.shards[0].sessions.workers[0].client == SECOND


def test_fenced_worker_is_told_about_everything_it_waits_for() -> None:
    one = rig(BoundedStaleness(0))
    assert one.step(FIRST, {0: [1.0]}, [0]).replies == [], "the push is applied, the pull waits"
    assert one.step(FIRST, {0: [1.0]}, [0], clock=1).replies == []
    one.join(SECOND, 0, incarnation=2)
    waited, queued = one.answers(FIRST)
    assert isinstance(waited, Refused)
    assert isinstance(queued, Refused)
    assert (waited.kind, waited.applied) == ("WorkerFenced", "yes")
    assert (queued.kind, queued.applied) == ("WorkerFenced", "no")
    assert one.value() == [1.0]


def test_fenced_reader_of_a_clock_is_told_that_nothing_was_applied() -> None:
    one = rig(BoundedStaleness(0))
    one.step(FIRST)
    assert one.step(FIRST, pull=[0], clock=1, tick=False).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    told = one.answers(FIRST)[-1]
    assert isinstance(told, Refused)
    assert told.applied == "no"


def test_death_of_the_slowest_lets_the_others_go_on() -> None:
    one = rig(Sync(reduce="sum"))
    assert one.step(OTHER, {0: [1.0]}).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    assert isinstance(one.answers(OTHER)[-1], Done)
    assert one.value() == [1.0]
    assert len(one.step(OTHER, {0: [1.0]}, clock=1).replies) == 1


def test_rank_that_comes_back_is_not_behind_the_clock_that_it_had() -> None:
    one = rig()
    for clock in range(3):
        one.step(FIRST, clock=clock)
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    one.send(SECOND, JoinGroup(0, 0))
    assert one.shards[0].report()[0].clocks == ((0, 3), (1, 0))


def test_step_that_is_repeated_sets_no_clock_back() -> None:
    one = rig()
    for clock in range(3):
        one.step(FIRST, {0: [1.0]}, clock=clock)
    one.join(SECOND, 0, incarnation=2)
    done(one.step(SECOND, {0: [1.0]}, clock=1))
    assert one.shards[0].report()[0].clocks == ((0, 3), (1, 0))
    assert one.value() == [4.0], "it is applied again"


# --- a worker that is started again: its rank is in each clock of Sync once -----------------------

SUM = Sync(reduce="sum")


def pair() -> Rig:
    """Rank 1 (`OTHER`) and rank 0 (`FIRST`, then `SECOND`) with one element on each of 2 shards."""
    one = Rig(SUM, shards=2)
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    one.define(OTHER, block_spec((1,), (1,), cuts=(0, 1, 2)))
    return one


def restart(one: Rig, *, older: int = FIRST, newer: int = SECOND, incarnation: int = 2) -> int:
    """The clock at which the new incarnation goes on."""
    one.tell(one.members((older, incarnation - 1, "restarting"), (OTHER, 1, "live")))
    one.join(newer, 0, incarnation=incarnation)
    one.tell(one.members((newer, incarnation, "live"), (OTHER, 1, "live")))
    return clocks_to_resume([shard.report() for shard in one.shards], 0)["group 0"].clock


def both(one: Rig, client: int, number: float, **options: Any) -> None:
    for shard in range(len(one.shards)):
        one.step(client, {0: [number]}, shard=shard, **options)


def decide_on_one_shard(one: Rig) -> None:
    """The lead has decided clock 0, and its commit is on its way to the other shard."""
    while [shard.groups[0].state.committed for shard in one.shards] == [0, 0]:
        shard, message = one.wire.pop(0)
        one.happen(FromShard(message), shard)


def values(one: Rig) -> list[float]:
    one.deliver()
    return one.value() + one.value(0, 1)


def resent(one: Rig) -> list[float]:
    """The values after both shards have told the lead again."""
    one.deliver()
    one.now += RESEND_S
    for shard in (0, 1):
        one.happen(DeadlineReached(), shard)
    return values(one)


def test_restart_where_one_shard_has_decided_already_goes_on_behind_it() -> None:
    one = pair()
    both(one, FIRST, 1.0)
    both(one, OTHER, 10.0)
    decide_on_one_shard(one)
    assert restart(one) == 1
    both(one, SECOND, 2.0, clock=1)
    both(one, OTHER, 20.0, clock=1)
    assert values(one) == [33.0, 33.0]


def test_restart_after_one_shard_told_the_lead_is_decided_with_the_newer() -> None:
    one = pair()
    one.step(FIRST, {0: [1.0]}, shard=1)
    both(one, OTHER, 10.0)
    assert len(one.wire) == 1, "shard 1 has told the lead"
    assert restart(one) == 0
    both(one, SECOND, 2.0)
    assert resent(one) == [12.0, 12.0]
    assert one.answers(FIRST)[-1].kind == "WorkerFenced"


def test_restart_the_lead_may_still_decide_with_the_older() -> None:
    """Both shards have told it of the older one, and its decision comes late."""
    one = pair()
    both(one, FIRST, 1.0)
    both(one, OTHER, 10.0)
    one.wire = []
    one.tell(one.members((FIRST, 1, "restarting"), (OTHER, 1, "live")))
    one.join(SECOND, 0, incarnation=2)
    one.step(SECOND, {0: [2.0]}, shard=1)
    one.wire = []
    one.decide(Commit(0, 0, (FIRST, OTHER), 1.0))
    one.deliver()
    assert values(one) == [11.0, 11.0]
    assert one.answers(SECOND, 1)[-1].skipped, "its rank is in the clock"


def test_restart_with_two_incarnations_on_two_shards_is_settled_by_the_third() -> None:
    one = pair()
    one.step(FIRST, {0: [1.0]}, shard=0)
    assert restart(one) == 0
    one.step(SECOND, {0: [1.0]}, shard=1)
    both(one, OTHER, 10.0)
    assert resent(one) == [0.0, 0.0], "neither is on both"
    third = 4
    assert restart(one, older=SECOND, newer=third, incarnation=3) == 0
    both(one, third, 1.0)
    assert resent(one) == [11.0, 11.0]


def test_restart_with_two_incarnations_on_two_shards_is_settled_by_its_end() -> None:
    one = pair()
    one.step(FIRST, {0: [1.0]}, shard=0)
    restart(one)
    one.step(SECOND, {0: [1.0]}, shard=1)
    both(one, OTHER, 10.0)
    one.tell(one.members((SECOND, 2, "dead"), (OTHER, 1, "live")))
    assert resent(one) == [10.0, 10.0]


def test_rank_that_joins_while_a_clock_is_decided_without_it_begins_with_the_next() -> None:
    one = pair()
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    both(one, OTHER, 10.0)
    one.join(SECOND, 0, incarnation=2)
    one.send(SECOND, JoinGroup(0, 0), 1)
    assert values(one) == [10.0, 10.0]
    one.send(SECOND, JoinGroup(0, 0), 0)
    one.deliver()
    assert {answer.at for answer in one.answers(SECOND)} == {1}
    both(one, SECOND, 2.0, clock=1)
    both(one, OTHER, 20.0, clock=1)
    assert values(one) == [32.0, 32.0]


def test_rank_that_joins_as_a_cut_holds_a_vote_without_it_is_waited_for() -> None:
    one = pair()
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.deliver()
    both(one, OTHER, 10.0)
    one.join(SECOND, 0, incarnation=2)
    one.send(SECOND, JoinGroup(0, 0), 1)
    one.happen(CutWanted())
    while not any(isinstance(message, CutAt) for _, message in one.wire):
        one.deliver_one()
    assert one.shards[0].cuts.stops
    one.send(SECOND, JoinGroup(0, 0), 0)
    one.deliver()
    parts = [part for shard in one.shards for part in shard.cuts.parts_here.values()]
    assert [part.clocks for part in parts] == [{0: 0}, {0: 0}], "the cut is before that clock"
    assert [answer.at for answer in one.answers(SECOND)] == [0, 0], "nothing is decided in a cut"
    assert values(one) == [0.0, 0.0], "the clock waits for rank 0"
    both(one, SECOND, 2.0)
    assert values(one) == [12.0, 12.0]


def test_rejoin_at_any_other_clock_is_refused() -> None:
    one = pair()
    restart(one)
    for clock in (2, 7):
        assert "sent gradients" in str(refused(one.step(SECOND, {0: [1.0]}, clock=clock)))


def report(*clocks: tuple[int, int], held: tuple[tuple[int, int], ...] = ()) -> GroupReport:
    return GroupReport("model", 0, clocks, 0, (), held)


@each_case(
    ("shards", "clock", "repeated"),
    [
        ([[report((0, 4))], [report((0, 4))]], 4, 0),
        ([[report((0, 6))], [report((0, 4))]], 4, 2),
        ([[report((1, 6))], [report((1, 4))]], 0, 0),
        ([[report((0, 1))], []], 0, 1),
    ],
)
def test_resume_in_async_takes_the_smallest_clock(
    shards: list[list[GroupReport]], clock: int, repeated: int
) -> None:
    assert clocks_to_resume(shards, 0) == {"model": (clock, repeated)}


@each_case(
    ("shards", "clock"),
    [
        ([[report((0, 4))], [report((0, 4))]], 4),
        ([[report((0, 5))], [report((0, 4), held=((0, 9),))]], 5),
        ([[report((0, 4), held=((0, 9),))], [report((0, 4))]], 4),
        ([[report((0, 4), held=((0, 9),))], [report((0, 4), held=((0, 9),))]], 5),
        ([[report((0, 4), held=((0, 9),))], [report((0, 4), held=((0, 8),))]], 4),
        ([[report((0, 4), held=((1, 9),))], [report((0, 4), held=((1, 9),))]], 4),
        ([[report((0, 0), held=((0, 9),))], []], 0),
    ],
)
def test_resume_in_sync_goes_on_behind_what_all_shards_have(
    shards: list[list[GroupReport]], clock: int
) -> None:
    collecting = [[structs.replace(each, collects=True) for each in shard] for shard in shards]
    assert clocks_to_resume(collecting, 0) == {"model": (clock, 0)}


def test_group_defined_after_a_death_waits_for_the_living() -> None:
    one = rig()
    one.tell(one.members((FIRST, 1, "left"), (OTHER, 1, "live")))
    one.define(OTHER, block_spec((1,), number=1, group=1))
    assert one.shards[0].report()[1].clocks == ((1, 0),)


@each_case("shards", [1, 2])
def test_define_that_waited_behind_a_clock_may_make_a_group_when_it_is_released(
    shards: int,
) -> None:
    one = Rig(Sync(reduce="sum"), shards=shards)
    one.join(FIRST, 0)
    one.join(OTHER, 1)
    cuts = (0, 1) if shards == 1 else (0, 1, 1)
    one.define(OTHER, block_spec((1,), cuts=cuts))
    for shard in range(shards):
        one.step(OTHER, shard=shard)
        spec = block_spec((0,), number=1, group=1, cuts=[0] * (shards + 1))
        assert one.send(OTHER, Define(0, spec, 1, 0, 0), shard).replies == []
    one.tell(one.members((FIRST, 1, "dead"), (OTHER, 1, "live")))
    one.deliver()
    for shard in range(shards):
        assert set(one.shards[shard].groups) == {0, 1}


def test_forgotten_client_that_comes_back_is_refused() -> None:
    one = rig()
    one.happen(ClientHere(9, 0, -1, 4))
    one.happen(ClientGone(9))
    assert one.happen(ClientHere(9, 0, -1, 4, again=True)).refused is None, "it is still known"
    one.happen(ClientGone(9))
    one.now += SESSION_KEEP_S
    one.happen(DeadlineReached())
    refused = one.happen(ClientHere(9, 0, -1, 4, again=True)).refused
    assert refused is not None, "its unanswered request would be applied a second time"
    assert refused.applied == "unknown"


@each_case("heard", [True, False], ids=["heard", "lost"])
def test_group_that_is_defined_later_has_the_members_of_the_first(heard: bool) -> None:
    """Also where a shard does not know of the added member when the group is defined."""
    one = pair()
    one.join(8, 7)
    for shard in range(2):
        one.send(8, JoinGroup(0, 0), shard)  # shard 0 leads, and decides it
    if heard:
        one.deliver()
    one.wire = []
    one.define(FIRST, block_spec((1,), (1,), number=1, group=1, cuts=(0, 1, 2)))
    found = [set(shard.groups[1].state.clocks) for shard in one.shards]
    assert found == [{0, 1, 7}, {0, 1, 7} if heard else {0, 1}]
    one.wire = []

    def step(client: int) -> list[list[float]]:
        for shard in range(2):
            one.step(client, {1: [1.0]}, shard=shard, group=1)
        resent(one)
        return [one.value(1, shard) for shard in range(2)]

    waits = [[0.0], [0.0]]
    assert [step(client) for client in (FIRST, OTHER)] == [waits, waits], "for whom the lead knew"
    assert step(8) == [[3.0], [3.0]]
    assert not any(one.answers(8, shard)[-1].pending for shard in range(2))


def test_group_that_is_defined_before_the_first_on_its_lead_has_the_members_of_the_lead() -> None:
    """Of two clients' defines another shard gets the later group's behind the first group's, and
    behind a member that has joined there: it goes by the lead, which decides without it."""
    one = pair()
    for client, rank in ((8, 7), (9, 8)):
        one.join(client, rank)
    later = block_spec((1,), (1,), number=1, group=1, cuts=(0, 1, 2))
    lead = one.shards[0]
    first = lead.groups.pop(0)  # it has not come to the lead yet
    one.send(8, Define(0, later, 1, 0, 0), 0, {0: gathered([np.zeros(1)])})
    lead.groups[0] = first
    for shard in range(2):
        one.send(9, JoinGroup(0, 0), shard)
    one.deliver()
    one.send(8, Define(0, later, 1, 0, 0), 1, {0: gathered([np.zeros(1)])})
    resent(one)
    assert [set(shard.groups[1].state.clocks) for shard in one.shards] == [{0, 1}, {0, 1}]
    for client in (FIRST, OTHER):
        for shard in range(2):
            one.step(client, {1: [1.0]}, shard=shard, group=1)
    resent(one)
    assert [one.value(1, shard) for shard in range(2)] == [[2.0], [2.0]], "none waits for 8"

"""A rank ends while its call of several synchronous groups is collected: the call counts whole."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from tests.suites import each_case
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec
from tests.unit.core.test_calls_again import clock, go_on, rig

from paramserve.consistency.built_in import Async, Sync
from paramserve.consistency.registry import spec
from paramserve.core.events import ClientBye, CutWanted, FromShard
from paramserve.core.resumption import clocks_to_resume
from paramserve.messages import CutAsk, Done, JoinGroup, LogEntry, Refused

AGAIN = 3
"""Rank 0's next client."""
SUM = Sync(reduce="sum")


def call(
    one: Rig, client: int, clock: int = 0, *, shards: tuple[int, ...] = (0, 1), value: float = 1.0
) -> None:
    """One step of each group, in one frame to each of these shards."""
    groups = len(one.shards[0].groups)
    for shard in shards:
        for group in range(groups):
            more = (0, 0) if group < groups - 1 else None
            push = {group: [value]}
            one.step(client, push, shard=shard, clock=clock, group=group, more=more)


def clocks(one: Rig) -> list[int]:
    """Where the next incarnation of rank 0 goes on, by group."""
    found = clocks_to_resume([shard.report() for shard in one.shards], 0)
    return [found[name].clock for name in sorted(found)]


def values(one: Rig) -> list[list[float]]:
    return [[one.value(g, s)[0] for s in range(2)] for g in sorted(one.shards[0].groups)]


def committed(one: Rig) -> list[list[int]]:
    return [[s.groups[g].state.committed for s in one.shards] for g in sorted(one.shards[0].groups)]


def told(one: Rig, number: int) -> set[tuple[Any, str]]:
    """What the ended client's request of this number came to, on the shards."""
    found = [each for each in one.answers(A) if each.seq == number]
    return {(type(each), each.applied if isinstance(each, Refused) else "") for each in found}


@each_case("decided", [0, 1])
def test_next_incarnation_goes_on_behind_the_whole_call(decided: int) -> None:
    """The rank ends before the first clock is decided, or when one shard has decided it."""
    one = rig(SUM, SUM, SUM)
    call(one, A)
    if decided:
        call(one, B)
        while sum(each.groups[0].state.committed for each in one.shards) < decided:
            one.deliver_one()
        assert committed(one) == [[1, 0], [0, 0], [0, 0]]
    one.join(AGAIN, 0, incarnation=2)
    assert clocks(one) == [1, 1, 1]
    if not decided:
        call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0]] * 3
    assert committed(one) == [[1, 1]] * 3
    call(one, AGAIN, 1, value=3.0)
    call(one, B, 1, value=3.0)
    one.deliver()
    assert values(one) == [[8.0, 8.0]] * 3


def test_answers_of_the_ended_client_say_what_was_applied() -> None:
    one = rig(SUM, SUM)
    call(one, A)
    call(one, A, 1)
    one.tell(one.members((A, 1, "restarting"), (B, 1, "live")))
    call(one, B)
    one.deliver()
    answers = one.answers(A)[-8:]
    assert [type(each) for each in answers].count(Done) == 4
    refused = [each for each in answers if isinstance(each, Refused)]
    assert [(each.kind, each.applied) for each in refused] == [("WorkerFenced", "no")] * 4
    assert [shard.sessions.by_client[A].fenced_at for shard in one.shards] == [4, 4]


def test_call_that_came_to_one_shard_only_is_made_again() -> None:
    one = rig(SUM, SUM)
    call(one, A, shards=(1,), value=5.0)
    one.join(AGAIN, 0, incarnation=2)
    assert clocks(one) == [0, 0]
    call(one, AGAIN)
    call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0]] * 2


def test_ended_client_is_forgotten_before_its_clocks_are_decided() -> None:
    one = rig(SUM, SUM)
    call(one, A)
    one.join(AGAIN, 0, incarnation=2)
    for shard in range(2):
        one.happen(ClientBye(A), shard)
    call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0]] * 2
    assert [shard.sessions.closed[A] for shard in one.shards] == [4, 4]


def test_dead_rank_counts_in_all_clocks_of_its_call() -> None:
    one = rig(SUM, SUM)
    call(one, A)
    one.tell(one.members((A, 1, "dead"), (B, 1, "live")))
    call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0]] * 2


def test_part_that_is_not_collected_is_refused() -> None:
    """Of a group that does not collect, the ended rank's step is made again."""
    one = rig(SUM, Async(), SUM)
    call(one, A)
    one.join(AGAIN, 0, incarnation=2)
    assert clocks(one) == [1, 0, 1]
    call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]


def test_only_member_of_a_group_on_the_only_shard() -> None:
    one = Rig(shards=1, workers=1)
    one.join(A, 0)
    for group in range(2):
        made = block_spec((1,), number=group, group=group)
        one.define(A, structs.replace(made, consistency=spec(SUM)))
    one.join(B, 1)
    one.send(B, JoinGroup(0, 0, (1,)))
    call(one, A, shards=(0,))
    one.join(AGAIN, 0, incarnation=2)
    assert clocks(one) == [1, 1]
    one.step(B, {0: [1.0]})
    assert [one.value(group)[0] for group in range(2)] == [2.0, 1.0]


def test_call_of_the_next_incarnation_is_known_to_a_cut() -> None:
    """The end of the older one's call comes between its parts."""
    one = rig(Async(), SUM, SUM)
    call(one, A)
    one.join(11, 0, incarnation=2)
    call(one, 11, 1)
    call(one, B)
    one.deliver()
    new = go_on(one, incarnation=3)
    assert [clock(new, group, 0) for group in range(3)] == [1, 1, 1]


def test_step_that_stays_collected_is_not_refused_for_another_one() -> None:
    """The next incarnation joins the second group anew, and steps it again."""
    one = rig(SUM, SUM)
    call(one, A)
    one.tell(one.members((A, 1, "dead"), (B, 1, "live")))
    one.deliver()
    one.join(AGAIN, 0, incarnation=2)
    for shard in range(2):
        one.send(AGAIN, JoinGroup(0, 1, (0,)), shard)
    one.deliver()
    for shard in range(2):
        one.step(B, {0: [1.0]}, shard=shard)
    one.deliver()
    assert values(one) == [[2.0, 2.0], [0.0, 0.0]]
    assert (told(one, 3), told(one, 4)) == ({(Done, "")}, {(Refused, "no")})


def test_second_clock_that_is_decided_first_is_told_as_applied() -> None:
    one = rig(SUM, Sync(reduce="sum", backup=1))
    call(one, A)
    one.join(AGAIN, 0, incarnation=2)
    one.deliver()
    assert values(one) == [[0.0, 0.0], [1.0, 1.0]]
    call(one, B)
    one.deliver()
    assert (told(one, 3), told(one, 4)) == ({(Done, "")}, {(Refused, "yes")})
    assert [shard.sessions.by_client[A].fenced_at for shard in one.shards] == [4, 4]


def test_cut_between_the_clocks_of_a_call_has_the_client_whole() -> None:
    """It comes to a shard before the decisions do."""
    one = rig(SUM, SUM)
    call(one, A)
    one.tell(one.members((A, 1, "restarting"), (B, 1, "live")))
    call(one, B)
    late = []
    while one.wire:
        shard, message = one.wire.pop(0)
        if isinstance(message, LogEntry):
            late.append((shard, message))
        else:
            one.happen(FromShard(message), shard)
    one.happen(CutWanted())
    while isinstance(one.wire[0][1], CutAsk):
        one.deliver_one()
    one.wire += late
    one.deliver()
    cut = [shard.cuts.parts_here[1] for shard in one.shards]
    assert [each.clocks for each in cut] == [{0: 1, 1: 1}] * 2
    assert ([each.clients[A] for each in cut], cut[0].torn) == ([4, 4], ())


def test_what_a_later_part_leaves_out_is_known() -> None:
    one = rig(SUM, SUM)
    for shard in range(2):
        one.step(A, {0: [1.0]}, shard=shard, more=(0, 0))
        one.step(A, {1: [1.0]}, shard=shard, group=1, leaves=True)
    one.tell(one.members((A, 1, "dead"), (B, 1, "live")))
    call(one, B)
    one.deliver()
    assert values(one)[1] == [2.0, 2.0]
    assert one.shards[0].sessions.by_client[A].left_out == {1}


def test_part_that_a_shard_refuses_is_refused_to_all() -> None:
    one = rig(SUM, SUM)
    for shard in range(2):
        one.step(A, {0: [1.0]}, shard=shard, more=(0, 0))
        one.step(A, {7: [1.0]}, shard=shard, group=1)
    one.join(AGAIN, 0, incarnation=2)
    call(one, B)
    one.deliver()
    assert values(one) == [[2.0, 2.0], [0.0, 0.0]]
    assert committed(one) == [[1, 1]] * 2

"""A cut lies between two calls, also where a call steps several synchronous groups."""

from __future__ import annotations

from tests.suites import each_case
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Sync
from paramserve.core.events import CutWanted
from paramserve.messages import CutAsk


def rig(policy: Policy) -> Rig:
    """Two ranks; a block with one element on each of two shards in group 0, one in group 1."""
    one = Rig(policy, shards=2, workers=2)
    for rank in range(2):
        one.join(rank + 1, rank)
    for group in range(2):
        one.define(A, block_spec((1,), (1,), number=group, group=group, cuts=range(3)))
    return one


def call(one: Rig, client: int, clock: int, *shards: int) -> None:
    """Steps of both groups in one frame."""
    for shard in shards or (0, 1):
        for group in range(2):
            push = {group: [1.0]}
            one.step(
                client, push, shard=shard, clock=clock, group=group, more=None if group else (0, 0)
            )


def in_cut(one: Rig) -> list[tuple[list[int], dict[int, int], list[float]]]:
    """By shard: numbers of both clients, clocks and values of its part of the newest cut."""
    found = []
    for shard in one.shards:
        part = shard.cuts.parts_here[max(shard.cuts.parts_here)]
        values = [float(part.blocks[number].field(0)[0]) for number in range(2)]
        found.append(([part.clients[A], part.clients[B]], part.clocks, values))
    return found


def decide_first_group(one: Rig, shards: int) -> None:
    """Until so many shards have decided group 0, beginning with its lead; none group 1."""
    while sum(shard.groups[0].state.committed for shard in one.shards) < shards:
        one.deliver_one()
    assert [shard.groups[1].state.committed for shard in one.shards] == [0, 0]


@each_case("shards", [1, 2])
def test_cut_after_the_first_clock_of_a_call_waits_for_the_second(shards: int) -> None:
    one = rig(Sync(reduce="sum"))
    call(one, A, 0)
    call(one, B, 0)
    decide_first_group(one, shards)
    one.happen(CutWanted())
    one.wire.sort(key=lambda sent: not isinstance(sent[1], CutAsk))  # it overtakes the votes
    one.deliver()
    (first, clocks, values), second = in_cut(one)
    assert second == (first, clocks, values)
    assert clocks == {0: 1, 1: 1}
    assert values == [2.0, 2.0]


def test_cut_does_not_wait_for_a_step_that_is_still_to_come() -> None:
    """Group 1 waits for the second rank, which has not made that call: the cut is between both."""
    one = rig(Sync(reduce="sum"))
    call(one, A, 0)
    for shard in (0, 1):
        one.step(B, {0: [1.0]}, shard=shard, group=0)
    one.deliver()
    one.happen(CutWanted())
    one.deliver()
    (_, clocks, values), second = in_cut(one)
    assert second[1:] == (clocks, values)
    assert clocks == {0: 1, 1: 0}
    assert values == [2.0, 0.0]

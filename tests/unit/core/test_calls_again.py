"""A call that a cut has a part of is made again behind it: that part is not applied twice."""

from __future__ import annotations

from msgspec import structs
from tests.suites import each_case
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Sync
from paramserve.consistency.registry import spec
from paramserve.core.cut_parts import ShardCut
from paramserve.core.events import CutWanted
from paramserve.core.restoring import restore
from paramserve.messages import Done, Refused

SUM = Sync(reduce="sum")
AGAIN = 10
"""Added to a client's number: its rank's next incarnation."""


def rig(*policies: Policy, workers: int = 2) -> Rig:
    """Ranks 0, 1, ... as clients 1, 2, ...; a group of each policy, one element on both shards."""
    one = Rig(shards=2, workers=workers)
    for rank in range(workers):
        one.join(rank + 1, rank)
    for group, policy in enumerate(policies):
        made = block_spec((1,), (1,), number=group, group=group, cuts=range(3))
        one.define(A, structs.replace(made, consistency=spec(policy)))
    return one


def call(one: Rig, client: int, clock: int, groups: range | list[int], sent: int = 9) -> None:
    """One step of each group; of the frame, so many steps come."""
    for shard in range(2):
        for group in groups[:sent]:
            more = (4, sent) if group != groups[-1] else None
            one.step(
                client, {group: [1.0]}, [group], shard=shard, clock=clock, group=group, more=more
            )


def go_on(one: Rig, *, workers: int = 2, incarnation: int = 2) -> Rig:
    """New shards that go on from a cut that is taken now; each rank comes again."""
    one.happen(CutWanted())
    one.deliver()
    new = Rig(shards=2, workers=workers)
    for shard, part in zip(new.shards, parts(one), strict=True):
        part.sessions = structs.replace(part.sessions, members=())  # as from files
        restore(shard, part, 0.0)
    for rank in range(workers):
        new.join(rank + 1 + AGAIN * (incarnation - 1), rank, incarnation=incarnation)
    return new


def parts(one: Rig) -> list[ShardCut]:
    """Of the newest cut."""
    return [shard.cuts.parts_here[max(shard.cuts.parts_here)] for shard in one.shards]


def values(one: Rig, group: int) -> list[float]:
    return [one.value(group, shard)[0] for shard in range(2)]


def clock(one: Rig, group: int, rank: int) -> int:
    """Where a rank goes on, as the shards tell it."""
    found = {dict(shard.report()[group].clocks)[rank] for shard in one.shards}
    assert len(found) == 1
    return found.pop()


def ahead(one: Rig, group: int) -> list[dict[int, int]]:
    return [shard.groups[group].state.already_applied for shard in one.shards]


@each_case(
    ("policy", "applied"),
    [(Async(), 4.0), (BoundedStaleness(2), 4.0), (Buffered(4), 1.0)],  # the mean of 4, not of 5
)
def test_part_of_a_call_that_the_cut_has_is_not_applied_again(
    policy: Policy, applied: float
) -> None:
    one = rig(policy, SUM)
    call(one, A, 0, range(2))
    new = go_on(one)
    assert [clock(new, group, 0) for group in range(2)] == [0, 0]
    for client in (A + AGAIN, B + AGAIN, A + AGAIN, B + AGAIN):
        call(new, client, int(len(new.answers(client)) > 2), range(2))
        new.deliver()
    assert (values(new, 0), values(new, 1)) == ([applied] * 2, [4.0, 4.0])
    assert [shard.groups[0].state.members.clocks for shard in new.shards] == [{0: 2, 1: 2}] * 2
    assert all(isinstance(answer, Done) for answer in new.answers(A + AGAIN))


@each_case("sent", [1, 2])
def test_several_groups_of_a_call_are_ahead(sent: int) -> None:
    """The cut comes when only so many steps of the frame have come to the shards."""
    one = rig(Async(), Async(), SUM)
    call(one, A, 0, range(3), sent)
    new = go_on(one)
    assert [each.begun for each in parts(one)] == [((A, 4, sent),)] * 2
    assert [ahead(new, group) for group in range(3)] == [
        [{0: 0} if group < sent else {}] * 2 for group in range(3)
    ]
    for client in (A + AGAIN, B + AGAIN):
        call(new, client, 0, range(3))
        new.deliver()
    assert [values(new, group) for group in range(3)] == [[2.0, 2.0]] * 3


def test_groups_that_wait_for_nothing_are_treated_alike() -> None:
    one = rig(Async(), Async())
    call(one, A, 0, range(2), 1)
    new = go_on(one)
    call(new, A + AGAIN, 0, range(2))
    call(new, A + AGAIN, 1, range(2))
    assert values(new, 0) == values(new, 1) == [2.0, 2.0]


def test_call_that_is_over_is_not_made_again() -> None:
    one = rig(Async(), Async())
    call(one, A, 0, range(2))
    new = go_on(one)
    assert ahead(new, 0) == ahead(new, 1) == [{}, {}]
    assert clock(new, 0, 0) == 1


def test_synchronous_part_is_not_late_when_it_is_made_again() -> None:
    """Of two synchronous groups, the second rank has stepped only the first one."""
    one = rig(SUM, SUM)
    call(one, A, 0, range(2))
    call(one, B, 0, [0])
    one.deliver()
    new = go_on(one)
    assert clock(new, 0, 0) == 0
    assert clock(new, 0, 1) == 1
    call(new, A + AGAIN, 0, range(2))
    call(new, B + AGAIN, 0, [1])
    new.deliver()
    assert values(new, 0) == values(new, 1) == [2.0, 2.0]
    assert not any(answer.skipped or answer.at >= 0 for answer in new.answers(A + AGAIN))
    assert not any(shard.groups[0].state.dropped for shard in new.shards)


def test_rank_that_ends_before_its_call_stays_ahead() -> None:
    one = rig(Async(), SUM)
    call(one, A, 0, range(2))
    new = go_on(one)
    new.join(A + 2 * AGAIN, 0, incarnation=3)
    assert clock(new, 0, 0) == 0
    call(new, A + 2 * AGAIN, 0, range(2))
    assert values(new, 0) == [1.0, 1.0]


@each_case("begun", [False, True])
def test_next_cut_has_what_was_not_over_in_the_one_before(begun: bool) -> None:
    """Also where the rank has begun to make its call again."""
    one = rig(Async(), SUM)
    call(one, A, 0, range(2))
    new = go_on(one)
    if begun:
        call(new, A + AGAIN, 0, range(2))
        assert ahead(new, 0) == [{}, {}]
    third = go_on(new, incarnation=3)
    for client in (A + 2 * AGAIN, B + 2 * AGAIN):
        call(third, client, 0, range(2))
    third.deliver()
    assert values(third, 0) == values(third, 1) == [2.0, 2.0]


def test_group_that_the_first_call_does_not_have_loses_no_later_step() -> None:
    one = rig(Async(), Async(), SUM, workers=1)
    call(one, A, 0, range(3), 2)
    new = go_on(one, workers=1)
    call(new, A + AGAIN, 0, [2])  # no call of several groups
    new.deliver()
    assert ahead(new, 0) == [{0: 0}] * 2
    call(new, A + AGAIN, 1, [1, 2])
    new.deliver()
    assert ahead(new, 0) == ahead(new, 1) == [{}, {}]
    call(new, A + AGAIN, 2, range(3))
    new.deliver()
    assert values(new, 0) == [2.0, 2.0]
    assert values(new, 1) == [2.0, 2.0]


def test_read_does_not_count_as_the_call() -> None:
    one = rig(Async(), SUM)
    call(one, A, 0, range(2))
    new = go_on(one)
    new.step(A + AGAIN, pull=[0], tick=False, more=(0, 0))
    new.step(A + AGAIN, pull=[1], group=1, tick=False)
    assert ahead(new, 0) == [{0: 0}] * 2


def test_rank_that_does_not_come_again_is_forgotten() -> None:
    one = rig(Async(), SUM)
    call(one, B, 0, range(2))
    assert ahead(go_on(one, workers=1), 0) == [{}, {}]


def test_part_that_was_refused_is_made_again() -> None:
    one = rig(Async(on_nonfinite="refuse"), SUM)
    for shard in range(2):
        one.step(A, {0: [float("nan")]}, shard=shard, more=(0, 0))
    assert all(isinstance(answer, Refused) for answer in one.answers(A)[-2:])
    assert ahead(go_on(one), 0) == [{}, {}]


def test_call_that_a_newer_incarnation_has_made_since_counts() -> None:
    one = rig(Async(), SUM)
    call(one, A, 0, range(2))
    one.join(A + AGAIN, 0, incarnation=2)
    call(one, A + AGAIN, 1, [0])
    new = go_on(one, incarnation=3)
    assert ahead(new, 0) == [{}, {}]


def test_step_behind_the_one_that_is_ahead_is_collected() -> None:
    """A client that goes on at another clock: others would wait for its step."""
    one = rig(SUM, SUM)
    call(one, A, 0, range(2))
    call(one, B, 0, [0])
    one.deliver()
    new = go_on(one)
    for client in (A + AGAIN, B + AGAIN):
        call(new, client, 1, [0])
    new.deliver()
    assert values(new, 0) == [4.0, 4.0]
    assert ahead(new, 0) == [{}, {}]

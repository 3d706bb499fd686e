"""Where a rank begins in the groups that follow the one that it has joined."""

from __future__ import annotations

from tests.unit.core.rig import Rig, block_spec, done
from tests.unit.core.test_shard_members import FIRST, OTHER

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core.group_members import JoinedBy
from paramserve.messages import JoinGroup, SuspendMembership

ENTRY, FOLLOWS = 0, 1
JOINER = 8


def two_groups(policy: Policy, *, workers: int = 1, shards: int = 1) -> Rig:
    """Rank 0, and others, are members of both; rank 7 has come."""
    one = Rig(policy, shards=shards, workers=workers)
    for client, rank in ((FIRST, 0), (OTHER, 1))[:workers]:
        one.join(client, rank)
    cuts = tuple(range(shards + 1))
    for group in (ENTRY, FOLLOWS):
        spec = block_spec((shards,), number=group, group=group, cuts=cuts)
        one.define(FIRST, spec)
    one.join(JOINER, 7)
    return one


def rounds(one: Rig, client: int, *steps: int, clock: int = 0) -> None:
    """Steps of these groups, one after the other; each group has made `clock` before."""
    clocks = {ENTRY: clock, FOLLOWS: clock}
    for group in steps:
        one.step(client, {group: [1.0]}, group=group, clock=clocks[group])
        clocks[group] += 1


def clocks(one: Rig, rank: int = 7, shard: int = 0) -> list[int | None]:
    """A rank's clocks in both groups; None: it is no member."""
    return [one.shards[shard].groups[group].state.clocks.get(rank) for group in (ENTRY, FOLLOWS)]


def enter(one: Rig) -> list[int | None]:
    """Join, and step the entry; the clocks behind it."""
    at = done(one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))).at
    assert clocks(one) == [at, None]
    one.step(JOINER, {ENTRY: [1.0]}, clock=at)
    return clocks(one)


def test_rank_begins_where_a_member_between_two_groups_is() -> None:
    one = two_groups(BoundedStaleness(4))
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY)
    assert clocks(one, 0) == [2, 1]
    assert enter(one) == [3, 2], "one further in the entry"


def test_rank_begins_where_a_member_is_to_be_that_has_ended_its_round() -> None:
    one = two_groups(BoundedStaleness(4))
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    assert clocks(one, 0) == [2, 2]
    assert enter(one) == [3, 2], "as that one when it steps the entry"


def test_rank_that_comes_to_what_others_have_ended_passes_clocks_of_its_entry() -> None:
    """When it asks for them: its own step of before may not have come to another shard."""
    one = two_groups(BoundedStaleness(4))
    at = done(one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))).at
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.step(JOINER, {ENTRY: [1.0]}, clock=at)
    assert clocks(one) == [1, 3], "no clock goes back"
    assert done(one.send(JOINER, JoinGroup(0, FOLLOWS))).at == 3
    assert done(one.send(JOINER, JoinGroup(0, ENTRY))).at == 4
    assert clocks(one) == [4, 3]


def test_rank_without_a_member_of_both_groups_begins_at_its_own_clock() -> None:
    one = two_groups(BoundedStaleness(4))
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.send(FIRST, SuspendMembership(0, ENTRY))
    assert enter(one) == [3, 2]


def test_member_that_has_stepped_is_asked_before_one_that_has_not() -> None:
    """Of this one nobody knows where it is in its round."""
    one = two_groups(BoundedStaleness(4), workers=2)
    rounds(one, FIRST, FOLLOWS, ENTRY)
    assert clocks(one, 1) == [0, 0]
    assert enter(one) == [1, 1], "all step the other group first"


def test_other_shards_pass_clocks_with_the_ranks_own_request() -> None:
    one = two_groups(BoundedStaleness(4), shards=2)
    for shard in (0, 1):
        one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)), shard)
    one.deliver()
    for clock in range(3):
        for group in (ENTRY, FOLLOWS):
            for shard in (0, 1):
                one.step(FIRST, {group: [1.0]}, group=group, clock=clock, shard=shard)
    one.step(JOINER, {ENTRY: [1.0]}, shard=0)
    one.deliver()
    assert one.shards[1].groups[ENTRY].state.members.joined[7].clock == 4
    assert clocks(one, shard=1) == [0, 3], "its step has not come there"
    one.step(JOINER, {ENTRY: [1.0]}, shard=1)
    for group in (FOLLOWS, ENTRY):
        one.send(JOINER, JoinGroup(0, group), 1)
    assert clocks(one, shard=1) == [4, 3]


def test_client_that_is_asked_again_is_told_where_it_began_though_the_clock_is_over() -> None:
    """It steps that clock all the same, and is told that it was late: so it stays in the round."""
    one = two_groups(Sync(reduce="sum", backup=1), workers=2)
    one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))
    for client in (FIRST, OTHER, JOINER):
        one.step(client, {ENTRY: [1.0]})
    for client in (FIRST, OTHER):
        one.step(client, {FOLLOWS: [1.0]}, group=FOLLOWS)
    assert one.shards[0].groups[FOLLOWS].state.committed == 1, "decided without it"
    assert done(one.send(JOINER, JoinGroup(0, FOLLOWS))).at == 0


def test_request_that_names_no_others_ends_what_follows() -> None:
    one = two_groups(BoundedStaleness(4))
    one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))
    one.send(JOINER, JoinGroup(0, ENTRY))
    one.step(JOINER, {ENTRY: [1.0]})
    assert clocks(one) == [1, None]
    assert one.shards[0].followers.joiners == {}


def test_newer_incarnation_forgets_what_followed_for_the_older_one() -> None:
    one = two_groups(BoundedStaleness(4))
    one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))
    one.join(9, 7, incarnation=2)
    assert one.shards[0].followers.joiners == {}
    assert one.shards[0].groups[ENTRY].state.members.joined[7] == JoinedBy(JOINER, 1, 0)

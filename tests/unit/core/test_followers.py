"""Where a rank begins in the groups that follow the one that it has joined."""

from __future__ import annotations

from msgspec import structs
from tests.suites import each_case
from tests.unit.core.group_rig import SUM, change, switched
from tests.unit.core.rig import Rig, block_spec, done
from tests.unit.core.test_shard_members import FIRST, OTHER

from paramserve.consistency import registry
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core.group_members import JoinedBy
from paramserve.core.shard_sessions import Round
from paramserve.messages import JoinGroup, SuspendMembership

ENTRY, FOLLOWS = 0, 1
JOINER = 8


def two_groups(
    policy: Policy, *, workers: int = 1, shards: int = 1, follows: Policy | None = None
) -> Rig:
    """Rank 0, and others, are members of both; rank 7 has come.

    Args:
        follows: the policy of the group that follows, if it is another one.
    """
    one = Rig(policy, shards=shards, workers=workers)
    for client, rank in ((FIRST, 0), (OTHER, 1))[:workers]:
        one.join(client, rank)
    cuts = tuple(range(shards + 1))
    for group in (ENTRY, FOLLOWS):
        spec = block_spec((shards,), number=group, group=group, cuts=cuts)
        if follows is not None and group == FOLLOWS:
            spec = structs.replace(spec, consistency=registry.spec(follows))
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


def test_rank_that_comes_to_what_others_have_ended_is_told_how_far_it_is_ahead() -> None:
    """So many of its steps there end no clock."""
    one = two_groups(BoundedStaleness(4))
    at = done(one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))).at
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.step(JOINER, {ENTRY: [1.0]}, clock=at)
    assert clocks(one) == [1, 3], "no clock goes back"
    answer = done(one.send(JOINER, JoinGroup(0, FOLLOWS)))
    assert (answer.at, answer.counts) == (3, (3,))


@each_case("ends", [SuspendMembership(0, FOLLOWS), JoinGroup(0, ENTRY, others=(FOLLOWS,))])
def test_round_of_a_rank_ends_with_its_membership(ends: SuspendMembership | JoinGroup) -> None:
    """Others that ask where to begin do not go by it any more."""
    one = two_groups(BoundedStaleness(4))
    one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.step(JOINER, {ENTRY: [1.0]})
    one.send(JOINER, JoinGroup(0, FOLLOWS))
    session = one.shards[0].sessions.of_rank(7)
    assert session.rounds.keys() == {FOLLOWS}
    one.send(JOINER, ends)
    assert session.rounds == {}


def test_rank_that_is_ahead_shows_where_it_is_when_it_is_so_no_more() -> None:
    one = two_groups(BoundedStaleness(4), workers=2)
    one.send(OTHER, SuspendMembership(0, FOLLOWS))
    one.step(OTHER, {ENTRY: [1.0]})
    at = done(one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))).at
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.step(JOINER, {ENTRY: [1.0]}, clock=at)
    one.send(FIRST, SuspendMembership(0, ENTRY))
    answer = done(one.send(OTHER, JoinGroup(0, FOLLOWS)))
    assert (answer.at, answer.counts) == (2, (2,)), "as rank 7, which has 2 to come"


def test_rank_begins_where_a_member_is_that_is_ahead_in_the_entry() -> None:
    """That one steps the other group first: when it has ended clock 4 there, its steps of this one
    end clocks again. Then it is in both at clock 5, as this rank is."""
    one = two_groups(BoundedStaleness(4))
    rounds(one, FIRST, *4 * (FOLLOWS, ENTRY))
    last = one.shards[0].sessions.of_rank(0).last
    one.shards[0].sessions.of_rank(0).rounds[FOLLOWS] = Round(ENTRY, 5, 4, last + 1)
    assert done(one.send(JOINER, JoinGroup(0, FOLLOWS, others=(ENTRY,)))).at == 4
    one.step(JOINER, {FOLLOWS: [1.0]}, group=FOLLOWS, clock=4)
    assert clocks(one) == [5, 5]


def test_rank_without_a_member_of_both_groups_begins_at_its_own_clock() -> None:
    one = two_groups(BoundedStaleness(4))
    rounds(one, FIRST, ENTRY, FOLLOWS, ENTRY, FOLLOWS)
    one.send(FIRST, SuspendMembership(0, ENTRY))
    assert enter(one) == [3, 2]


def test_member_that_has_stepped_is_asked_before_one_that_has_not() -> None:
    """It does not show where this one is in its round."""
    one = two_groups(BoundedStaleness(4), workers=2)
    rounds(one, FIRST, FOLLOWS, ENTRY)
    assert clocks(one, 1) == [0, 0]
    assert enter(one) == [1, 1], "all step the other group first"


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


def test_member_that_joins_again_is_told_its_present_clock() -> None:
    """As where an interrupt came before the suspension was sent."""
    one = two_groups(Sync(reduce="sum"))
    one.send(JOINER, JoinGroup(0, ENTRY))
    for clock in range(2):
        for client in (FIRST, JOINER):
            one.step(client, {ENTRY: [1.0]}, clock=clock)
    assert done(one.send(JOINER, JoinGroup(0, ENTRY))).at == 2


def test_clock_in_sync_before_a_bound_is_one_that_was_decided() -> None:
    one = two_groups(SUM)
    change(one, BoundedStaleness(1))
    (first,) = set(switched(one))
    for clock in range(first - 1):
        rounds_of = (ENTRY, FOLLOWS)
        for group in rounds_of:
            one.step(FIRST, {group: [1.0]}, group=group, clock=clock)
    at = done(one.send(JOINER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))).at
    for client in (FIRST, JOINER):
        one.step(client, {ENTRY: [1.0]}, clock=at)
    assert clocks(one) == clocks(one, 0)
    assert done(one.send(JOINER, JoinGroup(0, FOLLOWS))).counts == ()


def sync_and_bound() -> Rig:
    """The entry in Sync, and what follows with a bound; ranks 0 and 1 are members of both."""
    one = two_groups(SUM, workers=2, follows=BoundedStaleness(1))
    for clock in range(4):
        for group in (ENTRY, FOLLOWS):
            for client in (FIRST, OTHER):
                one.step(client, {group: [1.0]}, group=group, clock=clock)
    return one


@each_case("late", [False, True])
def test_member_of_an_entry_is_told_whether_the_clock_of_its_round_is_over(late: bool) -> None:
    one = sync_and_bound()
    one.send(OTHER, SuspendMembership(0, FOLLOWS))
    for client in (FIRST, OTHER):
        one.step(client, {ENTRY: [1.0]}, clock=4)
    if late:
        one.step(FIRST, {FOLLOWS: [1.0]}, group=FOLLOWS, clock=4)
    answer = done(one.send(OTHER, JoinGroup(0, FOLLOWS)))
    assert (answer.at, answer.counts) == ((5, (1,)) if late else (4, ()))


def test_rank_that_is_further_on_than_its_round_is_told_so_when_it_has_followed() -> None:
    one = sync_and_bound()
    one.send(OTHER, SuspendMembership(0, ENTRY))
    one.step(OTHER, {FOLLOWS: [1.0]}, group=FOLLOWS, clock=4)
    one.send(OTHER, JoinGroup(0, ENTRY, others=(FOLLOWS,)))
    for client in (FIRST, OTHER):
        one.step(client, {ENTRY: [1.0]}, clock=4)
    answer = done(one.send(OTHER, JoinGroup(0, FOLLOWS)))
    assert (answer.at, answer.counts) == (5, (1,))


@each_case("ends", ["rests", "begins anew"])
def test_call_that_ended_between_its_frames_is_not_under_way(ends: str) -> None:
    one = two_groups(Sync(reduce="sum"))
    one.step(FIRST, {ENTRY: [1.0]}, more=(3, 8))
    sessions = one.shards[0].sessions
    session = sessions.by_client[FIRST]
    assert sessions.in_call(0, FIRST, session.last)
    rests, again = SuspendMembership(0, ENTRY), JoinGroup(0, ENTRY, others=(FOLLOWS,))
    one.send(FIRST, rests if ends == "rests" else again)
    assert not sessions.in_call(0, FIRST, session.last)
    assert sessions.unfinished_marks({FIRST: session.last}) == ((FIRST, 3, 8),), (
        "until its next step"
    )
    one.step(FIRST, {ENTRY: [1.0]}, clock=1, more=(3, 16))
    assert sessions.unfinished_marks({FIRST: session.last}) == ((FIRST, 3, 16),)


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


RESTARTED = 9
"""The client of rank 1's second incarnation."""


def restarted(*last: int, shards: int = 1) -> Rig:
    """Rank 1 has ended with these steps of its third round, and its next incarnation has come; rank
    0 is two rounds further on."""
    one = two_groups(BoundedStaleness(2), workers=2, shards=shards)
    for shard in range(shards):
        for client, steps in ((OTHER, (*2 * (ENTRY, FOLLOWS), *last)), (FIRST, None)):
            at = {ENTRY: 0, FOLLOWS: 0}
            for group in steps if steps is not None else 4 * (ENTRY, FOLLOWS):
                one.step(client, {group: [1.0]}, shard=shard, group=group, clock=at[group])
                at[group] += 1
    one.join(RESTARTED, 1, incarnation=2)
    return one


@each_case(("last", "entry", "follows"), [((), ENTRY, FOLLOWS), ((ENTRY,), FOLLOWS, ENTRY)])
def test_restarted_rank_that_is_in_its_round_goes_on_at_its_own_clocks(
    last: tuple[int, ...], entry: int, follows: int
) -> None:
    """It steps the groups in turn, and ends with neither. Rank 0 goes on in between."""
    one = restarted(*last)
    before = clocks(one, 1)
    own = {ENTRY: 2 + len(last), FOLLOWS: 2}
    again = JoinGroup(0, entry, others=(follows,), clocks=(own[entry], own[follows]))
    assert done(one.send(RESTARTED, again)).at <= own[entry]
    assert clocks(one, 1) == before, "a member of both, at its own clocks"
    one.step(RESTARTED, {entry: [1.0]}, group=entry, clock=own[entry])
    one.step(FIRST, {ENTRY: [1.0]}, group=ENTRY, clock=4)
    answer = done(one.send(RESTARTED, JoinGroup(0, follows)))
    assert answer.at <= own[follows]
    assert answer.counts == (), "each of its steps ends a clock"
    one.step(RESTARTED, {follows: [1.0]}, group=follows, clock=own[follows])
    assert clocks(one, 1) == [3 + len(last), 3]


def test_restarted_rank_that_ended_between_two_groups_follows_into_the_second_one() -> None:
    """Else it waits in the first one for others that wait for it in the second one."""
    one = restarted(ENTRY)
    one.send(RESTARTED, JoinGroup(0, ENTRY, others=(FOLLOWS,), clocks=(3, 2)))
    assert clocks(one, 1) == [3, None]


def test_restarted_rank_goes_on_at_its_own_clocks_on_each_shard() -> None:
    """It repeats what one of them has not had of its predecessor."""
    one = restarted(shards=2)
    for group in (ENTRY, FOLLOWS):
        one.shards[0].groups[group].state.members.ticked(1, 2)
    assert [clocks(one, 1, shard) for shard in (0, 1)] == [[3, 3], [2, 2]]
    again = JoinGroup(0, ENTRY, others=(FOLLOWS,), clocks=(2, 2))
    for shard in (0, 1):
        one.send(RESTARTED, again, shard)
    one.deliver()
    assert [one.answers(RESTARTED, shard)[-1].at <= 2 for shard in (0, 1)] == [True, True]
    assert [clocks(one, 1, shard) for shard in (0, 1)] == [[3, 3], [2, 2]]

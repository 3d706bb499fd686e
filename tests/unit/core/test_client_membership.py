"""What a client sends to become a member of its groups, before which step."""

from __future__ import annotations

from collections.abc import Sequence

from tests.suites import each_case
from tests.unit.core.rig import block_spec

from paramserve.core.client_membership import ClientMembership, Joining
from paramserve.core.partition import Block

A, B, C, D = [Block(block_spec((1,), number=k, group=k)) for k in range(4)]


Sent = list[tuple[Block, Sequence[Block]]]


class Known:
    """A client that knows these groups.

    Args:
        plain: those that do not collect, and where no member waits for another.
        bounded: those that do not collect, and where members wait for slow ones.
    """

    def __init__(
        self, *groups: Block, plain: Sequence[Block] = (), bounded: Sequence[Block] = ()
    ) -> None:
        self.groups = groups
        self.plain = list(plain)
        self.membership = ClientMembership(
            lambda block: block not in (*self.plain, *bounded),
            lambda block: block not in self.plain,
        )

    def sends(self, *stepped: Block) -> Sent:
        """What it sends before a call, which the shards then know."""
        return self._join(self.membership.before(stepped, self.groups))

    def sends_ahead(self, block: Block) -> Sent:
        return self._join(self.membership.before_entering(block, self.groups))

    def _join(self, found: Sequence[Joining]) -> Sent:
        for each in found:
            self.membership.joined(each)
        return [(each.block, each.others) for each in found]

    def steps(self, *blocks: Block) -> list[str]:
        """A call that steps groups; those that follow its entry from now on."""
        self.sends(*blocks)
        found: list[str] = []
        for block in blocks:
            if self.membership.follows(block.group_name):
                self.sends(block)
            entry = self.membership.is_entry(block)
            self.membership.stepped(block)
            names = [each.group_name for each in self.groups]
            found += [each for each in names if entry and self.membership.follows(each)]
        return found

    def late(self, *blocks: Block) -> None:
        for each in blocks:
            self.membership.mark_pending(each.group_name)

    def suspends(self, *blocks: Block) -> None:
        for each in blocks:
            self.membership.suspended(each.group_name)

    def pending(self) -> list[Block]:
        return [each for each in self.groups if self.membership.pending(each.group_name)]


def test_member_of_all_groups_sends_nothing() -> None:
    one = Known(A, B)
    assert one.sends(A, B) == []
    assert one.steps(A, B) == []


def test_late_rank_joins_the_first_group_of_its_call_and_names_the_others() -> None:
    one = Known(A, B, C, D)
    one.late(A, B, C, D)
    assert one.sends(B, A) == [(B, (A, C, D))]
    assert one.pending() == [A, C, D], "until the first step of the entry"
    assert one.sends(B, A) == [], "the shards know"
    assert one.steps(B, A) == ["group 0", "group 2", "group 3"]
    assert one.pending() == []


def test_groups_that_do_not_collect_are_joined_one_by_one() -> None:
    one = Known(A, B, C, plain=[A, C])
    one.late(A, B, C)
    assert one.sends(A, B, C) == [(A, ()), (C, ()), (B, ())]
    assert one.pending() == []


def test_group_that_the_call_does_not_step_stays_pending_where_it_does_not_collect() -> None:
    one = Known(A, B, plain=[A])
    one.late(A, B)
    assert one.sends(B) == [(B, ())]
    assert one.pending() == [A]


def test_group_whose_members_wait_is_left_while_the_rank_joins_a_later_one() -> None:
    """Else its members wait for a step that comes after that of the second group."""
    one = Known(A, B, bounded=[A])
    one.late(A, B)
    assert one.sends(A) == [(A, ())]
    one.steps(A)
    assert one.sends(B) == [(B, (A,))]
    assert one.pending() == [A]
    assert one.steps(B) == ["group 0"]
    assert (one.sends(A), one.pending()) == ([(A, ())], []), "it asks when it is a member"
    assert one.sends(A) == []


def test_first_of_several_groups_whose_members_wait_is_the_entry_where_none_collects() -> None:
    one = Known(A, B, C, bounded=[A, B, C])
    one.late(A, B, C)
    assert one.sends(B, A) == [(B, (A, C))]
    assert one.steps(B) == ["group 0", "group 2"]
    assert one.sends(C, A) == [(C, ()), (A, ())]
    assert (one.sends(A, B, C), one.membership.any_pending) == ([], False)


def test_request_to_join_that_was_not_answered_is_made_again_before_the_next_step() -> None:
    """What it has named would follow, though the rank rests there."""
    one = Known(A, B, bounded=[A, B])
    one.suspends(B)
    one.steps(A)
    (joining,) = one.membership.before([A, B], one.groups)
    assert joining.others == (B,)
    one.membership.asks(joining)
    assert one.sends(A) == [(A, ())]
    assert (one.steps(A), one.pending()) == ([], [B])


def test_group_whose_members_wait_follows_an_entry_that_comes_before_it() -> None:
    one = Known(A, B, C, bounded=[B], plain=[C])
    one.late(A, B, C)
    assert one.sends(A, B, C) == [(C, ()), (A, (B,))]
    assert one.steps(A, B, C) == ["group 1"]


def test_group_whose_members_wait_follows_an_entry_that_comes_after_it_in_the_call() -> None:
    one = Known(A, B, bounded=[A])
    one.late(A, B)
    assert one.sends_ahead(B) == [(B, (A,))]
    assert one.sends(A, B) == []
    assert one.membership.steps_after(A, [A, B])
    assert not one.membership.steps_after(A, [A])


def test_member_of_groups_that_collect_joins_one_with_a_bound_by_itself() -> None:
    """The answer says whether its clock of this round is over."""
    one = Known(A, B, C, bounded=[A])
    one.suspends(A)
    assert one.sends(A) == [(A, ())]
    assert one.pending() == []
    assert one.sends(B) == []


def test_later_incarnation_asks_of_a_group_with_a_bound_that_it_steps_first() -> None:
    """Its predecessor may have stepped it in this round."""
    one = Known(A, B, bounded=[A])
    one.membership.mark_resumed()
    assert one.sends(A) == [(A, ())]
    assert one.sends(B) == [(B, (A,))]


def test_steps_that_end_no_clock_are_the_next_ones_of_their_group() -> None:
    one = Known(A, B, bounded=[A])
    one.membership.is_ahead("group 0", 2)
    for left in (True, True, False):
        assert one.membership.ends_no_clock("group 0") is one.membership.any_pending is left
        one.membership.stepped_within("group 0")
    one.membership.is_ahead("group 0", 2)
    one.suspends(A)
    assert not one.membership.ends_no_clock("group 0"), "it joins anew"


def test_group_that_may_have_been_joined_is_left() -> None:
    """The answer to the request was not read."""
    one = Known(A, B)
    one.suspends(A)
    one.steps(B)
    one.suspends(B)
    (joining,) = one.membership.before([A], one.groups)
    one.membership.asks(joining)
    assert one.sends(B) == [(B, (A,))]


@each_case("answered", [True, False])
def test_group_that_is_left_again_leaves_those_that_were_to_follow_by_themselves(
    answered: bool,
) -> None:
    """The shards may have suspended it in them. Where it rests in the first one alone, a step of
    another one does not make it a member there."""
    one = Known(A, B, C)
    one.membership.mark_resumed()
    (joining,) = one.membership.before([A], one.groups)
    assert joining.others == (B, C)
    one.membership.asks(joining)
    if answered:
        one.membership.joined(joining)
    one.suspends(A)
    one.membership.membership_ended("group 0")
    assert one.pending() == [A, B, C]
    assert one.sends(B) == [(B, (C,))]
    assert one.steps(B) == ["group 2"]
    assert one.pending() == [A]


def test_member_of_the_first_group_names_the_others_without_leaving_it() -> None:
    one = Known(A, B)
    one.late(B)
    assert one.sends(A, B) == [(A, (B,))]
    assert one.steps(A, B) == ["group 1"]


@each_case("stepped", [True, False])
def test_rank_that_begins_at_one_group_leaves_the_others(stepped: bool) -> None:
    one = Known(A, B)
    if stepped:
        one.steps(A, B)
    one.suspends(A)
    assert one.sends(A) == [(A, (B,))], "the members of B do not wait for it while it joins A"
    assert one.steps(A) == ["group 1"]


def test_groups_suspended_together_are_joined_together() -> None:
    one = Known(A, B, C)
    one.suspends(C)
    one.steps(A)
    one.suspends(A, B)
    assert one.sends(A) == [(A, (B,))]
    assert one.pending() == [B, C]


def test_call_that_begins_elsewhere_begins_the_round_there() -> None:
    one = Known(A, B)
    one.late(A, B)
    assert one.sends_ahead(A) == [(A, (B,))]
    assert one.sends(B) == [(B, (A,))]
    assert one.steps(B) == ["group 0"]


def test_group_joined_ahead_after_another_one_follows_it() -> None:
    one = Known(A, B, C)
    one.late(A, B)
    one.sends_ahead(A)
    one.late(C)
    assert one.sends_ahead(C) == [(A, (C, B))]
    assert one.sends_ahead(B) == [], "it follows already"
    assert sorted(one.steps(A, B, C)) == ["group 1", "group 2"]


def test_group_that_is_known_later_is_joined_in_place_of_one_that_was_joined_alone() -> None:
    """As by a late worker that makes one optimizer after the other."""
    one = Known(A)
    one.late(A)
    assert one.sends_ahead(A) == [(A, ())]
    one.groups = (A, B)
    one.late(B)
    assert one.sends_ahead(B) == [(B, (A,))], "else A and B wait for each other's members"
    assert one.sends(A) == [(A, (B,))]


def test_what_follows_an_entry_that_is_suspended_is_pending_again() -> None:
    one = Known(A, B)
    one.late(A, B)
    one.sends_ahead(A)
    one.suspends(A)
    assert one.pending() == [A, B]
    assert one.sends(A, B) == [(A, (B,))]


def test_following_group_that_is_suspended_stays_out() -> None:
    one = Known(A, B)
    one.late(A, B)
    one.sends_ahead(A)
    one.suspends(B)
    assert one.steps(A) == []
    assert one.pending() == [B]


def test_groups_that_are_found_to_collect_are_joined_together() -> None:
    """The answer to a request tells of a change of policy."""
    one = Known(A, B, plain=[A, B])
    one.suspends(A, B)
    (first, _) = one.membership.before([A, B], [A, B])
    one.plain = []
    one.membership.joined(first)
    assert one.pending() == [A, B]
    assert one.sends(A, B) == [(A, (B,))]


def test_later_incarnation_leaves_the_other_groups_until_its_first_clock_is_decided() -> None:
    """Its predecessor may have ended after a step of A, and before that of B."""
    one = Known(A, B, C, plain=[C])
    one.membership.mark_resumed()
    assert len(one.membership.before([A, C], one.groups)) == 1, "its answer is not read"
    assert one.sends(A, C) == [(A, (B,))]
    assert one.pending() == [B]
    assert one.steps(A, C) == ["group 1"]
    assert (one.sends(A), one.sends(B)) == ([], [(B, ())])
    assert not one.membership.any_pending


def test_later_incarnation_of_one_group_joins_nothing() -> None:
    one = Known(A, C, plain=[C])
    one.membership.mark_resumed()
    assert one.sends(C) == []
    assert one.sends(A) == []
    assert not one.membership.any_pending

"""Which ranks a group waits for, when it goes on from a checkpoint."""

from __future__ import annotations

from paramserve.core.group_members import GroupMembers, JoinedBy, MembersRecord


def test_member_that_only_the_lead_knew_of_begins_where_it_joined() -> None:
    members = GroupMembers((0, 1, 2), [0, 2])
    joined = {0: JoinedBy(9, 5, 7), 2: JoinedBy(0, 0, 0)}
    members.restore(MembersRecord(joined, {0: 4, 1: 7, 2: 8}, 4))
    assert members.clocks == {0: 7, 2: 8}
    assert members.slowest == 7
    assert members.left() == ((1, 7),)


def test_clocks_that_a_rank_passed_over_are_told_also_behind_a_checkpoint() -> None:
    members = GroupMembers((0, 1), [0, 1])
    for clock in range(5):
        members.ticked(0, clock)
    members.decided({**members.joined, 2: JoinedBy(7, 1, 4)}, 4)
    members.update([0, 1, 2], 4)
    assert members.clocks == {0: 5, 1: 0, 2: 4}
    assert members.passed() == ((2, 4),)
    members.update([0, 2], 4)  # rank 1 is dead, and comes back where the others are
    members.update([0, 1, 2], 4)
    assert members.passed() == ((1, 4), (2, 4))
    again = GroupMembers((0, 1), [0, 1])
    again.restore(members.record())
    assert again.passed() == ((2, 4),), "but for who came back: that is in no checkpoint"

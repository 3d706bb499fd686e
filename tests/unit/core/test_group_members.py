"""Which ranks a group waits for, when it goes on from a checkpoint."""

from __future__ import annotations

from paramserve.core.group_members import GroupMembers, JoinedBy


def test_member_that_only_the_lead_knew_of_begins_where_it_joined() -> None:
    members = GroupMembers((0, 1, 2), [0, 2])
    joined = {0: JoinedBy(9, 5, 7), 2: JoinedBy(0, 0, 0)}
    members.restore(3, joined, {0: 4, 1: 7, 2: 8}, 4)
    assert members.clocks == {0: 7, 2: 8}
    assert members.slowest == 7
    assert members.left() == ((1, 7),)

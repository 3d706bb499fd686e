from __future__ import annotations

import pytest

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.consistency.registry import spec
from paramserve.core.policy_traits import CHANGES_MAX, GroupTraits
from paramserve.messages import GroupPolicy


def change(number: int, clock: int, policy: Policy, group: int = 0) -> GroupPolicy:
    return GroupPolicy(group, number, clock, spec(policy))


@pytest.fixture
def known() -> GroupTraits:
    return GroupTraits(spec(Async()))


def test_group_without_its_own_policy_has_the_clusters(known: GroupTraits) -> None:
    known.defined(0, None)
    assert known.at(0, 7).policy == known.at(1, 0).policy == known.cluster.policy == Async()


def test_first_block_of_a_group_decides_its_policy(known: GroupTraits) -> None:
    known.defined(1, spec(Sync()))
    known.defined(1, None)
    known.defined(1, spec(BoundedStaleness(2)))
    assert [known.at(group, 0).policy for group in (0, 1)] == [Async(), Sync()]


def test_refused_block_leaves_the_policy_to_the_next_one(known: GroupTraits) -> None:
    known.defined(0, spec(Sync()))
    known.undefined(0)
    assert known.at(0, 0).policy == Async()
    known.defined(0, spec(BoundedStaleness(2)))
    assert known.at(0, 0).policy == BoundedStaleness(2)


def test_change_holds_from_its_clock_on_in_its_group_only(known: GroupTraits) -> None:
    known.changed(change(1, 10, Sync()))
    assert [known.at(0, clock).collects for clock in (9, 10, 11)] == [False, True, True]
    assert not known.at(1, 10).collects


def test_changes_hold_in_turn_in_whatever_order_they_are_told(known: GroupTraits) -> None:
    told = change(1, 10, Sync()), change(2, 20, BoundedStaleness(1)), change(3, 20, Sync())
    for each in (told[1], told[0], told[2], told[1]):
        known.changed(each)
    expected = {9: Async(), 10: Sync(), 19: Sync(), 20: Sync()}
    assert {clock: known.at(0, clock).policy for clock in expected} == expected


def test_oldest_changes_are_forgotten(known: GroupTraits) -> None:
    for number in range(1, 3 * CHANGES_MAX):
        known.changed(change(number, 10 * number, BoundedStaleness(number)))
    last = 3 * CHANGES_MAX - 1
    for number in (last - 1, last):
        assert known.at(0, 10 * number).policy == BoundedStaleness(number)
    assert len(known._changes[0]) == CHANGES_MAX


def test_terms_of_a_policy_without_its_class_are_what_the_spec_says(known: GroupTraits) -> None:
    class Own(Sync):
        pass

    described = spec(Own(on_nonfinite="skip"))
    known.defined(0, described)
    assert known.at(0, 0) == (True, False, None)

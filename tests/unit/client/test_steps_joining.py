"""What a client sends to join groups, and in which frames a call is sent that joins."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from tests.suites import each_case
from tests.unit.client.fakes import Memory, block_of
from tests.unit.client.test_steps import HYPER, Bench

from paramserve.client.staging import Staged
from paramserve.client.step_parts import BlockPush, StepOptions, StepParts
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.consistency.registry import spec
from paramserve.core.client_membership import Joining
from paramserve.core.partition import Block
from paramserve.errors import (
    ParamServeError,
    PushTimeout,
    Timeout,
)
from paramserve.messages import (
    Done,
    GroupPolicy,
    GroupReport,
    JoinGroup,
    ServerBeat,
    Step,
    SuspendMembership,
)

FREE, A, BB, CCC = (
    block_of({f"of {group}": (30_000,)}, number=number, group=group, shards=2)
    for number, group in enumerate(("asynchronous", "a", "bb", "ccc"))
)
"""The group's number is the length of its name; all but the first collect."""
JOIN, STEP = "join", "step"


class Joined(Memory):
    """Both shards answer requests about members at once, with these clocks; None: they do not."""

    clocks: tuple[int, int] | None = (0, 0)
    ahead: Mapping[int, int] = MappingProxyType({})
    """By group, how far the rank is ahead there."""
    news: tuple[GroupPolicy, ...] = ()
    refuses: int | None = None
    """A group whose requests to join are refused."""

    def submit(self, requests: Any, operation: Any, numbered: Any = None) -> None:
        super().submit(requests, operation, numbered)
        if requests[0] == JoinGroup(0, self.refuses or 0):
            self.refuse(len(self.sent) - 1)
        elif self.clocks is not None and isinstance(requests[0], JoinGroup | SuspendMembership):
            for shard, clock in enumerate(self.clocks):
                ahead = self.ahead.get(requests[0].group)
                counts = () if ahead is None else (ahead,)
                operation.answered(shard, Done(0, counts=counts, at=clock, news=self.news))


class Joiner(Bench):
    """A client of two groups, and of those where its rank is pending."""

    def __init__(self, *late: Block, memory: Joined | None = None) -> None:
        super().__init__(memory or Joined(shards=2))
        for number, block in enumerate((FREE, A, BB, CCC)):
            if block not in (FREE, A, *late):
                continue
            self.memory.blocks[number] = block
            self.steps.defined(block)
            if block is not FREE:
                self.terms.changed(GroupPolicy(block.group, 1, 0, spec(Sync())))
        for block in late:
            self.steps.membership.mark_pending(block.group_name)

    def step(self, *blocks: Block) -> None:
        """A call that ends a clock of each."""
        parts = []
        for block in blocks:
            slot = self.memory.take(block.nbytes)
            push = BlockPush(block, slot.array(block), None, HYPER)
            parts.append(StepParts("step", block, [(push, slot)], options=StepOptions(tick=True)))
        self.steps.send(parts)

    def pending(self) -> list[Block]:
        return [
            each for each in (FREE, A, BB, CCC) if self.steps.membership.pending(each.group_name)
        ]

    def said(self) -> list[tuple[Any, ...]]:
        """What both shards were sent since the last time: (JOIN, group, others) and (STEP, group,
        clock)."""
        found = []
        for (first, second), _ in self.memory.sent[self._read :]:
            if isinstance(first, JoinGroup):
                assert first == second
                found.append((JOIN, first.group, first.others))
            else:
                assert (first.group, first.clock) == (second.group, second.clock)
                found.append((STEP, first.group, first.clock))
        self._read = len(self.memory.sent)
        return found

    _read = 0


def test_late_rank_joins_and_steps_at_the_latest_clock_that_a_shard_names() -> None:
    one = Joiner(A)
    one.memory.clocks = (4, 6)
    one.step(A)
    one.step(A)
    assert one.said() == [(JOIN, 1, ()), (STEP, 1, 6), (STEP, 1, 7)]
    assert (one.pending(), one.steps.missed) == ([], 0)


def test_rank_joins_when_all_that_was_sent_before_is_answered() -> None:
    class Interrupted(Joined):
        """What was sent last is unanswered, until the client waits for it."""

        answered = False

        def submit(self, requests: Any, operation: Any, numbered: Any = None) -> None:
            assert self.answered
            super().submit(requests, operation, numbered)

        def settle(self, timeout_s: float) -> bool:
            self.answered = True
            return True

    one = Joiner(A, memory=Interrupted(shards=2))
    one.step(A)
    assert one.said() == [(JOIN, 1, ()), (STEP, 1, 0)]


def test_request_to_join_takes_no_mark() -> None:
    one = Joiner(A)
    marks = iter([(3, 8)])
    one.steps.next_mark = lambda: next(marks)
    one.step(A)
    assert [each.mark for each in one.sent(1)] == [(3, 8)] * 2


def test_groups_that_do_not_collect_are_joined_before_the_one_whose_clock_the_others_follow() -> (
    None
):
    one = Joiner(FREE, A, BB, CCC)
    one.step(FREE, A, BB)
    joins = [(JOIN, FREE.group, ()), (JOIN, 1, (2, 3))]
    steps = [(STEP, 1, 0), (JOIN, 2, ()), (STEP, 2, 0), (STEP, FREE.group, 0)]
    assert one.said() == joins + steps
    assert one.pending() == []


def test_group_whose_members_wait_comes_after_the_entry_and_its_first_step_ends_no_clock() -> None:
    one = Joiner(A, BB)
    one.terms.changed(GroupPolicy(A.group, 2, 0, spec(BoundedStaleness(1))))
    one.step(A, BB)
    assert one.said() == [(JOIN, 2, (1,)), (STEP, 2, 0), (JOIN, 1, ()), (STEP, 1, 0)]
    assert [one.sent(which)[0].tick for which in (1, 3)] == [True, False]


def test_group_with_a_bound_is_joined_beside_one_that_collects() -> None:
    one = Joiner(A, BB)
    one.terms.changed(GroupPolicy(A.group, 2, 0, spec(BoundedStaleness(1))))
    one.steps.enter_ahead(BB, 1.0)
    one.step(A)
    assert one.said() == [(JOIN, 2, (1,)), (JOIN, 1, ()), (STEP, 1, 0)]
    assert one.pending() == []


def test_steps_of_a_rank_that_is_ahead_in_a_group_end_no_clock() -> None:
    one = Joiner(A, BB)
    for block in (A, BB):
        one.terms.changed(GroupPolicy(block.group, 2, 0, spec(BoundedStaleness(1))))
    one.memory.ahead = {BB.group: 2}
    for _ in range(3):
        one.step(A, BB)
    one.steps.send([StepParts("pull", BB, pull=[BB])])
    steps = [first for (first, _), _ in one.memory.sent if isinstance(first, Step)]
    assert [each.tick for each in steps if each.group == A.group] == [True] * 3
    assert [each.tick for each in steps if each.group == BB.group] == [False, False, True, False]
    assert one.steps.clocks == {"a": 3, "bb": 1}
    assert not one.steps.membership.any_pending


def test_push_without_a_tick_is_none_of_the_steps_that_a_rank_is_ahead() -> None:
    one = Joiner(A)
    one.terms.changed(GroupPolicy(A.group, 2, 0, spec(BoundedStaleness(1))))
    one.memory.ahead = {A.group: 1}
    one.steps.enter_ahead(A, 1.0)
    for tick in (False, True, True):
        one.send("step", tick=tick, block=A)
    steps = [first for (first, _), _ in one.memory.sent if isinstance(first, Step)]
    assert [each.tick for each in steps] == [False, False, True]


def test_group_that_follows_is_joined_before_its_first_step() -> None:
    one = Joiner(A, BB)
    one.step(A)
    one.memory.clocks = (8, 8)
    one.steps.send([StepParts("pull", BB, pull=[BB])])
    assert one.said() == [(JOIN, 1, (2,)), (STEP, 1, 0), (STEP, 2, 0)], "a read is none"
    one.step(BB)
    one.step(BB)
    assert one.said() == [(JOIN, 2, ()), (STEP, 2, 8), (STEP, 2, 9)]


def test_suspension_that_was_interrupted_is_made_before_the_next_call() -> None:
    """A shard may not have heard of it, and clocks would wait for the rank in the group."""
    one = Joiner(A, BB)
    one.step(A, BB)
    one.memory.clocks = None
    with pytest.raises(Timeout):
        one.steps.suspend(BB, 0.01)
    one.memory.clocks = (1, 1)
    one.step(A)
    kinds = [(type(first), first.group) for (first, _), _ in one.memory.sent[-3:]]
    assert kinds == [(SuspendMembership, 2), (SuspendMembership, 2), (Step, 1)]
    assert one.pending() == [BB]
    one.step(A)
    assert type(one.memory.sent[-1][0][0]) is type(one.memory.sent[-2][0][0]) is Step, "once"


def test_parts_of_a_call_that_is_sent_in_two_frames_are_one_call() -> None:
    one = Joiner(A, BB)
    one.steps.next_mark = lambda: (3, 8)
    one.step(A, BB)
    assert one.said() == [(JOIN, 1, (2,)), (STEP, 1, 0), (JOIN, 2, ()), (STEP, 2, 0)]
    first, last = one.sent(1)[0], one.sent(3)[0]
    assert (first.mark, first.more, last.mark, last.more) == (None, (3, 8), (3, 8), None)


def test_call_that_ends_between_its_frames_begins_the_round_anew() -> None:
    """Else the others wait in the second group for a rank that goes on with the first."""
    one = Joiner(A, BB)
    joins = one.memory.submit

    def interrupted(requests: Any, operation: Any, numbered: Any = None) -> None:
        if requests[0] == JoinGroup(0, BB.group):
            raise KeyboardInterrupt
        joins(requests, operation, numbered)

    one.memory.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        one.step(A, BB)
    assert len(one.memory.taken) == 1, "the gradient that was not sent gave its slot back"
    one.memory.submit = joins
    one.step(A, BB)
    assert one.said() == [
        (JOIN, 1, (2,)),
        (STEP, 1, 0),
        (JOIN, 1, (2,)),
        (STEP, 1, 1),
        (JOIN, 2, ()),
        (STEP, 2, 0),
    ]


def test_call_that_waits_too_long_between_its_frames_says_what_was_sent() -> None:
    one = Joiner(A, BB)
    one.steps.enter_ahead(A, 1.0)
    one.memory.clocks = None
    with pytest.raises(PushTimeout, match="step of 'a' was sent, that of 'bb' was not") as found:
        one.step(A, BB)
    assert found.value.applied == "unknown"


def test_error_between_the_frames_says_that_the_first_one_was_sent() -> None:
    one = Joiner(A, BB)
    one.memory.refuses = BB.group
    with pytest.raises(ParamServeError, match="step of 'a' was sent") as found:
        one.step(A, BB)
    assert found.value.applied == "unknown"


def test_error_of_the_entry_is_told_with_its_ticket() -> None:
    """The other part of the call is sent all the same: others wait for it."""
    one = Joiner(A, BB)
    joins = one.memory.submit

    def refused(requests: Any, operation: Any, numbered: Any = None) -> None:
        if requests[0] == JoinGroup(0, BB.group):
            one.memory.refuse(1)
        joins(requests, operation, numbered)

    one.memory.submit = refused
    one.step(A, BB)
    assert one.said()[-2:] == [(JOIN, 2, ()), (STEP, 2, 0)]
    with pytest.raises(ParamServeError, match="no 1"):
        one.steps.raise_unread()


def test_rank_joins_at_a_clock_in_sync_though_its_next_one_has_a_bound() -> None:
    """It goes on behind a step of an older incarnation, which is in no clock since it had ended."""
    one = Joiner(A)
    one.terms.changed(GroupPolicy(A.group, 2, 5, spec(BoundedStaleness(1))))
    one.steps.advance_to("a", 5)
    one.memory.clocks = (4, 4)
    one.step(A)
    assert one.said() == [(JOIN, 1, ())] * 2 + [(STEP, 1, 4)], "once more, as it collects there"


def test_pull_does_not_join() -> None:
    one = Joiner(A)
    one.steps.send([StepParts("pull", A, pull=[A])])
    assert (one.said(), one.pending()) == ([(STEP, 1, 0)], [A])


@each_case("clock", [0, 5], ids=["where it was", "where the others are"])
def test_rank_that_is_told_that_it_is_pending_joins_before_its_next_step(clock: int) -> None:
    one = Joiner()
    one.step(A)
    one.memory.answer(0, skipped=True, pending=True, at=0)
    one.memory.clocks = (clock, clock)
    one.step(A)
    assert one.said() == [(STEP, 1, 0), (JOIN, 1, ()), (STEP, 1, clock)]


def test_join_that_takes_too_long_sends_nothing_of_the_call_and_is_repeated() -> None:
    one = Joiner(A, BB)
    staged = one.steps.stage(A, Staged(), None)
    one.memory.clocks = None
    with pytest.raises(PushTimeout, match="join timed out: rank 7") as found:
        one.send("tick", tick=True, block=A)
    assert found.value.applied == "no"
    with pytest.raises(PushTimeout, match="join timed out"):
        staged.result()
    assert (one.said(), one.memory.taken, one.steps.clocks) == ([(JOIN, 1, (2,))], [], {})
    assert one.pending() == [A, BB]
    one.memory.clocks = (3, 3)
    one.step(A)
    assert one.said() == [(JOIN, 1, (2,)), (STEP, 1, 3)]


def test_join_that_is_interrupted_sends_nothing_of_the_call_and_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Joiner(A)

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(one.memory, "read_until", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.step(A)
    assert (one.memory.taken, one.steps.clocks, one.pending()) == ([], {}, [A])
    one.step(A)
    assert one.said() == [(JOIN, 1, ()), (JOIN, 1, ()), (STEP, 1, 0)]


def test_join_that_is_refused_is_made_again() -> None:
    one = Joiner(A)
    one.memory.refuses = A.group
    with pytest.raises(ParamServeError, match="no 0"):
        one.step(A)
    one.memory.refuses = None
    one.step(A)
    assert one.said() == [(JOIN, 1, ()), (JOIN, 1, ()), (STEP, 1, 0)]
    assert one.memory.taken != [], "the refused call gave its slot back, this one is on its way"
    one.memory.answer(2)
    assert one.memory.taken == []


def test_enter_ahead_joins_once_and_says_whether_the_rank_was_pending() -> None:
    one = Joiner(FREE, A)
    one.memory.clocks = (2, 2)
    assert [one.steps.enter_ahead(each, 1.0) for each in (A, A, FREE, BB)] == [
        True,
        False,
        True,
        False,
    ]
    assert one.said() == [(JOIN, 1, ()), (JOIN, FREE.group, ())]
    assert one.pending() == []
    one.step(A)
    assert one.said() == [(STEP, 1, 2)]


def test_enter_ahead_of_a_group_that_follows_one_waits_for_its_step() -> None:
    one = Joiner(A, BB)
    assert [one.steps.enter_ahead(each, 1.0) for each in (A, BB)] == [True, True]
    assert (one.said(), one.pending()) == ([(JOIN, 1, (2,))], [BB])
    one.step(A, BB)
    assert one.said() == [(STEP, 1, 0), (JOIN, 2, ()), (STEP, 2, 0)]


def test_push_without_a_tick_joins_first_and_hears_that_its_group_collects_by_now() -> None:
    """Else it is sent at once, and the shards refuse it."""

    one = Joiner(FREE)
    one.memory.news = (GroupPolicy(FREE.group, 1, 0, spec(Sync())),)
    assert one.steps.collects(FREE)
    assert one.said() == [(JOIN, FREE.group, ()), (JOIN, FREE.group, (A.group,))]
    assert one.pending() == [A], "it follows"


def test_enter_ahead_that_takes_too_long_is_repeated() -> None:
    one = Joiner(A)
    one.memory.clocks = None
    with pytest.raises(PushTimeout, match="join timed out") as found:
        one.steps.enter_ahead(A, 0.0)
    assert (found.value.applied, one.pending()) == ("unknown", [A])
    one.memory.clocks = (0, 0)
    assert one.steps.enter_ahead(A, 0.0)
    assert (one.said(), one.pending()) == ([(JOIN, 1, ()), (JOIN, 1, ())], [])


@each_case("member", [False, True])
def test_added_rank_is_pending_in_a_group_that_is_new_unless_it_is_a_member_of_the_first(
    member: bool,
) -> None:
    one = Joiner() if member else Joiner(A)
    later = block_of({"later": (2,)}, number=5, group="later", shards=2)
    one.steps.first = False
    one.steps.defined(A)
    for _ in range(2):
        one.memory.blocks[5] = later
        one.steps.defined(later)
    pending = one.steps.membership.pending
    assert (pending("a"), pending("later")) == (not member, not member)


@each_case(("excluded", "pending"), [(False, [A]), (True, [A, BB])])
def test_rank_is_pending_in_groups_that_a_shard_does_not_know_it_as_a_member_of(
    excluded: bool, pending: list[Block]
) -> None:
    one = Joiner()
    without, has = ((0, 5),), ((0, 5), (7, 4))

    def told(shard: int, a: Any, bb: Any) -> ServerBeat:
        groups = (("a", a), ("bb", bb))
        return ServerBeat(shard, tuple(GroupReport(n, 0, c, 0, (), clock=5) for n, c in groups))

    one.steps.resume([told(0, has, has), told(1, without, has)], excluded=excluded)
    assert one.pending() == pending


@each_case("groups", [1, 2])
def test_later_incarnation_goes_on_with_the_first_group_at_its_own_clock(groups: int) -> None:
    """The shards hold the last step of the older one there: its clock is not decided yet."""
    one = Joiner(BB)
    one.steps.membership.joined(Joining(BB, True))
    reports = tuple(
        GroupReport(name, 0, ((7, 4),), 0, (), held=((7, 3),) if name == "a" else (), collects=True)
        for name in ("a", "bb")[:groups]
    )
    one.steps.resume([ServerBeat(0, reports), ServerBeat(1, reports)], excluded=False)
    one.memory.clocks = (4, 4)
    one.step(A)
    assert one.said() == [(JOIN, 1, (2,))] * (groups > 1) + [(STEP, 1, 5)]


@each_case("excluded", [False, True])
def test_rank_that_the_others_went_on_without_is_pending_in_a_group_that_is_new(
    excluded: bool,
) -> None:
    one = Bench()
    one.steps.resume([ServerBeat(0, ()), ServerBeat(1, ())], excluded=excluded)
    new = block_of({"of later": (30_000,)}, number=9, group="later", shards=2)
    one.memory.blocks[9] = new
    one.steps.defined(new)
    assert one.steps.membership.pending("later") is excluded

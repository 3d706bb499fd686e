"""How a pending comes into several groups: what is sent first, and what the first step names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from tests.unit.client.fakes import block_of

from paramserve.client.entering import Entering
from paramserve.client.ticket import Outcome
from paramserve.consistency.built_in import Async, Sync
from paramserve.consistency.registry import spec
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.core.session import Operation
from paramserve.errors import ParamServeError, PushTimeout
from paramserve.messages import CURRENT_CLOCK, Done, GroupPolicy

FREE, A, BB, CCC = (
    block_of({f"of {group}": (1,)}, number=number, group=group)
    for number, group in enumerate(("asynchronous", "a", "bb", "ccc"))
)
"""The group's number is the length of its name; all but the first collect."""


class Told:
    """A ticket whose answer is there: in time, not in time, or an error."""

    def __init__(self, answer: bool | Exception) -> None:
        self.answer = answer

    def result(self, timeout_s: float) -> Outcome:
        if isinstance(self.answer, Exception):
            raise self.answer
        return Outcome(1, skipped=not self.answer)


class Guest(Entering):
    """Knocks that are answered at once, as `in_time` says; then all are in time."""

    def __init__(self, *blocks: Block) -> None:
        terms = GroupTraits(spec(Sync()))
        terms.changed(GroupPolicy(FREE.group, 1, 0, spec(Async())))
        super().__init__(terms)
        self.blocks = blocks
        self.in_time: list[bool | Exception] = []
        self.joins: list[tuple[str, tuple[int, ...]]] = []

    def _send_join(self, block: Block, until: float, enters: Sequence[Block]) -> Any:
        self.joins.append((block.group_name, tuple(each.group_name for each in enters)))
        self._steps_in(block)
        return Told(self.in_time.pop(0) if self.in_time else True)

    def _defined(self) -> Iterator[Block]:
        return iter(self.blocks)

    def pendings(self) -> list[str]:
        return [each.group_name for each in self.blocks if self.is_pending(each.group_name)]

    def step(self, *blocks: Block) -> tuple[str, ...]:
        """A call that ends a clock of each; the groups that its first step names."""
        enters = self.enter(blocks, 1.0)
        for each in blocks:
            self._steps_in(each)
        self.named(enters)
        return tuple(each.group_name for each in enters)


def late(*blocks: Block) -> Guest:
    pending = Guest(*blocks)
    for block in blocks:
        pending.came_late(block.group_name)
    return pending


def test_worker_that_is_waited_for_everywhere_sends_nothing_first() -> None:
    worker = Guest(A, BB)
    assert (worker.step(A, BB), worker.joins) == ((), [])


def test_late_worker_joins_at_the_first_group_until_it_is_in_time_and_names_the_others() -> None:
    worker = late(FREE, A, BB, CCC)
    worker.in_time = [False, False, True]
    assert worker.step(FREE, A, BB) == ("bb", "ccc")
    assert worker.joins == [("a", ())] * 3
    assert worker.pendings() == []
    assert worker.step(FREE, A, BB) == ()


def test_groups_that_do_not_collect_are_entered_by_their_step() -> None:
    worker = late(FREE)
    assert (worker.step(FREE), worker.joins, worker.pendings()) == ((), [], [])


def test_step_of_a_group_where_the_others_wait_names_those_where_it_rests() -> None:
    worker = Guest(A, BB)
    worker.step(A, BB)
    worker.rests("bb")
    assert (worker.step(A, BB), worker.joins, worker.pendings()) == (("bb",), [], [])


@pytest.mark.parametrize("call", [(A, BB), (A,)])
def test_pending_of_the_first_group_enters_with_an_empty_step_where_the_others_wait(
    call: Sequence[Block],
) -> None:
    """In the same call, or in another one: they would not come to its clock before."""
    worker = Guest(A, BB)
    worker.step(A, BB)
    worker.rests("a")
    assert worker.step(*call) == ()
    assert (worker.joins, worker.pendings()) == ([("bb", ("a",))], [])


def test_group_that_was_never_stepped_is_none_where_the_others_wait() -> None:
    worker = Guest(A, BB)
    worker.rests("a")
    assert (worker.step(A), worker.joins) == ((), [("a", ())])


def test_pending_ends_the_round_of_the_others_and_the_last_group_names_the_first() -> None:
    """They wait for it in each of them, one after the other, before they come back to the first."""
    worker = Guest(CCC, BB, A, FREE)
    for call in ((A,), (FREE, BB), (CCC,)):
        worker.step(*call)
    worker.rests("bb")
    assert worker.step(FREE, BB) == ()
    assert worker.joins == [("ccc", ()), ("a", ("bb",))]


def test_round_that_came_to_nothing_in_a_group_is_not_made_twice_there() -> None:
    """Another worker had no gradient for that clock: all of them go on."""
    worker = Guest(A, BB, CCC)
    worker.step(A, BB, CCC)
    worker.rests("a")
    worker.in_time = [False, False]
    worker.step(A, BB, CCC)
    assert worker.joins == [("bb", ()), ("ccc", ("a",))]


def test_round_that_took_too_long_goes_on_where_it_was() -> None:
    worker = Guest(A, BB, CCC)
    worker.step(A, BB, CCC)
    worker.rests("a")
    late = PushTimeout("late", applied="unknown", fix="wait")
    worker.in_time = [late]
    for _ in range(2):
        with pytest.raises(PushTimeout) as found:
            worker.step(A, BB, CCC)
        assert found.value.applied == "no"
    assert worker.joins == [("bb", ())]
    assert worker._coming is not None
    worker._coming.ticket = Told(True)
    worker.step(A, BB, CCC)
    assert worker.joins == [("bb", ()), ("ccc", ("a",))]
    assert worker.pendings() == []


def test_rest_ends_a_round_that_was_interrupted() -> None:
    worker = Guest(A, BB, CCC)
    worker.step(A, BB, CCC)
    worker.rests("a")
    worker.in_time = [PushTimeout("late", applied="unknown", fix="wait")]
    with pytest.raises(PushTimeout):
        worker.step(A, BB, CCC)
    for name in ("bb", "ccc"):
        worker.rests(name)
    worker.joins.clear()
    assert worker.step(A, BB, CCC) == ("bb", "ccc")
    assert worker.joins == [("a", ())]


def test_knock_that_is_refused_is_made_again() -> None:
    worker = late(A)
    worker.in_time = [ParamServeError("no", fix="none"), True]
    with pytest.raises(ParamServeError):
        worker.step(A)
    worker.step(A)
    assert (worker.joins, worker.pendings()) == ([("a", ())] * 2, [])


def test_other_pending_of_the_call_is_named_by_its_first_step() -> None:
    worker = Guest(A, BB, CCC)
    worker.step(A, BB, CCC)
    for name in ("a", "ccc"):
        worker.rests(name)
    assert worker.step(A, BB, CCC) == ("ccc",)
    assert worker.joins == [("bb", ("a",))]


def test_rest_in_one_group_stays_while_another_one_is_stepped() -> None:
    worker = Guest(A, BB, CCC)
    worker.step(A, BB, CCC)
    worker.rests("bb")
    worker.step(A)
    worker.rests("a")
    worker.rests("ccc")
    assert worker.step(A) == ("ccc",)
    assert worker.pendings() == ["bb"]


# --- ahead ---------------------------------------------------------------------------------------


def test_only_group_that_collects_is_entered_ahead() -> None:
    worker = late(FREE, A)
    assert [worker.enter_ahead(each, 1.0) for each in (A, A, FREE)] == [True, False, True]
    assert (worker.joins, worker.pendings()) == ([("a", ())], [])


def test_late_worker_that_has_stepped_none_of_several_groups_enters_none_ahead() -> None:
    worker = late(A, BB)
    assert worker.enter_ahead(A, 1.0)
    assert (worker.joins, worker.pendings()) == ([], ["a", "bb"])


def test_of_several_groups_the_one_that_was_stepped_first_is_entered_ahead() -> None:
    worker = Guest(A, BB)
    worker.step(BB)
    worker.step(A)
    for name in ("a", "bb"):
        worker.rests(name)
    assert [worker.enter_ahead(each, 1.0) for each in (A, BB)] == [True, True]
    assert (worker.joins, worker.pendings()) == ([("bb", ())], ["a"])


# --- clocks --------------------------------------------------------------------------------------


def answer(worker: Guest, at: int, skipped: bool = False) -> None:
    """Two shards answer a step of group bb that asked for its clock."""
    operation = Operation(2)
    for shard in range(2):
        operation.answered(shard, Done(0, at=at, skipped=skipped))
    worker._hear(operation, "bb", CURRENT_CLOCK)


def test_steps_ask_for_their_clock_until_no_answer_that_says_it_is_on_its_way() -> None:
    worker = late(A, BB)
    worker.step(A)
    assert [worker._clock_of_step("bb", tick) for tick in (True, False, True)] == [-1, 0, -1]
    answer(worker, 8)
    assert (worker.clocks["bb"], worker._clock_of_step("bb", True)) == (8, CURRENT_CLOCK)
    answer(worker, 9)
    answer(worker, 10)
    assert worker._clock_of_step("bb", True) == 10


def test_clock_that_was_asked_for_is_not_missed() -> None:
    worker = late(A, BB)
    worker.step(A)
    worker._clock_of_step("bb", True)
    answer(worker, 8, skipped=True)
    assert (worker.missed, worker._clock_of_step("bb", True)) == (0, 8)

"""Barriers and reduced values: who is waited for, and what a rank gets that comes again."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs

from paramserve.core import collectives
from paramserve.core.collectives import Collectives, CollectivesRecord
from paramserve.core.membership import DEAD, LEFT, Membership
from paramserve.errors import CollectiveMismatch, Overloaded, ParamServeError
from paramserve.messages import AllReduce, AllReduced, Join, PassBy


class Ranks:
    """Ranks that join, call collectives, die and come again."""

    def __init__(self, workers: int, *, joined: bool = True) -> None:
        self.membership = Membership(1, workers)
        self.collectives = Collectives(self.membership, bytes_max=64)
        self.seen: dict[int, int] = {}
        for rank in range(workers if joined else 0):
            self.join(rank)

    def join(self, rank: int) -> None:
        self.membership.join(Join(0, rank, 1), 0.0)
        self.seen[rank] = 0
        self.collectives.changed()

    def ended(self, rank: int, state: str = DEAD) -> None:
        self.membership.ended(rank, state)
        self.collectives.changed()

    def dies(self, rank: int) -> None:
        """It will be started again."""
        self.membership.restarting(rank, 0.0)
        self.collectives.changed()

    def call(
        self, rank: int, value: Any = 0.0, op: str = "sum", *, place: int = 0, **changes: Any
    ) -> float | None:
        """What a rank gets; None: it waits."""
        data = value if isinstance(value, bytes) else np.float64(value).tobytes()
        message = AllReduce(0, op, "float64", (), data, self.seen[rank], place, 1.0)
        message = structs.replace(message, **{"ticks": place, **changes})
        reply = self.collectives.call(message, self.membership.members[rank])
        if reply is None:
            return None
        assert isinstance(reply, AllReduced)
        assert reply.ended
        self.seen[rank] = reply.number
        return float(np.frombuffer(reply.value)[0])

    def all_call(self, value: float, *, place: int = 0, **changes: Any) -> float | None:
        """All live ranks call, and wait until they have the result."""
        live = [r for r, each in self.membership.members.items() if each.state == "live"]
        found = [self.call(rank, value, place=place, **changes) for rank in live][-1]
        assert all(self.call(rank, value, place=place, **changes) == found for rank in live[:-1])
        return found

    def begin_steps(self, rank: int, place: int, ticks: int | None = None) -> None:
        ticks = ticks if ticks is not None else place
        message = PassBy(0, place=place, seen=self.seen[rank], ticks=ticks)
        self.collectives.begin_steps(message, self.membership.members[rank])

    @property
    def missing(self) -> list[int]:
        return [each.rank for each in self.collectives.missing()]


@pytest.mark.parametrize(
    ("op", "result"), [("sum", 7.0), ("mean", 7.0 / 3), ("max", 4.0), ("min", 1.0)]
)
def test_all_ranks_get_the_same(op: str, result: float) -> None:
    ranks = Ranks(3)
    for rank, value in ((2, 4.0), (0, 1.0)):
        assert ranks.call(rank, value, op) is None
    assert ranks.missing == [1]
    assert ranks.call(1, 2.0, op) == result
    assert [ranks.call(rank, value, op) for rank, value in ((2, 4.0), (0, 1.0))] == [result] * 2
    assert ranks.missing == []


def test_late_rank_gets_what_a_loader_agreed_on_wherever_it_is() -> None:
    ranks = Ranks(2)
    own: dict[str, Any] = {"op": "min", "number": True}
    assert ranks.call(0, 7.0, parts=1, **own) is None
    assert ranks.call(1, 5.0, parts=1, **own) == 5.0
    assert ranks.call(0, 7.0, parts=1, **own) == 5.0
    assert ranks.all_call(3.0, place=20) == 6.0
    ranks.membership.scale(3)
    ranks.join(2)
    assert ranks.call(2, 9.0, place=10, parts=1, **own) == 5.0
    assert ranks.call(2, 1.0, place=10) == 6.0, "its other calls go on after it"
    assert ranks.missing == []
    for rank in (0, 1):
        ranks.ended(rank, LEFT)
    assert ranks.call(2, 9.0, place=40, parts=1, **own) == 5.0
    assert ranks.seen[2] == 2


def test_loader_over_own_parts_matches_no_other_call() -> None:
    ranks = Ranks(2)
    assert ranks.call(0, 7.0, "min", number=True, parts=1) is None
    with pytest.raises(ParamServeError, match=r"rank 1 called worker.all_reduce.*shards=\"own\""):
        ranks.call(1, 5.0, "min", number=True)


def test_values_are_added_in_the_order_of_the_ranks() -> None:
    values = [1.0, 1e100, -1e100]
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        ranks = Ranks(3)
        found = [ranks.call(rank, values[rank]) for rank in order]
        assert found[-1] == (values[0] + values[1]) + values[2] == 0.0


def test_asking_again_changes_nothing_and_gets_the_result_of_that_call() -> None:
    ranks = Ranks(2)
    assert ranks.call(0, 1.0) is ranks.call(0, 1.0) is None
    seen = ranks.seen[0]
    assert ranks.call(1, 2.0) == ranks.call(0, 1.0) == 3.0
    ranks.seen[0] = seen  # its answer was lost
    assert ranks.call(0, 1.0) == 3.0
    assert ranks.call(0, 5.0) is None, "which is the next one"


def test_rank_that_has_not_joined_is_waited_for() -> None:
    ranks = Ranks(2, joined=False)
    ranks.join(0)
    assert ranks.call(0, 1.0) is None
    ranks.join(1)
    assert ranks.missing == [1]
    assert ranks.call(1, 1.0) == 2.0


@pytest.mark.parametrize("state", [DEAD, LEFT])
@pytest.mark.parametrize("had_come", [True, False])
def test_rank_that_ends_is_not_waited_for(state: str, had_come: bool) -> None:
    ranks = Ranks(3)
    ranks.call(0, 1.0)
    if had_come:
        ranks.call(2, 4.0)
    ranks.ended(2, state)
    assert ranks.missing == [1]
    assert ranks.call(1, 2.0) == (7.0 if had_come else 3.0)


def test_last_rank_that_ends_ends_what_the_others_wait_in() -> None:
    ranks = Ranks(2)
    ranks.call(0, 1.0)
    ranks.ended(1)
    assert ranks.call(0, 1.0) == 1.0


@pytest.mark.parametrize("waits", [True, False])
def test_last_rank_is_refused_where_another_has_returned_without_it(waits: bool) -> None:
    ranks = Ranks(3)
    if waits:
        ranks.call(0, 1.0)
    ranks.ended(2)
    if waits:
        assert ranks.call(0, 1.0) is None, "rank 1 may come"
    ranks.ended(1, LEFT)
    told = (
        r"rank 0 called worker.all_reduce\(op='sum'\) with an array of float64 and shape \[\] "
        "alone: rank 1 returned without this call"
    )
    for _ in range(2):
        with pytest.raises(ParamServeError, match=told):
            ranks.call(0, 1.0)
    ranks.join(1)  # it comes again
    assert ranks.call(0, 1.0) == 1.0, "which is not waited for before it takes part"
    assert ranks.call(1, 2.0, place=1) is None
    assert ranks.call(0, 1.0, place=1) == 3.0


def test_last_rank_goes_on_alone_where_the_others_were_asked_to_end() -> None:
    ranks = Ranks(2)
    ranks.call(0, 1.0)
    ranks.membership.scale(1)
    ranks.ended(1, LEFT)
    assert ranks.call(0, 1.0) == 1.0


def test_numbers_of_several_dtypes_are_reduced_as_floats() -> None:
    def number(rank: int, value: np.generic) -> AllReduced | None:
        message = AllReduce(
            0, "max", value.dtype.name, (), value.tobytes(), ranks.seen[rank], 0, 1.0, number=True
        )
        return ranks.collectives.call(message, ranks.membership.members[rank])

    ranks = Ranks(3)
    assert number(0, np.int64(2)) is number(1, np.float32(1.5)) is None
    with pytest.raises(ParamServeError, match=r"shape \[\], and rank 0 .* a number.*float\(loss\)"):
        ranks.call(2, 1.0, "max")
    reply = number(2, np.int64(-7))
    assert reply is not None
    assert (reply.dtype, reply.value) == ("float64", np.float64(2.0).tobytes())
    for rank in range(3):
        ranks.seen[rank] = reply.number
    assert number(0, np.int64(2)) is number(1, np.int64(3)) is None
    reply = number(2, np.int64(1 << 60))
    assert reply is not None
    assert (reply.dtype, reply.value) == ("int64", np.int64(1 << 60).tobytes())


def test_restart_is_waited_for_until_the_first_step_only() -> None:
    for place, missing in ((0, [1]), (5, [])):
        ranks = Ranks(2)
        ranks.call(0, 1.0, place=place)
        ranks.dies(1)
        assert ranks.missing == missing
    ranks.call(0, 1.0, place=6)
    ranks.join(1)
    assert ranks.missing == [], "it joined while the others were in it"


def test_value_of_rank_0_is_waited_for_until_it_ends() -> None:
    ranks = Ranks(3)
    assert ranks.all_call(1.0, place=4) == 3.0
    assert ranks.call(2, 7.0, "rank0", place=8) is None
    ranks.dies(0)
    ranks.ended(1)
    assert ranks.call(2, 7.0, "rank0", place=8) is None
    assert ranks.missing == [0], "it is being restarted, and its value decides"
    ranks.join(0)
    assert ranks.missing == [0]
    assert ranks.call(0, 9.0, place=4) == 3.0, "what it had got before"
    assert ranks.call(0, 5.0, "rank0", place=8) == 5.0
    assert ranks.call(2, 7.0, "rank0", place=8) == 5.0
    assert ranks.call(2, 7.0, "rank0", place=12) is None
    ranks.ended(0)
    with pytest.raises(ParamServeError, match=r"rank 2 called .*op='rank0'.* rank 0 has ended"):
        ranks.call(2, 7.0, "rank0", place=12)
    assert ranks.missing == []
    assert ranks.call(2, 7.0, place=12) == 7.0, "the call that was refused is gone"


def test_rank_that_begins_behind_a_call_is_not_waited_for_there() -> None:
    """As in a loop that leaves out the epochs that are done, with what follows them."""
    ranks = Ranks(3)
    assert ranks.all_call(1.0, place=4) == 3.0
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(1, 2.0, place=8) is None
    assert ranks.missing == [0, 2]
    assert ranks.call(0, 9.0, place=12) is None, "its call is the next one"
    assert ranks.missing == [2]
    assert ranks.call(2, 3.0, place=8) == 5.0, "without the 9"
    assert ranks.call(1, 2.0, place=8) == 5.0
    assert ranks.call(0, 9.0, place=12) is None
    assert ranks.missing == [1, 2]
    assert ranks.call(1, 1.0, place=12) is None
    assert ranks.call(2, 1.0, place=12) == 11.0
    assert ranks.call(0, 9.0, place=12) == 11.0


def test_ranks_of_unequal_steps_are_matched_by_the_order_of_their_calls() -> None:
    ranks = Ranks(2)
    assert ranks.call(1, 1.0, place=4) is None
    assert ranks.call(0, 1.0, place=6) == 2.0
    assert ranks.call(1, 1.0, place=4) == 2.0
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, 1.0, place=6) == 2.0
    assert ranks.call(1, 2.0, place=8) is None
    assert ranks.call(0, 3.0, place=12) == 5.0


def test_call_of_before_that_is_left_out_is_refused() -> None:
    ranks = Ranks(2)
    for place in (4, 4, 8, 8):
        ranks.all_call(1.0, place=place)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, place=4) == 2.0
    with pytest.raises(ParamServeError, match=r"rank 0 .* at step 8 .* one of its calls .* step 4"):
        ranks.call(0, place=8)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, place=8) == 2.0, "whole epochs may be left out"
    assert ranks.call(0, place=8) == 2.0
    assert ranks.call(0, place=12) is None


def test_leased_samples_put_ranks_at_other_steps_in_the_same_call() -> None:
    ranks = Ranks(2)
    assert ranks.all_call(1.0, place=4) == 2.0
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(1, 2.0, place=8, exact=False) is None
    assert ranks.call(0, 9.0, place=12, exact=False) == 11.0


def test_rank_that_waits_for_those_who_wait_for_it_passes_by() -> None:
    ranks = Ranks(2)
    assert ranks.all_call(1.0, place=4) == 2.0
    assert ranks.call(1, 2.0, place=8) is None
    members, collectives = ranks.membership.members, ranks.collectives
    assert not collectives.pass_by(members[0]), "it was not started again"
    ranks.dies(0)
    assert ranks.call(1, 2.0, place=8) == 2.0, "it may begin behind the call"
    ranks.join(0)
    assert ranks.call(1, 3.0, place=12) is None
    assert ranks.missing == [0]
    assert collectives.pass_by(members[0])
    assert ranks.missing == []
    assert ranks.call(1, 3.0, place=12) == 3.0
    assert not collectives.pass_by(members[0]), "none is open"
    assert ranks.call(1, 2.0, "rank0", place=16) is None
    assert collectives.pass_by(members[0])
    with pytest.raises(ParamServeError, match=r"rank 0 was started again, and has gone on without"):
        ranks.call(1, 2.0, "rank0", place=16)


def test_rank_that_makes_its_first_step_is_waited_for_in_no_call_up_to_there() -> None:
    """In a loop that begins at its clock, whichever calls the others make at that step yet."""
    ranks = Ranks(2)
    for place in (0, 1):
        ranks.all_call(1.0, place=place)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(1, 2.0, place=2) is None
    ranks.begin_steps(0, place=2)
    assert ranks.missing == []
    assert ranks.call(1, 2.0, place=2) == 2.0
    assert ranks.call(1, 3.0, place=2) == 3.0, "nor in the next one at this step"
    assert ranks.call(1, 4.0, place=3) is None
    assert ranks.missing == [0], "now it comes"
    assert ranks.call(0, 5.0, place=3) == 9.0
    assert ranks.call(1, 4.0, place=3) == 9.0
    ranks.dies(0)
    ranks.join(0)
    ranks.seen[0] = 5
    assert ranks.call(1, 1.0, place=2) is None
    assert ranks.missing == [0], "that was an older client"
    ranks.collectives.withdraw(1)
    assert ranks.call(1, 1.0, place=2, exact=False) is None
    ranks.begin_steps(0, place=3)
    assert ranks.missing == [0], "places of leased loaders cannot be compared"


def test_calls_between_steps_of_another_optimizer_than_the_first_are_not_passed_by() -> None:
    """The place counts the first one's steps: that of a second phase of the training stays."""
    ranks = Ranks(2)
    for ticks in (4, 5):
        ranks.all_call(1.0, place=4, ticks=ticks)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(1, 1.0, place=4, ticks=6) is None
    ranks.seen[0] = 2
    ranks.begin_steps(0, place=4, ticks=6)
    assert ranks.call(1, 1.0, place=4, ticks=6) == 1.0
    assert ranks.call(1, 2.0, place=4, ticks=7) is None
    assert ranks.missing == [0]
    assert ranks.call(0, 3.0, place=4, ticks=7) == 5.0


def test_calls_at_one_clock_of_the_first_optimizer_are_told_apart() -> None:
    """Two optimizers step in turn."""
    ranks = Ranks(2)
    for ticks, place in enumerate((0, 1, 1, 2, 2)):
        ranks.all_call(ticks, place=place, ticks=ticks)
    ranks.dies(0)
    record = msgspec.msgpack.encode(ranks.collectives.record())
    ranks.collectives.restore(msgspec.msgpack.decode(record, type=CollectivesRecord))
    ranks.join(0)
    assert ranks.call(0, 9.0, place=2, ticks=4) == 8.0
    assert ranks.call(0, 9.0, place=3, ticks=5) is None


def test_first_step_of_a_rank_that_was_not_restarted_passes_nothing_by() -> None:
    ranks = Ranks(2)
    assert ranks.call(1, 2.0, place=2) is None
    ranks.begin_steps(0, place=2)
    assert ranks.missing == [0]


def test_who_waits_for_the_value_of_a_rank_0_that_steps_behind_its_call_is_told() -> None:
    ranks = Ranks(2)
    assert ranks.all_call(1.0, place=1) == 2.0
    ranks.dies(0)
    assert ranks.call(1, 2.0, "rank0", place=2) is None
    ranks.join(0)
    ranks.begin_steps(0, place=2)
    with pytest.raises(ParamServeError, match=r"rank 0 was started again, and has gone on without"):
        ranks.call(1, 2.0, "rank0", place=2)


@pytest.mark.parametrize("ended", [True, False])
def test_rank_that_has_made_some_calls_of_a_step_and_not_all_is_refused(ended: bool) -> None:
    """Of calls before a step and behind the one before it gets the results of the wrong ones."""
    ranks = Ranks(2)
    for place in (0, 1, 1):
        ranks.all_call(1.0, place=place)
    ranks.dies(0)
    assert ranks.call(1, 2.0, place=2) == 2.0
    if ended:
        assert ranks.call(1, 3.0, place=2) == 3.0
    ranks.join(0)
    if not ended:
        assert ranks.call(1, 3.0, place=2) is None
    assert ranks.call(0, 9.0, place=2) == 2.0, "of the call behind the step before"
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 was started again and has made some .* step 2"
    ):
        ranks.begin_steps(0, place=2)
    assert ranks.missing == ([] if ended else [0])


def test_call_that_a_rank_has_made_another_one_in_place_of_is_refused() -> None:
    """The others make it only when that rank steps already."""
    ranks = Ranks(2)
    for place in (0, 1, 1):
        ranks.all_call(1.0, place=place)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(1, 2.0, place=2) is None
    assert ranks.call(0, 9.0, place=2) == ranks.call(1, 2.0, place=2) == 11.0
    ranks.begin_steps(0, place=2)
    with pytest.raises(CollectiveMismatch, match=r"rank 0 .* one more: sum of float64"):
        ranks.call(1, 3.0, place=2)
    assert ranks.call(1, 3.0, place=3) is None


def test_calls_behind_an_epoch_are_told_from_those_before_the_next_one() -> None:
    ranks = Ranks(2)
    for epoch in (1, 2):
        ranks.all_call(1.0, place=2 * epoch - 2, epoch=epoch)
        ranks.all_call(epoch, place=2 * epoch, epoch=epoch)
    ranks.dies(0)
    assert ranks.call(1, 7.0, place=4, epoch=3) == 7.0
    ranks.join(0)
    assert ranks.call(0, 0.0, place=4, epoch=3) == 7.0, "it goes on behind the second"
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, 5.0, place=4, epoch=4) is None
    assert ranks.call(1, 6.0, place=4, epoch=4) == 11.0


def test_calls_in_what_a_restart_leaves_out_may_be_left_out() -> None:
    """Those of a pass over a loader, behind one of the setup."""
    ranks = Ranks(2)
    ranks.all_call(1.0)
    for place in (0, 1, 2):
        ranks.all_call(place, place=place, inner=True)
    ranks.dies(0)
    record = msgspec.msgpack.encode(ranks.collectives.record())
    ranks.collectives.restore(msgspec.msgpack.decode(record, type=CollectivesRecord))
    ranks.join(0)
    assert ranks.call(0, 9.0) == 2.0
    assert ranks.call(0, 9.0, place=2, inner=True) == 4.0


def test_rank_that_had_not_joined_is_waited_for_when_it_has() -> None:
    """Also where the others have made steps, as in a run that goes on from a checkpoint."""
    ranks = Ranks(2, joined=False)
    ranks.join(0)
    assert ranks.call(0, 1.0, place=5) is None
    ranks.join(1)
    assert ranks.missing == [1]
    assert ranks.call(1, 1.0, place=5) == 2.0


def test_who_ends_a_collective_without_a_restarting_rank_is_told() -> None:
    ranks = Ranks(2)
    assert ranks.all_call(1.0, place=4) == 2.0
    ranks.dies(0)
    message = AllReduce(0, "sum", "float64", (), np.float64(3.0).tobytes(), 1, 8, 1.0)
    for _ in range(2):  # also where the first answer was lost
        reply = ranks.collectives.call(message, ranks.membership.members[1])
        assert reply is not None
        assert [(each.rank, each.state) for each in reply.missing] == [(0, "restarting")]
    ranks.join(0)
    assert ranks.call(0, 9.0, place=4) == 2.0
    message = structs.replace(message, seen=1)
    late = ranks.collectives.call(message, ranks.membership.members[0])
    assert late is not None
    assert late.missing == (), "it gets the same, and was not there itself"


def test_restarted_rank_gets_what_the_others_got_and_then_takes_part() -> None:
    ranks = Ranks(2)
    for step in (10, 20):  # each epoch
        assert ranks.all_call(step, place=step) == 2.0 * step
    ranks.dies(1)  # after step 30, before its call
    assert ranks.call(0, 30.0, place=30) == 30.0
    ranks.join(1)
    assert [ranks.call(1, 0.0, place=step) for step in (10, 20, 30)] == [20.0, 40.0, 30.0]
    assert ranks.call(1, 1.0, place=40) is None
    assert ranks.call(0, 2.0, place=40) == 3.0


def test_restarted_rank_that_calls_at_each_step_takes_part_at_once() -> None:
    ranks = Ranks(2)
    for step in range(1, 5):
        ranks.all_call(step, place=step)
    ranks.dies(1)
    ranks.join(1)
    assert ranks.call(1, 1.0, place=5) is None
    assert ranks.call(0, 2.0, place=5) == 3.0


def test_several_calls_after_one_step_are_repeated_in_order() -> None:
    ranks = Ranks(2)
    for value in (1.0, 2.0):
        ranks.all_call(value, place=3)
    ranks.dies(1)
    ranks.join(1)
    assert [ranks.call(1, 9.0, place=3) for _ in range(3)] == [2.0, 4.0, None]
    assert ranks.missing == [0]


@pytest.mark.parametrize(
    "other", [{"op": "max"}, {"number": True}, {"shape": (1,)}, {"op": "barrier", "value": b""}]
)
@pytest.mark.parametrize("saved", [False, True])
def test_function_that_has_changed_gets_no_result_of_another_call(
    other: dict[str, Any], saved: bool
) -> None:
    ranks = Ranks(2)
    ranks.all_call(1.0, place=3)
    if saved:
        record = msgspec.msgpack.encode(ranks.collectives.record())
        ranks = Ranks(2)
        ranks.collectives.restore(msgspec.msgpack.decode(record, type=CollectivesRecord))
    else:
        ranks.dies(1)
        ranks.join(1)
    told = r"at step 3 of its program, where the call of before was sum of float64\[\]"
    with pytest.raises(ParamServeError, match=told):
        ranks.call(1, **{"value": 9.0, "place": 3, **other})
    assert ranks.call(1, 9.0, place=3) == 2.0


def test_function_that_calls_once_more_at_a_step_is_refused() -> None:
    """Else it would get what the call of a later step had."""
    ranks = Ranks(2)
    for step in (10, 20):
        ranks.all_call(step, place=step)
    ranks.dies(1)
    ranks.join(1)
    assert ranks.call(1, 0.0, place=10) == 20.0
    with pytest.raises(
        ParamServeError, match=r"was the next one 10 steps later: .* another batch_s"
    ):
        ranks.call(1, 0.0, place=10)
    assert ranks.call(1, 0.0, place=20) == 40.0
    assert ranks.call(1, 0.0, place=20) is None, "behind all of before it is new"


@pytest.mark.parametrize("took_part", [False, True])
def test_rank_that_made_no_step_between_two_calls_gets_both_again(took_part: bool) -> None:
    """The others made some, as with dynamic shards; or it was not there."""
    ranks = Ranks(2)
    ranks.all_call(1.0, place=10)
    if not took_part:
        ranks.dies(1)
    ranks.call(0, 2.0, place=14)
    if took_part:
        ranks.call(1, 3.0, place=10)
        ranks.dies(1)
    ranks.join(1)
    assert [ranks.call(1, 0.0, place=10) for _ in range(2)] == [2.0, 5.0 if took_part else 2.0]


def test_added_rank_is_waited_for_once_it_takes_part() -> None:
    ranks = Ranks(1)
    ranks.call(0, 1.0, place=10)
    ranks.membership.scale(2)
    ranks.join(1)
    assert ranks.call(0, 2.0, place=20) == 2.0, "without it"
    assert [ranks.call(1, 9.0, place=each) for each in (0, 0)] == [1.0, 2.0]
    assert ranks.call(1, 9.0, place=5) is None
    assert ranks.call(0, 3.0, place=30) == 12.0
    assert ranks.call(0, 3.0, place=40) is None, "now it is waited for"


def test_rank_that_had_ended_for_good_is_waited_for_once_it_takes_part() -> None:
    """Before, its step may wait for the others, which would wait for it here."""
    ranks = Ranks(2)
    ranks.ended(1)
    ranks.join(1)
    assert ranks.call(0, 1.0, place=3) == 1.0
    assert ranks.call(1, 5.0, place=3) == 1.0
    assert ranks.call(1, 5.0, place=6) is None
    assert ranks.call(0, 1.0, place=6) == 6.0
    assert ranks.call(0, 1.0, place=9) is None


def test_rank_that_is_asked_to_end_gets_its_own_value() -> None:
    ranks = Ranks(2)
    ranks.membership.scale(1)
    assert ranks.call(1, 5.0) == 5.0
    assert ranks.call(0, 1.0) == 1.0


def test_value_that_is_withdrawn_does_not_count() -> None:
    ranks = Ranks(2)
    ranks.call(0, 1.0)
    ranks.collectives.withdraw(0)
    assert ranks.missing == []
    ranks.call(1, 1.0, "max")
    assert ranks.call(0, 3.0, "max") == 3.0


def test_other_call_of_a_rank_that_was_interrupted_takes_the_place_of_the_first() -> None:
    ranks = Ranks(2)
    ranks.call(0, op="barrier", value=b"", shape=(0,))
    assert ranks.call(0, 1.0) is None
    assert ranks.call(1, 2.0) == 3.0


def test_other_call_on_another_rank_is_refused_with_both() -> None:
    ranks = Ranks(2)
    ranks.call(0, 1.0, "mean")
    told = (
        r"rank 1 called worker.barrier\(\), and rank 0 worker.all_reduce\(op='mean'\) with an arr"
    )
    with pytest.raises(ParamServeError, match=told):
        ranks.call(1, op="barrier", value=b"", shape=(0,))
    with pytest.raises(ParamServeError, match=r"with an array of float64 and shape \[1\], and"):
        ranks.call(1, op="mean", shape=(1,))
    assert ranks.call(1, 3.0, "mean") == 2.0


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "eval"},
        {"dtype": "object"},
        {"shape": (-1,)},
        {"shape": (1,) * 65},
        {"shape": (2,)},
        {"op": "mean", "dtype": "int64"},
        {"shape": (1,), "number": True},
        {"place": -1},
        {"seen": -1},
    ],
)
def test_call_that_no_client_makes_is_refused(changes: dict[str, Any]) -> None:
    ranks = Ranks(1)
    with pytest.raises(ParamServeError, match="same version"):
        ranks.call(0, **{"value": 1.0, **changes})
    assert ranks.call(0, 1.0) == 1.0


def test_value_that_is_too_large_is_refused() -> None:
    with pytest.raises(Overloaded, match="got a value of 72 bytes, reduce_bytes_max is 64"):
        Ranks(1).call(0, shape=(9,), value=bytes(72))


def test_result_that_is_kept_no_longer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_MAX", 2)
    ranks = Ranks(1)
    for step in range(1, 6):
        ranks.call(0, 1.0, place=step)
    ranks.membership.restarting(0, 0.0)
    ranks.join(0)
    with pytest.raises(ParamServeError, match=r"at step 2 .* before number 4 are kept no longer"):
        ranks.call(0, 1.0, place=2)
    assert ranks.call(0, 1.0, place=6) == 1.0


def test_memory_of_results_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "KEPT_BYTES_MAX", 20 + collectives.CLIENT_BYTES)
    ranks = Ranks(1)
    for step in range(5):
        ranks.call(0, 1.0, place=step)
    assert len(ranks.collectives._ended) == 2


def test_memory_of_who_took_part_is_limited_and_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = 100
    ranks = Ranks(workers)
    for step in range(3):
        ranks.all_call(1.0, place=step)
    ended = ranks.collectives._ended.values()
    assert len({id(each.clients) for each in ended}) == 1, "equal sets are one"
    monkeypatch.setattr(collectives, "KEPT_BYTES_MAX", workers * collectives.CLIENT_BYTES)
    for step in range(3, 13):  # another set each time
        ranks.dies(step % 2)
        ranks.join(step % 2)
        ranks.all_call(1.0, place=step)
    assert len(ended) == 1
    for step in range(13, 20):
        ranks.all_call(1.0, place=step)
    assert len(ended) == 1, "one set and a result are above the bound"
    monkeypatch.setattr(collectives, "KEPT_BYTES_MAX", workers * collectives.CLIENT_BYTES + 16)
    for step in range(20, 25):
        ranks.all_call(1.0, place=step)
    assert len(ended) == 2, "the set counts once, and what has gone counts no longer"


def test_call_that_waits_looks_at_no_kept_result() -> None:
    ranks = Ranks(2)
    for step in range(200):
        ranks.all_call(1.0, place=step)

    def lines(seen: int, place: int) -> int:
        """How many lines Python runs until the call waits, and is asked again."""
        count = 0

        def trace(frame: Any, event: str, arg: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        member = ranks.membership.members[0]
        message = AllReduce(0, "sum", "float64", (), bytes(8), seen, place, 1.0)
        sys.settrace(trace)
        try:
            for _ in range(10):
                assert ranks.collectives.call(message, member) is None
        finally:
            sys.settrace(None)
        ranks.collectives.withdraw(0)
        return count

    assert lines(ranks.seen[0], 201) < 300
    ranks.dies(0)
    ranks.join(0)
    assert lines(0, 201) < 1000, "who begins again looks once, however often it is asked for"

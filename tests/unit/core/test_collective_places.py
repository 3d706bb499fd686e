"""Which collective a call of a rank that comes again is, where ranks are at other steps in one,
make several at one step, or leave some out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.suites import each_case
from tests.unit.core.test_collectives import Ranks

from paramserve.core import collectives
from paramserve.core.collectives import CollectivesRecord
from paramserve.core.membership import LEFT
from paramserve.errors import CollectiveMismatch


def rounds(ranks: Ranks, steps: tuple[int, int], *calls: tuple[int, float]) -> None:
    """Calls that both ranks make, in these rounds, in which each makes its own number of steps."""
    for number, value in calls:
        places = [number * each for each in steps]
        found = [ranks.call(rank, value, "max", place=places[rank]) for rank in (0, 1)]
        assert found == [None, value]
        assert ranks.call(0, value, "max", place=places[0]) == value


def test_rank_of_fewer_steps_gets_the_results_of_the_calls_that_it_took_part_in() -> None:
    ranks = Ranks(2)
    rounds(ranks, (1, 3), (1, 10.0), (1, 11.0), (2, 20.0), (2, 21.0), (3, 30.0), (3, 31.0))
    ranks.dies(0)
    ranks.join(0)
    found = [ranks.call(0, 9.0, "max", place=place) for place in (2, 2, 3, 3, 4)]
    assert found == [20.0, 21.0, 30.0, 31.0, None]


@each_case("saved", [False, True])
def test_call_of_unequal_steps_that_a_rank_may_have_missed_is_refused(saved: bool) -> None:
    """It may be behind the step at which it died, and left out by its loop, or the next one."""
    ranks = Ranks(2)
    rounds(ranks, (1, 3), (1, 10.0), (2, 20.0))
    ranks.dies(0)
    assert ranks.call(1, 30.0, "max", place=9) == 30.0
    if saved:
        record = msgspec.msgpack.encode(ranks.collectives.record())
        ranks.collectives.restore(msgspec.msgpack.decode(record, type=CollectivesRecord))
    ranks.join(0)
    with pytest.raises(
        CollectiveMismatch, match=r"rank 0 .* step 3 .* made collective 3 .* step 9"
    ):
        ranks.call(0, 40.0, "max", place=3, inner=True)


def test_rank_of_unequal_steps_that_makes_all_calls_again_gets_those_it_has_missed() -> None:
    ranks = Ranks(2)
    rounds(ranks, (1, 3), (1, 10.0), (2, 20.0))
    ranks.dies(0)
    assert ranks.call(1, 30.0, "max", place=9) == 30.0
    ranks.join(0)
    assert [ranks.call(0, 9.0, "max", place=place) for place in (1, 2, 3)] == [10.0, 20.0, 30.0]


@each_case("steps", [(1, 1), (1, 3)])
def test_call_that_restarted_ranks_have_left_out_is_not_paired_with_their_next_one(
    steps: tuple[int, int],
) -> None:
    ranks = Ranks(2)
    rounds(ranks, steps, (1, 10.0))
    ranks.dies(1)
    ranks.join(1)
    epochs = {2: {"epoch": 2}, 3: {"epoch": 4}} if steps[0] != steps[1] else {2: {}, 3: {}}
    ours: dict[str, Any] = {"place": 3 * steps[1], **epochs[3]}
    theirs: dict[str, Any] = {"place": 2 * steps[0], **epochs[2]}
    assert ranks.call(1, 30.0, "max", **ours) is None, "it has left out the call of round 2"
    assert ranks.call(0, 20.0, "max", **theirs) is None
    assert ranks.call(1, 30.0, "max", **ours) is None
    assert ranks.call(0, 20.0, "max", **theirs) == 20.0
    theirs = {"place": 3 * steps[0], **epochs[3]}
    assert ranks.call(0, 31.0, "max", **theirs) == ranks.call(1, 30.0, "max", **ours) == 31.0


def test_call_of_leased_samples_is_found_by_its_epoch() -> None:
    ranks = Ranks(2)
    for epoch in (2, 4):
        for value in (epoch, epoch + 0.5):
            ranks.all_call(value, op="max", place=epoch, epoch=epoch, exact=False)
    ranks.dies(0)
    ranks.join(0)
    again: dict[str, Any] = {"op": "max", "place": 9, "epoch": 4, "exact": False}
    assert [ranks.call(0, 9.0, **again) for _ in range(2)] == [4.0, 4.5]
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, 9.0, **{**again, "epoch": 6}) is None
    assert ranks.call(1, 1.0, **{**again, "epoch": 6}) == 9.0


def test_calls_in_a_pass_that_is_left_out_are_none_of_those_behind_it() -> None:
    ranks = Ranks(2)
    for value, in_pass in ((10.0, True), (11.0, False)):
        ranks.all_call(value, op="max", place=2, in_pass=in_pass)
    ranks.dies(0)
    ranks.join(0)
    assert ranks.call(0, 9.0, "max", place=2, begins=True) == 11.0


def test_last_rank_goes_on_without_a_restarted_one_that_had_nothing_left_to_do() -> None:
    """Its loop was at its end, and it has made no call."""
    ranks = Ranks(2)
    ranks.all_call(1.0, place=1)
    ranks.dies(1)
    ranks.join(1)
    ranks.ended(1, LEFT)
    ranks.membership.left_unasked.add(1)
    assert ranks.call(0, 5.0, place=2) == 5.0


def test_call_of_a_forgotten_epoch_is_refused_where_steps_began_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank with leased samples counts its steps anew when it comes again, and not its epochs."""
    monkeypatch.setattr(collectives, "KEPT_MAX", 2)
    ranks = Ranks(1)
    for epoch, place in ((2, 10), (4, 0), (6, 0), (8, 0)):
        ranks.call(0, float(epoch), "max", place=place, epoch=epoch, exact=False)
    ranks.dies(0)
    ranks.join(0)
    with pytest.raises(CollectiveMismatch, match="kept no longer"):
        ranks.call(0, 99.0, "max", place=0, epoch=4, exact=False)
    assert ranks.call(0, 99.0, "max", place=0, epoch=6, exact=False) == 6.0

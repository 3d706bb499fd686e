"""Before the cut for a checkpoint, clients flush what they have left out of their gradients."""

from __future__ import annotations

from typing import Any

from msgspec import structs
from tests.unit.core.group_rig import A, B
from tests.unit.core.rig import Rig, block_spec

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.consistency.registry import spec
from paramserve.core.cut import CUT_RETRY_S
from paramserve.core.events import CheckpointEnded, ClientBye, CutWanted, DeadlineReached
from paramserve.core.flush import AHEAD_LIMIT_S, FLUSH_LIMIT_MAX_S, FLUSH_LIMIT_S, FLUSH_STEPS
from paramserve.messages import CutAsk, CutOver, Done

SHARDS = 2


def rig(policy: Policy) -> Rig:
    """Two ranks; a block with one element on each of two shards; both have left something out."""
    one = Rig(policy, shards=SHARDS, workers=2)
    for rank in range(2):
        one.join(rank + 1, rank)
    one.define(A, block_spec((1,), (1,), cuts=range(3)))
    for client in (A, B):
        step(one, client, 0, leaves=True)
    one.deliver()
    return one


def step(one: Rig, client: int, clock: int, **options: Any) -> None:
    """A step of one call, to both shards."""
    for shard in range(SHARDS):
        one.step(client, {0: [1.0]}, shard=shard, clock=clock, **options)


def asked(one: Rig, client: int) -> tuple[int, ...]:
    """What the newest answer of shard 0 has asked for."""
    answer = one.answers(client, 0)[-1]
    assert isinstance(answer, Done)
    return answer.flush


def cuts(one: Rig) -> list[tuple[dict[int, int], tuple[int, ...]]]:
    """By shard: the clocks of its part of the newest cut, and the ranks that keep something."""
    one.deliver()
    parts = [
        shard.cuts.parts_here[max(shard.cuts.parts_here)]
        for shard in one.shards
        if shard.cuts.parts_here
    ]
    return [(part.clocks, part.left_out) for part in parts]


def test_cut_lies_behind_a_clock_that_no_member_can_have_sent() -> None:
    """A member that had sent it already is asked once more, and the cut is taken right behind the
    clock that all have flushed, whatever the outcome of the next one."""
    one = rig(Sync("sum"))
    one.happen(CutWanted(1))
    step(one, A, 1, leaves=True)
    step(one, A, 2, leaves=True)  # before it hears
    step(one, B, 1, leaves=True)
    one.deliver()
    number, group, clock = asked(one, B)
    assert (group, clock) == (0, 2)
    step(one, B, 2, flush=number)
    assert not cuts(one)
    later = one.shards[0].cuts.flush
    assert later is not None
    number, _, clock = later.request
    assert clock > 3 + 1, "no more than a window can be on its way"
    for at in range(3, clock):
        for client in (A, B):
            step(one, client, at, leaves=True)
        one.deliver()
        assert asked(one, A) == asked(one, B) == later.request
    for client in (A, B):
        step(one, client, clock, flush=number)
        step(one, client, clock + 1, leaves=True)
    assert cuts(one) == [({0: clock + 1}, ())] * SHARDS
    assert one.shards[0].groups[0].state.committed == clock + 2, "it goes on behind the cut"


def test_member_that_keeps_nothing_is_not_asked_and_a_flush_needs_all_others() -> None:
    one = rig(Sync("sum"))
    step(one, A, 1)  # as a worker on the servers' host
    step(one, B, 1, leaves=True)
    one.deliver()
    one.happen(CutWanted(1))
    for client in (A, B):
        step(one, client, 2, leaves=client == B)
    one.deliver()
    assert asked(one, A) == ()
    number, _, clock = asked(one, B)
    step(one, A, clock)
    step(one, B, clock, flush=number)
    assert cuts(one) == [({0: clock + 1}, ())] * SHARDS


def test_cut_waits_for_the_next_step_of_each_client_where_clocks_are_not_decided() -> None:
    """What is left out since is told; a step that was not applied is no flush."""
    one = rig(Async())
    one.happen(CutWanted(1))
    step(one, A, 1, leaves=True)
    number, group, _ = asked(one, A)
    assert group < 0
    step(one, A, 2, flush=number)
    step(one, A, 3, leaves=True)
    assert not cuts(one)
    step(one, B, 1, flush=number, skip=True)
    assert not cuts(one)
    step(one, B, 2, flush=number)
    assert [left for _, left in cuts(one)] == [(0,)] * SHARDS


def test_cut_is_taken_without_the_flush_of_who_does_not_step() -> None:
    one = rig(Sync("sum"))
    one.happen(CutWanted(1))
    one.now = FLUSH_LIMIT_S - 0.1
    one.happen(DeadlineReached())
    assert not cuts(one)
    one.now = FLUSH_LIMIT_S
    one.happen(DeadlineReached())
    assert cuts(one) == [({0: 1}, (0, 1))] * SHARDS


def steps_that_take(one: Rig, seconds: float, clocks: range) -> None:
    """Of all clients; what is to be a flush is one."""
    for clock in clocks:
        one.now += seconds
        one.happen(DeadlineReached())
        for client in (A, B):
            number, *at = asked(one, client) or (0,)
            flush = number if at == [0, clock] else 0
            step(one, client, clock, leaves=not flush, flush=flush)
        one.deliver()


def test_flush_of_slow_clocks_is_waited_for() -> None:
    one = rig(Sync("sum"))
    one.now = 40.0
    steps_that_take(one, 40.0, range(1, 3))
    one.happen(CutWanted(1))
    steps_that_take(one, 40.0, range(3, 5))
    assert cuts(one) == [({0: 5}, ())] * SHARDS


def test_flush_is_waited_for_as_long_as_its_limits_say() -> None:
    """So many steps of the slowest; never longer than the longest; less where a caller says so."""
    for step_s, flush_s, limit in (
        (1.0, 1e9, FLUSH_LIMIT_S),
        (40.0, 1e9, FLUSH_STEPS * 40.0),
        (1000.0, 1e9, FLUSH_LIMIT_MAX_S),
        (40.0, 31.0, 31.0),
    ):
        one = rig(Async())
        steps_that_take(one, step_s, range(1, 3))
        one.happen(CutWanted(1, flush_s=flush_s))
        began = one.now
        one.now = began + limit - 0.1
        one.happen(DeadlineReached())
        assert not cuts(one), step_s
        one.now = began + limit
        one.happen(DeadlineReached())
        assert [left for _, left in cuts(one)] == [(0, 1)] * SHARDS


def test_caller_with_less_time_shortens_the_flush_that_is_under_way() -> None:
    one = rig(Async())
    one.happen(CutWanted(1))
    one.now = 1.0
    one.happen(CutWanted(1, flush_s=5.0))
    one.happen(CutWanted(1, flush_s=9.0))
    one.now = 6.0
    one.happen(DeadlineReached())
    assert [left for _, left in cuts(one)] == [(0, 1)] * SHARDS


def test_long_step_of_long_ago_counts_no_more() -> None:
    one = rig(Async())
    steps_that_take(one, 100.0, range(1, 2))
    steps_that_take(one, 1.0, range(2, 300))
    one.happen(CutWanted(1))
    one.now += FLUSH_LIMIT_S
    one.happen(DeadlineReached())
    assert cuts(one)


def test_clients_that_end_are_not_waited_for_and_told() -> None:
    one = rig(Async())
    one.happen(CutWanted(1))
    for client in (A, B):
        assert not cuts(one)
        for shard in range(SHARDS):
            one.happen(ClientBye(client, answered=True), shard)
    assert [left for _, left in cuts(one)] == [(0, 1)] * SHARDS


def test_shard_that_has_stopped_goes_on_where_the_checkpoint_is_given_up() -> None:
    """Or where the call within which the flush was does not end in time."""
    one = rig(Sync("sum"))
    one.happen(CutWanted(1))
    for client in (A, B):
        step(one, client, 1, leaves=True)
    one.deliver()
    number, _, clock = asked(one, A)
    step(one, A, clock, flush=number, more=(0, 0))  # another group's step follows
    step(one, B, clock, flush=number)
    assert not cuts(one)
    shard = one.shards[0]
    assert shard.cuts.stops
    one.happen(CheckpointEnded(1, False))
    one.now = AHEAD_LIMIT_S
    one.happen(DeadlineReached())
    assert not shard.cuts.stops
    assert shard.cuts.flush is None
    one.happen(DeadlineReached())
    assert not cuts(one)


def lose_an_attempt(one: Rig) -> None:
    """The other shard hears of nothing."""
    one.wire = [(shard, m) for shard, m in one.wire if not isinstance(m, CutAsk | CutOver)]
    one.deliver()
    one.now += 1.0
    one.happen(DeadlineReached())
    one.wire = [(shard, m) for shard, m in one.wire if not isinstance(m, CutAsk | CutOver)]
    one.deliver()


def test_attempt_that_failed_is_made_again_behind_the_clock_of_another_flush() -> None:
    one = rig(Sync("sum"))
    one.happen(CutWanted(1))
    for client in (A, B):
        step(one, client, 1, leaves=True)
    one.deliver()
    number, _, clock = asked(one, A)
    for client in (A, B):
        step(one, client, clock, flush=number)
    while not one.shards[0].cuts.under_way:
        one.deliver_one()
    lose_an_attempt(one)
    for client in (A, B):
        step(one, client, clock + 1, leaves=True)
    one.deliver()
    one.now += CUT_RETRY_S
    one.happen(DeadlineReached())
    for client in (A, B):
        step(one, client, clock + 2, leaves=True)
    one.deliver()
    number, _, clock = asked(one, A)
    for client in (A, B):
        step(one, client, clock, flush=number)
    assert cuts(one) == [({0: clock + 1}, ())] * SHARDS


def test_attempt_that_failed_waits_for_no_more_steps_where_clocks_are_not_decided() -> None:
    """Who has pushed since the flush is told, as where the first attempt took longer."""
    one = rig(Async())
    one.happen(CutWanted(1))
    for client in (A, B):
        step(one, client, 1, flush=1)
    lose_an_attempt(one)
    step(one, A, 2, leaves=True)
    one.now += CUT_RETRY_S
    one.happen(DeadlineReached())
    assert [left for _, left in cuts(one)] == [(0,)] * SHARDS


def test_cut_names_who_has_pushed_and_waits_to_read() -> None:
    one = rig(BoundedStaleness(0))
    one.happen(CutWanted(1))
    step(one, A, 1, leaves=True)
    step(one, A, 2, flush=1)
    for shard in range(SHARDS):  # it waits for the other rank, and is in the cut
        one.step(A, {0: [1.0]}, [0], shard=shard, clock=3, leaves=True)
    step(one, B, 1, flush=1)
    assert [left for _, left in cuts(one)] == [(0,)] * SHARDS


def test_rank_that_is_to_come_again_is_not_waited_for() -> None:
    one = rig(Async())
    one.tell(one.members((A, 1, "live"), (B, 1, "restarting")))
    one.happen(CutWanted(1))
    step(one, A, 1, flush=1)
    assert [left for _, left in cuts(one)] == [(1,)] * SHARDS


def test_call_that_has_begun_does_not_keep_a_flush_that_stops_nothing() -> None:
    one = rig(Async())
    other = structs.replace(
        block_spec((1,), (1,), number=1, group=1, cuts=range(3)), consistency=spec(Sync("sum"))
    )
    one.define(A, other)
    one.happen(CutWanted(1))
    step(one, A, 1, flush=1)
    step(one, B, 1, flush=1, more=(0, 0))  # another group's step follows
    assert one.shards[0].cuts.flush is None


def test_group_that_no_rank_steps_any_more_is_not_waited_for() -> None:
    one = rig(Sync("sum"))
    one.define(A, block_spec((1,), (1,), number=1, group=1, cuts=range(3)))

    def step_later(clock: int, **options: Any) -> None:
        for client in (A, B):
            for shard in range(SHARDS):
                one.step(client, {1: [1.0]}, shard=shard, clock=clock, group=1, **options)
        one.deliver()

    step_later(0, leaves=True)
    one.happen(CutWanted(1))
    step_later(1, leaves=True)
    step_later(2, leaves=True)
    step_later(3, leaves=True)
    number, group, clock = asked(one, B)
    assert group == 1
    for at in range(4, clock):
        step_later(at, leaves=True)
    step_later(clock, flush=number)
    assert [clocks[1] for clocks, _ in cuts(one)] == [clock + 1] * SHARDS
    assert [left for _, left in cuts(one)] == [(0, 1)] * SHARDS

"""What workers save with their steps: a shard keeps it as of the last two steps that told some."""

from __future__ import annotations

from tests.unit.core.group_rig import A, B, last, push, rig
from tests.unit.core.rig import Rig

from paramserve.config import Limits
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.cut_parts import ShardCut
from paramserve.core.restoring import restore
from paramserve.core.shard import Shard
from paramserve.messages import SAVED_BYTES_MAX, SAVED_NAMES_MAX, CutAsk, Refused, Saved


def saved(**values: bytes) -> tuple[Saved, ...]:
    """Values that are numbered by what they are."""
    return tuple(Saved(name, value[-1], value) for name, value in values.items())


def kept(shard: Shard, rank: int = 0) -> list[tuple[int, dict[str, bytes]]]:
    """(clock, values) of a rank, the older first; as reports say it, but for the clocks."""
    saved = shard.groups[0].state.saved.by_rank.get(rank, ())
    found = [(each.clock, {v.name: v.data for v in each.values}) for each in saved]
    for clock, values in found:
        (group,) = shard.report(saved=("group 0", rank, clock + 1))
        assert {each.name: each.data for each in group.saved} == values
    return found


def stepped(*steps: tuple[int, tuple[Saved, ...]]) -> Rig:
    one = rig(Async(), workers=2)
    for clock, values in steps:
        push(one, A, clock, saved=values)
    return one


def test_last_two_steps_that_told_some_are_kept_whole() -> None:
    one = stepped((0, saved(a=b"0", b=b"0")), (1, saved(a=b"1")), (2, ()), (3, saved(b=b"3")))
    push(one, B, 0)
    (shard,) = one.shards
    assert kept(shard) == [(1, {"a": b"1", "b": b"0"}), (3, {"a": b"1", "b": b"3"})]
    assert kept(shard, rank=1) == []
    for ask in (None, ("group 0", 0, 1), ("group 0", 1, 9), ("group 1", 0, 9)):
        assert [each.saved for each in shard.report(saved=ask)] == [()]


def test_step_that_is_taken_again_forgets_what_it_and_later_ones_told() -> None:
    one = stepped((0, saved(a=b"0")), (1, saved(a=b"1")), (2, saved(b=b"2")))
    push(one, A, 2)
    assert kept(one.shards[0]) == [(1, {"a": b"1"})]
    push(one, A, 1, saved=saved(b=b"9"))
    assert kept(one.shards[0]) == [(1, {"b": b"9"})]


def test_step_that_ends_no_clock_tells_what_was_saved_after_the_clock_before() -> None:
    one = stepped((0, saved(a=b"0")), (1, saved(b=b"1")))
    one.step(A, clock=2, tick=False, saved=saved(a=b"2"))
    assert kept(one.shards[0]) == [(0, {"a": b"0"}), (1, {"a": b"2", "b": b"1"})]


def test_refused_step_counts_and_so_does_what_it_told() -> None:
    one = stepped((0, saved(a=b"0")))
    one.step(A, {7: [1.0]}, clock=1, saved=saved(a=b"1"))
    assert isinstance(last(one, A), Refused)
    assert one.shards[0].report()[0].clocks[0] == (0, 2)
    assert kept(one.shards[0])[-1] == (1, {"a": b"1"})


def test_step_of_a_clock_that_is_not_decided_tells_what_it_has_saved() -> None:
    one = rig(Sync(), workers=2)
    push(one, A, 0, saved=saved(a=b"0"))
    assert kept(one.shards[0]) == [(0, {"a": b"0"})], "who takes it again looks before clock 0"


def test_too_much_is_refused_and_what_was_kept_stays() -> None:
    one = stepped((0, saved(a=b"0")))
    names = tuple(Saved(f"n{i}", i, b"x") for i in range(SAVED_NAMES_MAX))
    for clock, values in ((1, names), (2, saved(b=bytes(SAVED_BYTES_MAX)))):
        push(one, A, clock, saved=values)
        refused = last(one, A)
        assert isinstance(refused, Refused)
        assert refused.kind == "Overloaded"
        assert kept(one.shards[0]) == [(0, {"a": b"0"})]


def test_shard_that_is_restored_has_what_was_saved() -> None:
    one = stepped((0, saved(a=b"0")), (1, saved(b=b"1")))
    (shard,) = one.shards
    ask = CutAsk(1, 0, (), True)
    clients = {client: each.last for client, each in shard.sessions.by_client.items()}
    part = ShardCut(0, ask, clients, shard.groups, shard.sessions)
    push(one, A, 2, saved=saved(a=b"2"))
    twin = Shard(0, 1, 2, Async(), limits=Limits(), resend_s=0.5)
    restore(twin, part, 0.0)
    assert kept(twin) == [(0, {"a": b"0"}), (1, {"a": b"0", "b": b"1"})]

"""Notes that ranks send with their steps: the next incarnation finds its last two."""

from __future__ import annotations

from tests.unit.core.group_rig import A, B, push, rig
from tests.unit.core.rig import Rig

from paramserve.consistency.built_in import Async


def notes(one: Rig, rank: int = 0, shard: int = 0) -> list[tuple[int, bytes]]:
    """(clock, note) of a rank on a shard."""
    (group,) = one.shards[shard].report(notes=True)
    return [(clock, note) for of, clock, note in group.notes if of == rank]


def test_repeated_older_step_leaves_the_notes_of_later_steps() -> None:
    one = rig(Async(), workers=1)
    for clock in range(4):
        push(one, A, clock, note=b"%d" % clock)
    push(one, A, 1, note=b"again")
    assert notes(one) == [(2, b"2"), (3, b"3")]


def test_repeated_last_step_leaves_the_note_before() -> None:
    one = rig(Async(), workers=1)
    for clock in range(3):
        push(one, A, clock, note=b"%d" % clock)
    push(one, A, 2, note=b"again")
    assert notes(one) == [(1, b"1"), (2, b"again")]


def test_notes_of_a_rank_that_has_left_are_dropped_if_a_live_one_has_some() -> None:
    one = rig(Async(), workers=2)
    for client in (A, B):
        push(one, client, 0, note=b"0")
    one.tell(one.members((A, 1, "dead"), (B, 1, "live")))
    assert notes(one) == [(0, b"0")], "it may come again"
    one.tell(one.members((A, 2, "left"), (B, 1, "live")))
    assert (notes(one), notes(one, 1)) == ([], [(0, b"0")])
    one.tell(one.members((A, 2, "left"), (B, 1, "left")))
    assert notes(one, 1) == [(0, b"0")], "one that comes later goes by them"

"""Runs and counts of a block's pieces equal those that are worked out anew for each push."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paramserve.core.pieces import CHOICES_MAX, Pieces
from paramserve.messages import Piece
from paramserve.rules import Run

SIZES = (2, 0, 3, 1, 1, 4)
LOW, HIGH = 1, 9
"""The shard has a part of the first and of the last piece that it has."""


def expected_runs(counts: list[int], active: set[int], separate: bool) -> list[tuple[int, ...]]:
    """Element by element: neighbours that are active, with one count, are one run."""
    elements = [(piece, counts[piece]) for piece, size in enumerate(SIZES) for _ in range(size)]
    runs: list[tuple[int, ...]] = []
    before: object = None
    for at, (piece, count) in enumerate(elements[LOW:HIGH]):
        now = None if piece not in active else (piece, count) if separate else count
        if now is not None and now == before:
            runs[-1] = (runs[-1][0], at + 1, count)
        elif now is not None:
            runs.append((at, at + 1, count))
        before = now
    return runs


PUSHES = st.lists(
    st.one_of(st.none(), st.sets(st.integers(0, len(SIZES) - 1)), st.just({0, 2, 3})), max_size=12
)


@given(PUSHES, st.booleans())
def test_pieces_give_the_runs_and_counts_of_any_pushes(
    pushes: list[set[int] | None], separate: bool
) -> None:
    named = [Piece(f"p{at}", (size,)) for at, size in enumerate(SIZES)]
    pieces = Pieces(named, LOW, HIGH, separate=separate)
    counts = [0] * len(SIZES)
    for push in pushes:
        active = None if push is None else tuple(push)
        chosen = set(range(len(SIZES))) if push is None else push
        runs = pieces.runs(active)
        assert [run[:3] for run in runs] == expected_runs(counts, chosen, separate)
        assert all(isinstance(run, Run) for run in runs)
        pieces.count(active)
        counts = [count + (piece in chosen) for piece, count in enumerate(counts)]
        assert pieces.counts == counts


def test_ranges_join_neighbours() -> None:
    pieces = Pieces([Piece(f"p{at}", (size,)) for at, size in enumerate(SIZES)], LOW, HIGH)
    assert pieces.ranges((4, 0, 2)) == [(0, 4), (5, 6)]
    assert pieces.ranges(()) == pieces.ranges((1,)) == []


def test_pieces_keep_a_bounded_number_of_choices() -> None:
    pieces = Pieces([Piece(f"p{at}", (1,)) for at in range(2 * CHOICES_MAX)], 0, 2 * CHOICES_MAX)
    for at in range(2 * CHOICES_MAX):
        pieces.count((at,))
    assert len(pieces._choices) <= CHOICES_MAX
    assert pieces.counts == [1] * 2 * CHOICES_MAX
    assert pieces.runs(None) == [Run(0, 2 * CHOICES_MAX, 1)]


def test_pieces_with_shapes_are_runs_of_their_own() -> None:
    named = [Piece("a", (2, 2)), Piece("b", ()), Piece("c", (0, 3))]
    pieces = Pieces(named, 0, 5, separate=True, shaped=True)
    for count in range(2):
        assert pieces.runs(None) == [Run(0, 4, count, (2, 2)), Run(4, 5, count, ())]
        pieces.count(None)
    assert pieces.runs((1,)) == [Run(4, 5, 2, ())]

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.core.rig import block_spec

from paramserve.core.partition import PIECE_BYTES_MIN, Block, borders, cut, size_of
from paramserve.messages import ALIGN, Piece

LOADS = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9)


@given(st.integers(0, 1 << 22), st.sampled_from([4, 8]), LOADS)
def test_cut_covers_every_element_once_in_order(size: int, itemsize: int, loads: list[int]) -> None:
    cuts = cut(size, itemsize, loads)
    assert len(cuts) == len(loads) + 1
    assert (cuts[0], cuts[-1]) == (0, size)
    assert all(low <= high for low, high in pairwise(cuts))
    assert all(low * itemsize % ALIGN == 0 for low in cuts[:-1] if low < size)


@given(st.integers(0, 1 << 22), st.sampled_from([4, 8]), LOADS)
def test_cut_gives_equal_parts_of_64_kb_or_more_to_the_lightest_shards(
    size: int, itemsize: int, loads: list[int]
) -> None:
    parts = [high - low for low, high in pairwise(cut(size, itemsize, loads))]
    owners = [shard for shard, part in enumerate(parts) if part]
    assert len(owners) == min(len(loads), max(size > 0, size * itemsize // (64 << 10)))
    others = set(range(len(loads))) - set(owners)
    assert all(loads[owner] <= loads[other] for owner in owners for other in others)
    if len(owners) > 1:
        held = [parts[owner] * itemsize for owner in owners]
        assert max(held) - min(held) <= 2 * ALIGN
        assert min(held) > (64 << 10) - 2 * ALIGN


@given(st.integers(8192, 9000), st.integers(1000, 3000))
def test_cut_more_shards_than_lines_stays_inside(size: int, shards: int) -> None:
    cuts = cut(size, 8, [0] * shards)
    assert all(0 <= low <= high <= size for low, high in pairwise(cuts))


def test_size_of_counts_scalars_and_empty_tensors() -> None:
    assert size_of([Piece("a", ()), Piece("b", (2, 3)), Piece("c", (0, 9))]) == 7


def test_block_names_what_its_spec_says() -> None:
    spec = block_spec((2, 3), (), (4,), number=5, group=2, cuts=(0, 8, 11), dtype="float32")
    block = Block(spec)
    assert (block.id, block.group, block.group_name) == (5, 2, "group 2")
    assert block.dtype == np.float32
    assert block.rule == spec.rule
    assert block.pieces == spec.pieces
    assert block.starts == (0, 6, 7, 11)
    assert (block.size, block.nbytes) == (11, 44)
    assert [block.range(shard) for shard in (0, 1)] == [(0, 8), (8, 11)]


@given(st.lists(st.integers(0, 1 << 17), min_size=1, max_size=30), LOADS)
def test_cut_of_whole_tensors_is_at_their_borders(sizes: list[int], loads: list[int]) -> None:
    pieces = [Piece(str(i), (size,)) for i, size in enumerate(sizes)]
    cuts = cut(size_of(pieces), 4, loads, borders(pieces))
    assert len(cuts) == len(loads) + 1
    assert (cuts[0], cuts[-1]) == (0, sum(sizes))
    assert all(low <= high for low, high in pairwise(cuts))
    assert set(cuts) <= set(borders(pieces))
    even = sum(sizes) / len(loads)
    assert max(high - low for low, high in pairwise(cuts)) <= max(
        2 * PIECE_BYTES_MIN / 4, even + max(sizes)
    )

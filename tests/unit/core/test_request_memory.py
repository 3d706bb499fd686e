"""What a shard keeps of a client's arenas is good for what was checked, and for nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import block_spec

from paramserve.core import request_memory
from paramserve.core.block import ShardBlock
from paramserve.core.request_memory import Memory
from paramserve.errors import ShapeMismatch
from paramserve.rules import Add


def block(size: int) -> ShardBlock:
    return ShardBlock(block_spec((size,)), 0, Add(), attempt=1)


def arena(nbytes: int = 256) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(nbytes, np.uint8)


def test_place_that_was_found_good_gives_the_same_array() -> None:
    one, memory = block(8), Memory({1: arena()}, mirrored=False)
    assert memory.at(1, 64, one) is memory.at(1, 64, one)
    assert memory.at(1, 128, one) is not memory.at(1, 64, one)


def test_arena_that_was_replaced_is_checked_and_used_instead() -> None:
    one, arenas = block(8), {1: arena()}
    memory = Memory(arenas, mirrored=False)
    memory.at(1, 64, one)
    arenas[1] = arena()
    memory.at(1, 64, one)[:] = 1.0
    assert arenas[1][64:128].any()
    arenas[1] = arena(100)
    with pytest.raises(ShapeMismatch):
        memory.at(1, 64, one)
    del arenas[1]
    with pytest.raises(ShapeMismatch):
        memory.at(1, 64, one)


def test_place_that_is_good_for_one_block_is_checked_for_another() -> None:
    small, large, memory = block(8), block(100), Memory({1: arena()}, mirrored=False)
    memory.at(1, 64, small)
    with pytest.raises(ShapeMismatch):
        memory.at(1, 64, large)


@each_case(("number", "offset"), [(1, -64), (1, 8), (1, 256), (2, 64), (0, 64)])
def test_bad_place_is_refused_each_time(number: int, offset: int) -> None:
    one, memory = block(8), Memory({1: arena()}, mirrored=False)
    memory.at(1, 64, one)
    for _ in range(2):
        with pytest.raises(ShapeMismatch):
            memory.at(number, offset, one)


def test_runs_that_lie_in_an_arena_are_known() -> None:
    memory = Memory({1: arena(64)}, mirrored=False)
    assert all(map(memory.has, [(1, 0, 64), (1, 63, 1), (1, 64, 0)]))
    assert not any(map(memory.has, [(1, 0, 65), (1, 64, 1), (2, 0, 0), (1, 1 << 63, 1)]))


def test_number_of_kept_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_memory, "VIEWS_MAX", 3)
    one, memory = block(1), Memory({1: arena(64 * 20)}, mirrored=False)
    for at in range(20):
        memory.at(1, 64 * at, one)[:] = at
        assert len(memory._views) <= 3
    assert [float(memory.at(1, 64 * at, one)[0]) for at in range(20)] == list(map(float, range(20)))

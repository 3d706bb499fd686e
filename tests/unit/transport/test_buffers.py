"""Receive buffers: used again after the last use, never before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paramserve.messages import ALIGN
from paramserve.transport.buffers import POOLED_BYTES_MIN, Buffers
from paramserve.transport.framing import ByteArray

SIZE = 4 * POOLED_BYTES_MIN


@pytest.fixture
def pool() -> Buffers:
    return Buffers(4 * SIZE)


def at(array: ByteArray) -> int:
    return int(array.ctypes.data)


@pytest.mark.parametrize("size", [1, 63, POOLED_BYTES_MIN - 1, POOLED_BYTES_MIN, SIZE + 1])
def test_array_has_the_size_and_is_aligned_and_writable(pool: Buffers, size: int) -> None:
    for _ in range(3):
        array = pool.take(size)
        assert (array.size, array.dtype, at(array) % ALIGN) == (size, np.uint8, 0)
        array.data[:] = bytes(size)


def test_buffer_without_references_is_used_again(pool: Buffers) -> None:
    array = pool.take(SIZE)
    place = at(array)
    del array
    assert pool.idle_bytes == SIZE
    again = pool.take(SIZE - 100)
    assert (at(again), again.size, pool.idle_bytes) == (place, SIZE - 100, 0)


HOLDS: list[Callable[[ByteArray], Any]] = [
    lambda array: array,
    lambda array: array[100:200],
    lambda array: array[64:][64:][8:16].view(np.float64),
    lambda array: array[:4096].view(np.float32).reshape(32, 32).T[3],
    lambda array: array.data[1000:2000],
    lambda array: memoryview(array[10:])[5:].cast("B"),
    lambda array: np.frombuffer(array.data[64:128], np.int64),
    lambda array: [array[:64], array[64:128]][1],
]


def test_held_part_of_a_payload_is_never_given_out_again() -> None:
    pools = [Buffers(4 * SIZE) for _ in HOLDS]
    held, before = [], []
    for pool, hold in zip(pools, HOLDS, strict=True):
        array = pool.take(SIZE)
        array[:] = 7
        held.append(hold(array))
        before.append(memoryview(held[-1]).tobytes())
        del array
    gc.collect()  # once for all: it takes longer than all else
    others = []
    for pool in pools:
        assert pool.idle_bytes == 0
        others += [pool.take(SIZE) for _ in range(4)]
    for other in others:
        other[:] = 9
    assert [memoryview(each).tobytes() for each in held] == before
    del held, other, others
    gc.collect()
    assert [pool.idle_bytes for pool in pools] == [4 * SIZE] * len(pools)


def test_array_in_a_cycle_comes_back_with_the_collection(pool: Buffers) -> None:
    cycle: list[object] = [pool.take(SIZE)]
    cycle.append(cycle)
    del cycle
    assert pool.idle_bytes == 0
    gc.collect()
    assert pool.idle_bytes == SIZE


def test_idle_memory_has_a_bound_and_the_oldest_goes_first(pool: Buffers) -> None:
    arrays = [pool.take(SIZE * n // 4) for n in range(2, 8)]
    places = [at(array) for array in arrays]
    while arrays:
        del arrays[0]
    assert pool.idle_bytes == SIZE * 7 // 4 + SIZE * 6 // 4  # and 5/4 would be over 16/4
    assert at(pool.take(SIZE * 6 // 4)) == places[4]


def test_buffer_over_the_bound_is_not_kept(pool: Buffers) -> None:
    pool.take(4 * SIZE + 1)
    assert pool.idle_bytes == 0


def test_buffer_twice_as_large_is_left_for_others(pool: Buffers) -> None:
    pool.take(2 * SIZE)
    small = pool.take(SIZE - 1)
    assert (pool.idle_bytes, small.size) == (2 * SIZE, SIZE - 1)


def test_smallest_that_fits_is_taken(pool: Buffers) -> None:
    large, small = pool.take(SIZE + SIZE // 2), pool.take(SIZE)
    place = at(small)
    del large, small
    assert at(pool.take(SIZE)) == place


def test_closed_pool_keeps_nothing(pool: Buffers) -> None:
    held = pool.take(SIZE)
    pool.take(SIZE)
    pool.close()
    assert pool.idle_bytes == 0
    del held
    assert pool.idle_bytes == 0

from __future__ import annotations

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.core.table import memory
from paramserve.core.table.memory import HUGE_BYTES, Growing, zeros


def test_growing_keeps_rows_and_adds_zeros() -> None:
    growing = Growing(3, np.float32)
    growing.array[:5] = 7.0
    growing.reserve(1_000_000)
    assert growing.capacity >= 1_000_000
    assert growing.array.shape == (growing.capacity, 3)
    assert (growing.array[:5] == 7.0).all()
    assert not growing.array[5:6000].any()
    growing.array[999_999] = 1.0


def test_growing_while_a_reference_to_the_array_exists_copies() -> None:
    growing = Growing(0, np.int64)
    held = growing.array
    held[:] = 3
    growing.reserve(20_000)
    growing.array[0] = 4
    assert growing.array[1] == held[0] == 3
    assert growing.array.size >= 20_000
    assert not growing.array[held.size :].any()


def test_growing_without_memory_stays_as_it_was() -> None:
    growing = Growing(1, np.int64)
    growing.array[7] = 5
    with pytest.raises(MemoryError):
        growing.reserve(1 << 58)
    assert growing.array[7] == 5
    assert growing.capacity == len(growing.array)


def test_growing_where_nothing_can_be_resized_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoResize(memory.mmap.mmap):
        def resize(self, newsize: int) -> None:
            raise SystemError("mmap: resizing not available--no mremap()")

    monkeypatch.setattr(memory.mmap, "mmap", NoResize)
    growing = Growing(2, np.float32)
    growing.array[:] = 2.0
    before = growing.capacity
    growing.reserve(100_000)
    assert (growing.array[:before] == 2.0).all()
    assert not growing.array[before:].any()


@each_case("rows", [0, 1, HUGE_BYTES // 16 - 1, HUGE_BYTES // 16, HUGE_BYTES])
def test_zeros_has_its_shape(rows: int) -> None:
    array = zeros(rows, 2)
    assert (array.shape, array.dtype) == ((rows, 2), np.int64)
    assert not array[-5:].any()
    array[-5:] = 1


def test_zeros_without_memory_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        zeros(1 << 56, 2)

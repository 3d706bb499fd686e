"""Copies for cuts lie in memory that was touched before, and is given back."""

from __future__ import annotations

import numpy as np

from paramserve.server.cut_memory import LEAST_BYTES, PreparedMemory


def test_copy_lies_in_prepared_memory_of_its_size() -> None:
    memory, large = PreparedMemory(), np.arange(LEAST_BYTES // 8, dtype=np.float64)
    prepared = memory.prepare([large.nbytes, 8])
    assert [each.size for each in prepared] == [large.nbytes], "the small array needs none"
    memory.add(prepared)
    first, second = memory.copy(large), memory.copy(large)
    assert np.shares_memory(first, prepared[0])
    assert not np.shares_memory(second, prepared[0])
    for each in (first, second, memory.copy(large[:5])):
        assert each.dtype == large.dtype
        assert (each == large[: each.size]).all()


def test_unused_memory_is_given_back() -> None:
    memory, large = PreparedMemory(), np.ones(LEAST_BYTES // 8)
    prepared = memory.prepare([large.nbytes])
    memory.add(prepared)
    memory.give_back()
    assert not np.shares_memory(memory.copy(large), prepared[0])


def test_memory_that_is_not_there_is_no_failure() -> None:
    assert PreparedMemory().prepare([1 << 62]) == []

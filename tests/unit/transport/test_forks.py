"""Copies of what callers were given to keep, which a fork makes."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from paramserve.transport import forks


class Rows:
    """What is lent, as a slot of an arena."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        self.bytes = np.frombuffer(self.memory, np.uint8)


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rows]:
    rows = Rows()
    monkeypatch.setattr(forks, "lent", {rows: None})
    yield rows
    forks._drop_copies()


def test_fork_without_memory_for_copies_tells_what_the_child_shares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(address: int, size: int) -> bytes:
        raise MemoryError

    monkeypatch.setattr(ctypes, "string_at", full)
    forks._copy_lent()
    assert not forks._forking.copies
    [error] = caplog.records
    assert "no memory to copy the rows that Table.pull has returned" in error.getMessage()


def test_threads_that_fork_at_once_have_copies_of_their_own(rows: Rows) -> None:
    def fork() -> None:
        forks._copy_lent()
        forks._drop_copies()

    forks._copy_lent()
    other = threading.Thread(target=fork)
    other.start()
    other.join()
    [(begin, pages)] = forks._forking.copies
    assert begin == rows.bytes.ctypes.data
    assert len(pages) == rows.bytes.nbytes

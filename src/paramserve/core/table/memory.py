"""Memory of a table: zeroed, private to the process, on huge pages where the kernel has them.

An array grows in place where the kernel can move its pages (`mremap`), which copies nothing: 3 GB
in 0.5 ms. Elsewhere it is copied.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_BYTES = 2 << 20
"""A huge page on x86-64 and on most of arm64. Sizes are whole numbers of them, which is also what
makes Linux align the memory."""
SMALL_BYTES = 64 << 10
"""What an array has at first, so that a small table is small."""
GROW = 16
"""An array grows by a 16th of itself, or to what is asked for. Memory ahead of its use costs
addresses, not pages."""

_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def _map(size: int, *, small: bool = False) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=_FLAGS)
    except (OSError, OverflowError) as refused:
        raise MemoryError(f"a table could not get {size} bytes: {refused}") from refused
    _advise(memory, small=small)
    return memory


def _advise(memory: mmap.mmap, *, small: bool = False) -> None:
    if len(memory) >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_NOHUGEPAGE if small else mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages
            return


def _round_up(size: int) -> int:
    unit = HUGE_BYTES if size > HUGE_BYTES // 2 else SMALL_BYTES
    return -(-size // unit) * unit


def zeros(rows: int, columns: int) -> npt.NDArray[np.int64]:
    """An int64 array [rows, columns] of zeros, whose pages are there once they are touched."""
    if rows * columns * 8 < HUGE_BYTES:
        return np.zeros((rows, columns), np.int64)
    memory = _map(_round_up(rows * columns * 8))
    return np.frombuffer(memory, np.int64, rows * columns).reshape(rows, columns)


def sparse(size: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """An array of zeros that is written at a place here and there: on small pages, where a huge one
    would be cleared for each place. Its pages are there once they are touched."""
    nbytes = size * np.dtype(dtype).itemsize
    if nbytes < HUGE_BYTES:
        return np.zeros(size, dtype)
    memory = _map(_round_up(nbytes), small=True)
    return np.frombuffer(memory, dtype, size)


class Growing:
    """An array [capacity, columns] of zeros that gets more rows.

    A caller that keeps `array` over a `reserve` keeps the old memory: what it reads there is old,
    and what it writes there is lost.

    Args:
        columns: of a row; 0 for an array of one dimension.
        dtype: of an element.
    """

    def __init__(self, columns: int, dtype: npt.DTypeLike) -> None:
        self._columns = columns
        self._dtype = np.dtype(dtype)
        self.row_bytes = max(columns, 1) * self._dtype.itemsize
        self._memory = _map(SMALL_BYTES)
        self.array: npt.NDArray[Any]
        self._view()

    @property
    def capacity(self) -> int:
        """Rows that there is room for."""
        return len(self._memory) // self.row_bytes

    def reserve(self, rows: int) -> None:
        """Have room for this many rows. Those that are there stay, the new ones are zeros.

        Raises:
            MemoryError: the system has no such memory. Everything is as it was.
        """
        if rows <= self.capacity:
            return
        old = self._memory
        size = _round_up(max(rows * self.row_bytes, len(old) + len(old) // GROW))
        del self.array
        try:
            self._grow(size)
        except OSError as refused:
            raise MemoryError(f"a table could not get {size} bytes: {refused}") from refused
        finally:
            self._view()

    def _grow(self, size: int) -> None:
        try:
            self._memory.resize(size)
            _advise(self._memory)
        except (BufferError, SystemError, ValueError):
            # Something still holds the array, as a traceback does, or there is no mremap here.
            old, self._memory = self._memory, _map(size)
            self._memory[: len(old)] = old[:]

    def _view(self) -> None:
        capacity = self.capacity
        flat = np.frombuffer(self._memory, self._dtype, capacity * max(self._columns, 1))
        self.array = flat.reshape(capacity, self._columns) if self._columns else flat

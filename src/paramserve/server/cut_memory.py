"""Memory for the copies that a cut makes before a write: there before the cut is taken.

The first touch of new pages takes longer than the copy itself. So a thread touches them ahead, and
the shard pauses for the copy only. All of it is given back when the checkpoint is written.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.core.cut_parts import CutMemory
from paramserve.transport.timing import SYSTEM

Array = npt.NDArray[Any]
Pages = npt.NDArray[np.uint8]

LEAST_BYTES = 1 << 20
"""Smaller arrays are copied to where the allocator puts them."""
PAGE_BYTES = 4096
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def touched(nbytes: int) -> Pages | None:
    """New memory whose pages are there; None: there is not so much."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=_FLAGS)
    except (OSError, OverflowError):
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    pages = np.frombuffer(memory, np.uint8)
    pages[::PAGE_BYTES] = 0
    return pages


class PreparedMemory(CutMemory):
    """Copies to memory that was prepared, where there is some."""

    def __init__(self) -> None:
        self._ready: dict[int, list[Pages]] = {}
        """Memory by size."""

    def prepare(self, sizes: Iterable[int]) -> list[Pages]:
        """Memory for arrays of these sizes, for `add`; takes long, and may run in any thread."""
        touched_pages = (touched(nbytes) for nbytes in sizes if nbytes >= LEAST_BYTES)
        return [each for each in touched_pages if each is not None]

    def add(self, pages: Iterable[Pages]) -> None:
        """Use this memory for the next copies."""
        for each in pages:
            self._ready.setdefault(each.size, []).append(each)

    def give_back(self) -> None:
        """Release what was not used."""
        self._ready.clear()

    def copy(self, array: Array) -> Array:
        ready = self._ready.get(array.nbytes)
        if not ready:
            return np.copy(array)
        into: Array = ready.pop().view(array.dtype)
        np.copyto(into, array)
        return into

    def now(self) -> float:
        return SYSTEM.monotonic()

"""Loops over the order of use of a table's rows, compiled by Numba: import this lazily.

The order is a doubly linked list: `links` is int64 [capacity, 3] of (newer row, older row, number
of the last use), `ends` int64 [2] of (newest row, oldest row); -1 stands for none.
"""

from __future__ import annotations

import numpy as np

from paramserve.core.table.kernels import ENTRIES, INT, KEYS
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import prefetch
from paramserve.rules.kernels import kernel

NEWER, OLDER, USE = 0, 1, 2
NEWEST, OLDEST = 0, 1
LINK_BYTES = 24
AHEAD = 16


@kernel
def unlink(links: Array, ends: Array, row: int) -> None:
    """Take a row out of the list."""
    newer, older = links[row, NEWER], links[row, OLDER]
    if newer < 0:
        ends[NEWEST] = older
    else:
        links[newer, OLDER] = older
    if older < 0:
        ends[OLDEST] = newer
    else:
        links[older, NEWER] = newer


@kernel
def link(links: Array, ends: Array, row: int, use: int) -> None:
    """Put a row in front, as the newest."""
    newest = ends[NEWEST]
    links[row, NEWER] = -1
    links[row, OLDER] = newest
    links[row, USE] = use
    if newest < 0:
        ends[OLDEST] = row
    else:
        links[newest, NEWER] = row
    ends[NEWEST] = row


@kernel
def add(links: Array, ends: Array, rows: Array, first: int) -> None:
    """Put rows that are not in the list in front of it, in their order, with uses from `first`
    on."""
    for i in range(rows.size):
        link(links, ends, rows[i], first + i)


@kernel
def touch(links: Array, ends: Array, rows: Array, first: int) -> None:
    """Move rows of the list to its front, in their order, with uses from `first` on; -1 is left
    out."""
    for i in range(rows.size):
        if i + AHEAD < rows.size and rows[i + AHEAD] >= 0:
            prefetch(np.uint64(links.ctypes.data + rows[i + AHEAD] * LINK_BYTES))
        if rows[i] >= 0:
            unlink(links, ends, rows[i])
            link(links, ends, rows[i], first + i)


@kernel
def oldest(links: Array, ends: Array, before: int, rows: Array) -> int:
    """Write rows last used before a use to `rows`, the oldest first, until it is full."""
    row, n = ends[OLDEST], 0
    while n < rows.size and row >= 0 and links[row, USE] < before:
        rows[n] = row
        n += 1
        row = links[row, NEWER]
    return n


@kernel
def drop(links: Array, ends: Array, rows: Array) -> None:
    """Take rows out of the list."""
    for i in range(rows.size):
        unlink(links, ends, rows[i])


KERNELS: Kernels = {
    add: (ENTRIES, KEYS, KEYS, INT),
    touch: (ENTRIES, KEYS, KEYS, INT),
    oldest: (ENTRIES, KEYS, INT, KEYS),
    drop: (ENTRIES, KEYS, KEYS),
}
"""All of them, compiled for these arguments."""

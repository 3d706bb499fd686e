"""Loops over the index of a keyed table, compiled by Numba: import this lazily.

An index is an int64 array [places, 2] of (key, row + 1): 0 in the second column is an empty place,
`BURIED` one whose key was removed while the entries move to a larger array. A key lies at its home,
which a hash with the index's secret tells, or in one of the places behind it, without an empty
place between (linear probing; behind the last place comes the first). At a load of at most 0.75
this looks at 2.5 places for a key that is there and 8.5 for one that is not, four to a cache line,
so a look-up costs little more than one miss.

While entries move to a larger array, a key belongs to the new one if its home in the old one lies
below a mark, else to the old one. The mark stands behind an empty place, so all keys with a home
below it were moved when it passed; they are copied, so that no chain of the old array breaks, and a
key that is removed is buried there. New keys go where they belong: a request touches the part of
the new array that is in use, not all of it, whose pages the system would have to make at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paramserve.kernel_cache import Kernels
from paramserve.rules import halves
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import inlined, prefetch, prefetch_to_write
from paramserve.rules.kernels import kernel

AHEAD = 16
"""Keys whose places are asked for ahead of their use: the work on so many takes longer than memory
takes to answer."""
ENTRY_BYTES = 16
BURIED = -1

KEYS = types.Array(types.int64, 1, "C")
ENTRIES = types.Array(types.int64, 2, "C")
INT = types.intp

_1, _32 = np.uint64(1), np.uint64(32)

mix = inlined(halves.mix)


@inlined
def hidden_hash(key: Any, secret: int) -> Any:
    """A hash of 64 bits that only a process which knows the secret can compute.

    `mix` alone can be inverted: keys that a user chooses could all collide, and a look-up would
    pass them all. The multiplication hides the difference of two keys; the shift brings a
    difference of their highest bits, which the multiplication leaves there, to the lower ones.
    """
    hidden = np.uint64(secret)
    z = (np.uint64(key) ^ hidden) * (hidden | _1)
    return mix(z ^ (z >> _32))


@inlined
def home(key: Any, places: Any, secret: int) -> Any:
    """Where a key belongs: in the order of its hash, so that a larger array keeps the order."""
    return np.intp(((hidden_hash(key, secret) >> _32) * np.uint64(places)) >> _32)


@inlined
def place_of(entries: Array, key: Any, at: Any) -> Any:
    """Where a key lies, or -1, with its home known."""
    while True:
        row = entries[at, 1]
        if row == 0:
            return -1
        if entries[at, 0] == key and row != BURIED:
            return at
        at += 1
        if at == entries.shape[0]:
            at = 0


@kernel
def find(entries: Array, keys: Array, rows: Array, secret: int) -> int:
    """rows[i] = row of keys[i], or -1; says how many are -1."""
    base, places, n = entries.ctypes.data, entries.shape[0], keys.size
    absent = 0
    for i in range(min(AHEAD, n)):
        prefetch(base + home(keys[i], places, secret) * ENTRY_BYTES)
    for i in range(n):
        if i + AHEAD < n:
            prefetch(base + home(keys[i + AHEAD], places, secret) * ENTRY_BYTES)
        key = keys[i]
        at = home(key, places, secret)
        row = entries[at, 1]
        while row != 0 and entries[at, 0] != key:
            at += 1
            if at == places:
                at = 0
            row = entries[at, 1]
        rows[i] = row - 1
        absent += row == 0
    return absent


@kernel
def find_moving(new: Array, old: Array, mark: int, keys: Array, rows: Array, secret: int) -> int:
    """Find the rows of keys, as `find`, while entries move."""
    n, absent = keys.size, 0
    for i in range(n):
        if i + AHEAD < n:
            ask_moving(new, old, mark, keys[i + AHEAD], secret)
        key = keys[i]
        before = home(key, old.shape[0], secret)
        if before < mark:
            at = place_of(new, key, home(key, new.shape[0], secret))
            rows[i] = new[at, 1] - 1 if at >= 0 else -1
        else:
            at = place_of(old, key, before)
            rows[i] = old[at, 1] - 1 if at >= 0 else -1
        absent += at < 0
    return absent


@inlined
def ask_moving(new: Array, old: Array, mark: Any, key: Any, secret: int) -> None:
    """Prefetch the home of a key while entries move."""
    before = home(key, old.shape[0], secret)
    if before < mark:
        prefetch_to_write(new.ctypes.data + home(key, new.shape[0], secret) * ENTRY_BYTES)
    else:
        prefetch_to_write(old.ctypes.data + before * ENTRY_BYTES)


@inlined
def enter(entries: Array, key: Any, row: Any, secret: int) -> None:
    """Write an entry to the first empty place from its home on."""
    at = home(key, entries.shape[0], secret)
    while entries[at, 1] != 0:
        at += 1
        if at == entries.shape[0]:
            at = 0
    entries[at, 0] = key
    entries[at, 1] = row


@kernel
def insert(entries: Array, keys: Array, rows: Array, secret: int) -> None:
    """Enter keys that are not there, each once. The caller has seen to it that they fit."""
    base, places, n = entries.ctypes.data, entries.shape[0], keys.size
    for i in range(min(AHEAD, n)):
        prefetch_to_write(base + home(keys[i], places, secret) * ENTRY_BYTES)
    for i in range(n):
        if i + AHEAD < n:
            prefetch_to_write(base + home(keys[i + AHEAD], places, secret) * ENTRY_BYTES)
        enter(entries, keys[i], rows[i] + 1, secret)


@kernel
def insert_moving(new: Array, old: Array, mark: int, keys: Array, rows: Array, secret: int) -> None:
    """Insert keys with their rows, as `insert`, while entries move."""
    n = keys.size
    for i in range(n):
        if i + AHEAD < n:
            ask_moving(new, old, mark, keys[i + AHEAD], secret)
        if home(keys[i], old.shape[0], secret) < mark:
            enter(new, keys[i], rows[i] + 1, secret)
        else:
            enter(old, keys[i], rows[i] + 1, secret)


@kernel
def move(old: Array, new: Array, mark: int, least: int, secret: int) -> int:
    """Copy entries of `old` from the mark on to `new`: at least so many places, and to an empty
    one. Returns the mark after it, which is all places of `old` at the end."""
    places = old.shape[0]
    while mark < places:
        row = old[mark, 1]
        if row > 0:
            enter(new, old[mark, 0], row, secret)
        mark += 1
        least -= 1
        if least <= 0 and row == 0:
            return mark
    # Keys of the last places that found them taken lie in the first ones, maybe behind the mark.
    at = 0
    while old[at, 1] != 0:
        key = old[at, 0]
        if old[at, 1] > 0 and place_of(new, key, home(key, new.shape[0], secret)) < 0:
            enter(new, key, old[at, 1], secret)
        at += 1
    return int(places)


@inlined
def close_gap(entries: Array, gap: Any, secret: int) -> None:
    """Empty a place and pull the entries behind it forward, so that every chain stays whole."""
    places = entries.shape[0]
    at = gap
    while True:
        at += 1
        if at == places:
            at = 0
        row = entries[at, 1]
        if row == 0:
            break
        begin = home(entries[at, 0], places, secret)
        # It may go to the gap unless its home lies behind the gap, on the way round to `at`.
        behind = (at - begin) if at >= begin else (at - begin + places)
        to_gap = (at - gap) if at >= gap else (at - gap + places)
        if behind >= to_gap:
            entries[gap, 0] = entries[at, 0]
            entries[gap, 1] = row
            gap = at
    entries[gap, 0] = 0
    entries[gap, 1] = 0


@kernel
def remove(entries: Array, old: Array, keys: Array, secret: int) -> int:
    """Take keys out of both arrays (`old` has no places where none move). Says how many it had."""
    count = 0
    for i in range(keys.size):
        key = keys[i]
        at = place_of(entries, key, home(key, entries.shape[0], secret))
        if at >= 0:
            close_gap(entries, at, secret)
        before = -1
        if old.shape[0] > 0:
            before = place_of(old, key, home(key, old.shape[0], secret))
            if before >= 0:
                old[before, 1] = BURIED
        count += at >= 0 or before >= 0
    return count


@kernel
def distinct(
    keys: Array, rows: Array, scratch: Array, unique: Array, which: Array, secret: int
) -> int:
    """The keys without a row (rows[i] < 0), each once, in the order in which they first stand.

    found[:result] are the keys; which[i] is the place of keys[i] among them, or -1. `scratch` holds
    zeros, at least twice as many as there are such keys.
    """
    count, places = 0, scratch.size
    for i in range(keys.size):
        which[i] = -1
        if rows[i] >= 0:
            continue
        key = keys[i]
        at = home(key, places, secret)
        while scratch[at] != 0 and unique[scratch[at] - 1] != key:
            at += 1
            if at == places:
                at = 0
        if scratch[at] == 0:
            unique[count] = key
            count += 1
            scratch[at] = count
        which[i] = scratch[at] - 1
    return count


@kernel
def give_rows(which: Array, numbers: Array, rows: Array) -> int:
    """rows[i] = made[which[i]] where which[i] >= 0; says how many rows are -1 after that."""
    absent = 0
    for i in range(which.size):
        if which[i] >= 0:
            rows[i] = numbers[which[i]]
        absent += rows[i] < 0
    return absent


KERNELS: Kernels = {
    find: (ENTRIES, KEYS, KEYS, INT),
    find_moving: (ENTRIES, ENTRIES, INT, KEYS, KEYS, INT),
    insert: (ENTRIES, KEYS, KEYS, INT),
    insert_moving: (ENTRIES, ENTRIES, INT, KEYS, KEYS, INT),
    move: (ENTRIES, ENTRIES, INT, INT, INT),
    remove: (ENTRIES, ENTRIES, KEYS, INT),
    distinct: (KEYS, KEYS, KEYS, KEYS, KEYS, INT),
    give_rows: (KEYS, KEYS, KEYS),
}
"""All of them, compiled for these arguments."""

"""Keys to row numbers: open addressing, in an array that grows piece by piece.

A larger array is filled while requests come: each one moves some entries, so none waits for all of
them. Until then both arrays are there, and each key belongs to one of them (`kernels`).
"""

from __future__ import annotations

from paramserve.core.table.compiled import index_kernels
from paramserve.core.table.hashing import Keys, new_secret
from paramserve.core.table.memory import zeros

PLACES = 1024
"""Places of a new index."""
FULL = (3, 4)
"""Keys in places, at most."""
GROWTH = 2
"""Factor by which the number of places grows. With 3 / 2 there are 4 bytes less for each key on
average, and to enter keys takes 1.6 times as long: twice as many entries move, and more requests
meet full arrays."""
MOVED_PER_KEY = 8
"""Entries that move for each key that is entered, and no more for a request that begins or ends a
growth. All are moved when as many have come as an eighth of the old array has places: it was 6 in 8
full, so it is at most 7 in 8 full by then."""
OLD_FULL = (7, 8)
KEY_BYTES_MAX = 64
"""Bytes of both arrays, for each key: 16 bytes a place, 4 in 3 places of the old array and 8 in 3
of the new one. Where no keys are removed, a sixth more have been added by the time that all has
moved: 55 bytes."""
MOVED_MIN = 1024
"""Entries that move at least: some 20 us."""


class Index:
    """int64 keys, each with a row number that is at least 0.

    Attributes:
        secret: that the places of its keys depend on, and nothing else; drawn anew for each index.
    """

    def __init__(self) -> None:
        self.secret = new_secret()
        self._new = zeros(PLACES, 2)
        self._old = zeros(0, 2)
        """What entries move from; no places: none move."""
        self._mark = 0
        """Keys with a home in `_old` below it are in `_new`."""
        self._in_old = 0
        """Places of `_old` that may be taken."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays, without the part of the new one that nothing has moved to: its
        pages have not been touched."""
        moved = self._mark / self._old.shape[0] if self._moving else 1.0
        return int(self._new.nbytes * moved) + self._old.nbytes

    def move(self, entries: int) -> None:
        """Move this many entries, or a few more, if any are left to move."""
        if self._moving:
            least = max(MOVED_MIN, entries)
            self._mark = int(
                index_kernels().move(self._old, self._new, self._mark, least, self.secret)
            )
            if self._mark == self._old.shape[0]:
                self._old, self._mark = zeros(0, 2), 0

    @property
    def _moving(self) -> bool:
        return bool(self._old.shape[0])

    def find(self, keys: Keys, rows: Keys) -> int:
        """Write the row of each key to `rows`, -1 for one that is not there; how many are not."""
        if self._moving:
            absent = index_kernels().find_moving(
                self._new, self._old, self._mark, keys, rows, self.secret
            )
        else:
            absent = index_kernels().find(self._new, keys, rows, self.secret)
        return int(absent)

    def insert(self, keys: Keys, rows: Keys) -> None:
        """Enter keys that are not there, each once.

        Raises:
            MemoryError: the system has no memory for a larger array. No key was entered.
        """
        self.reserve(keys.size)
        self.move(MOVED_PER_KEY * keys.size)
        if self._moving:
            index_kernels().insert_moving(self._new, self._old, self._mark, keys, rows, self.secret)
            self._in_old += keys.size
        else:
            index_kernels().insert(self._new, keys, rows, self.secret)
        self._size += keys.size

    def remove(self, keys: Keys) -> None:
        """Take keys out; one that is not there is left out."""
        self._size -= int(index_kernels().remove(self._new, self._old, keys, self.secret))

    def reserve(self, more: int) -> None:
        """Have room for so many more keys: entering them then needs no memory.

        Raises:
            MemoryError: the system has no memory for a larger array. All keys are as they were.
        """
        if self._moving and not fits(self._in_old + more, self._old.shape[0], OLD_FULL):
            self.move(self._old.shape[0])
        if fits(self._size + more, self._new.shape[0], FULL):
            return
        self.move(self._old.shape[0])
        larger = zeros(max(self._new.shape[0] * GROWTH, (self._size + more) * 2), 2)
        self._old, self._mark, self._in_old = self._new, 0, self._size
        self._new = larger
        self.reserve(more)


def fits(keys: int, places: int, full: tuple[int, int]) -> bool:
    """Whether so many keys may be in so many places."""
    return keys * full[1] <= places * full[0]

"""Which keys get a row: those that were pushed often enough.

Keys without a row are counted in two generations. When the young one is full it becomes the old
one, and what the old one held is forgotten; a key of the old one that is pushed again moves over
with its count. So memory is bounded, and keys that come often are never forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from paramserve.core.table.hashing import Keys
from paramserve.core.table.index import KEY_BYTES_MAX, Index
from paramserve.core.table.memory import Growing

CANDIDATES_MAX = 1 << 20
"""Keys of one generation. Two full ones take at most 160 MB."""
BYTES_MAX = 2 * (KEY_BYTES_MAX + 12)
"""Memory for each key that one generation may hold."""


Counts = npt.NDArray[np.uint32]
Waiting = tuple[tuple[Keys, Counts], tuple[Keys, Counts]]
"""Keys that wait for admission with their counts, the young ones and the old ones."""


class _Generation:
    def __init__(self) -> None:
        self.index = Index()
        self.keys = Growing(0, np.int64)
        """Keys in the order in which they came."""
        self.counts = Growing(0, np.uint32)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + 12 * len(self)

    def find(self, keys: Keys) -> Keys:
        slots = np.empty(keys.size, np.int64)
        self.index.find(keys, slots)
        return slots

    def count(self, slots: Keys) -> npt.NDArray[np.int64]:
        counts = np.zeros(slots.size, np.int64)
        counts[slots >= 0] = self.counts.array[slots[slots >= 0]]
        return counts

    def reserve(self, more: int) -> None:
        self.keys.reserve(len(self) + more)
        self.counts.reserve(len(self) + more)
        self.index.reserve(more)

    def put(self, keys: Keys, slots: Keys, counts: npt.NDArray[np.int64]) -> None:
        """Set counts of keys, whose slots are known or -1."""
        new = slots < 0
        new_slots = np.arange(len(self), len(self) + int(new.sum()), dtype=np.int64)
        self.keys.reserve(len(self) + new_slots.size)
        self.counts.reserve(len(self) + new_slots.size)
        self.index.insert(keys[new], new_slots)
        self.keys.array[new_slots] = keys[new]
        slots[new] = new_slots
        self.counts.array[slots] = counts


class Counted:
    """Keys of both generations as they are at one moment. Their counts, 8 MB at most, are copied;
    the keys are read later, since one that has come stays where it is."""

    def __init__(self, generations: Sequence[_Generation]) -> None:
        self._generations = generations
        self._counts = [each.counts.array[: len(each)].copy() for each in generations]
        self._keys = [np.empty(counts.size, np.int64) for counts in self._counts]
        self._read = [0, 0]

    def read(self, limit: int) -> bool:
        """Copy some of the keys; whether there are more. Then `entries` are not known yet."""
        for number, generation in enumerate(self._generations):
            keys, begin = self._keys[number], self._read[number]
            if begin < keys.size:
                part = slice(begin, min(begin + limit, keys.size))
                keys[part] = generation.keys.array[part]
                self._read[number] = part.stop
                return True
        return False

    def entries(self) -> Waiting:
        """Keys with their counts, the young ones and the old ones, each in the order in which they
        came."""
        while self.read(CANDIDATES_MAX):
            pass
        (young, old), (new, late) = self._keys, self._counts
        return (young, new), (old, late)


class Candidates:
    """How often keys without a row were pushed.

    Args:
        needed: pushes after which a key gets a row.
        limit: keys of one generation.
    """

    def __init__(self, needed: int, limit: int = CANDIDATES_MAX) -> None:
        self._needed = needed
        self._limit = limit
        self._young = _Generation()
        self._old = _Generation()
        self._next: list[_Generation] = []
        """Generations that `reserve` has made for the count to come."""

    @property
    def nbytes(self) -> int:
        return self._young.nbytes + self._old.nbytes

    def counted(self) -> Counted:
        """The keys as they are now."""
        return Counted((self._young, self._old))

    def restore(self, young: tuple[Keys, Counts], old: tuple[Keys, Counts]) -> None:
        """Take both generations over, in place of what is there.

        Raises:
            MemoryError: the system has no memory for them. All counts are as they were.
        """
        generations = _Generation(), _Generation()
        for generation, (keys, counts) in zip(generations, (young, old), strict=True):
            generation.reserve(keys.size)
            slots = np.full(keys.size, -1, np.int64)
            generation.put(keys, slots, counts.astype(np.int64))
        self._young, self._old = generations

    def admitted(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these keys, each once, a push of them all would give a row. Changes nothing."""
        return self._counts(keys, self._young.find(keys)) + 1 >= self._needed

    def reserve(self, keys: Keys) -> None:
        """Have the memory to count a push of these keys, each once.

        Raises:
            MemoryError: the system has not. All counts are as they were.
        """
        self._next = []
        for start in range(0, keys.size, self._limit):
            part = keys[start : start + self._limit]
            if start == 0:
                more = int((self._young.find(part) < 0).sum())
                if len(self._young) + more <= self._limit:
                    self._young.reserve(more)
                    continue
            fresh = _Generation()  # a part behind the first finds a generation that is full
            fresh.reserve(part.size)
            self._next.append(fresh)

    def forget(self, keys: Keys) -> None:
        """Let no push of these keys be counted so far; they may repeat."""
        for generation in (self._young, self._old):
            slots = generation.find(keys)
            generation.counts.array[slots[slots >= 0]] = 0

    def count(self, keys: Keys, admitted: npt.NDArray[np.bool_]) -> None:
        """Count one push of each of these keys; those that get a row by it begin again at 0."""
        for start in range(0, keys.size, self._limit):
            part = slice(start, start + self._limit)
            self._count(keys[part], admitted[part])

    def _count(self, keys: Keys, admitted: npt.NDArray[np.bool_]) -> None:
        """Count that these keys were seen; those admitted begin anew. When the young generation is
        full, it becomes the old one."""
        slots = self._young.find(keys)
        if len(self._young) + int((slots < 0).sum()) > self._limit:
            fresh = self._next.pop(0) if self._next else _Generation()
            self._young, self._old = fresh, self._young
            slots = self._young.find(keys)
        counts = self._counts(keys, slots) + 1
        counts[admitted] = 0
        before = self._old.find(keys)
        self._old.counts.array[before[before >= 0]] = 0
        self._young.put(keys, slots, counts)

    def _counts(self, keys: Keys, young: Keys) -> npt.NDArray[np.int64]:
        """A key stands in the old generation with 0 once the young one has it."""
        return self._young.count(young) + self._old.count(self._old.find(keys))

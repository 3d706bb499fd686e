"""Stores for tests, and a table as a plain dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from paramserve.core.table import compiled
from paramserve.core.table.options import Normal, TableOptions
from paramserve.core.table.store import Purpose, RowStore
from paramserve.rules.layout import RowLayout

Keys = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

STATE = np.array([0.5, 1.5, 2.5], np.float32)
STREAM = 0xFEDCBA9876543210

compiled.prepare()  # here, so that no test is the one that waits for it


def keys_of(keys: Iterable[int]) -> Keys:
    return np.array(list(keys), np.int64)


def store_of(
    options: TableOptions | None = None, *, dim: int = 3, dtype: str = "float32"
) -> RowStore:
    layout = RowLayout(dim, dtype, (2, 1), counted=True)
    return RowStore(layout, STATE, options or TableOptions(Normal(std=1.0)), STREAM)


def read(store: RowStore, keys: Iterable[int], purpose: Purpose = Purpose.READ) -> Floats:
    asked = keys_of(keys)
    out = np.empty((asked.size, store.layout.dim), np.float32)
    store.read(store.take(asked, 0, purpose).rows, asked, out)
    return out


def contents(store: RowStore) -> dict[int, tuple[bytes, bytes, int]]:
    """All rows: values, state and count by key."""
    found: dict[int, tuple[bytes, bytes, int]] = {}
    cursor = 0
    while cursor >= 0:
        keys, rows, cursor = store.scan(cursor, 7)
        values = np.empty((keys.size, store.layout.dim), np.float32)
        store.read(rows, keys, values)
        state, counts = store.read_state(rows)
        if counts is None:
            counts = np.zeros(keys.size, np.uint32)
        for i, key in enumerate(keys.tolist()):
            assert key not in found
            found[key] = (values[i].tobytes(), state[i].tobytes(), int(counts[i]))
    return found


class Model:
    """Which keys a table has, said again without arrays.

    Keys lie in the order of their use. `clock` of a request never goes back.
    """

    def __init__(self, *, count: int = 1, ttl: int | None = None, lru: int | None = None) -> None:
        self.count, self.ttl, self.lru = count, ttl, lru
        self.used: OrderedDict[int, int] = OrderedDict()
        self.pushes: dict[int, int] = {}
        self.created = self.evicted = self.deleted = self.dropped = 0

    def delete(self, keys: list[int], clock: int) -> int:
        """How many rows went."""
        self.take([], clock, Purpose.READ)
        there = {key for key in keys if key in self.used}
        for key in keys:
            self.used.pop(key, None)
            self.pushes.pop(key, None)
        self.deleted += len(there)
        return len(there)

    def take(self, keys: list[int], clock: int, purpose: Purpose) -> list[bool]:
        """Whether each key has a row."""
        if self.ttl is not None:
            for key in [k for k, at in self.used.items() if at < clock - self.ttl]:
                del self.used[key]
                self.evicted += 1
        if purpose is Purpose.READ:
            return [key in self.used for key in keys]
        new = [key for key in dict.fromkeys(keys) if key not in self.used]
        counted: list[int] = []
        pushes = purpose in (Purpose.PUSH, Purpose.DRAFT)
        if self.count > 1 and pushes:
            counted = new
            new = [key for key in counted if self.pushes.get(key, 0) + 1 >= self.count]
        if purpose is Purpose.DRAFT:
            has = [key in self.used or key in new for key in keys]
            self.dropped += has.count(False)
            return has
        known = [key for key in dict.fromkeys(keys) if key in self.used]
        least = len(new) + len(known)
        for key in counted:
            self.pushes[key] = self.pushes.get(key, 0) + 1
        for key in new if counted else ():  # a row that was put takes back no push
            self.pushes.pop(key, None)
        for key in keys:
            if key in self.used:
                self.used[key] = clock
                self.used.move_to_end(key)
        while self.lru and new and len(self.used) + len(new) > max(self.lru, least):
            self.used.popitem(last=False)
            self.evicted += 1
        for key in new:
            self.used[key] = clock
        self.created += len(new)
        has = [key in self.used for key in keys]
        self.dropped += has.count(False) if pushes else 0
        return has

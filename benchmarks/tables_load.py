"""Keyed tables: sizes, keys, batches and the clockwork, the same for every contestant.

A contestant makes something with `pull`, `push` and `send`; `drive` checks it once against Adagrad
written out here and then times it. Seconds are of whole calls: a push has been applied.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.workloads import medians, timed

Array = np.ndarray[Any, Any]
Keys = np.ndarray[Any, np.dtype[np.int64]]

_SIXTY_THREE_BITS = np.uint64(2**63 - 1)
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9))
_PRIME = 2_654_435_761
"""Larger than any table here: times this, modulo the rows, each rank is another id."""
_HALF = np.uint64(32)
HUGE_BYTES = 2 << 20


@dataclass(frozen=True)
class TableLoad:
    """One client, a table of `rows` rows of float32 under Adagrad on `servers` servers.

    Attributes:
        batch: keys of one call, drawn uniformly.
        zipf_keys: keys of one small call, drawn by Zipf's law: rank r as often as r**-exponent.
        window: pushes on their way at one time where they are streamed.
        fill: rows that are created by one call.
        varied: batches of sizes that vary, where a client's memory is looked at.
    """

    rows: int = 8_000_000
    dim: int = 64
    servers: int = 2
    batch: int = 65_536
    calls: int = 60
    zipf_keys: int = 4_096
    zipf_calls: int = 300
    exponent: float = 1.05
    window: int = 2
    fill: int = 262_144
    varied: int = 300
    lr: float = 0.05
    eps: float = 1e-10

    @property
    def table_bytes(self) -> int:
        """Bytes of values and state, under Adagrad."""
        return self.rows * self.dim * 4 * 2

    @property
    def batch_row_bytes(self) -> int:
        """Bytes of a batch, for each key: itself and its row."""
        return 8 + self.dim * 4

    @property
    def settling_pulls(self) -> int:
        """Pulls of `batch` keys after which our index has moved to its larger array, if it was
        growing when the last row came: each request moves four places for each of its keys."""
        return self.rows // (3 * self.batch) + 1

    def parts(self) -> Iterator[tuple[int, int]]:
        """First and last + 1 of the ids that are created together."""
        for begin in range(0, self.rows, self.fill):
            yield begin, min(begin + self.fill, self.rows)


BLOCK_ROWS = 256
"""Rows in a block of Adagrad in numpy: 64 KB an array at dim 64. 10.5 ms for 32,768 rows; whole
23."""


def adagrad(load: TableLoad, values: Array, state: Array, gradients: Array) -> None:
    """One update in place of rows that lie together, in blocks that stay in the cache."""
    lr, eps = np.float32(load.lr), np.float32(load.eps)
    for begin in range(0, len(values), BLOCK_ROWS):
        part = slice(begin, begin + BLOCK_ROWS)
        gradient, squares = gradients[part], state[part]
        change = gradient * gradient
        squares += change
        root = np.sqrt(squares)
        root += eps
        np.divide(gradient, root, out=change)
        change *= lr
        values[part] -= change


@dataclass(frozen=True)
class SizesLoad(TableLoad):
    """Load with narrow rows, timed at several sizes of one table that grows."""

    dim: int = 16
    sizes: tuple[int, ...] = (1_000_000, 8_000_000, 24_000_000)


class Target(Protocol):
    """A table as `drive` sees it. Keys may repeat; gradients of one key are summed."""

    def pull(self, keys: Keys) -> Array:
        """[n, dim], in the order of the keys."""

    def push(self, keys: Keys, gradients: Array) -> object:
        """Return when the gradients are applied."""

    def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
        """Send a push; what is returned waits until it is applied."""


def keys_of(ids: Keys) -> Keys:
    """Keys all over int64, none below zero; different ids have different keys."""
    found = (ids.astype(np.uint64) * _ODD[0]) & _SIXTY_THREE_BITS
    found ^= found >> _HALF
    return ((found * _ODD[1]) & _SIXTY_THREE_BITS).astype(np.int64)


class Batches:
    """Draws batches of ids, or of keys; the same ones for every contestant.

    Args:
        dense: ids from 0 to rows - 1, for a table without an index.
    """

    def __init__(self, load: TableLoad, dense: bool = False, seed: int = 0) -> None:
        self._load = load
        self._dense = dense
        self._chance = np.random.default_rng(seed)

    @cached_property
    def _ranks(self) -> Array:
        """How likely each rank or a lower one is, times a constant."""
        weights = np.arange(1, self._load.rows + 1, dtype=np.float64) ** -self._load.exponent
        sums: Array = np.cumsum(weights)
        return sums

    def uniform(self) -> Keys:
        return self._named(self._chance.integers(self._load.rows, size=self._load.batch))

    def distinct(self) -> Keys:
        """Each key once, in no order."""
        ids = self._chance.integers(self._load.rows, size=self._load.batch * 5 // 4 + 16)
        return self._named(self._chance.permutation(np.unique(ids))[: self._load.batch])

    def zipf(self) -> Keys:
        draws = self._chance.random(self._load.zipf_keys) * self._ranks[-1]
        ranks = np.searchsorted(self._ranks, draws)
        return self._named(ranks * _PRIME % self._load.rows)

    def gradients(self, count: int) -> Array:
        """[count, dim]"""
        return self._chance.standard_normal((count, self._load.dim), dtype=np.float32)

    def _named(self, ids: Keys) -> Keys:
        return ids if self._dense else keys_of(ids)


def drive(load: TableLoad, target: Target, dense: bool = False) -> dict[str, float]:
    """Check a full table, then time it: median seconds of a pull of `batch` keys and of one of
    `zipf_keys` keys, and what `drive_pushes` times."""
    batches = Batches(load, dense)
    check(load, target, batches)
    keys = np.zeros(0, np.int64)

    def draw(source: Callable[[], Keys]) -> Callable[[], None]:
        def set_keys() -> None:
            nonlocal keys
            keys = source()

        return set_keys

    figures: dict[str, float] = {}
    for name, source, count in (
        ("pull", batches.uniform, load.calls),
        ("zipf", batches.zipf, load.zipf_calls),
    ):
        calls = {name: lambda: target.pull(keys)}
        figures |= medians(calls, count, before={name: draw(source)}, block=min(10, count))
    return figures | drive_pushes(load, target, dense)


def drive_pushes(load: TableLoad, target: Target, dense: bool = False) -> dict[str, float]:
    """Median seconds of a push of `batch` keys, and seconds for each when `window` are on their
    way at one time."""
    batches = Batches(load, dense, seed=1)
    gradients = batches.gradients(load.batch)
    keys = np.zeros(0, np.int64)

    def draw() -> None:
        nonlocal keys
        keys = batches.uniform()

    calls = {"push": lambda: target.push(keys, gradients)}
    figures = medians(calls, load.calls, before={"push": draw}, block=min(10, load.calls))
    waiting = [batches.uniform() for _ in range(load.calls)]
    seconds = timed(lambda: stream(load, target, waiting, gradients))
    return figures | {"push_streamed": seconds / len(waiting)}


class Ballast:
    """Memory that this machine has already, given back bit by bit to the process that asks next.

    A virtual machine gets a page from its host when it is first touched, and may return it seconds
    after it is free (page reporting): 32 MB took 100 to 200 ms here, and 4 ms once the machine had
    them. What times first uses of memory gives back as much before each request.
    """

    def __init__(self, nbytes: int) -> None:
        size = -(-nbytes // HUGE_BYTES) * HUGE_BYTES
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(self._memory, np.uint8)[:: mmap.PAGESIZE] = 1
        self._given = 0

    @property
    def left(self) -> int:
        """Bytes that are not given back yet."""
        return len(self._memory) - self._given

    def give(self, nbytes: int) -> None:
        """Free some; nothing if all is given."""
        count = min(-(-nbytes // HUGE_BYTES) * HUGE_BYTES, self.left)
        if count > 0:
            self._memory.madvise(mmap.MADV_DONTNEED, self._given, count)
            self._given += count


class Processors:
    """Processor time of the processes of this session: this one, its driver and its servers."""

    def __init__(self) -> None:
        session = os.getsid(0)
        self._pids = [
            int(entry)
            for entry in os.listdir("/proc")
            if entry.isdigit() and _session(entry) == session
        ]

    def seconds(self) -> Array:
        """So far, of each process, without threads that have ended."""
        found = []
        for pid in self._pids:
            threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
            found.append(sum(int(each.read_text().split()[0]) for each in threads) / 1e9)
        return np.array(found)


def _session(entry: str) -> int:
    try:
        stat = Path("/proc", entry, "stat").read_text()
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[3])


def stream(load: TableLoad, target: Target, batches: list[Keys], gradients: Array) -> None:
    """Push all, with `window` on their way at one time."""
    sent: deque[Callable[[], object]] = deque()
    for keys in batches:
        sent.append(target.send(keys, gradients))
        if len(sent) == load.window:
            sent.popleft()()
    for wait in sent:
        wait()


def check(load: TableLoad, target: Target, batches: Batches, row_wise: bool = False) -> None:
    """Pull, push twice and pull again a batch that has keys several times.

    Args:
        row_wise: the sum is of the mean of a row's squared gradients.
    Raises:
        AssertionError: a value is not what Adagrad on fresh rows makes of these gradients.
    """
    keys = np.concatenate([batches.uniform()[:1000], batches.zipf()[:1000]])
    unique, first, back = np.unique(keys, return_index=True, return_inverse=True)
    before = np.array(target.pull(keys))
    values, state = before[first].copy(), np.zeros((unique.size, load.dim), np.float32)
    same("pulled twice in one batch", before, values[back])
    for _ in range(2):
        gradients = batches.gradients(keys.size)
        target.push(keys, gradients)
        summed = np.zeros_like(state)
        np.add.at(summed, back, gradients)
        squares = summed * summed
        state += squares.mean(axis=1, keepdims=True) if row_wise else squares
        values -= load.lr * summed / (np.sqrt(state) + load.eps)
    after = np.array(target.pull(keys))
    same("pushed", after, values[back])
    if np.allclose(after, before, atol=load.lr / 10):
        raise AssertionError("the pushes changed nothing")


def same(what: str, found: Array, expected: Array) -> None:
    """Raises:
    AssertionError: they differ by more than the order of a sum explains.
    """
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-4, atol=1e-5):
        raise AssertionError(f"{what}: the values are not those of Adagrad on this batch")

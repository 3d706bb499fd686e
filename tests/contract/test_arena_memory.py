"""Shared memory of a client: used again for other sizes, and given back when it is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster

from paramserve.client import links
from paramserve.client.exchange import FIRST_ARENA_BYTES
from paramserve.core.table.options import Zeros
from paramserve.rules import Add

DIM = 64
LARGEST = 20_000
"""Rows of the largest batch."""


class Arenas:
    """Memory that clients share with servers in this process, and began to after this was made: of
    each arena once, however often it is mapped."""

    def __init__(self) -> None:
        self._before = frozenset(self._resident())

    @property
    def nbytes(self) -> int:
        return sum(size for each, size in self._resident().items() if each not in self._before)

    def _resident(self) -> dict[str, int]:
        found: dict[str, int] = {}
        inode = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            mapping = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)", line)
            if mapping is not None:
                inode = mapping[1] if mapping[2].startswith("/memfd:paramserve") else ""
            elif inode and line.startswith("Rss:"):
                found[inode] = max(found.get(inode, 0), int(line.split()[1]) * 1024)
        return found


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


def need(rows: int) -> int:
    """Bytes of one pull or push of so many distinct rows: keys, places or none, values."""
    return rows * (4 * DIM + 12)


@pytest.mark.parametrize("order", ["growing", "random"])
def test_batches_of_many_sizes_take_little_more_than_the_largest(
    make_cluster: MakeCluster, arenas: Arenas, shards: int, order: str, tables_ready: None
) -> None:
    cluster = make_cluster("unix", servers=shards)
    table = cluster.client().table("t", dim=DIM, rule=Add(), init=Zeros())
    sizes = np.linspace(100, LARGEST, 60).astype(int)
    if order == "random":
        np.random.default_rng(3).shuffle(sizes)
    pushed = np.zeros(LARGEST)
    for size in sizes.tolist():
        keys = np.arange(size)
        table.push(keys, np.ones((size, DIM), np.float32)).result()
        pushed[:size] += 1
        rows = table.pull(keys)
        assert (rows == pushed[:size, None]).all()
        del rows
    assert arenas.nbytes < 2 * need(LARGEST) + FIRST_ARENA_BYTES


def test_memory_of_a_largest_batch_goes_back_when_later_ones_are_small(
    make_cluster: MakeCluster,
    arenas: Arenas,
    shards: int,
    tables_ready: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "TRIM_TAKES", 64)
    cluster = make_cluster("unix", servers=shards)
    table = cluster.client().table("t", dim=DIM, rule=Add(), init=Zeros())
    keys = np.arange(LARGEST)
    assert (table.pull(keys) == 0.0).all()
    assert arenas.nbytes >= need(LARGEST)
    for count in range(1, 100):
        table.push(keys[:1000], np.ones((1000, DIM), np.float32)).result()
        assert (table.pull(keys[:1000]) == count).all()
    assert arenas.nbytes < 2 * need(1000) + 2 * FIRST_ARENA_BYTES
    assert (table.pull(keys)[1000:] == 0.0).all()

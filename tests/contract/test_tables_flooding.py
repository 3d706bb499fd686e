"""Keys made so that an unkeyed hash of them collides cost no more than other keys do.

Counted are the places that a look-up has to pass: no clock is asked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster

from paramserve.core.table import routing
from paramserve.core.table.compiled import index_kernels
from paramserve.core.table.index import Index
from paramserve.core.table.options import MinCount
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

KEYS = 8_000
CHAIN_MAX = 500
"""Taken places in a row, at a load of at most 0.875. Ordinary keys make some 50."""


def colliding(n: int) -> np.ndarray:
    """Keys whose splitmix64 begins with the same 32 bits: the inverse of numbers that do."""

    def undo_shift(z: int, shift: int) -> int:
        found = z
        for _ in range(64 // shift):
            found = z ^ found >> shift
        return found

    keys = []
    for hashed in range(n):
        z = undo_shift((0xABCD << 48) + hashed * 0x10001 % 2**32, 31)
        z = undo_shift(z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64, 27)
        z = undo_shift(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64, 30)
        keys.append((z - 0x9E3779B97F4A7C15) % 2**64)
    return np.array(keys, np.uint64).view(np.int64)


def longest_chain(taken: np.ndarray) -> int:
    """Taken places in a row; behind the last comes the first."""
    empty = np.flatnonzero(~taken)
    return int(np.diff(np.append(empty, empty[0] + taken.size)).max()) - 1


def test_keys_with_one_hash_are_spread_by_servers_and_clients(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes: list[Index] = []
    scratch: list[int] = []
    begin = Index.__init__

    def recorded(index: Index, *args: Any) -> None:
        indexes.append(index)
        begin(index, *args)

    def watch(module: Any, name: str, place: int, empty: int) -> None:
        kernel = getattr(module, name)

        def watched(*args: Any) -> int:
            found = kernel(*args)
            scratch.append(longest_chain(args[place] != empty))
            return int(found)

        monkeypatch.setattr(module, name, watched)

    monkeypatch.setattr(Index, "__init__", recorded)
    client = make_cluster(servers=2, workers=1).client(0)
    keys = colliding(KEYS)
    table = client.table("users", dim=1, rule=Add(), admit=MinCount(2)).cache_rows(KEYS)
    watch(index_kernels(), "distinct", 2, 0)
    watch(routing.routing_kernels(), "find_distinct", 1, -1)
    for _ in range(2):
        table.push(keys, np.ones((KEYS, 1), np.float32)).result()
    table.pull(keys)
    assert (len(table), table.cache_report().rows) == (KEYS, KEYS)
    chains = [
        longest_chain(entries[:, 1] != 0)
        for index in indexes
        for entries in (index._new, index._old)
        if entries.size
    ]
    assert sum(len(index) for index in indexes) >= 2 * KEYS, "on the servers and in the cache"
    assert len(scratch) >= 3
    assert max(chains + scratch) < CHAIN_MAX


def test_indexes_do_not_share_a_secret() -> None:
    """What is learnt of one table's index tells nothing of another's."""
    keys = np.arange(500)
    lying = []
    for _ in range(2):
        index = Index()
        index.insert(keys, keys)
        lying.append(index._new[:, 1].tolist())
    assert lying[0] != lying[1]

"""An LRU of so many rows in all, where a request names more of one server than its part."""

from __future__ import annotations

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.test_tables import ones, users

from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import LRU

pytestmark = pytest.mark.usefixtures("tables_ready")


def test_push_of_as_many_keys_as_the_lru_has_rows_is_applied_whole(
    make_cluster: MakeCluster,
) -> None:
    table = users(make_cluster("unix", servers=2).client(), evict=LRU(rows=64))
    keys = np.arange(64)
    assert np.bincount(shard_of(keys, 2)).max() > 32, "of one server more than half"
    table.push(keys, ones(64)).result()
    assert sorted(table.keys()) == keys.tolist()
    assert (table.pull(keys, create=False) == 0.5).all()
    more = np.arange(100, 130)
    table.push(more, ones(30)).result()
    assert set(more.tolist()) <= set(table.keys().tolist())
    assert [report.rows for report in table.reports()] == [32, 32]


def test_requests_of_more_keys_than_the_lru_has_rows_keep_them_until_the_next(
    make_cluster: MakeCluster,
) -> None:
    table = users(make_cluster("unix", servers=2).client(), evict=LRU(rows=8))
    keys = np.arange(100)
    for step in range(2):
        table.push(keys, ones(100)).result()
        assert (table.pull(keys) == 0.5 - 0.5 * step).all()
    table.put(keys + 100, 7 * ones(100))
    assert sorted(table.keys()) == (keys + 100).tolist()
    assert (table.pull(keys[:50]) == 1.0).all(), "new ones"
    assert sorted(table.keys()) == keys[:50].tolist()

"""Under Sync a table's rows do not depend on which worker's request comes first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import in_threads
from tests.contract.test_tables import ones, users, whole

from paramserve.client.table import Table
from paramserve.consistency.built_in import Sync
from paramserve.core.table.options import LRU

pytestmark = pytest.mark.usefixtures("tables_ready")

ROOM = 8


def clock(tables: list[Table], keys: list[Any]) -> None:
    """A clock to which each rank pushes some keys."""

    def step(rank: int) -> None:
        tables[rank].push(keys[rank], ones(len(keys[rank])))
        tables[rank].client.tick("users").result()

    in_threads(*(lambda rank=rank: step(rank) for rank in range(len(tables))))


def run(make_cluster: MakeCluster, order: list[int]) -> list[Any]:
    """Two ranks fill a table, read in this order, and push what they have read; what they read, and
    the rows at the end."""
    cluster = make_cluster("unix", servers=1, workers=2)
    options: dict[str, Any] = {"evict": LRU(rows=ROOM), "consistency": Sync()}
    tables = [users(cluster.client(rank), **options) for rank in range(2)]
    clock(tables, [[0, 1, 2, 3], [4, 5, 6, 7]])
    keys = [[100, 101], [0, 1]]  # new ones, and those that were used before all others
    read = {rank: tables[rank].pull(keys[rank]) for rank in order}
    clock(tables, keys)
    return [
        *(read[rank].tolist() for rank in range(2)),
        *(each.tolist() for each in whole(tables[0])),
    ]


def test_order_of_reads_does_not_decide_which_rows_an_lru_keeps(make_cluster: MakeCluster) -> None:
    one, other = run(make_cluster, [0, 1]), run(make_cluster, [1, 0])
    assert one == other
    assert one[2] == [0, 1, 4, 5, 6, 7, 100, 101], "those that were pushed last"


def test_read_of_a_new_key_gives_the_values_that_its_row_begins_with(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=1, workers=1)
    table = users(cluster.client(0), evict=LRU(rows=ROOM), consistency=Sync(), init=None)
    before = table.pull([3, 4])
    assert len(table.keys()) == 0, "a row begins with its first gradient"
    clock([table], [[3, 4]])
    assert np.allclose(table.pull([3, 4]), before - 0.5)

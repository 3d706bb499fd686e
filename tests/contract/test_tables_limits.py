"""Tables that are full, evict rows or admit keys late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from tests.contract.test_tables import ones, users, whole

from paramserve.client.table import Table
from paramserve.consistency.built_in import Buffered, Sync
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import TTL, MinCount, Uniform
from paramserve.errors import TableFull
from paramserve.rules import SGD

pytestmark = pytest.mark.usefixtures("tables_ready")

SMALL = 1 << 15


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: limits are the servers' own."""
    return make_cluster("tcp", servers=2)


def room(cluster: RoleCluster, shard: int = 0) -> int:
    """Rows that the first table may have on a shard."""
    return int(cluster.servers[shard].role.shard.blocks[0].store.rows_max)


def keys_of(cluster: RoleCluster, shard: int, n: int, start: int = 0) -> np.ndarray:
    """The first `n` keys from `start` on that a shard holds."""
    keys = np.arange(start, start + 8 * n + 64)
    return keys[shard_of(keys, len(cluster.servers)) == shard][:n]


def first_values(table: Table) -> dict[int, float]:
    keys, values, _, _ = whole(table)
    return dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True))


# --- full ---------------------------------------------------------------------------------------


def test_full_table_refuses_pushes_of_new_keys_and_keeps_the_others(cluster: RoleCluster) -> None:
    table = users(cluster.client(), max_bytes=SMALL)
    most = room(cluster)
    there = np.concatenate([keys_of(cluster, s, most) for s in range(len(cluster.servers))])
    table.push(there, ones(there.size)).result()
    full = len(table)
    assert full == most * len(cluster.servers)
    fresh = np.concatenate([keys_of(cluster, s, 2, 10**6) for s in range(len(cluster.servers))])
    keys = np.concatenate([fresh, there[:5]])
    with pytest.raises(TableFull) as raised:
        table.push(keys, ones(keys.size)).result()
    text = str(raised.value)
    assert f"it has {most} of {most} rows (max_bytes={SMALL} on each server)" in text
    assert "2 more were asked for. Applied: no. To fix: raise max_bytes" in text
    assert (len(table), table.pull(there)[:, 0].tolist()) == (full, [0.5] * full)
    assert table.pull(fresh)[:, 0].tolist() == [1.0] * fresh.size, "the initial values, no rows"
    assert len(table) == full
    table.push(there[:5], ones(5)).result()
    assert table.pull(there[:6])[:, 0].tolist() == [0.0] * 5 + [0.5]
    assert table.memory_bytes() <= SMALL * len(cluster.servers)
    with pytest.raises(TableFull):
        table.put(fresh, ones(fresh.size))


def test_push_that_one_of_two_shards_has_no_room_for_is_half_applied_and_says_so(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("tcp", servers=2)
    table = users(cluster.client(), max_bytes=SMALL)
    most = room(cluster)
    there = keys_of(cluster, 0, most)
    table.put(there, ones(most))
    more = np.concatenate([keys_of(cluster, 0, 1, 10**6), keys_of(cluster, 1, 1), there[:1]])
    with pytest.raises(TableFull, match="Applied: unknown") as raised:
        table.push(more, ones(3)).result()
    assert f"it has {most} of {most} rows" in str(raised.value)
    rows = first_values(table)
    assert len(rows) == most + 1
    assert (int(more[0]) in rows, rows[int(more[1])], rows[int(more[2])]) == (False, 0.5, 1.0)
    table.push(keys_of(cluster, 1, 5), ones(5)).result()


def test_full_table_in_sync_tells_every_worker_and_goes_on(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = [cluster.client(rank) for rank in range(2)]
    options: dict[str, Any] = {"max_bytes": SMALL, "consistency": Sync(reduce="sum")}
    tables = [users(client, **options) for client in ranks]
    most = room(cluster)
    there, fresh = keys_of(cluster, 0, most), keys_of(cluster, 0, 2, 10**6)
    tables[0].put(there, ones(most))
    for round_ in range(2):
        for table, key in zip(tables, fresh, strict=True):
            table.push([key], ones(1))
        tickets = [client.tick("users") for client in ranks]
        for ticket in tickets:
            with pytest.raises(TableFull, match=f"it has {most} of {most} rows"):
                ticket.result()
        for table in tables:
            table.push([there[0]], ones(1))
        for ticket in [client.tick("users") for client in ranks]:
            ticket.result()
        assert tables[0].pull(there[:2])[:, 0].tolist() == [0.0 - round_, 1.0]


def test_full_table_drops_a_buffer_that_it_has_no_room_for(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=1, workers=1)
    client = cluster.client(0)
    table = users(client, max_bytes=SMALL, consistency=Buffered(size=2, damping=None))
    most = room(cluster)
    table.put(np.arange(most), ones(most))
    table.push([10**6], ones(1)).result()
    with pytest.raises(TableFull, match="Applied: no"):
        table.push([0], ones(1)).result()
    assert (len(table), table.pull([0])[0, 0]) == (most, 1.0)
    (report,) = [group for beat in client.connection.reports() for group in beat.groups]
    assert sum(count for _, count in report.dropped) == 1, "the first one had been taken"
    table.push([0], ones(1)).result()
    table.push([0], ones(1)).result()
    assert table.pull([0])[0, 0] == 0.5


# --- evicted ------------------------------------------------------------------------------------


def test_ttl_counts_the_clocks_of_the_slowest_worker(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = [cluster.client(rank) for rank in range(2)]
    tables = [users(client, evict=TTL(clocks=2), init=Uniform()) for client in ranks]
    table = tables[0]
    keys = np.arange(20)
    table.push(keys, ones(20)).result()
    first = table.pull(keys)

    def tick(*ticking: int) -> None:
        for rank in ticking:
            ranks[rank].tick("users").result()

    tick(0, 0, 0, 0)
    table.push([100], ones(1)).result()
    assert len(table) == 21, "worker 1 has not ended a clock"
    tick(1, 1)
    table.push(keys[:5], 0.0 * ones(5)).result()  # used at clock 2
    table.pull(keys)  # no use
    tick(1, 1, 0)
    rows = table.pull(keys)
    assert np.array_equal(rows[:5], first[:5])
    assert not np.array_equal(rows[5:], first[5:])
    assert np.array_equal(rows[5:], tables[1].pull(keys[5:]))
    table.push([100], ones(1)).result()
    assert len(table) <= 6 + 15
    assert 0 < sum(report.evicted for report in table.reports()) <= 16


# --- admitted -----------------------------------------------------------------------------------


def test_min_count_in_sync_counts_a_clock_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = [cluster.client(rank) for rank in range(2)]
    tables = [
        users(client, admit=MinCount(2), rule=SGD(1.0), consistency=Sync(reduce="sum"))
        for client in ranks
    ]
    for clock in range(3):
        for table in tables:
            table.push([5], ones(1))
        for ticket in [client.tick("users") for client in ranks]:
            ticket.result()
        assert len(tables[0]) == (clock > 0)
    assert tables[1].pull([5])[0, 0] == 1.0 - 2 * 2.0

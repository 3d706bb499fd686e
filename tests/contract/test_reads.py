"""Reads by themselves: they go where something of what is asked is, and outlive a connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from tests.contract.test_tables import DIM, ones, users
from tests.suites import each_case

import paramserve as ps
from paramserve.client import Client, row_reads
from paramserve.client.row_slots import RowPull
from paramserve.client.rows import TablePush
from paramserve.codecs import BFloat16
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core.table import block
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import Zeros
from paramserve.errors import Overloaded
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

KINDS = pytest.mark.parametrize("kind", ["unix", "tcp"])
SERVERS = 4


def asked(client: Client) -> list[int]:
    """Reads that each shard was sent."""
    return [shard.session.last_read for shard in client.connection.exchange.shards]


@KINDS
def test_pull_of_a_key_asks_the_one_server_that_has_it(
    make_cluster: MakeCluster, kind: str
) -> None:
    client = make_cluster(kind, servers=SERVERS).client()
    table, key = users(client), 12_345
    owner = int(shard_of(np.array([key]), SERVERS)[0])
    assert table.pull([key]).tolist() == [[1.0] * DIM]
    one = [int(shard == owner) for shard in range(SERVERS)]
    assert asked(client) == one
    table.pull([])
    assert asked(client) == one
    table.pull(np.arange(200))
    assert asked(client) == [1 + each for each in one]


@KINDS
def test_pull_of_a_tensor_asks_the_servers_that_have_parts_of_it(
    make_cluster: MakeCluster, kind: str
) -> None:
    client = make_cluster(kind, servers=SERVERS).client()
    small, large = np.arange(9, dtype=np.float32), np.arange(1 << 16, dtype=np.float32)
    client.define("small", small, rule=ps.Add())
    client.define("none", np.zeros((0, 3), np.float32), rule=ps.Add())
    client.define("large", large, rule=ps.Add())
    assert client.pull("small").tolist() == small.tolist()
    assert sum(asked(client)) == 1
    assert client.pull("none").shape == (0, 3)
    assert sum(asked(client)) == 2
    assert np.array_equal(client.pull("large"), large)
    assert sum(asked(client)) == 2 + SERVERS
    found = client.pull()
    assert {name: value.shape for name, value in found.items()} == {
        "small": (9,),
        "none": (0, 3),
        "large": (1 << 16,),
    }


def test_staleness_counts_on_the_servers_that_have_something_of_a_push(
    make_cluster: MakeCluster,
) -> None:
    """A pull asks no other one: what these have had since is none of its staleness."""
    client = make_cluster("unix", servers=2).client()
    client.define("w", np.zeros(10, np.float32), rule=ps.Add())
    for number in range(4):
        client.pull("w")
        outcome = client.push("w", np.ones(10, np.float32)).result()
        assert (outcome.version, outcome.staleness, outcome.skipped) == (number + 1, 0, False)


@KINDS
def test_read_that_waits_outlives_its_connections_and_holds_up_no_push(
    make_cluster: MakeCluster, kind: str
) -> None:
    cluster = make_cluster(kind, servers=2, workers=2, policy=BoundedStaleness(0))
    first, second = (users(cluster.client(rank)) for rank in range(2))

    def step(table: Any, keys: list[int]) -> None:
        table.client.push_tables([TablePush(table, keys, ones(len(keys)))]).result()

    step(first, [1, 2])
    first.prefetch([1, 2, 3])
    first.push([3], ones(1)).result()
    for shard in range(2):
        cluster.cut(first.client, shard)
    step(second, [1])
    assert first.pull([1, 2, 3])[:, 0].tolist() == [0.0, 0.5, 0.5]


@KINDS
def test_read_behind_a_step_in_sync_sees_its_clock(make_cluster: MakeCluster, kind: str) -> None:
    cluster = make_cluster(kind, servers=2, workers=2, policy=Sync(reduce="sum"))
    clients = [cluster.client(rank) for rank in range(2)]
    for client in clients:
        client.define("w", np.zeros(4, np.float32), rule=ps.Add())
    for client in clients:
        client.push("w", np.ones(4, np.float32))
    tickets = [client.tick() for client in clients]
    assert [client.pull("w").tolist() for client in clients] == [[2.0] * 4] * 2
    assert [ticket.result().version for ticket in tickets] == [1, 1]


# --- links that change under a read -----------------------------------------------------------

KEYS = np.arange(1, 200)
"""Keys with a row; no row is that of a key without one."""
ASKED = np.concatenate([KEYS[::-1], KEYS[:7]])
CHANGES = [
    (first, then, shards)
    for first, then in [("unix", "tcp"), ("tcp", "unix"), ("unix", "")]
    for shards in [(0,), (1,), (0, 1)]
]
"""How all servers are reached at first, how some are then (empty: not until the next read of
answers), and which."""


def rows_of(keys: np.ndarray) -> np.ndarray:
    """Rows that tell whose they are, in 8 bits."""
    return np.outer(keys, np.ones(DIM)).astype(np.float32)


def change_links(cluster: RoleCluster, client: Client, way: str, shards: Sequence[int]) -> None:
    """Break the links to some servers, and reach these in another way at once, if in any."""
    cluster.ways = way if way else cluster.ways
    exchange = client.connection.exchange
    with exchange._lock:
        for each in (exchange.shards[shard] for shard in shards):
            if way:
                exchange._reconnect(each, ConnectionResetError("the network broke"))
                assert each.link is not None
                assert each.link.shared == (way == "unix")
            else:
                exchange._disconnect(each)


def full_table(cluster: RoleCluster, **options: Any) -> Any:
    table = users(cluster.client(), rule=Add(), init=Zeros(), **options)
    table.put(KEYS, rows_of(KEYS))
    return table


@each_case("codec", [None, BFloat16()])
@each_case("cached", [False, True])
@each_case(("first", "then", "shards"), CHANGES)
def test_links_that_change_before_a_read_is_laid_change_none_of_its_rows(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
    then: str,
    shards: tuple[int, ...],
    cached: bool,
    codec: Any,
) -> None:
    cluster = make_cluster("tcp", servers=2)
    cluster.ways = first
    table = full_table(cluster, pull=codec)
    if cached:
        table.cache_rows(1000)
    lay = row_reads.lay_pull

    def lay_late(*args: Any, **options: Any) -> RowPull:
        change_links(cluster, table.client, then, shards)
        return lay(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(row_reads, "lay_pull", lay_late)
        assert np.array_equal(table.pull(ASKED), rows_of(ASKED))
    assert np.array_equal(table.pull(ASKED[::-1]), rows_of(ASKED[::-1]))


@each_case("codec", [None, BFloat16()])
@each_case(("first", "then", "shards"), CHANGES)
def test_links_that_change_before_a_read_is_answered_change_none_of_its_rows(
    make_cluster: MakeCluster, first: str, then: str, shards: tuple[int, ...], codec: Any
) -> None:
    cluster = make_cluster("tcp", servers=2, workers=2, policy=BoundedStaleness(0))
    cluster.ways = first
    ahead, behind = (cluster.client(rank) for rank in range(2))
    tables = [users(each, rule=Add(), init=Zeros(), pull=codec) for each in (ahead, behind)]
    tables[0].put(KEYS, rows_of(KEYS))
    last = np.zeros((1, DIM), np.float32)
    ahead.push_tables([TablePush(tables[0], [1], last)]).result()
    tables[0].prefetch(ASKED)  # waits for the other one's clock
    change_links(cluster, ahead, then, shards)
    behind.push_tables([TablePush(tables[1], [1], last)]).result()
    assert np.array_equal(tables[0].pull(ASKED), rows_of(ASKED))


def test_rows_too_many_to_be_sent_each_by_itself_are_refused_and_read_again(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("tcp", servers=2)
    cluster.ways = "unix"
    table = full_table(cluster)
    lay = row_reads.lay_pull

    def lay_early(*args: Any, **options: Any) -> RowPull:
        pull = lay(*args, **options)
        change_links(cluster, table.client, "tcp", [0, 1])
        return pull

    with monkeypatch.context() as patch:
        patch.setattr(row_reads, "lay_pull", lay_early)
        patch.setattr(block, "SCATTERED_MAX", 50)
        with pytest.raises(Overloaded, match="rows of table 'users' were to be sent one by one"):
            table.pull(ASKED)
    assert np.array_equal(table.pull(ASKED), rows_of(ASKED))

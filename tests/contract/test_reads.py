"""Reads by themselves: they go where something of what is asked is, and outlive a connection."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.test_tables import DIM, ones, users

import paramserve as ps
from paramserve.client import Client
from paramserve.client.rows import TablePush
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core.table.hashing import shard_of

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

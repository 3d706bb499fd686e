"""Tables when connections break, servers end or do not answer, over all transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs
from tests.contract.role_cluster import DEADLINES, RoleCluster
from tests.contract.test_tables import DIM, ones, users, whole

from paramserve.client.rows import TablePush
from paramserve.core.table.options import MinCount, Zeros
from paramserve.errors import ServerGone
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

PATIENT = structs.replace(DEADLINES, reconnect_s=5.0)
"""A connection that is cut again and again may take its time to come back."""
SOON_S = 2.0
"""Within this time every client knows that a server is gone."""


class Cuts:
    """Cuts a client's connections again and again, from another thread."""

    def __init__(self, cluster: RoleCluster, client: object) -> None:
        self._cluster, self._client = cluster, client
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        shard = 0
        while not self._over.wait(0.008):
            self._cluster.cut(self._client, shard % len(self._cluster.servers))
            shard += 1

    def __enter__(self) -> Cuts:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_pulls_scans_and_puts_go_on_over_the_next_connection(cluster: RoleCluster) -> None:
    client = cluster.client(deadlines=PATIENT)
    table = users(client, rule=Add())
    keys = np.arange(-200, 200)
    with Cuts(cluster, client):
        for n in range(4):
            table.put(keys, np.outer(keys + n, np.ones(DIM)))
            assert np.array_equal(table.pull(keys)[:, 1], keys + n)
            table.prefetch(keys[::3])
            found, values, _, _ = whole(table, 150)
            assert np.array_equal(found, keys)
            assert np.array_equal(values[:, 2], keys + n)
            assert np.array_equal(table.pull(keys[::3])[:, 3], keys[::3] + n)


def test_steps_of_several_tables_are_applied_once_through_reconnects(
    cluster: RoleCluster,
) -> None:
    client = cluster.client(deadlines=PATIENT)
    tables = [client.table(f"t{n}", dim=2, rule=Add(), init=Zeros()) for n in range(5)]
    keys = np.arange(30)
    with Cuts(cluster, client):
        for _ in range(25):
            client.push_tables([TablePush(table, keys, ones(30, 2)) for table in tables])
            time.sleep(0.002)
        client.drain()
    for table in tables:
        assert (table.pull(keys) == 25.0).all()
        assert client.clock(table.name) == 25


def test_min_count_counts_a_push_that_was_sent_twice_once(cluster: RoleCluster) -> None:
    client = cluster.client(deadlines=PATIENT)
    table = users(client, rule=Add(), init=Zeros(), admit=MinCount(20))
    with Cuts(cluster, client):
        for _ in range(30):
            table.push([1, 2, 3], ones(3))
            time.sleep(0.002)
        client.drain()
    assert table.pull([1, 2, 3])[:, 0].tolist() == [11.0] * 3


def test_server_that_ends_is_gone_for_every_call_of_a_table(remote: RoleCluster) -> None:
    client = remote.client()
    table = users(client)
    rows = table.pull(np.arange(100))
    with remote.frozen():
        ticket = table.push(np.arange(100), rows)
        table.prefetch([1, 2])
        remote.serving.loop.call_soon_threadsafe(remote.servers[-1].stop)
    with pytest.raises(ServerGone, match=r"server of shard \d.*Applied: unknown"):
        ticket.result()
    uses: tuple[Callable[[], object], ...] = (
        lambda: table.pull([1, 2, 3]),
        lambda: table.push([1], ones(1)),
        lambda: table.put([1], ones(1)),
        lambda: list(table.scan()),
        lambda: len(table),
        lambda: client.tick("users"),
    )
    start = time.monotonic()
    for use in uses:
        with pytest.raises(ServerGone):
            use()
    client.close()
    assert time.monotonic() - start < SOON_S
    assert (rows == 1.0).all()

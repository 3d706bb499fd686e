"""Tables when connections break, servers end or do not answer, over all transports."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs
from tests.contract.role_cluster import DEADLINES, RoleCluster, in_threads
from tests.contract.test_tables import DIM, MakeCluster, ones, users, whole

from paramserve.client.table import TablePush
from paramserve.consistency.built_in import Sync
from paramserve.core.table.options import MinCount, Zeros
from paramserve.errors import PushTimeout, ServerGone, WorkerFenced
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

PATIENT = structs.replace(DEADLINES, reconnect_s=5.0)
"""A connection that is cut again and again may take its time to come back."""
SOON_S = 2.0
"""Within this time everybody knows that a server is gone."""


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


def test_pipelined_pushes_are_applied_once_through_reconnects(cluster: RoleCluster) -> None:
    client = cluster.client(deadlines=PATIENT)
    table = users(client, rule=Add(), init=Zeros())
    before = cluster.connects
    draw = np.random.default_rng(1)
    expected = np.zeros(50)
    tickets = []
    with Cuts(cluster, client):
        for _ in range(60):
            keys = draw.integers(0, 50, 40)
            np.add.at(expected, keys, 1.0)
            tickets.append(table.push(keys, ones(40)))
            time.sleep(0.001)
        versions = [ticket.result().version for ticket in tickets]
    assert versions == list(range(1, 61))
    assert np.array_equal(table.pull(np.arange(50)), np.outer(expected, np.ones(DIM)))
    assert np.array_equal(cluster.client().table("users").pull([7])[:, 0], expected[[7]])
    assert cluster.connects > before + 3


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


def test_sync_clocks_survive_reconnects_of_every_rank(make_cluster: MakeCluster, kind: str) -> None:
    cluster = make_cluster(kind, servers=2, workers=2)
    policy = Sync(reduce="sum")
    ranks = [cluster.client(rank, deadlines=PATIENT) for rank in range(2)]
    tables = [users(c, rule=Add(), init=Zeros(), consistency=policy) for c in ranks]
    keys = np.arange(40)

    def work(rank: int) -> None:
        for _ in range(20):
            tables[rank].push(keys, ones(40))
            ranks[rank].tick("users").result()

    with Cuts(cluster, ranks[0]), Cuts(cluster, ranks[1]):
        in_threads(lambda: work(0), lambda: work(1))
    assert (cluster.client().table("users").pull(keys) == 40.0).all()


def test_arena_that_grows_after_a_cut_comes_with_the_next_connection(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    table = users(client, dim=64, rule=Add())
    table.pull([1])
    for shard in range(len(cluster.servers)):
        cluster.cut(client, shard)
    keys = np.arange(20_000)
    assert (table.pull(keys) == 1.0).all()
    table.push(keys, ones(20_000, 64)).result()
    assert (table.pull(keys) == 2.0).all()


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


def test_timeout_of_a_push_frees_nothing_and_result_can_be_called_again(
    remote: RoleCluster,
) -> None:
    table = users(remote.client())
    with remote.frozen():
        ticket = table.push([1, 2], ones(2))
        for _ in range(2):
            with pytest.raises(PushTimeout, match=r"push timed out.*Applied: unknown"):
                ticket.result(0.01)
    assert ticket.result().version == 1
    assert table.pull([1, 2])[:, 0].tolist() == [0.5, 0.5]


def test_older_incarnation_of_a_rank_changes_no_row(make_cluster: MakeCluster, kind: str) -> None:
    cluster = make_cluster(kind, servers=2, workers=1, restarts=True)
    old = cluster.client(0)
    table = users(old, rule=Add(), init=Zeros())
    table.push([1], ones(1)).result()
    old.tick("users").result()
    cluster.mark_dead(0)
    with pytest.raises((WorkerFenced, ServerGone)):
        table.push([1], ones(1)).result()
    new = cluster.client(0)
    again = users(new, rule=Add(), init=Zeros())
    assert new.clock("users") == 1
    again.push([1], ones(1)).result()
    new.tick("users").result()
    assert again.pull([1]).tolist() == [[2.0] * DIM]

"""`ps.Cluster` with real processes."""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref

import numpy as np
import pytest
from tests.faults.leftovers import all_end

import paramserve as ps
from paramserve.errors import ClientClosed, ServerGone
from paramserve.launch.entries import Key

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def pids(cluster: ps.Cluster) -> dict[Key, int]:
    return {key: process.pid for process, key in cluster._supervisor._processes.items()}


def test_cluster_holds_values_and_closes_its_clients() -> None:
    with ps.Cluster(servers=2) as cluster, all_end(list(pids(cluster).values())):
        first, second = cluster.client(), cluster.client()
        first.define("w", np.zeros(10), rule=ps.Add())
        first.push("w", np.ones(10)).result()
        np.testing.assert_array_equal(second.pull("w"), np.ones(10))
        cluster.close()
        cluster.close()
        assert first.closed
        with pytest.raises(ClientClosed):
            second.pull("w")
        with pytest.raises(ClientClosed, match="was closed"):
            cluster.client()
        del first, second


def test_clients_that_the_program_has_closed_are_freed() -> None:
    with ps.Cluster() as cluster:
        handle = cluster.handle()
        closed: list[weakref.ref[ps.Client]] = []
        for connect in (cluster.client, handle.connect, cluster.client):
            client = connect()
            client.close()
            closed.append(weakref.ref(client))
        client = cluster.client()
        gc.collect()
        assert [each() for each in closed] == [None] * 3
        assert not client.closed


def test_cluster_closes_when_the_block_raises() -> None:
    found: list[int] = []

    def use() -> None:
        with ps.Cluster() as cluster:
            found.extend(pids(cluster).values())
            raise LookupError

    with pytest.raises(LookupError):
        use()
    with all_end(found):
        pass


def test_killed_server_is_server_gone_for_clients_within_2_s() -> None:
    with ps.Cluster(servers=2) as cluster, all_end(list(pids(cluster).values())):
        client = cluster.client()
        client.define("w", np.zeros(100_000), rule=ps.Add())
        os.kill(pids(cluster)[Key("server", 1)], signal.SIGKILL)
        began = time.monotonic()

        def push_on() -> None:
            while True:
                client.push_pull({"w": np.ones(100_000)})

        with pytest.raises(ServerGone):
            push_on()
        assert time.monotonic() - began < 2.0
        cluster._supervisor.ended.wait()
        for _ in range(2):
            with pytest.raises(ServerGone, match="server 1 was killed by SIGKILL"):
                client.pull("w")
        with pytest.raises(ServerGone, match="server 1 was killed by SIGKILL"):
            cluster.client()

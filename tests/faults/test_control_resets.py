"""A reset of one connection to the coordinator ends neither a worker nor a server."""

from __future__ import annotations

import contextlib
import socket

import numpy as np
import pytest
from tests.contract.role_cluster import wait_until
from tests.faults.proxies import Proxy
from tests.faults.servers import Servers

import paramserve as ps

LARGE = 20_000
IDLE_PEERS = 200


@pytest.mark.parametrize("restart_s", [None, 60.0], ids=["plain", "restart"])
def test_worker_goes_on_after_its_connection_to_the_coordinator_was_reset(
    servers: Servers, restart_s: float | None
) -> None:
    _, address = servers.serve(workers=1, restart_s=restart_s, sync=True)
    with Proxy(address) as proxy:
        joined = ps.connect(proxy.address, rank=0, token_file=servers.token)
        with joined as worker:
            worker.client.define("w", np.zeros(4), rule=ps.Add())
            for times in range(1, 4):
                assert proxy.reset() == 1
                worker.client.push("w", np.ones(4))
                worker.client.tick().result()
                if times == 1:  # a call notices it, or the next heartbeat does
                    worker.client.define(f"w{times}", np.zeros(4), rule=ps.Add(), group="other")
                wait_until(lambda wanted=1 + times: proxy.carried == wanted)
                assert worker.client.pull("w").tolist() == [float(times)] * 4
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        assert worker.incarnation == 2


def test_idle_peers_do_not_turn_a_reset_into_a_lost_worker(servers: Servers) -> None:
    _, address = servers.serve(workers=2)
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(Proxy(address))
        worker = ps.connect(proxy.address, rank=0, token_file=servers.token)
        stack.enter_context(worker)
        for _ in range(IDLE_PEERS):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10.0))
        assert proxy.reset() == 1
        worker.client.define("w", np.zeros(4), rule=ps.Add())
        assert worker.client.pull("w").tolist() == [0.0] * 4
        stack.enter_context(ps.connect(address, rank=1, token_file=servers.token, timeout_s=4.0))


def test_cluster_goes_on_after_a_joined_servers_connection_was_reset(servers: Servers) -> None:
    first, address = servers.serve(servers=2, workers=2)
    with Proxy(address) as proxy:
        second, _ = servers.serve(join=proxy.address)
        with ps.connect(address, rank=0, token_file=servers.token) as one:
            one.client.define("w", np.zeros(LARGE), rule=ps.Add())
            for times in range(1, 3):
                assert proxy.reset() == 1
                wait_until(lambda wanted=1 + times: proxy.carried == wanted)
                one.client.push("w", np.ones(LARGE)).result()
            with ps.connect(address, rank=1, token_file=servers.token) as other:
                other.client.push("w", np.ones(LARGE)).result()  # the second server knows it
                np.testing.assert_array_equal(other.client.pull("w"), np.full(LARGE, 3.0))
    assert not first.ended()
    second.finish()  # with the proxy, no process listens there any more

"""What servers keep for clients that have read their answers and ask for nothing more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import wait_until

from paramserve.config import Limits
from paramserve.rules import Add

SIZE = 5_000_000
"""40 MB of float64: the allocator gives so much back to the system as soon as it is free."""
CLIENTS = 3


def anonymous_bytes() -> int:
    """Memory of this process that is no file's and not shared: not that of clients' arenas."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


def test_values_that_idle_clients_have_read_over_tcp_are_not_kept(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("tcp", limits=Limits(buffers_bytes_max=0))
    clients = [cluster.client() for _ in range(CLIENTS)]
    clients[0].define("w", np.ones(SIZE), rule=Add())
    clients[0].push("w", np.zeros(SIZE)).result()  # Its next request: nothing is kept for it.
    before = anonymous_bytes()
    for client in clients:
        assert client.pull("w")[-1] == 1.0
    wait_until(lambda: anonymous_bytes() < before + 8 * SIZE)
    cluster.cut(clients[0])  # It goes on as before, also on a new connection.
    assert clients[0].pull("w")[-1] == 1.0

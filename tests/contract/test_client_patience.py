"""A server that listens and does not answer, while a client connects to it again."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import DEADLINES, WAIT_S

from paramserve.client import Client
from paramserve.errors import ServerGone
from paramserve.rules import Add

BUSY_S = 3 * DEADLINES.reconnect_s


def cut(client: Client) -> None:
    """Break a client's link as the network does."""
    link = client.connection.exchange.shards[0].link
    assert link is not None
    link._sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_link_that_breaks_while_the_server_is_busy_is_made_anew(
    make_cluster: MakeCluster, kind: str
) -> None:
    cluster = make_cluster(kind)
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with cluster.frozen():
        cut(client)
        wake = threading.Timer(BUSY_S, lambda: None)
        wake.start()
        ticket = client.push("w", np.ones(3))
        assert not ticket.done()
        wake.join(WAIT_S)
    assert ticket.result().version == 1
    assert client.pull("w").tolist() == [1.0] * 3


def test_server_that_does_not_answer_for_stall_s_is_gone(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", deadlines=structs.replace(DEADLINES, stall_s=BUSY_S))
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with cluster.frozen():
        cut(client)
        with pytest.raises(ServerGone, match="does not answer"):
            client.push("w", np.ones(3)).result()

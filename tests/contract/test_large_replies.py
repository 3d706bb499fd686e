"""Replies that are larger than what a server keeps unread for one peer."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster

from paramserve.client.exchange import WINDOW
from paramserve.client.steps import BlockPush
from paramserve.config import Limits
from paramserve.rules import Add

SIZE = 2_000_000
"""16 MB of float64: more than the sockets' buffers hold, in either direction."""
UNREAD_MAX = 1 << 20


@pytest.fixture
def cluster(make_cluster: MakeCluster, shards: int) -> RoleCluster:
    return make_cluster("tcp", servers=shards, limits=Limits(send_buffer_bytes_max=UNREAD_MAX))


def test_steps_sent_before_the_first_is_read_are_answered_on_one_connection(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    block = client.define("w", np.zeros(SIZE), rule=Add())
    connects, tickets = cluster.connects, []
    for _ in range(WINDOW - 1):
        gradient = client.dense.gradient_slot(block)
        gradient[:] = 1.0
        push = BlockPush(block, gradient)
        tickets.append(client.dense.step("default", [push], pull=[block], tick=False))
    for number, ticket in enumerate(tickets, 1):
        values = ticket.result().values[block.id]
        assert (values == number).all()
        ticket.release()
    assert cluster.connects == connects


def test_threads_that_pull_at_once_are_answered_on_one_connection(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.ones(SIZE), rule=Add())
    connects, found = cluster.connects, []
    threads = [
        threading.Thread(target=lambda: found.append(client.pull("w"))) for _ in range(WINDOW)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(found) == WINDOW
    assert all((values == 1.0).all() for values in found)
    assert cluster.connects == connects


def test_client_that_reads_nothing_stops_no_other(cluster: RoleCluster) -> None:
    slow, other = cluster.client(), cluster.client()
    block = slow.define("w", np.ones(SIZE), rule=Add())
    tickets = [slow.dense.step("default", [], pull=[block], tick=False) for _ in range(WINDOW - 1)]
    assert (other.push_pull({"w": np.ones(SIZE)})["w"] == 2.0).all()
    for ticket in tickets:
        assert np.isin(ticket.result().values[block.id], (1.0, 2.0)).all()
        ticket.release()

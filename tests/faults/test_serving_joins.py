"""A server that fails to join leaves a cluster as it was."""

from __future__ import annotations

import numpy as np
from tests.faults.servers import SOON_S, Servers

import paramserve as ps


def test_refused_extra_server_leaves_the_first_one_serving(servers: Servers) -> None:
    first, address = servers.serve(workers=1)
    extra = servers.start("server", bind="127.0.0.1:0", token=servers.token, join=address)
    _, text = extra.error(SOON_S)
    assert "one more server came to a cluster of 1" in text
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(3), rule=ps.Add())
        worker.client.push("w", np.ones(3)).result()
        assert worker.client.pull("w").tolist() == [1.0] * 3
    assert not first.ended()


def test_joiner_whose_port_is_taken_leaves_its_shard_to_the_next_one(servers: Servers) -> None:
    first, address = servers.serve(servers=2, workers=1)
    failing = servers.start("server", bind=address, token=servers.token, join=address)
    _, text = failing.error(SOON_S)
    assert "another process listens there" in text
    servers.serve(join=address)
    with ps.connect(address, rank=0, token_file=servers.token) as worker:
        worker.client.define("w", np.zeros(20_000), rule=ps.Add())
        worker.client.push("w", np.ones(20_000)).result()
        np.testing.assert_array_equal(worker.client.pull("w"), np.ones(20_000))
    assert not first.ended()


def test_first_server_ends_with_an_error_when_a_registered_one_is_killed(servers: Servers) -> None:
    (first, second), _ = servers.pair(workers=1)
    second.close()
    kind, text = first.error()
    assert kind == "ServerGone"
    assert "a server of this cluster has ended" in text

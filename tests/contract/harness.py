"""A cluster with a client that must be served whatever untrusted peers do."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.contract.echo_host import frame
from tests.contract.role_cluster import WAIT_S, RoleCluster

from paramserve.client import Client
from paramserve.messages import Hello, encode
from paramserve.rules import SGD
from paramserve.transport.link import Link

UNTRUSTED = 1000
"""The client number of a peer that sends nonsense."""
HELLO = frame(encode(Hello("client", client=UNTRUSTED)))


class Harness:
    """A cluster and its member, which under Sync is the only worker."""

    def __init__(self, cluster: RoleCluster, rank: int = -1) -> None:
        self.cluster = cluster
        self.member: Client = cluster.client(rank)
        self.member.define({"w": np.zeros(8), "b": np.zeros(3)}, rule=SGD(1.0))

    def goes_on(self) -> None:
        """The member is served, and nothing was raised out of the servers' loop."""
        self.member.push_pull({"b": np.zeros(3)}, tick=True, timeout_s=WAIT_S)
        assert len(self.member.connection.reports()) == len(self.cluster.servers)
        assert self.cluster.serving.errors == []

    def untrusted(self, **hello: Any) -> Link:
        """A connection of an accepted peer, which may have an arena."""
        arenas = hello.pop("arenas", ())
        fields = {"role": "client", "client": UNTRUSTED} | hello
        listeners = self.cluster.servers[0].listeners
        return Link.connect(
            [x.address for x in listeners if x.address.startswith(self.cluster.kind)],
            Hello(**fields),
            credentials=self.cluster.credentials,
            arenas=arenas,
            timeout_s=WAIT_S,
        )

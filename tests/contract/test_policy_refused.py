"""A change of policy that one server cannot make is made by none, and training goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.shard import Shard
from paramserve.errors import UnknownRule
from paramserve.rules import Add

SIZE = 20_000
"""Elements of float64: enough to lie on two shards."""


@dataclass(frozen=True)
class Patient(BoundedStaleness):
    """A policy of the owner's."""


def forget_policies(shard: Shard) -> None:
    """As a server that was started without them."""
    for machine in shard.groups.values():
        machine.policies._policies = {}


@pytest.mark.parametrize("lacking", range(2))
@pytest.mark.parametrize("before", [Sync(reduce="sum"), Async()], ids=["sync", "async"])
def test_change_to_a_class_that_one_server_was_started_without_changes_nothing(
    make_cluster: MakeCluster, before: Policy, lacking: int
) -> None:
    cluster = make_cluster(servers=2, workers=1, policy=before, registers=[Patient])
    client = cluster.client(0)
    client.define("w", np.zeros(SIZE), rule=Add())
    cluster.on_server(lambda: forget_policies(cluster.servers[lacking].role.shard))

    def steps(count: int) -> None:
        for _ in range(count):
            client.push_pull({"w": np.ones(SIZE)}, tick=True, timeout_s=2.0)

    steps(2)
    with pytest.raises(UnknownRule) as refused:
        client.set_consistency("default", Patient(1), timeout_s=2.0)
    for part in (f"the server of shard {lacking}", "'Patient'", "policies=[Patient]"):
        assert part in str(refused.value)
    assert refused.value.applied == "no"
    steps(4)
    assert (client.steps.terms().policy, (client.pull("w") == 6).all()) == (before, True)
    first = client.set_consistency("default", BoundedStaleness(3))
    while client.clock() < first:
        steps(1)
    steps(1)
    assert client.steps.terms().policy == BoundedStaleness(3)

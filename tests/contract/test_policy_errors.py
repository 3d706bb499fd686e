"""Policies that decide nothing time out and say who waits; a change that one server cannot make is
made by none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.suites import each_case

from paramserve.consistency.base import Admission, GroupView, Policy, Pull, Wait
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.shard import Shard
from paramserve.errors import PushTimeout, UnknownRule
from paramserve.rules import Add

SIZE = 20_000
"""Elements of float64: enough to lie on two shards."""
SOON_S = 0.3


@dataclass(frozen=True)
class ShutDoor(Policy):
    """Admits no read."""

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        return Wait(tuple(rank for rank in group.clocks if rank != pull.worker))


@dataclass(frozen=True)
class NeverEnough(Policy):
    """No clock is decided."""

    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        return Wait((1,))


def test_policy_that_admits_no_read_times_out_and_names_who_is_waited_for(
    make_cluster: MakeCluster, shards: int
) -> None:
    cluster = make_cluster(servers=shards, policy=ShutDoor(), workers=2, registers=[ShutDoor])
    first, second, reader = cluster.client(0), cluster.client(1), cluster.client()
    for client in (first, second):
        client.define("w", np.zeros(SIZE), rule=Add())
    with pytest.raises(PushTimeout) as told:
        first.push_pull({"w": np.ones(SIZE)}, tick=True, timeout_s=SOON_S)
    text = str(told.value)
    assert "rank 0 waited 0.3 s; ShutDoor does not let worker 0 read at clock 1 yet" in text
    assert "worker 1 (at clock 0)" in text
    assert reader.pull("w")[-1] == 1.0, "the push was applied, and a client without a rank reads"
    second.push("w", np.ones(SIZE)).result()
    assert reader.pull("w")[-1] == 2.0


def test_policy_that_decides_no_clock_times_out_and_names_who_is_waited_for(
    make_cluster: MakeCluster, shards: int
) -> None:
    cluster = make_cluster(servers=shards, policy=NeverEnough(), workers=2, registers=[NeverEnough])
    first, second, reader = cluster.client(0), cluster.client(1), cluster.client()
    for client in (first, second):
        client.define("w", np.zeros(SIZE), rule=Add())
    first.push("w", np.ones(SIZE))
    with pytest.raises(PushTimeout, match=r"worker 1 \(at clock 0\)") as told:
        first.tick().result(SOON_S)
    assert told.value.applied == "unknown"
    assert reader.pull("w")[-1] == 0.0


@dataclass(frozen=True)
class Patient(BoundedStaleness):
    """A policy of the owner's."""


def forget_policies(shard: Shard) -> None:
    """As a server that was started without them."""
    for machine in shard.groups.values():
        machine.policies._policies = {}


@each_case("lacking", range(2))
@each_case("before", [Sync(reduce="sum"), Async()], ids=["sync", "async"])
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
    for part in (f"the server of shard {lacking}", "'Patient'", "rules=[Patient]"):
        assert part in str(refused.value)
    assert refused.value.applied == "no"
    steps(4)
    assert (client.steps.terms().policy, (client.pull("w") == 6).all()) == (before, True)
    first = client.set_consistency("default", BoundedStaleness(3))
    while client.clock() < first:
        steps(1)
    steps(1)
    assert client.steps.terms().policy == BoundedStaleness(3)

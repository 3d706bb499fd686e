"""A policy that admits no read: an error by deadline, which says who waits for whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster

from paramserve.consistency.base import Admission, GroupView, Policy, Pull, Wait
from paramserve.errors import PushTimeout
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

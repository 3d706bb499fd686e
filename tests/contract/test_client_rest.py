"""A worker that rests in a group and reads from it: reading is no step, and no clock waits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tests.contract.role_cluster import RoleCluster
from tests.suites import each_case

from paramserve.client import Client
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness
from paramserve.rules import Add

SIZE = 20_000
"""Elements of float64: enough to lie on two shards."""
MakeCluster = Callable[..., RoleCluster]


def counted(client: Client) -> set[tuple[int, ...]]:
    """The ranks that the shards count in the group."""
    return {
        tuple(r for r, _ in g.clocks) for beat in client.connection.reports() for g in beat.groups
    }


@each_case("policy", [BoundedStaleness(1), Async()], ids=["bounded", "async"])
def test_pull_of_a_resting_worker_does_not_end_its_rest(
    make_cluster: MakeCluster, shards: int, policy: Policy
) -> None:
    cluster = make_cluster(servers=shards, workers=2, policy=policy)
    steps, rests = (cluster.client(rank) for rank in range(2))
    for client in (steps, rests):
        client.define("w", np.zeros(SIZE), rule=Add())
    rests.rest()
    assert (rests.pull("w") == 0).all()
    for clock in range(4):  # beyond the bound, if the other one counted
        values = steps.push_pull({"w": np.ones(SIZE)}, tick=True, timeout_s=2.0)
        assert (values["w"] == clock + 1).all()
    assert (rests.pull("w") == 4).all()
    assert counted(steps) == {(0,)}
    rests.push("w", np.ones(SIZE))
    rests.tick().result()
    assert counted(steps) == {(0, 1)}
    assert (rests.pull("w") == 5).all()
    rests.rest()
    assert rests.enter() is True
    assert counted(steps) == {(0, 1)}, "from now on, and not from its next step on"
    assert rests.enter() is False


@each_case("joins", [False, True], ids=["rested", "joins"])
@each_case("policy", [BoundedStaleness(1), Async()], ids=["bounded", "async"])
def test_worker_that_enters_goes_on_at_the_clock_of_the_others(
    make_cluster: MakeCluster, shards: int, policy: Policy, joins: bool
) -> None:
    cluster = make_cluster(servers=shards, workers=1 if joins else 2, policy=policy)
    steps = cluster.client(0)
    steps.define("w", np.zeros(SIZE), rule=Add())
    gradient = {"w": np.ones(SIZE)}
    if joins:
        steps.push_pull(gradient, tick=True, timeout_s=2.0)
        cluster.scale(2)
    enters = cluster.client(1)
    enters.define("w", np.zeros(SIZE), rule=Add())
    if not joins:
        enters.rest()
    while steps.clock() < 5:
        steps.push_pull(gradient, tick=True, timeout_s=2.0)
    assert enters.enter() is True
    assert enters.clock() == 5
    for _ in range(3):  # in turns, so within the bound
        enters.push_pull(gradient, tick=True, timeout_s=2.0)
        steps.push_pull(gradient, tick=True, timeout_s=2.0)
    assert enters.clock() == steps.clock() == 8
    assert enters.steps.missed == 0
    said = {tuple(g.clocks) for beat in steps.connection.reports() for g in beat.groups}
    assert said == {((0, 8), (1, 8))}

"""A define that one server refuses leaves nothing behind on the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster

from paramserve.client import Client
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import RuleFailed
from paramserve.rules import Add
from paramserve.rules.custom import CustomRule

pytestmark = pytest.mark.usefixtures("tables_ready")

SIZE = 20_000


@dataclass(frozen=True)
class Roomy(CustomRule):
    """value += gradient. Of the servers that begin to keep its state, the second one cannot."""

    name: ClassVar[str] = "Roomy"
    state_names: ClassVar[tuple[str, ...]] = ("seen",)
    begun: ClassVar[int] = 0

    def init(self, name: str, size: int, dtype: Any) -> Any:
        Roomy.begun += 1
        if Roomy.begun == 2:
            raise MemoryError("no room")
        return np.zeros(size, dtype)

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value += gradient


@pytest.fixture
def cluster(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> RoleCluster:
    """Of two workers, so that a push in Sync waits for the other one's."""
    monkeypatch.setattr(Roomy, "begun", 0)
    return make_cluster("unix", servers=2, workers=2, policy=Sync(), registers=[Roomy])


def define(client: Client, kind: str, **options: Any) -> None:
    if kind == "tensor":
        client.define("w", np.zeros(SIZE), rule=Roomy(), **options)
    else:
        client.table("w", dim=4, rule=Roomy(), **options)


def group_of(kind: str) -> str:
    return "default" if kind == "tensor" else "w"


def kept(cluster: RoleCluster) -> list[list[tuple[int, str]]]:
    """By shard: the blocks that it keeps, with their group's policy."""
    shards = [server.role.shard for server in cluster.servers]
    policies = [{report.name: report.policy for report in shard.report()} for shard in shards]
    return [
        [(number, policies[at][block.spec.group_name]) for number, block in shard.blocks.items()]
        for at, shard in enumerate(shards)
    ]


@pytest.mark.parametrize("kind", ["tensor", "table"])
@pytest.mark.parametrize(("first", "then"), [(Sync(), Async()), (Async(), Sync())])
def test_define_that_one_server_refuses_is_free_for_another_policy(
    cluster: RoleCluster, kind: str, first: Policy, then: Policy
) -> None:
    client = cluster.client(0)
    with pytest.raises(RuleFailed, match="no room"):
        define(client, kind, consistency=first)
    assert kept(cluster) == [[], []]
    define(client, kind, consistency=then)
    now = kept(cluster)
    assert now[0] == now[1] == [(1, type(then).__name__)]


def test_push_after_a_refused_define_is_applied_by_the_policy_of_the_second_one(
    cluster: RoleCluster,
) -> None:
    client = cluster.client(0)
    with pytest.raises(RuleFailed):
        define(client, "tensor")
    define(client, "tensor", consistency=Async())
    client.push("w", np.ones(SIZE)).result(WAIT_S)
    assert (client.pull("w") == 1.0).all()


def test_refused_define_leaves_the_other_blocks_of_its_group(cluster: RoleCluster) -> None:
    client = cluster.client(0)
    client.define("b", np.zeros(SIZE), rule=Add(), consistency=Async())
    with pytest.raises(RuleFailed):
        define(client, "tensor")
    assert kept(cluster) == [[(0, "Async")]] * 2
    client.push("b", np.ones(SIZE)).result(WAIT_S)
    define(client, "tensor")
    client.push({"b": np.ones(SIZE), "w": np.ones(SIZE)}).result(WAIT_S)
    assert [sorted(set(each.tolist())) for each in client.pull(["b", "w"]).values()] == [
        [2.0],
        [1.0],
    ]

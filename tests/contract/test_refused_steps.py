"""What one server refuses: a step ends its synchronous clock for all, a define leaves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster, in_threads
from tests.contract.test_tables import ones, users
from tests.suites import each_case

from paramserve.client import BlockPush, Client, Ticket
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import ParamServeError, RuleFailed
from paramserve.rules import Add
from paramserve.rules.custom import CustomRule

pytestmark = pytest.mark.usefixtures("tables_ready")

GOOD, BAD = (1.0,), (-1.0,)


@dataclass(frozen=True)
class Rising(CustomRule):
    """value += rate * gradient. Only servers check the rate of a rule that is not built in."""

    name: ClassVar[str] = "Rising"
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.rate < 0.0:
            raise ValueError(f"rate is {self.rate}, it must not be negative")

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value += self.rate * gradient


class Dense:
    """Workers that step a tensor."""

    def __init__(self, cluster: RoleCluster, workers: int) -> None:
        self.clients = [cluster.client(rank) for rank in range(workers)]
        for client in self.clients:
            client.define("w", np.zeros(20_000), rule=Rising())

    def step(self, client: Client, rate: tuple[float, ...]) -> Ticket:
        block = client.blocks()[0]
        slot = client.dense.gradient_slot(block)
        slot[:] = 1.0
        return client.dense.step("default", [BlockPush(block, slot, None, rate)], pull=[block])

    def value(self) -> Sequence[float]:
        values = self.clients[0].pull("w")
        return sorted(set(values.tolist()))


class Rows:
    """Workers that step a table."""

    def __init__(self, cluster: RoleCluster, workers: int) -> None:
        self.clients = [cluster.client(rank) for rank in range(workers)]
        self.tables = [users(each, consistency=Sync(), rule=Rising()) for each in self.clients]
        self.first = self.tables[0].pull(np.arange(100))

    def step(self, client: Client, rate: tuple[float, ...]) -> Ticket:
        table = self.tables[self.clients.index(client)]
        table.push(np.arange(100), ones(100), hyper=rate)
        return client.tick("users")

    def value(self) -> Sequence[float]:
        added = self.tables[0].pull(np.arange(100)) - self.first
        return sorted(set(added.ravel().round(5).tolist()))


def outcome(ticket: Ticket) -> str:
    """What a worker is told of a step."""
    try:
        ticket.result(WAIT_S)
    except ParamServeError as error:
        return str(error)
    return "applied"


@each_case("servers", [1, 2])
@each_case("workers", [1, 2])
@each_case("kind", [Dense, Rows])
def test_step_that_servers_refuse_is_told_to_every_worker_and_the_next_one_is_applied(
    make_cluster: MakeCluster, kind: type[Dense] | type[Rows], workers: int, servers: int
) -> None:
    cluster = make_cluster(
        "unix", servers=servers, workers=workers, policy=Sync(), registers=[Rising]
    )
    team = kind(cluster, workers)
    rates = [[GOOD] * workers, [GOOD] * (workers - 1) + [BAD], [GOOD] * workers]
    told: list[list[str]] = [[] for _ in range(workers)]

    def train(rank: int) -> None:
        for of_step in rates:
            told[rank].append(outcome(team.step(team.clients[rank], of_step[rank])))

    in_threads(*(lambda rank=rank: train(rank) for rank in range(workers)))
    for of_rank in told:
        assert [of_rank[0], of_rank[2]] == ["applied", "applied"]
        assert f"the step of rank {workers - 1} for clock 1 of group" in of_rank[1]
        assert "rate is -1.0, it must not be negative" in of_rank[1]
        assert "Applied: no" in of_rank[1]
    assert team.value() == [2.0], "the clocks before and after it, and nothing of it"


def test_step_that_servers_refuse_ends_a_clock_that_waits_for_fewer_workers(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=3, policy=Sync(backup=1), registers=[Rising])
    team = Dense(cluster, 3)
    tickets = [
        team.step(team.clients[0], BAD),
        team.step(team.clients[1], GOOD),
    ]
    assert all("rate is -1.0" in outcome(each) for each in tickets)
    assert outcome(team.step(team.clients[2], GOOD)) == "applied"
    tickets = [team.step(each, GOOD) for each in team.clients[:2]]
    assert [outcome(each) for each in tickets] == ["applied"] * 2
    assert team.value() == [1.0]


# --- a define that one server refuses -------------------------------------------------------------


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

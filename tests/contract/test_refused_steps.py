"""A step that a server refuses ends its synchronous clock: every worker is told, none waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, RoleCluster, in_threads
from tests.contract.test_tables import ones, users

from paramserve.client import BlockPush, Client, Ticket
from paramserve.consistency.built_in import Sync
from paramserve.errors import ParamServeError
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


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Dense, Rows])
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

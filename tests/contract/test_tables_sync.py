"""A table under Sync: a clock that one shard cannot apply is refused on all, and rows do not depend
on the order of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import in_threads
from tests.contract.test_tables import ones, users, whole
from tests.contract.test_tables_limits import SMALL, first_values, keys_of, room
from tests.suites import each_case

from paramserve.client.table import Table
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import DelayCompensated, Sync
from paramserve.core.table import memory
from paramserve.core.table.options import LRU
from paramserve.errors import ParamServeError, RuleFailed, TableFull
from paramserve.rules.custom import CustomRule

pytestmark = pytest.mark.usefixtures("tables_ready")


@dataclass(frozen=True)
class Careful(CustomRule):
    """value -= gradient; but no gradient above 100."""

    name: ClassVar[str] = "Careful"

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        if float(np.abs(gradient).max(initial=0.0)) > 100.0:
            raise ArithmeticError("too steep")
        value -= gradient


def step(table: Table, keys: Any, gradients: Any) -> None:
    table.push(keys, gradients)
    table.client.tick("users").result()


def values(table: Table, keys: Any) -> list[float]:
    return [float(each) for each in table.pull(keys)[:, 0]]


def refusal(table: Table, keys: Any, gradients: Any, kind: type[ParamServeError]) -> str:
    table.push(keys, gradients)
    ticket = table.client.tick("users")
    with pytest.raises(kind) as found:
        ticket.result()
    return str(found.value)


@each_case("servers", [1, 2])
def test_clock_that_finds_a_shard_full_is_refused_whole(
    make_cluster: MakeCluster, servers: int
) -> None:
    cluster = make_cluster("unix", servers=servers, workers=1)
    table = users(cluster.client(rank=0), consistency=Sync(), max_bytes=SMALL)
    most = room(cluster)
    last = servers - 1
    there = keys_of(cluster, last, most)
    other = int(keys_of(cluster, 0, 1)[0]) if servers > 1 else int(there[0])
    step(table, there, ones(most))
    step(table, [other], ones(1))
    before = values(table, [other])
    new = int(keys_of(cluster, last, most + 1)[-1])
    text = refusal(table, [other, new], ones(2), TableFull)
    assert "Applied: no" in text
    assert values(table, [other]) == before, "no shard has applied its part"
    step(table, [other], ones(1))
    assert values(table, [other]) == [before[0] - 0.5], "the next clock goes on"


@each_case("servers", [1, 2])
def test_clock_whose_rule_fails_on_one_shard_is_refused_whole(
    make_cluster: MakeCluster, servers: int
) -> None:
    cluster = make_cluster("unix", servers=servers, workers=1, registers=[Careful])
    table = users(cluster.client(rank=0), consistency=Sync(), rule=Careful())
    one, two = int(keys_of(cluster, 0, 1)[0]), int(keys_of(cluster, servers - 1, 2)[1])
    step(table, [one, two], ones(2))
    text = refusal(table, [one, two], np.array([[1.0] * 4, [1000.0] * 4]), RuleFailed)
    assert "too steep" in text
    assert "Applied: no" in text
    assert values(table, [one, two]) == [0.0, 0.0]
    step(table, [one, two], ones(2))
    assert values(table, [one, two]) == [-1.0, -1.0]


def test_server_without_memory_refuses_the_clock_and_goes_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1)
    table = users(cluster.client(rank=0), consistency=Sync())
    step(table, [1, 2, 3], ones(3))
    before = values(table, [1, 2, 3])

    def none_left(*given: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(memory.Growing, "reserve", none_left)
        text = refusal(table, [1, 2, 3, *range(100, 5000)], ones(4903), TableFull)
    assert "no memory" in text
    assert values(table, [1, 2, 3]) == before
    step(table, [1, 2, 3, 4], ones(4))
    assert values(table, [1, 2, 3, 4]) == [*(each - 0.5 for each in before), 0.5]


@each_case("evict", [None, LRU()])
def test_clock_that_one_shard_refuses_leaves_the_rows_of_the_others(
    make_cluster: MakeCluster, evict: LRU | None
) -> None:
    """Neither does it make rows there, nor are any released for them."""
    cluster = make_cluster("unix", servers=2, workers=1)
    table = users(cluster.client(rank=0), consistency=Sync(), max_bytes=SMALL, evict=evict)
    most = room(cluster)
    there = keys_of(cluster, 0, most + 5)
    trained = there[: most if evict else most - 5]
    step(table, trained, ones(trained.size))
    before = first_values(table), table.reports()
    refused = np.concatenate([there[most:], keys_of(cluster, 1, most + 1)])
    refusal(table, refused, ones(refused.size), TableFull)
    assert (first_values(table), table.reports()) == before
    table.put(there[most:], ones(5))  # no room is held any more
    step(table, there[most:], ones(5))
    assert values(table, there[most:]) == [0.5] * 5


LRU_ROWS = 8


def clock(tables: list[Table], keys: list[Any]) -> None:
    """A clock to which each rank pushes some keys."""

    def step_clock(rank: int) -> None:
        tables[rank].push(keys[rank], ones(len(keys[rank])))
        tables[rank].client.tick("users").result()

    in_threads(*(lambda rank=rank: step_clock(rank) for rank in range(len(tables))))


def run(make_cluster: MakeCluster, order: list[int]) -> list[Any]:
    """Two ranks fill a table, read in this order, and push what they have read; what they read, and
    the rows at the end."""
    cluster = make_cluster("unix", servers=1, workers=2)
    options: dict[str, Any] = {"evict": LRU(rows=LRU_ROWS), "consistency": Sync()}
    tables = [users(cluster.client(rank), **options) for rank in range(2)]
    clock(tables, [[0, 1, 2, 3], [4, 5, 6, 7]])
    keys = [[100, 101], [0, 1]]  # new ones, and those that were used before all others
    read = {rank: tables[rank].pull(keys[rank]) for rank in order}
    clock(tables, keys)
    return [
        *(read[rank].tolist() for rank in range(2)),
        *(each.tolist() for each in whole(tables[0])),
    ]


def test_order_of_reads_does_not_decide_which_rows_an_lru_keeps(make_cluster: MakeCluster) -> None:
    one, other = run(make_cluster, [0, 1]), run(make_cluster, [1, 0])
    assert one == other
    assert one[2] == [0, 1, 4, 5, 6, 7, 100, 101], "those that were pushed last"


def test_read_of_a_new_key_gives_the_values_that_its_row_begins_with(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=1, workers=1)
    table = users(cluster.client(0), evict=LRU(rows=LRU_ROWS), consistency=Sync(), init=None)
    before = table.pull([3, 4])
    assert len(table.keys()) == 0, "a row begins with its first gradient"
    clock([table], [[3, 4]])
    assert np.allclose(table.pull([3, 4]), before - 0.5)


@each_case("policy", [Sync(reduce="sum"), DelayCompensated()])
def test_table_without_a_policy_goes_by_the_clusters_or_says_why_not(
    make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str], policy: Policy
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=policy)
    table = users(cluster.client(rank=0))
    follows = isinstance(policy, Sync)
    ticket = table.push([1], ones(1))
    assert values(table, [1]) == [1.0 if follows else 0.5], "a gradient of Sync waits for its tick"
    table.client.tick("users").result()
    ticket.result()
    assert values(table, [1]) == [0.5]
    told = capsys.readouterr().err
    assert ("table 'users' steps under ps.Async()" in told) is not follows
    assert told.count("\n") == (not follows)

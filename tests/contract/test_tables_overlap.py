"""Rows that are asked for ahead: by tables, and by a loader.

Whose memory they lie in is in `test_tables_memory.py`, copies that are kept in
`test_tables_cache.py`, the loader alone in `tests/unit/pytorch/test_loader_prefetch.py`.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.contract.test_tables import DIM, MakeCluster, ones, users
from tests.contract.test_tables_memory import in_use
from tests.suites import each_case

import paramserve as ps
from paramserve.client import Client
from paramserve.client.row_reads import PREFETCHED_MAX
from paramserve.client.rows import TablePush
from paramserve.client.table import Table
from paramserve.errors import PullTimeout, ServerGone, UnknownName
from paramserve.rules import SGD, Add
from paramserve.worker import Worker

pytestmark = pytest.mark.usefixtures("tables_ready")


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over a network, where each row travels once; `test_tables_memory.py` has the other ones."""
    return make_cluster("tcp", servers=2)


@pytest.fixture
def remote(make_cluster: MakeCluster) -> RoleCluster:
    """As `cluster`, where a server can stand still."""
    return make_cluster("tcp", servers=2)


def films(client: Client) -> Table:
    return client.table("films", dim=2, rule=Add(), init=ps.Zeros())


def calls_of(client: Client) -> int:
    """Calls of a client that have sent something."""
    return client.connection.exchange._place


def step(table: Table, keys: Any = (), gradient: float = 1.0) -> int:
    """End a clock on a table; the staleness that is reported."""
    array = np.array(keys, np.int64)
    gradients = gradient * ones(array.size, table.dim)
    return table.client.push_tables([TablePush(table, array, gradients)]).result().staleness


# --- several tables ahead -----------------------------------------------------------------------


def test_prefetch_of_several_tables_is_one_message_and_each_pull_finds_its_own(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    first, second = users(client), films(client)
    second.put([1, 2, 3], np.outer([1, 2, 3], np.ones(2)))
    before = calls_of(client)
    client.prefetch_tables([(first, [1, 2]), (second, [3, 1]), (second, [[2], [2]]), (first, [])])
    assert calls_of(client) == before + 1
    assert second.pull([[2], [2]])[..., 0].tolist() == [[2.0], [2.0]]
    assert second.pull([1, 3])[:, 0].tolist() == [1.0, 3.0]
    assert first.pull([1, 2]).tolist() == [[1.0] * DIM] * 2
    assert calls_of(client) == before + 1


def test_prefetch_of_more_tables_than_a_message_holds_is_whole(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    table.put(np.arange(500), np.outer(np.arange(500), np.ones(DIM)))
    client.prefetch_tables([(table, [n]) for n in range(300)])
    assert table.pull([299])[0, 0] == 299.0
    reads = client.prefetch_tables([(table, [n]) for n in range(PREFETCHED_MAX)])
    before = calls_of(client)
    assert [table.pull([n])[0, 0] for n in range(PREFETCHED_MAX)] == list(range(PREFETCHED_MAX))
    assert calls_of(client) == before
    for read in reads:
        read.drop()


def test_dropped_prefetches_give_their_memory_back(cluster: RoleCluster) -> None:
    client = cluster.client()
    first, second = users(client), films(client)
    reads = client.prefetch_tables([(first, np.arange(50)), (second, [1, 2])])
    read = second.pull([1, 2])
    for read in reads:
        read.drop()
    for read in reads:
        read.drop()
    before = calls_of(client)
    first.pull(np.arange(50))
    assert calls_of(client) == before + 1
    client.drain()
    first.pull([1])
    del read
    gc.collect()
    assert in_use(client) == 0


def test_prefetch_of_wrong_keys_or_tables_asks_for_nothing(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    table = users(client)
    before = calls_of(client)
    with pytest.raises(TypeError, match="have to be integers"):
        client.prefetch_tables([(table, [1]), (table, [1.5])])
    with pytest.raises(ValueError, match="from another client"):
        client.prefetch_tables([(table, [1]), (other.table("users"), [1])])
    assert calls_of(client) == before
    assert not client._keyed.reads._prefetched


def test_prefetch_that_comes_too_late_is_raised_by_the_pull_and_not_used_again(
    remote: RoleCluster,
) -> None:
    client = remote.client()
    table = users(client)
    with remote.frozen():
        table.prefetch(np.arange(100))
        with pytest.raises(PullTimeout, match=r"pull timed out.*Applied: no"):
            table.pull(np.arange(100), timeout_s=0.01)
    before = calls_of(client)
    assert (table.pull(np.arange(100)) == 1.0).all()
    assert calls_of(client) == before + 1


def test_prefetch_that_a_server_took_along_is_raised_by_the_pull(remote: RoleCluster) -> None:
    client = remote.client()
    table = users(client)
    with remote.frozen():
        table.prefetch(np.arange(100))
        remote.serving.loop.call_soon_threadsafe(remote.servers[0].stop)
    with pytest.raises(ServerGone):
        table.pull(np.arange(100))


@each_case("policy", [ps.Sync(), ps.BoundedStaleness(bound=0), ps.Async()])
def test_workers_that_prefetch_wait_no_longer_than_without(
    make_cluster: MakeCluster, policy: Any
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2, policy=policy)
    tables = [users(cluster.client(rank), consistency=policy, rule=Add()) for rank in range(2)]
    both = 1.0 if policy == ps.Sync() else 2.0  # a mean, or each by itself

    def work(table: Table) -> None:
        for n in range(10):
            table.prefetch([n + 1, 0])
            table.pull([n, 0])
            step(table, [n, 0])

    in_threads(*[lambda t=t: work(t) for t in tables])
    assert tables[0].pull(np.arange(1, 10))[:, 0].tolist() == [1.0 + both] * 9


# --- how old ------------------------------------------------------------------------------------


@each_case("clocks", [0, 1, 2, 9])
@each_case("policy", [ps.Sync(), ps.BoundedStaleness(bound=0), ps.Async()])
def test_prefetched_rows_are_used_across_one_clock_at_most_and_in_sync_across_none(
    make_cluster: MakeCluster, policy: Any, clocks: int
) -> None:
    client = make_cluster("unix", servers=2, workers=1).client(0)
    table = users(client, rule=Add(), init=ps.Zeros(), consistency=policy)
    table.prefetch([1, 2])
    for _ in range(clocks):
        step(table, [1])
    used = clocks <= (0 if policy == ps.Sync() else 1)
    before = calls_of(client)
    assert table.pull([1, 2])[:, 0].tolist() == [0.0 if used else clocks, 0.0]
    assert calls_of(client) - before == (not used)
    assert not any(client._keyed.reads._prefetched.values())


def test_prefetch_of_before_a_change_to_sync_is_not_used_after_it(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix", servers=2, workers=1).client(0)
    table = users(client, rule=Add(), init=ps.Zeros())
    client.set_consistency("users", ps.Sync())
    while not client.steps.terms("users").collects:
        table.prefetch([1])
        step(table, [1])
    assert client.clock("users") > 0
    assert table.pull([1])[0, 0] == client.clock("users")


def test_prefetches_that_are_too_old_give_their_memory_back_without_a_pull(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    table = users(client).cache_rows(100)
    reads = [client.prefetch_tables([(table, np.arange(n, n + 50))]) for n in range(20)]
    for _ in range(3):
        step(table, [7])
    client.drain()
    films(client).pull([1])
    assert in_use(client) == 0
    assert not client._keyed.reads._under_way[table.block.id], "nothing is noted for them any more"
    assert len(reads) == 20


def test_loader_that_prefetches_on_a_table_in_sync_trains_as_without(
    make_cluster: MakeCluster,
) -> None:
    def trained(**options: Any) -> np.ndarray:
        worker = Worker(make_cluster("unix", servers=2, workers=1).client(0), 0)
        table = users(worker.client, consistency=ps.Sync())
        data = torch.utils.data.TensorDataset(torch.arange(40) % 3)
        for (ids,) in worker.loader(data, batch_size=5, shuffle=False, **options):
            step(table, ids.numpy(), 0.1 * float(table.pull(ids).mean()))
        return table.pull(range(3))

    assert np.array_equal(trained(prefetch=lambda batch: {"users": batch[0]}), trained())


# --- staleness ----------------------------------------------------------------------------------


def test_staleness_counts_from_the_rows_pulled_and_not_from_those_prefetched_since(
    cluster: RoleCluster,
) -> None:
    mine, others = users(cluster.client()), users(cluster.client())
    mine.pull([1, 2])
    step(others, [5])
    step(others, [6])
    mine.prefetch([3, 4])
    mine.client.drain()  # it is answered
    step(others, [5])
    assert step(mine, [1, 2]) == 3
    step(others, [6])
    mine.pull([3, 4])
    assert step(mine, [3, 4]) == 3, "one of the others', this worker's own, and one more"
    mine.pull([3, 4])
    assert step(mine, [3, 4]) == 0


def test_staleness_of_prefetched_rows_stands_when_newer_ones_were_read_to_evaluate(
    cluster: RoleCluster,
) -> None:
    mine, others = users(cluster.client()), users(cluster.client())
    mine.prefetch([1])
    mine.client.drain()
    for _ in range(4):
        step(others, [5])
    mine.pull([7], learns=False)
    mine.pull([1])
    mine.pull([8], learns=False)
    assert step(mine, [1]) == 4
    mine.pull([7], learns=False)
    step(others, [5])
    mine.pull([1])
    assert step(mine, [1]) == 0, "an evaluation before it does not count"


def test_staleness_of_several_pulls_is_that_of_the_oldest(cluster: RoleCluster) -> None:
    mine, others = users(cluster.client()), users(cluster.client())
    mine.pull([1])
    step(others, [5])
    mine.pull([7], learns=False)
    step(others, [5])
    mine.pull([2])
    step(others, [5])
    assert step(mine, [1, 2]) == 3


# --- a loader that asks ahead -------------------------------------------------------------------


def train(worker: Worker, **options: Any) -> tuple[np.ndarray, list[int]]:
    """Two tables by modules, one padded; the rows after it, and messages in each step."""
    client = worker.client
    torch.manual_seed(0)
    words = ps.pytorch.Embedding(users(client, rule=SGD(0.5)), padding_idx=0)
    bags = ps.pytorch.EmbeddingBag(films(client), mode="sum")
    model = torch.nn.ModuleList([words, bags])
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), dense="local")
    ids = torch.stack([torch.arange(40), torch.zeros(40, dtype=torch.long)], 1)
    data = torch.utils.data.TensorDataset(ids, 1000 + torch.arange(40).reshape(40, 1))
    sent = []
    if options:
        options = {"prefetch": lambda batch: [(words, batch[0]), (bags, batch[1])]}
    for batch in worker.loader(data, batch_size=5, epochs=2, shuffle=False, **options):
        before = calls_of(client)
        optimizer.zero_grad()
        (words(batch[0]).sum() + bags(batch[1]).square().sum()).backward()
        optimizer.step()
        sent.append(calls_of(client) - before)
    client.drain()
    keys = np.arange(40)
    return np.hstack([words.table.pull(keys), bags.table.pull(1000 + keys)]), sent


def test_loader_that_prefetches_trains_alike_and_its_forwards_send_nothing(
    make_cluster: MakeCluster,
) -> None:
    plain = train(Worker(make_cluster("unix", servers=2, workers=1).client(0), 0))
    client = make_cluster("unix", servers=2, workers=1).client(0)
    ahead = train(Worker(client, 0), prefetch=True)
    assert np.array_equal(plain[0], ahead[0]), "no key comes in two batches that follow each other"
    assert (plain[1], ahead[1]) == ([3] * 16, [1] * 16)
    assert 0 not in client.table("users").keys().tolist()
    assert not any(client._keyed.reads._prefetched.values())


def test_loader_left_early_or_failing_leaves_no_prefetch_behind(make_cluster: MakeCluster) -> None:
    client = make_cluster("unix", workers=1).client(0)
    worker, table = Worker(client, 0), users(client)
    data = torch.utils.data.TensorDataset(torch.arange(40))

    def fails(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        if batch[0].max() > 20:
            raise KeyError("no such column")
        return {"users": batch[0]}

    for shards in ("static", "dynamic"):
        options: dict[str, Any] = {"batch_size": 5, "shuffle": False, "shards": shards}
        for (ids,) in worker.loader(data, prefetch=lambda batch: [(table, batch[0])], **options):
            table.pull(ids)
            break
        with pytest.raises(KeyError, match="no such column"):
            list(worker.loader(data, prefetch=fails, **options))
        with pytest.raises(UnknownName, match="absent"):
            next(iter(worker.loader(data, prefetch=lambda batch: {"absent": batch[0]}, **options)))
    assert not any(client._keyed.reads._prefetched.values())
    client.drain()
    table.pull([1])
    gc.collect()
    assert in_use(client) == 0

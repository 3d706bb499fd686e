"""Tables that count: rows of int64 and float64, exact beyond what float32 holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.needs import needs
from tests.suites import each_case

import paramserve as ps
from paramserve.client import Client
from paramserve.client.table import Table
from paramserve.errors import DtypeMismatch, NonFinite

pytestmark = pytest.mark.usefixtures("tables_ready")

BEYOND = {"int64": 2**53 + 1, "float64": 2.0**24 + 1}
"""By dtype: a count that the next narrower numbers do not hold."""


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: what is exact in one frame is so in all."""
    return make_cluster("tcp", servers=2)


def counts(client: Client, dtype: str = "int64", **options: Any) -> Table:
    options = {"rule": ps.Add(), "init": ps.Zeros(), "dtype": dtype, **options}
    return client.table("counts", dim=2, **options)


@pytest.mark.parametrize("dtype", BEYOND)
def test_counts_are_exact_beyond_narrower_numbers(cluster: RoleCluster, dtype: str) -> None:
    table = counts(cluster.client(), dtype)
    assert repr(table) == "Table('counts', dim=2)"
    most = BEYOND[dtype]
    table.push([1, 2, 1], np.array([[most, -1], [0, 5], [1, -1]], dtype)).result()
    table.push([1], np.array([[1, 1]], dtype)).result()
    pulled = table.pull([[1, 2], [1, 3]])
    assert pulled.dtype == dtype
    assert pulled.tolist() == [[[most + 2, -1], [0, 5]], [[most + 2, -1], [0, 0]]]


def test_counts_of_ranks_are_summed_in_one_clock(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    policy = ps.Sync(reduce="sum")
    clients = [cluster.client(rank=rank) for rank in (0, 1)]
    tables = [counts(client, consistency=policy) for client in clients]

    def step(table: Table, more: int) -> None:
        table.push([7, 7], np.array([[2**53, more], [more, 0]]))
        table.push([8], np.array([[-1, -1]]))
        table.client.tick("counts").result()

    in_threads(lambda: step(tables[0], 1), lambda: step(tables[1], 2))
    assert tables[0].pull([7, 8]).tolist() == [[2**54 + 3, 3], [-2, -2]]


@each_case("policy", [ps.Sync(reduce="sum"), ps.BoundedStaleness(1), ps.Sync()])
def test_table_that_counts_follows_the_cluster_or_tells_why_not(
    make_cluster: MakeCluster, capsys: pytest.CaptureFixture[str], policy: ps.Policy
) -> None:
    """Under a mean each gradient counts whole when it arrives."""
    client = make_cluster("unix", servers=2, workers=1, policy=policy).client(rank=0)
    table = counts(client)
    told = capsys.readouterr().err
    refused = policy == ps.Sync()
    assert ("table 'counts' steps under ps.Async()" in told) is refused
    assert ("is not for tables of int64" in told) is refused
    assert told.count("\n") == refused
    ticket = table.push([7], np.array([[2**53, 1]]))
    if isinstance(policy, ps.Sync):
        here = table.pull([7]).tolist()
        assert here == [[2**53, 1] if refused else [0, 0]], "Sync waits for the clock's end"
    client.tick("counts").result()
    ticket.result()
    assert table.pull([7]).tolist() == [[2**53, 1]]


def test_mean_of_ranks_counts_in_float64_and_is_refused_in_int64(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix", workers=1).client(rank=0)
    with pytest.raises(ValueError, match="no whole number"):
        counts(client, consistency=ps.Sync())
    table = counts(client, "float64", consistency=ps.Sync())
    table.push([1], np.full((1, 2), 2.0**24 + 1))
    client.tick("counts").result()
    assert table.pull([1]).tolist() == [[2.0**24 + 1] * 2]


def test_counts_are_put_scanned_and_deleted(cluster: RoleCluster) -> None:
    table = counts(cluster.client())
    table.put([1, 2], np.array([[2**62, 1], [3, -(2**62)]]))
    found = {int(key): row for part in table.scan() for key, row in zip(*part[:2], strict=True)}
    assert {key: row.tolist() for key, row in found.items()} == {1: [2**62, 1], 2: [3, -(2**62)]}
    assert table.delete([1]) == 1
    assert table.pull([1, 2]).tolist() == [[0, 0], [3, -(2**62)]]


def test_counts_in_copies_and_prefetched_are_as_exact(make_cluster: MakeCluster) -> None:
    table = counts(make_cluster("tcp", servers=2).client()).cache_rows(10)
    table.push([1, 2], np.array([[2**53 + 1, 0], [1, 1]])).result()
    for _ in range(2):
        assert table.pull([2, 1]).tolist() == [[1, 1], [2**53 + 1, 0]]
    table.prefetch([1])
    assert table.pull([1]).tolist() == [[2**53 + 1, 0]]


@each_case("dtype", BEYOND)
def test_counts_go_to_parquet_and_back(
    make_cluster: MakeCluster, tmp_path: Path, dtype: str
) -> None:
    pa, path = needs("pyarrow"), tmp_path / "counts.parquet"
    table = counts(make_cluster(servers=2).client(), dtype)
    table.push(range(20), np.full((20, 2), BEYOND[dtype], dtype)).result()
    assert table.to_parquet(path) == 20
    assert str(table.to_arrow().schema.field("value").type.value_type) in (dtype, "double")
    other = counts(make_cluster(servers=1).client(), dtype)
    assert other.from_parquet(path) == 20
    assert other.pull(range(20)).tobytes() == table.pull(range(20)).tobytes()
    floats = pa.table({"key": [1], "value": pa.array([[1.5, 2.0]], pa.list_(pa.float32(), 2))})
    if dtype == "int64":
        with pytest.raises(DtypeMismatch, match="lists of 2 integers"):
            other.from_arrow(floats)


def test_counts_come_back_from_a_checkpoint_also_under_a_mean(tmp_path: Path) -> None:
    def train(worker: ps.Worker, times: int) -> list[Any]:
        table = counts(worker.client)
        for _ in range(times):
            table.push([1, 2], np.array([[2**53, 1], [1, -1]]))
            worker.client.tick("counts").result()
        return table.pull([1, 2, 3]).tolist()

    options: dict[str, Any] = {"workers": 2, "checkpoint": tmp_path / "run", "show": "none"}
    sums = ps.Sync(reduce="sum")
    first = ps.run(train, args=(3,), servers=2, consistency=sums, **options)
    assert first.returns[0] == first.returns[1] == [[6 * 2**53, 6], [6, -6], [0, 0]]
    again = ps.run(train, args=(1,), servers=1, resume=True, **options)
    assert max(again.returns.values()) == [[8 * 2**53, 8], [8, -8], [0, 0]], (
        "as the last rank reads"
    )


@each_case(
    ("options", "text"),
    [
        ({"rule": ps.SGD(lr=0.1)}, "rows of int64 are for counting, with rule=ps.Add"),
        ({"init": ps.Normal()}, r"init=ps.Zeros\(\)"),
        ({"push": ps.Int8()}, "a codec encodes float32"),
        ({"dtype": "int32"}, "int32"),
    ],
)
def test_table_that_cannot_count_is_refused(
    make_cluster: MakeCluster, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        counts(make_cluster().client(), **options)


def test_gradients_that_are_no_counts_are_refused_whole(make_cluster: MakeCluster) -> None:
    client = make_cluster(servers=2).client()
    table = counts(client)
    with pytest.raises(DtypeMismatch, match="counts in int64"):
        table.push([1], [[0.5, 1.0]])
    floats = client.table("floats", dim=1, rule=ps.Add(), init=ps.Zeros(), dtype="float64")
    with pytest.raises(NonFinite, match="key 5"):
        floats.push([4, 5], [[1.0], [np.inf]])
    assert floats.pull([4, 5]).tolist() == [[0.0], [0.0]]

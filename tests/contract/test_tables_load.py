"""Tables that begin with rows of a file: who loads them, and that no client sees them without."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.contract.arrow_tables import DIM, KEYS, rows_of, table_of, train
from tests.contract.conftest import MakeCluster
from tests.needs import needs

import paramserve as ps
from paramserve.client import Client, Table, arrow
from paramserve.errors import DefineMismatch, ShapeMismatch
from paramserve.pytorch import from_embedding

needs("pyarrow.parquet")
LONG_S = 20.0
pytestmark = pytest.mark.usefixtures("tables_ready")


@pytest.fixture
def file(make_cluster: MakeCluster, tmp_path: Path) -> tuple[str, dict[int, tuple[bytes, ...]]]:
    """A file of a trained table, and its rows."""
    table = table_of(make_cluster())
    train(table)
    table.to_parquet(tmp_path / "users.parquet", state=True)
    return str(tmp_path / "users.parquet"), rows_of(table)


def users_of(client: Client, rule: object = None) -> Table:
    chosen = rule if rule is not None else ps.Adam(lr=0.1)
    return client.table("users", dim=DIM, rule=chosen, init=ps.Zeros())


class Blocks:
    """Loading as it is, but the first client that loads puts a wrong row and then waits."""

    def __init__(self, fill: Callable[[Table, str], int]) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        self.fails = False
        self._fill = fill

    def __call__(self, table: Table, path: str) -> int:
        if not self.begun.is_set():
            table.put([99], np.full((1, DIM), 9.0))
            self.begun.set()
            assert self.goes_on.wait(LONG_S)
            if self.fails:
                raise InterruptedError("died")
            table.put([99], np.zeros((1, DIM)))
        return self._fill(table, path)


@pytest.mark.parametrize("fails", [False, True], ids=["slow", "dies"])
def test_no_client_gets_the_table_before_its_rows_are_there(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    file: tuple[str, dict[int, tuple[bytes, ...]]],
    fails: bool,
) -> None:
    path, expected = file
    cluster = make_cluster(servers=2)
    loading = Blocks(arrow.fill)
    loading.fails = fails
    monkeypatch.setattr(arrow, "fill", loading)
    first, second = cluster.client(), cluster.client()
    found: list[dict[int, tuple[bytes, ...]]] = []

    def define(client: Client) -> None:
        client.load_tables = {"users": path}
        try:
            found.append(rows_of(users_of(client)))
        except InterruptedError:  # the worst moment: some rows are there
            client.connection.control.close()

    threads = [threading.Thread(target=define, args=(client,)) for client in (first, second)]
    threads[0].start()
    assert loading.begun.wait(LONG_S)
    second.timeout_s = 0.1  # the load takes longer
    threads[1].start()
    threads[1].join(0.5)
    assert threads[1].is_alive(), "it waits"
    assert cluster.client().tables() == []
    loading.goes_on.set()
    for thread in threads:
        thread.join(LONG_S)
    assert len(found) == 2 - fails
    for rows in found:
        assert {key: row for key, row in rows.items() if key != 99} == expected
        assert fails == (99 not in rows), "what a dead client had put is gone"


def test_file_that_does_not_fit_leaves_the_name_free(
    make_cluster: MakeCluster, file: tuple[str, dict[int, tuple[bytes, ...]]]
) -> None:
    client = make_cluster(servers=2).client()
    client.load_tables = {"users": file[0]}
    told = rf"{file[0]}.*5 elements in each row, the table's dim is 7.*To fix: .*dim=5"
    with pytest.raises(ShapeMismatch, match=told):
        client.table("users", dim=7, rule=ps.Add())
    table = users_of(client, ps.Add())
    rows = rows_of(table)
    assert {key: row[0] for key, row in rows.items()} == {k: row[0] for k, row in file[1].items()}
    assert {row[2] for row in rows.values()} == {0}, "another rule's state is not taken over"
    assert len(rows) == KEYS.size


def test_rows_of_the_file_stand_before_those_of_a_module_that_is_taken_over(
    make_cluster: MakeCluster, file: tuple[str, dict[int, tuple[bytes, ...]]]
) -> None:
    client = make_cluster().client()
    client.load_tables = {"users": file[0]}
    from_embedding(client, "users", torch.nn.Embedding(20, DIM), rule=ps.Adam(lr=0.1))
    assert rows_of(client.table("users")) == file[1]


def test_labels_of_the_file_are_there_for_the_client_that_loads_and_others(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    def named(client: Client) -> Table:
        return client.table("users", dim=DIM, rule=ps.Adam(lr=0.1), labels=True)

    path, names = str(tmp_path / "users.parquet"), ["anna", "Zoë"]
    first = make_cluster(servers=2)
    named(first.client()).put(names, np.ones((2, DIM)))
    assert named(first.client()).to_parquet(path, state=True) == 2
    second = make_cluster(servers=2)
    loads, other = second.client(), second.client()
    loads.load_tables = other.load_tables = {"users": path}
    for table in (named(loads), named(other), second.client().table("users")):
        assert table.labels([*ps.keys_of(names), 7]) == [*names, ""]
    assert rows_of(named(loads)).keys() == set(ps.keys_of(names).tolist())
    without = make_cluster().client()
    without.load_tables = {"users": path}
    with pytest.raises(DefineMismatch, match=rf"{path} has labels.*labels=True"):
        users_of(without)
    assert named(without).labels(names) == names, "a refused define leaves the name free"

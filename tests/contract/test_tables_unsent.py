"""Steps of tables that are refused before they are sent: what was kept for them goes as well."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.contract.test_tables import DIM, MakeCluster, ones, users
from tests.contract.test_tables_memory import in_use

import paramserve as ps
from paramserve.client import BlockPush, Client
from paramserve.client.table import Table, TablePush
from paramserve.errors import NonFinite, ParamServeError
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")


def two_tables(client: Client) -> list[Table]:
    return [
        client.table(name, DIM, rule=Add(), init=ps.Zeros(), consistency=ps.Sync(reduce="sum"))
        for name in ("words", "films")
    ]


@pytest.mark.parametrize(
    ("bad", "raised", "told"),
    [
        (np.nan, NonFinite, r"gradient of 'w' on rank 0 holds NaN.*Applied: no"),
        (None, ValueError, r"step of group '\w+' was not sent: ValueError.*Applied: no"),
    ],
)
def test_dense_gradient_that_is_refused_fails_the_kept_pushes_of_all_its_tables(
    make_cluster: MakeCluster, bad: Any, raised: type[Exception], told: str
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=ps.Sync(reduce="sum"))
    client = cluster.client(0)
    block = client.define("w", np.zeros(4), rule=Add())
    tables = two_tables(client)
    early = [table.push([1], ones(1), weight=3.0) for table in tables]
    pushes = [TablePush(table, [2], ones(1)) for table in tables]
    slot = client.dense.gradient_slot(block)
    slot[:] = bad if bad is not None else 0.0
    gradient = slot if bad is not None else np.ones(4)
    with pytest.raises(raised):
        client.dense.step("default", [BlockPush(block, gradient)], tables=pushes, weight=3.0)
    slot[:] = 1.0
    ended = client.dense.step("default", [BlockPush(block, slot)], tables=pushes)
    assert ended.result().version == 1
    for ticket in early:
        with pytest.raises(ParamServeError, match=told):
            ticket.result()
    assert [table.pull([1, 2])[:, 0].tolist() for table in tables] == [[0.0, 1.0]] * 2
    assert client.pull("w").tolist() == [1.0] * 4
    client.drain()
    gc.collect()
    assert in_use(client) == 0


def test_step_without_a_tick_that_is_refused_leaves_what_was_kept(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=ps.Sync(reduce="sum"))
    client = cluster.client(0)
    block = client.define("w", np.zeros(4), rule=Add())
    words, films = two_tables(client)
    early = words.push([1], ones(1))
    slot = client.dense.gradient_slot(block)
    slot[:] = np.nan
    push = [BlockPush(block, slot)]
    with pytest.raises(NonFinite):
        client.dense.step("default", push, tables=[TablePush(films)], tick=False)
    with pytest.raises(NonFinite):
        client.dense.step("default", push, tables=[TablePush(films)])
    client.tick("words").result()
    assert early.result().version == 1
    assert words.pull([1])[0, 0] == 1.0


def test_rows_that_do_not_fit_into_memory_fail_what_was_kept_for_their_step(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make_cluster("unix", servers=2, workers=1).client(0)
    table = users(client, rule=Add(), init=ps.Zeros(), consistency=ps.Sync())
    early = table.push([1], ones(1))

    def no_room(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(client.connection.exchange, "take", no_room)
        with pytest.raises(MemoryError):
            client.tick("users")
    table.push([2], ones(1))
    client.tick("users").result()
    with pytest.raises(ParamServeError, match=r"'users' was not sent: MemoryError.*Applied: no"):
        early.result()
    assert table.pull([1, 2])[:, 0].tolist() == [0.0, 1.0]

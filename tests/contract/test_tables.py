"""Tables over all transports, with 1 to 3 shards: what is pulled, pushed, put and scanned.

Bad input is in `test_tables_refusals.py`, limits of a table in `test_tables_limits.py`, steps and
policies in `test_tables_steps.py`, broken connections in `test_tables_links.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import KINDS, RoleCluster
from tests.suites import each_case

from paramserve.client import Client, keyed
from paramserve.client.table import Table
from paramserve.consistency.built_in import Sync
from paramserve.core.table.options import Constant, Normal, Uniform, Zeros
from paramserve.rules import SGD, Adagrad, Adam, Add

pytestmark = pytest.mark.usefixtures("tables_ready")

DIM = 4
EDGES = np.array([0, -1, 1, -(2**63), 2**63 - 1, 2**62, -(2**62)])


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: that all give the same is a test of its own."""
    return make_cluster("tcp", servers=2)


def users(client: Client, **options: Any) -> Table:
    """A table whose rows begin with 1 and lose half of each gradient, unless told otherwise."""
    given: dict[str, Any] = {"dim": DIM, "rule": SGD(0.5), "init": Constant(1.0), **options}
    return client.table("users", **given)


def ones(n: int, dim: int = DIM) -> np.ndarray:
    return np.ones((n, dim), np.float32)


def whole(table: Table, rows: int = 65_536) -> tuple[np.ndarray, ...]:
    """Keys, values, state and counts, in the order of the keys."""
    parts = list(table.scan(rows, state=True))
    arrays = [np.concatenate(each) for each in list(zip(*parts, strict=True))[:4]]
    order = np.argsort(arrays[0])
    return tuple(each[order] for each in arrays)


# --- pull and push ----------------------------------------------------------------------------


def test_keys_of_any_shape_give_rows_of_that_shape(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    keys = np.array([[1, 2, 3], [3, 2, 9]], np.int32)
    assert table.pull(keys).shape == (2, 3, DIM)
    table.push(keys, np.arange(6.0).reshape(2, 3, 1) * np.ones(DIM)).result()
    assert table.pull(keys)[..., 0].tolist() == [[1.0, -1.5, -1.5], [-1.5, -1.5, -1.5]]
    assert table.pull(7).shape == (DIM,)
    table.push(7, np.ones(DIM)).result()
    assert table.pull(np.uint8(7)).tolist() == [0.5] * DIM
    assert table.pull(np.array([7], np.uint64))[0].tolist() == [0.5] * DIM


def test_empty_batches_do_nothing(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    assert bool(table), "an empty table is one"
    assert table.pull([]).shape == (0, DIM)
    assert table.pull(np.empty((3, 0), np.int64)).shape == (3, 0, DIM)
    table.push([], np.empty((0, DIM))).result()
    table.push(np.empty(0, np.int64), np.empty((0, DIM), np.float32)).result()
    table.prefetch([])
    table.put([], np.empty((0, DIM)))
    assert (table.delete([]), table.contains(np.empty((2, 0), int)).shape) == (0, (2, 0))
    assert (len(table), list(table.scan()), table.keys().tolist()) == (0, [], [])


def test_inputs_of_every_layout_are_taken(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    keys = np.arange(20)[::2]
    keys.flags.writeable = False
    gradients = np.asfortranarray(np.arange(10.0 * DIM).reshape(10, DIM).astype(np.float16))
    gradients.flags.writeable = False
    table.push(keys, gradients).result()
    assert np.array_equal(table.pull(keys), 1.0 - 0.5 * gradients.astype(np.float32))
    assert table.pull(list(range(0, 20, 2))).flags.writeable


def test_two_clients_share_the_rows_and_each_finds_the_table(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    mine, same = users(first), users(second)
    found = cluster.client().table("users")
    for round_ in range(1, 4):
        mine.push([1, 2], ones(2)).result()
        same.push([2, 3], ones(2)).result()
        expected = [1 - round_ / 2, 1 - round_, 1 - round_ / 2]
        assert [t.pull([1, 2, 3])[:, 0].tolist() for t in (mine, same, found)] == [expected] * 3
    assert (found.name, found.group, found.dim, len(found)) == ("users", "users", DIM, 3)
    assert first.table("users") is mine
    assert [each.name for each in second.tables()] == ["users"]


@each_case("dim", [1, 3, 17])
@each_case("dtype", ["float32", "bfloat16", "float16"])
def test_dims_that_fill_no_cache_line_come_back_whole(
    make_cluster: MakeCluster, dim: int, dtype: str
) -> None:
    for kind in ("unix", "tcp"):
        table = users(make_cluster(kind, servers=3).client(), dim=dim, dtype=dtype, rule=Add())
        keys = np.arange(-50, 50)
        values = np.arange(100.0 * dim).reshape(100, dim) % 97
        table.put(keys, values)
        assert np.array_equal(table.pull(keys), values)
        table.push(keys[::-1], np.full((100, dim), 2.0)).result()
        assert np.array_equal(table.pull(keys), values + 2.0)


# --- deleted ----------------------------------------------------------------------------------


def test_many_keys_are_deleted_and_looked_for(
    cluster: RoleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "NAMED_KEYS", 1000)
    table = users(cluster.client(), rule=Add(), init=Zeros())
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 5_000)
    table.push(keys, ones(5_000)).result()
    assert table.delete(np.concatenate([keys[::2], keys[:100]])) == 2_550
    expected = np.arange(5_000) % 2 == 1
    expected[:100] = False
    assert np.array_equal(table.contains(keys), expected)
    assert sorted(table.keys()) == sorted(keys[expected])
    table.push(keys, ones(5_000)).result()
    assert np.array_equal(table.pull(keys), ones(5_000) * (1.0 + expected[:, None]))


@each_case("kind", ["unix", "tcp"])
def test_delete_beside_gradients_that_wait_for_their_clock(
    make_cluster: MakeCluster, kind: str
) -> None:
    """Under Sync they are applied behind it, as they are behind a put."""
    client = make_cluster(kind, servers=2, workers=1).client(0)
    table = users(client, rule=Add(), consistency=Sync())
    table.put([1, 2], 5 * ones(2))
    table.push([1], ones(1))
    assert table.delete([1, 2]) == 2
    client.tick("users").result()
    assert table.contains([1, 2]).tolist() == [True, False]
    assert table.pull([1, 2])[:, 0].tolist() == [2.0, 1.0]


# --- the same bits everywhere -----------------------------------------------------------------


def history_of(client: Client) -> bytes:
    """What a client gets to see that works with two tables for a while."""
    draw = np.random.default_rng(5)
    seen: list[np.ndarray] = []
    words = client.table("words", dim=3, rule=Adagrad(lr=0.1), init=Normal(std=0.1), seed=3)
    films = client.table("films", dim=5, rule=Adam(lr=0.1), init=Uniform(), dtype="bfloat16")
    for _ in range(6):
        keys = np.concatenate([draw.integers(-40, 40, 30), EDGES])
        for table in (words, films):
            seen.append(table.pull(keys.reshape(-1, 1)))
            gradients = draw.standard_normal((keys.size, table.dim))
            table.push(keys, gradients).result()
        films.prefetch(keys[:9])
        seen.append(films.pull(keys[3:6]))
    words.put([5, 6, 5, 2000], draw.standard_normal((4, 3)))
    for table in (words, films):
        seen += whole(table)
        seen += whole(table, rows=7)
    return b"".join(each.tobytes() for each in seen)


def test_every_transport_and_number_of_shards_gives_the_same_bits(
    make_cluster: MakeCluster,
) -> None:
    found = {
        (kind, servers): history_of(make_cluster(kind, servers=servers).client())
        for kind in KINDS
        for servers in (1, 2, 3)
    }
    assert len(set(found.values())) == 1


# --- whole tables -----------------------------------------------------------------------------


def test_scan_parts_are_the_callers_to_keep(cluster: RoleCluster) -> None:
    table = users(cluster.client(), rule=Add())
    table.put(np.arange(10), np.outer(np.arange(10), np.ones(DIM)))
    parts = list(table.scan(2, state=True))
    kept = [tuple(each.tobytes() for each in part if each is not None) for part in parts]
    table.put(np.arange(10), 5 * ones(10))
    for _ in table.scan(2, state=True):
        pass
    assert kept == [tuple(each.tobytes() for each in part if each is not None) for part in parts]


def test_scan_while_rows_are_created_meets_those_that_were_there(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    before = range(100)
    table.put(before, ones(100))
    met: list[int] = []
    for step, part in enumerate(table.scan(9)):
        met += part.keys.tolist()
        # Many at first, so that the shard's memory grows; then fewer than a part has: it ends.
        new = np.arange(300 if step == 0 else 4) + 1000 * (step + 1)
        table.put(new, ones(new.size))
    assert len(met) == len(set(met))
    assert set(before) <= set(met)
    assert len(met) > 400, "rows that were created meanwhile are met, too"


def test_memory_bytes_and_reports_tell_of_rows_and_their_state(cluster: RoleCluster) -> None:
    client = cluster.client()
    plain = users(client)
    with_state = client.table("films", dim=DIM, rule=Adam(lr=0.1))
    before = with_state.memory_bytes()
    keys = np.arange(10_000)
    plain.put(keys, ones(10_000))
    with_state.push(keys, ones(10_000)).result()
    grown = with_state.memory_bytes() - before
    assert grown >= 10_000 * 3 * DIM * 4
    assert with_state.memory_bytes() > plain.memory_bytes() >= 10_000 * DIM * 4
    reports = with_state.reports()
    assert len(reports) == len(cluster.servers)
    assert {report.width for report in reports} == {2 * DIM}
    assert sum(report.created for report in reports) == 10_000
    assert [sum(r.evicted + r.unadmitted for r in reports), sum(r.rows for r in reports)] == [
        0,
        10_000,
    ]

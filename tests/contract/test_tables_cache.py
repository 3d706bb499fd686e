"""Copies of rows that a client keeps: how old, whose, and what is pulled.

The cache alone is in `tests/unit/client/test_row_cache.py`.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.contract.test_tables import MakeCluster, ones, users
from tests.contract.test_tables_memory import in_use
from tests.contract.test_tables_overlap import calls_of, films, step
from tests.suites import each_case

import paramserve as ps
from paramserve.client import row_reads
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: copies are the client's own, however rows come."""
    return make_cluster("unix", servers=2)


def test_cache_serves_copies_for_so_many_clocks(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    table, theirs = users(client, rule=Add()).cache_rows(100, clocks=2), users(other, rule=Add())
    assert table.pull([1, 2])[:, 0].tolist() == [1.0, 1.0]
    theirs.push([1, 2], ones(2)).result()
    seen, sent = [], []
    for _ in range(4):
        before = calls_of(client)
        seen.append(table.pull([2, 1, 2])[:, 0].tolist())
        sent.append(calls_of(client) - before)
        step(table)
    assert (seen, sent) == ([[1.0] * 3] * 3 + [[2.0] * 3], [0, 0, 0, 1])
    assert theirs.pull([1, 2])[:, 0].tolist() == [2.0, 2.0]
    assert table.cache_report()[:3] == (2, 9, 5)


def test_cache_pulls_just_the_rows_that_are_not_there(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client, init=ps.Uniform(-1.0, 1.0))
    expected = table.pull(np.arange(40))
    table.cache_rows(100)
    table.pull([1, 3, 5])
    found = table.pull([[3, 7], [5, 7], [1, 3]])
    assert np.array_equal(found, expected[[[3, 7], [5, 7], [1, 3]]])
    assert table.cache_report()[:3] == (4, 4, 5)
    found[:] = 9.0
    assert np.array_equal(table.pull(np.arange(40)), expected), "copies are not the caller's"


def test_cache_row_that_was_pushed_to_or_put_is_read_anew(cluster: RoleCluster) -> None:
    table = users(cluster.client(), rule=Add()).cache_rows(100, clocks=9)
    table.pull(np.arange(6))
    table.push([1, 2, 2], ones(3)).result()
    assert table.pull(np.arange(6))[:, 0].tolist() == [1.0, 2.0, 3.0, 1.0, 1.0, 1.0]
    table.put([4], 7 * ones(1))
    step(table, [5])
    assert table.pull(np.arange(6))[:, 0].tolist() == [1.0, 2.0, 3.0, 1.0, 7.0, 2.0]


def test_cache_that_keeps_what_was_pushed_reads_it_when_it_is_too_old(cluster: RoleCluster) -> None:
    table = users(cluster.client(), rule=Add()).cache_rows(100, clocks=1, keep_pushed=True)
    seen = []
    for _ in range(5):
        seen.append(float(table.pull([1])[0, 0]))
        step(table, [1])
    assert seen == [1.0, 1.0, 3.0, 3.0, 5.0]


def test_no_copy_of_a_row_that_was_deleted_here_is_read(cluster: RoleCluster) -> None:
    table = users(cluster.client(), rule=Add()).cache_rows(100, clocks=9, keep_pushed=True)
    table.put(np.arange(6), 5 * ones(6))
    table.pull([1, 2])
    table.prefetch([2, 3])
    table.prefetch([4, 5])
    assert table.delete([2, 3]) == 2
    assert table.pull([1, 2])[:, 0].tolist() == [5.0, 1.0]
    assert table.pull([2, 3])[:, 0].tolist() == [1.0, 1.0]
    before = calls_of(table.client)
    assert table.pull([4, 5])[:, 0].tolist() == [5.0, 5.0]
    assert calls_of(table.client) == before, "it was asked for ahead, and is there"


def test_cache_does_not_keep_what_was_prefetched_before_a_push_to_it(cluster: RoleCluster) -> None:
    table = users(cluster.client(), rule=Add()).cache_rows(100, clocks=9)
    table.prefetch([1, 2, 3])
    pushed = np.array([2])
    table.push(pushed, ones(1))
    pushed[:] = 1000  # the caller's to use again
    assert table.pull([1, 2, 3])[:, 0].tolist() == [1.0, 1.0, 1.0], "as it was then"
    before = calls_of(table.client)
    assert table.pull([1, 2, 3])[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert table.pull([1, 2, 3])[:, 0].tolist() == [1.0, 2.0, 1.0]
    assert calls_of(table.client) == before + 1


def test_cache_notes_no_more_of_many_pushes_than_a_prefetch_reads(
    cluster: RoleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reads, "PUSHED_MAX", 20)
    client = cluster.client()
    table = users(client, rule=Add()).cache_rows(100, clocks=9)
    reads = client.prefetch_tables([(table, [1, 2, 3, 4]), (table, [5, 6])])
    table.push([2], ones(1))
    for n in range(100):
        table.push(np.arange(100 + n, 110 + n), ones(10))
        assert all(sum(map(len, read._pushed)) <= 28 for read in reads)
    table.push([3], ones(1))
    table.push(np.arange(200, 300), ones(100))
    assert table.pull([1, 2, 3, 4])[:, 0].tolist() == [1.0] * 4, "as it was then"
    assert table.pull([5, 6])[:, 0].tolist() == [1.0] * 2
    assert table.cache_report().rows == 4
    assert table.pull([1, 2, 3, 4, 5, 6])[:, 0].tolist() == [1.0, 2.0, 2.0, 1.0, 1.0, 1.0]


def test_cache_and_prefetch_ask_for_what_is_missing_only(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client, init=ps.Uniform(-1.0, 1.0))
    expected = table.pull(np.arange(10))
    table.cache_rows(100)
    table.pull([1, 2, 3])
    before = calls_of(client)
    table.prefetch([3, 2])
    assert calls_of(client) == before
    table.prefetch([2, 4, 4])
    assert np.array_equal(table.pull([2, 3]), expected[[2, 3]])
    assert np.array_equal(table.pull([4, 2]), expected[[4, 2]])
    assert calls_of(client) == before + 1
    assert table.cache_report()[:3] == (4, 3, 5)


def test_staleness_counts_from_the_oldest_copy_that_was_used(cluster: RoleCluster) -> None:
    mine, others = users(cluster.client()).cache_rows(10, clocks=9), users(cluster.client())
    mine.pull([1])
    step(others, [5])
    step(mine)
    mine.pull([2])
    step(others, [5])
    mine.pull([1, 2, 3])
    assert step(mine, [3]) == 2
    step(others, [5])
    mine.pull([2])
    assert step(mine, [2]) == 3
    mine.pull([2])
    assert step(mine, [2]) == 0


def test_cache_is_each_clients_own_and_goes_when_it_is_told(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    table, theirs = users(client), users(other)
    assert table.cache_rows(10) is table
    assert theirs.cache_report() == (0, 0, 0, 0)
    table.pull([1])
    theirs.push([1], ones(1)).result()
    assert (table.pull([1])[0, 0], theirs.pull([1])[0, 0]) == (1.0, 0.5)
    table.cache_rows(0)
    assert (table.pull([1])[0, 0], table.cache_report()) == (0.5, (0, 0, 0, 0))


@each_case("bad", [{"rows": -1}, {"rows": 1.5}, {"rows": True}, {"clocks": -1}, {"clocks": None}])
def test_cache_of_wrong_size_is_refused(make_cluster: MakeCluster, bad: dict[str, Any]) -> None:
    table = users(make_cluster().client())
    with pytest.raises(ValueError, match=f"{next(iter(bad))} of the cache of table 'users'"):
        table.cache_rows(**bad)


def test_cache_is_refused_and_not_used_where_all_read_the_same_clock(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", workers=1)
    client, other = cluster.client(0), cluster.client()
    with pytest.raises(ValueError, match="read the values of the same clock"):
        users(client, consistency=ps.Sync()).cache_rows(10)
    table = films(client).cache_rows(10, clocks=100)
    table.pull([1])
    other.table("films").push([1], ones(1, 2)).result()
    assert table.pull([1])[0, 0] == 0.0
    client.set_consistency("films", ps.Sync())
    while not client.steps.terms("films").collects:
        step(table)
    assert table.pull([1])[0, 0] == 1.0


def test_threads_pull_push_and_prefetch_with_a_cache(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client, rule=Add()).cache_rows(150, clocks=100)

    def work(mine: int) -> None:
        keys = np.arange(mine * 100, mine * 100 + 100)
        for n in range(15):
            assert (table.pull(keys) == 1.0 + n).all()
            table.prefetch(keys[::-1])
            table.push(keys, ones(100)).result()
            assert (table.pull(keys[::-1]) == 1.0 + n).all()

    in_threads(*[lambda m=m: work(m) for m in range(3)])
    gc.collect()
    assert in_use(client) == 0

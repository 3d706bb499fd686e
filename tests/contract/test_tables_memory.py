"""Rows that were pulled or asked for ahead: whose memory they lie in, and for how long."""

from __future__ import annotations

import contextlib
import gc
import os
import warnings

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, in_threads, taken
from tests.contract.test_tables import DIM, MakeCluster, ones, users

from paramserve.client import Client
from paramserve.client.row_reads import PREFETCHED_MAX
from paramserve.errors import ClientClosed, PullTimeout
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")


def in_use(client: Client) -> int:
    """Slots in use, when what was given back later has been taken back."""
    client.connection.exchange.give_back([client.connection.exchange.take(64)])
    return taken(client)


# --- what was pulled ----------------------------------------------------------------------------


def test_pulled_rows_stand_while_others_are_pulled_and_changed(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    kept = []
    for n in range(1, 30):
        keys = np.arange(n * 7)
        table.push(keys, ones(keys.size)).result()
        rows = table.pull(keys)
        kept.append((rows, rows.copy()))
    for rows, copy in kept:
        assert np.array_equal(rows, copy)
    kept[0][0][:] = 7.0  # and they are the caller's to write to
    assert table.pull(np.arange(7))[0, 0] == 1.0 - 29 * 0.5


def test_pulled_rows_outlive_the_client_and_the_cluster(make_cluster: MakeCluster) -> None:
    for kind in ("unix", "tcp"):
        cluster = make_cluster(kind, servers=2)
        client = cluster.client()
        table = users(client)
        rows = table.pull(np.arange(5000))
        ahead = table.pull(np.arange(10))
        client.close()
        cluster.stop(0)
        cluster.stop(1)
        del client, table
        gc.collect()
        assert (rows == 1.0).all()
        rows += 1.0
        assert (rows == 2.0).all()
        assert (ahead == 1.0).all()


def test_pulled_rows_are_the_callers_own_on_both_sides_of_a_fork(cluster: RoleCluster) -> None:
    table = users(cluster.client())
    table.push(np.arange(1000), np.arange(4000.0).reshape(1000, 4)).result()
    rows, kept = table.pull(np.arange(1000)), table.pull(np.arange(100))
    first, second = rows.copy(), kept.copy()
    wakes, waker = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        child = os.fork()
    if not child:
        status = 1
        with contextlib.suppress(BaseException):
            os.read(wakes, 1)
            kept *= 1000.0
            status = int(not (np.array_equal(rows, first) and kept[9, 3] == second[9, 3] * 1000.0))
        os._exit(status)
    del rows
    others = [table.pull(np.arange(1000) + n * 1000) for n in range(1, 4)]  # in its place
    os.write(waker, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(kept, second)
    assert all((each == 1.0).all() for each in others)
    assert np.array_equal(table.pull(np.arange(1000)), first)
    os.close(wakes)
    os.close(waker)


def test_slot_goes_back_with_the_last_view_of_its_rows(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    assert in_use(client) == 0
    rows = table.pull(np.arange(100).reshape(10, 10))
    used = in_use(client)
    assert used == (1 if client.connection.exchange.shared else 0)
    corner = rows[3:5, 2:4][1][..., 1:]
    del rows
    gc.collect()
    assert in_use(client) == used
    other = table.pull(np.arange(100, 200))
    table.push(np.arange(100), ones(100)).result()
    assert (corner == 1.0).all()
    del corner, other
    gc.collect()
    assert in_use(client) == 0


def test_pull_that_timed_out_gives_its_slots_back_when_it_is_answered(
    remote: RoleCluster,
) -> None:
    client = remote.client()
    table = users(client)
    with remote.frozen():
        with pytest.raises(PullTimeout, match=r"pull timed out.*Applied: no"):
            table.pull(np.arange(1000), timeout_s=0.01)
        assert taken(client) >= 1
    for _ in range(3):
        assert (table.pull(np.arange(1000)) == 1.0).all()
    client.drain()
    table.pull([1])
    gc.collect()
    assert in_use(client) == 0


def test_arenas_of_batches_that_vary_are_as_large_as_the_largest(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix").client()
    table, most = client.table("rows", dim=256, rule=Add()), 9000
    gradients = np.ones((most, 256), np.float32)
    draws = np.random.default_rng(1)
    for count in draws.integers(1, most + 1, 60):
        table.pull(np.arange(count))
        table.push(np.arange(count), gradients[:count]).result()
    arenas = sum(arena.nbytes for arena in client.connection.exchange._arenas.values())
    assert arenas < 1.5 * gradients.nbytes


def test_threads_pull_and_push_at_once(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client, rule=Add())

    def work(mine: int) -> None:
        keys = np.arange(mine * 100, mine * 100 + 100)
        for n in range(20):
            table.prefetch(keys)
            before = table.pull(keys)
            assert (before == 1.0 + n).all()
            table.push(keys, ones(100)).result()
            assert (before == 1.0 + n).all()

    in_threads(*[lambda m=m: work(m) for m in range(4)])
    gc.collect()
    assert in_use(client) == 0


def test_call_that_another_thread_closes_the_client_under_raises_that(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix", servers=2).client()
    table = users(client)
    client.define("w", np.zeros(9), rule=Add())
    rows = [table.pull(np.arange(500))]
    returned = client.connection.exchange.returned
    client.connection.exchange.close()  # as behind the checks that a call begins with
    del rows[:]  # goes back to the memory that was released
    assert returned
    for call in (lambda: table.pull(np.arange(500)), lambda: client.push_pull({"w": np.ones(9)})):
        with pytest.raises(ClientClosed):
            call()
    assert not client.connection.exchange._pool.unused()  # and no new memory was made


# --- what was asked for ahead -------------------------------------------------------------------


def requests_of(client: Client) -> int:
    """Requests and reads that a client has sent."""
    return sum(e.session.last + e.session.last_read for e in client.connection.exchange.shards)


def test_pull_finds_what_was_prefetched_and_sends_nothing(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    table.put(np.arange(50), np.outer(np.arange(50), np.ones(DIM)))
    table.prefetch([9, 3, 3, 7])
    table.pull([0])
    sent = requests_of(client)
    rows = table.pull([[7, 7], [9, 3]])
    assert rows[..., 1].tolist() == [[7.0, 7.0], [9.0, 3.0]]
    assert requests_of(client) == sent
    table.pull([7])
    assert requests_of(client) == sent + 1, "each prefetch is for one pull"


def test_pull_of_a_subset_is_served_and_one_of_other_keys_is_not(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    table.prefetch(np.arange(10))
    for others in ([10, 11], [9, 11]):
        assert (table.pull(others) == 1.0).all()
    sent = requests_of(client)
    assert (table.pull([9]) == 1.0).all()
    assert requests_of(client) == sent
    table.prefetch([1, 2])
    table.prefetch([3, 4])
    sent = requests_of(client)
    table.pull([4])
    table.pull([1])
    assert requests_of(client) == sent


def test_prefetched_rows_that_are_not_pulled_are_freed(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    for n in range(2 * PREFETCHED_MAX):
        table.prefetch(np.arange(n, n + 50))
    table.pull([10**6])
    client.drain()
    table.pull([10**6])
    gc.collect()
    assert in_use(client) <= PREFETCHED_MAX
    rows = table.pull([2 * PREFETCHED_MAX])
    assert (rows == 1.0).all()
    client.close()
    assert (rows == 1.0).all()


def test_prefetch_then_close_is_no_error(cluster: RoleCluster) -> None:
    client = cluster.client()
    table = users(client)
    table.prefetch(np.arange(100))
    client.close()
    for use in (lambda: table.pull([1]), lambda: table.prefetch([1]), lambda: len(table)):
        with pytest.raises(ClientClosed):
            use()

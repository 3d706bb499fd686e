"""Memory of clients and servers: large replies, idle clients, reports, and arenas."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, wait_until

from paramserve.client import Client, links
from paramserve.client.exchange import FIRST_ARENA_BYTES, WINDOW
from paramserve.client.step_parts import BlockPush
from paramserve.config import Limits
from paramserve.core.table.options import Zeros
from paramserve.rules import Add

SIZE = 2_000_000
"""16 MB of float64: more than the sockets' buffers hold, in either direction."""
UNREAD_MAX = 1 << 20


@pytest.fixture
def cluster(make_cluster: MakeCluster, shards: int) -> RoleCluster:
    return make_cluster("tcp", servers=shards, limits=Limits(send_buffer_bytes_max=UNREAD_MAX))


def test_steps_sent_before_the_first_is_read_are_answered_on_one_connection(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    block = client.define("w", np.zeros(SIZE), rule=Add())
    connects, tickets = cluster.connects, []
    for _ in range(WINDOW - 1):
        gradient = client.dense.gradient_slot(block)
        gradient[:] = 1.0
        push = BlockPush(block, gradient)
        tickets.append(client.dense.step("default", [push], pull=[block], tick=False))
    for number, ticket in enumerate(tickets, 1):
        values = ticket.result().values[block.id]
        assert (values == number).all()
        ticket.release()
    assert cluster.connects == connects


def test_values_of_an_outcome_stay_as_they_are_without_their_ticket(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define("w", np.ones(SIZE), rule=Add())
    values = client.dense.step("default", (), pull=[block], tick=False).result().values
    for _ in range(4):
        client.push({"w": np.ones(SIZE)}).result()
        client.dense.step("default", (), pull=[block], tick=False).result()
    assert (values[block.id] == 1.0).all()


def test_threads_that_pull_at_once_are_answered_on_one_connection(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.ones(SIZE), rule=Add())
    connects, found = cluster.connects, []
    threads = [
        threading.Thread(target=lambda: found.append(client.pull("w"))) for _ in range(WINDOW)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(found) == WINDOW
    assert all((values == 1.0).all() for values in found)
    assert cluster.connects == connects


def test_client_that_reads_nothing_stops_no_other(cluster: RoleCluster) -> None:
    slow, other = cluster.client(), cluster.client()
    block = slow.define("w", np.ones(SIZE), rule=Add())
    tickets = [slow.dense.step("default", [], pull=[block], tick=False) for _ in range(WINDOW - 1)]
    assert (other.push_pull({"w": np.ones(SIZE)})["w"] == 2.0).all()
    for ticket in tickets:
        assert np.isin(ticket.result().values[block.id], (1.0, 2.0)).all()
        ticket.release()


# --- mirrors of clients on other hosts ------------------------------------------------------------


def mirror_of(cluster: RoleCluster, client: Client) -> dict[int, Any]:
    sessions = cluster.servers[0].role.shard.sessions
    return sessions.by_client[client.connection.id].mirror.arenas


def is_mirrored(cluster: RoleCluster, client: Client) -> bool:
    arenas = client.connection.exchange._arenas.values()
    mirror = mirror_of(cluster, client)
    return {n: each.size for n, each in mirror.items()} == {a.number: a.nbytes for a in arenas}


def test_mirror_has_the_arenas_of_its_client_and_ends_with_its_session(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("tcp")
    client = cluster.client()
    client.define("w", np.ones(SIZE), rule=Add())
    for _ in range(2):
        assert client.pull("w")[-1] == 1.0
        assert is_mirrored(cluster, client)
    exchange = client.connection.exchange
    assert len(exchange._arenas) > 1
    with exchange._lock:
        for number in exchange._unused():
            exchange._drop_arena(number)
    (kept,) = exchange._arenas
    mirrored = weakref.ref(mirror_of(cluster, client)[kept])
    client.connection.reports()
    assert is_mirrored(cluster, client)
    assert mirror_of(cluster, client)[kept] is mirrored(), "what stays keeps its bytes"
    cluster.cut(client)
    assert client.pull("w")[-1] == 1.0
    assert mirror_of(cluster, client)[kept] is mirrored(), "also over the next connection"
    client.close()
    wait_until(lambda: not cluster.servers[0].role.shard.sessions.by_client)

    def back() -> bool:
        gc.collect()
        return mirrored() is None

    wait_until(back)


def test_mirror_takes_memory_only_where_it_is_written_to(make_cluster: MakeCluster) -> None:
    """A shard has that of its own part of each slot."""
    cluster = make_cluster("tcp", servers=4)
    client = cluster.client()
    client.define("w", np.ones(SIZE), rule=Add())
    client.pull("w")
    before = anonymous_bytes()
    clients = [cluster.client() for _ in range(4)]
    for each in clients:
        each.pull("w")
    most = len(clients) * 8 * SIZE * 2.2
    assert anonymous_bytes() - before < most, "their own values, and a mirror of them"


def anonymous_bytes() -> int:
    """Memory of this process that is no file's and not shared: not that of clients' arenas."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not tell")


# --- reports --------------------------------------------------------------------------------------


NOTE_BYTES = 1 << 14
WORKERS = 3


def test_reports_leave_the_notes_out_unless_they_are_asked_for(
    make_cluster: Callable[..., RoleCluster],
) -> None:
    cluster = make_cluster("unix", workers=WORKERS)
    small = Limits(header_bytes_max=2 * NOTE_BYTES)
    watcher = cluster.client(limits=small)
    workers = [cluster.client(rank) for rank in range(WORKERS)]
    block = workers[0].define("w", np.zeros(4), rule=Add())
    for worker in workers:
        worker.pull("w")
        for number in range(2):
            note = bytes([number]) * NOTE_BYTES
            worker.dense.step("default", (), pull=[block], tick=True, note=note).result()
    (beat,) = watcher.connection.reports()
    assert beat.groups[0].clocks == tuple((rank, 2) for rank in range(WORKERS))
    assert watcher.pull("w").tolist() == [0.0] * 4, "the watcher goes on"
    assert [len(notes) for notes in workers[0].dense.notes("default").values()] == [2] * WORKERS


# --- arenas ---------------------------------------------------------------------------------------


DIM = 64
LARGEST = 20_000
"""Rows of the largest batch."""


class Arenas:
    """Memory that clients share with servers in this process, and began to after this was made: of
    each arena once, however often it is mapped."""

    def __init__(self) -> None:
        self._before = frozenset(self._resident())

    @property
    def nbytes(self) -> int:
        return sum(size for each, size in self._resident().items() if each not in self._before)

    def _resident(self) -> dict[str, int]:
        found: dict[str, int] = {}
        inode = ""
        for line in Path("/proc/self/smaps").read_text().splitlines():
            mapping = re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ (\d+)\s*(.*)", line)
            if mapping is not None:
                inode = mapping[1] if mapping[2].startswith("/memfd:paramserve") else ""
            elif inode and line.startswith("Rss:"):
                found[inode] = max(found.get(inode, 0), int(line.split()[1]) * 1024)
        return found


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


def need(rows: int) -> int:
    """Bytes of one pull or push of so many distinct rows: keys, places or none, values."""
    return rows * (4 * DIM + 12)


@pytest.mark.parametrize("order", ["growing", "random"])
def test_batches_of_many_sizes_take_little_more_than_the_largest(
    make_cluster: MakeCluster, arenas: Arenas, shards: int, order: str, tables_ready: None
) -> None:
    cluster = make_cluster("unix", servers=shards)
    table = cluster.client().table("t", dim=DIM, rule=Add(), init=Zeros())
    sizes = np.linspace(100, LARGEST, 60).astype(int)
    if order == "random":
        np.random.default_rng(3).shuffle(sizes)
    pushed = np.zeros(LARGEST)
    for size in sizes.tolist():
        keys = np.arange(size)
        table.push(keys, np.ones((size, DIM), np.float32)).result()
        pushed[:size] += 1
        rows = table.pull(keys)
        assert (rows == pushed[:size, None]).all()
        del rows
    assert arenas.nbytes < 2 * need(LARGEST) + FIRST_ARENA_BYTES


def test_memory_of_a_largest_batch_goes_back_when_later_ones_are_small(
    make_cluster: MakeCluster,
    arenas: Arenas,
    shards: int,
    tables_ready: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(links, "TRIM_TAKES", 64)
    cluster = make_cluster("unix", servers=shards)
    table = cluster.client().table("t", dim=DIM, rule=Add(), init=Zeros())
    keys = np.arange(LARGEST)
    assert (table.pull(keys) == 0.0).all()
    assert arenas.nbytes >= need(LARGEST)
    for count in range(1, 100):
        table.push(keys[:1000], np.ones((1000, DIM), np.float32)).result()
        assert (table.pull(keys[:1000]) == count).all()
    assert arenas.nbytes < 2 * need(1000) + 2 * FIRST_ARENA_BYTES
    assert (table.pull(keys)[1000:] == 0.0).all()

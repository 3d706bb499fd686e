"""Tickets, steps by block, snapshots, shared memory and the life of a client.

The key-value calls are in `test_client_contract.py`, over all transports.
"""

from __future__ import annotations

import asyncio
import pickle
import time

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, in_threads, taken

from paramserve.client import BlockPush, Client, Snapshots
from paramserve.client.exchange import WINDOW
from paramserve.client.snapshots import GroupSnapshot
from paramserve.consistency.built_in import Sync
from paramserve.errors import ClientClosed, NonFinite, PullTimeout
from paramserve.rules import SGD, Adam, Add

LARGE = 40_000
"""float64 elements that are split over the shards."""


# --- tickets ----------------------------------------------------------------------------------


def test_ticket_done_turns_true_without_waiting(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    ticket = client.push("w", np.ones(3))
    while not ticket.done():
        pass
    assert ticket.result(0).version == 1
    assert ticket.result() is ticket.result()


def test_ticket_can_be_awaited(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())

    async def several() -> list[int]:
        tickets = [client.push("w", np.ones(3)) for _ in range(6)]
        return [outcome.version for outcome in await asyncio.gather(*map(_await, tickets))]

    assert asyncio.run(several()) == [1, 2, 3, 4, 5, 6]


async def _await(ticket):
    return await ticket


def test_staleness_counts_updates_since_the_values_were_read(cluster: RoleCluster) -> None:
    first, second = cluster.client(), cluster.client()
    first.define("w", np.zeros(3), rule=Add())
    first.pull("w")
    for _ in range(3):
        second.push("w", np.ones(3)).result()
    assert first.push("w", np.ones(3)).result().staleness == 3
    assert first.push_pull({"w": np.ones(3)})["w"][0] == 5.0
    assert first.push("w", np.ones(3)).result().staleness == 0


def test_many_pipelined_pushes_are_all_applied_in_order(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(LARGE), rule=SGD(1.0, momentum=0.5))
    expected, buffer = np.zeros(LARGE), np.zeros(LARGE)
    tickets = []
    for step in range(40):
        tickets.append(client.push("w", np.full(LARGE, float(step))))
        buffer = 0.5 * buffer + step
        expected -= buffer
    assert [ticket.result().version for ticket in tickets] == list(range(1, 41))
    assert np.array_equal(client.pull("w"), expected)
    assert taken(client) == 0


def test_tick_counts_a_groups_clock(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    client.define("v", np.zeros(3), rule=Add(), group="g")
    client.tick().result()
    client.tick().result()
    client.push_pull({"v": np.ones(3)}, tick=True)
    assert (client.clock(), client.clock("g"), client.clock("none")) == (2, 1, 0)


# --- by block ---------------------------------------------------------------------------------


def test_step_pushes_ticks_and_pulls_in_one_message(cluster: RoleCluster) -> None:
    client = cluster.client()
    first = client.define({"a": np.zeros(LARGE), "b": np.zeros(2)}, rule=SGD(1.0), group="g")
    second = client.define("c", np.zeros(5, np.float32), rule=SGD(1.0), group="g")
    slots = client.dense.gradient_slot(first), client.dense.gradient_slot(second)
    assert client.dense.gradient_slot(first) is slots[0]
    for slot in slots:
        slot[:] = 1.0
    push = [BlockPush(first, slots[0], (1,), (0.5, 0, 0, 0, 0, 0)), BlockPush(second, slots[1])]
    ticket = client.dense.step("g", push, pull=[first, second])
    values = ticket.result().values
    assert (values[first.id][:LARGE] == 0.0).all()
    assert values[first.id][LARGE:].tolist() == [-0.5, -0.5]
    assert values[second.id].tolist() == [-1.0] * 5
    ticket.release()
    assert (client.clock("g"), taken(client)) == (1, 0)


def test_step_clips_by_the_global_norm_of_its_gradient(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define("w", np.zeros(LARGE), rule=Add())
    slot = client.dense.gradient_slot(block)
    slot[:] = 3.0
    client.dense.step("default", [BlockPush(block, slot)], clip_norm=1.0).result()
    assert np.linalg.norm(client.pull("w")) == pytest.approx(1.0, rel=1e-6)


def test_fetch_and_store_every_field(cluster: RoleCluster) -> None:
    client = cluster.client()
    block = client.define({"a": np.zeros(LARGE), "b": np.zeros(3)}, rule=Adam())
    client.push("a", np.ones(LARGE)).result()
    average, counts = client.dense.fetch(block, 1)
    assert counts == (1, 0)
    assert average[:LARGE] == pytest.approx(0.1)
    assert not average[LARGE:].any()
    for field in (0, 1, 2):
        client.dense.store(block, field, np.full(block.size, 1.0 + field), counts=(7, 8))
    for field in (0, 1, 2):
        values, counts = client.dense.fetch(block, field)
        assert (values == 1.0 + field).all()
        assert counts == (7, 8)
    client.dense.store(block, 2, np.zeros(block.size), active=(1,))
    assert client.dense.fetch(block, 2)[0].tolist() == [3.0] * LARGE + [0.0] * 3
    assert taken(client) == 0


def test_reports_tell_versions_staleness_and_bytes_of_each_shard(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    for _ in range(3):
        client.push("w", np.ones(LARGE)).result()
    reports = client.connection.reports()
    assert [report.shard for report in reports] == list(range(len(cluster.servers)))
    assert sum(report.value_bytes for report in reports) == LARGE * 8
    for report in reports:
        (group,) = report.groups
        assert (group.name, group.version, group.skipped) == ("default", 3, 0)
        assert group.staleness == ((-1, 3, 3, 2),)


def test_snapshots_are_kept_from_watch_on(cluster: RoleCluster) -> None:
    writer, reader = cluster.client(), cluster.client()
    assert Snapshots(reader).watch("default", 2) is False
    assert Snapshots(reader).take("default", 0) is None
    writer.define("w", np.zeros(LARGE), rule=Add())
    assert Snapshots(reader).watch("default", every=2, keep=2) is True
    assert Snapshots(reader).take("default", 0) is None
    for _ in range(7):
        writer.push("w", np.ones(LARGE)).result()
    first = soon(reader, writer, after=0)
    second = soon(reader, writer, after=first.version)
    if len(cluster.servers) == 1:
        assert (first.version, second.version, second.dropped) == (4, 6, 1)
    # Several servers agree first: a version may be past the second one, and take one's place.
    assert first.version < second.version
    for snapshot in (first, second):
        assert (snapshot.values["w"] == snapshot.version).all()
    assert taken(reader) == 0


def soon(reader: Client, writer: Client, *, after: int) -> GroupSnapshot:
    """The next snapshot; where no cut has made one in time, one more push asks for another."""
    for _ in range(20):
        found = Snapshots(reader).take("default", after)
        if found is not None:
            return found
        time.sleep(0.05)
        writer.push("w", np.ones(LARGE)).result()
    raise AssertionError(f"no snapshot after version {after}")


# --- memory and life ---------------------------------------------------------------------------


def test_arenas_grow_with_what_is_in_use_and_not_with_the_steps(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    for number in range(6):
        client.define(f"w{number}", np.zeros(60_000), rule=Add())
    names = [f"w{number}" for number in range(6)]
    for _ in range(3):
        values = client.push_pull({name: np.ones(60_000) for name in names})
    before = len(client.connection.exchange._arenas)
    for _ in range(10):
        values = client.push_pull({name: np.ones(60_000) for name in names})
    assert all((values[name] == 13.0).all() for name in names)
    assert (len(client.connection.exchange._arenas), taken(client)) == (before, 0)
    assert before > 1
    assert (other.pull("w5") == 13.0).all()


def test_several_clients_push_at_once_and_nothing_is_lost(cluster: RoleCluster) -> None:
    clients = [cluster.client() for _ in range(4)]
    clients[0].define({"a": np.zeros(LARGE), "b": np.zeros(3)}, rule=Add())

    def work(client: Client) -> None:
        gradients = {"a": np.ones(LARGE), "b": np.ones(3)}
        for step in range(15):
            if step % 3:
                client.push(gradients)
            else:
                client.push_pull(gradients)
        client.drain()

    in_threads(*[lambda c=c: work(c) for c in clients])
    values = clients[3].pull()
    assert all((value == 60.0).all() for value in values.values())
    assert clients[3].push({"b": np.ones(3)}).result().version == 61


def test_one_client_may_be_used_by_several_threads(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())

    def work() -> None:
        for _ in range(10):
            client.push("w", np.ones(LARGE)).result()
            client.pull("w")

    in_threads(work, work, work)
    assert (client.pull("w") == 30.0).all()
    assert taken(client) == 0


def test_close_waits_for_what_was_sent_and_then_refuses(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    ticket = client.push("w", np.ones(LARGE))
    client.close()
    client.close()
    assert client.closed
    assert ticket.result().version == 1
    assert (other.pull("w") == 1.0).all()
    for use in (
        lambda: client.push("w", np.ones(LARGE)),
        lambda: client.pull("w"),
        lambda: client.tick(),
        lambda: client.gradient("w"),
        lambda: client.define("x", np.ones(1)),
        lambda: client.connection.reports(),
        lambda: client.drain(),
    ):
        with pytest.raises(ClientClosed, match="was closed"):
            use()


def test_pickled_client_is_a_new_one(make_cluster: MakeCluster) -> None:
    """It carries what opens the cluster: it has to work on other hosts too."""
    cluster = make_cluster("unix", servers=2)
    client = cluster.client()
    client.define("w", np.ones(3), rule=Add())
    data = pickle.dumps(client)
    assert cluster.token in data
    assert cluster.token.hex() not in repr(client) + str(vars(client))
    with pickle.loads(data) as copy:
        assert copy.connection.id != client.connection.id
        copy.push("w", np.ones(3)).result()
        assert (copy.pull("w") == 2.0).all()
    assert (client.pull("w") == 2.0).all()


# --- not sent -------------------------------------------------------------------------------------


def test_pull_behind_a_full_window_keeps_its_own_deadline(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=2, policy=Sync())
    client = cluster.client(0)
    client.define("w", np.zeros(4), rule=Add())
    for _ in range(WINDOW):
        client.tick()  # the other worker never comes
    began = time.monotonic()
    with pytest.raises(PullTimeout):
        client.pull("w", timeout_s=0.1)
    assert time.monotonic() - began < 5.0


def test_staged_push_that_overflows_is_told_to_its_ticket(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1, policy=Sync())
    client = cluster.client(0)
    client.define("w", np.zeros(4), rule=Add())
    largest = np.full(4, np.finfo(np.float64).max)
    first, second = client.push("w", largest), client.push("w", largest)
    with np.errstate(over="ignore"), pytest.raises(NonFinite):
        client.tick()
    client.push("w", np.ones(4))
    client.tick().result()
    for ticket in (first, second):
        with pytest.raises(NonFinite):
            ticket.result()
    assert (client.pull("w") == 1.0).all()
    assert taken(client) == 0

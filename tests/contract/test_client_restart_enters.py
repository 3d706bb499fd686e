"""A worker that is started again where no clock waits for its rank: it rested, or had not begun.

In plain Sync it enters as one that joins late does: no gradient of it is left out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, wait_until

from paramserve.client import BlockPush, Client, Outcome, Ticket
from paramserve.consistency.built_in import Sync
from paramserve.rules import Add

SIZE = 20_000
"""Elements of float64: enough to lie on two shards."""
STEPS = 3
MakeCluster = Callable[..., RoleCluster]
Make = Callable[[int], RoleCluster]


@pytest.fixture
def make(make_cluster: MakeCluster, shards: int) -> Make:
    return lambda workers: make_cluster(
        servers=shards, workers=workers, policy=Sync(reduce="sum"), restarts=True
    )


def define(client: Client) -> Client:
    client.define("w", np.zeros(SIZE), rule=Add())
    return client


def push(client: Client) -> Ticket:
    """Add 1 to all elements, in one clock."""
    (block,) = client.blocks()
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    return client.dense.step("default", [BlockPush(block, slot)], pull=[block])


def step(client: Client) -> Outcome:
    """As `push`, and wait until the clock is decided."""
    ticket = push(client)
    outcome = ticket.result()
    ticket.release()
    return outcome


@contextmanager
def stepping(client: Client) -> Iterator[list[int]]:
    """Another worker steps all the time; how often it has."""
    stop, made = threading.Event(), [0]
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not stop.is_set():
                step(client)
                made[0] += 1
            client.rest()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield made
    finally:
        stop.set()
        thread.join()
        assert failed == []


def dies(cluster: RoleCluster, client: Client) -> None:
    """As if its process had ended: the coordinator loses it without a word."""
    client.connection.control.close()
    shards = [server.role.shard for server in cluster.servers]
    wait_until(lambda: {s.sessions.members[client.rank].state for s in shards} == {"restarting"})


def each_step_counts(cluster: RoleCluster, first: Client, before: int) -> None:
    """The next incarnation of rank 1 steps while rank 0 does, which is always ahead of it."""
    with stepping(first) as made:
        again = define(cluster.client(1))
        assert again.connection.incarnation == 2
        joined = made[0]
        wait_until(lambda: made[0] > joined)
        outcomes = [step(again) for _ in range(STEPS)]
        again.rest()
    assert [outcome.skipped for outcome in outcomes] == [False] * STEPS
    assert again.steps.missed == 0
    with cluster.client() as reader:
        assert (reader.pull("w") == before + made[0] + STEPS).all()


def test_worker_restarted_after_its_rank_rested_has_every_gradient_applied(make: Make) -> None:
    cluster = make(2)
    first, second = (define(cluster.client(rank)) for rank in range(2))
    second.rest()
    step(first)
    dies(cluster, second)
    each_step_counts(cluster, first, 1)


def test_worker_restarted_before_its_added_rank_ever_stepped_has_every_gradient_applied(
    make: Make,
) -> None:
    cluster = make(1)
    first = define(cluster.client(0))
    step(first)
    cluster.scale(2)
    dies(cluster, cluster.client(1))
    each_step_counts(cluster, first, 1)


def test_rank_that_counted_as_dead_comes_back_while_a_clock_is_decided_without_it(
    make_cluster: MakeCluster,
) -> None:
    """Its first step is for the clock after that one, and not left out."""
    cluster = make_cluster(servers=2, workers=2, policy=Sync(reduce="sum"))
    first, second = (define(cluster.client(rank)) for rank in range(2))
    second.connection.control.close()
    shards = [server.role.shard for server in cluster.servers]
    wait_until(lambda: {shard.sessions.members[1].state for shard in shards} == {"dead"})
    on_the_way = [HoldsBack(server.role._peers.send) for server in cluster.servers]
    for server, peers in zip(cluster.servers, on_the_way, strict=True):
        server.role._peers.send = peers  # type: ignore[method-assign]  # wrapped
    alone = push(first)
    wait_until(lambda: all(shard.groups[0].state.collect.last_vote for shard in shards))
    again = define(cluster.client(1))
    assert (again.connection.incarnation, again.clock()) == (2, 0)
    for peers in on_the_way:
        cluster.on_server(peers.let_go)
    assert not alone.result().skipped
    both = [push(again), push(first)]
    assert [ticket.result().skipped for ticket in both] == [False, False]
    assert (again.steps.missed, again.clock(), first.clock()) == (0, 2, 2)
    assert (again.pull("w") == 3).all()


class HoldsBack:
    """Sends messages to another server only when it is told to."""

    def __init__(self, send: Callable[[int, bytes], None]) -> None:
        self._send = send
        self._held: list[tuple[int, bytes]] | None = []

    def __call__(self, shard: int, header: bytes) -> None:
        if self._held is None:
            self._send(shard, header)
        else:
            self._held.append((shard, header))

    def let_go(self) -> None:
        held, self._held = self._held or [], None
        for each in held:
            self._send(*each)

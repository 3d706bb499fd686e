"""Awaited tickets: what they take of the program, and what a cancelled await leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import DEADLINES, WAIT_S, RoleCluster, in_threads, wait_until

from paramserve.client import Client
from paramserve.client.ticket import Outcome, Ticket
from paramserve.consistency.built_in import Sync
from paramserve.errors import ClientClosed, PushTimeout, TableFull
from paramserve.rules import Add

SOON_S = 2.0
ROWS = np.arange(5000)


async def outcome(ticket: Ticket) -> Outcome:
    return await ticket


def waiting_threads() -> int:
    return sum(each.name.startswith("paramserve-await") for each in threading.enumerate())


@pytest.fixture
def pair(make_cluster: MakeCluster) -> tuple[Client, Client]:
    """Two workers under Sync: neither's step ends without the other."""
    cluster = make_cluster("unix", servers=2, workers=2, policy=Sync(reduce="sum"))
    clients = cluster.client(0), cluster.client(1)
    in_threads(*(lambda c=c: c.define("w", np.zeros(3), rule=Add()) for c in clients))
    return clients


@pytest.fixture
def refusing(make_cluster: MakeCluster, tables_ready: None) -> tuple[RoleCluster, Client]:
    """A client with a table that has no room for `ROWS`."""
    cluster = make_cluster("unix", servers=2)
    client = cluster.client()
    client.table("t", dim=4, rule=Add(), max_bytes=60_000)
    return cluster, client


def push_rows(client: Client) -> Ticket:
    return client.table("t").push(ROWS, np.ones((ROWS.size, 4), np.float32))


def test_await_that_is_cancelled_leaves_the_refusal_to_the_next_call(
    refusing: tuple[RoleCluster, Client],
) -> None:
    cluster, client = refusing

    async def cancel() -> None:
        with cluster.frozen():
            task = asyncio.ensure_future(outcome(push_rows(client)))
            await asyncio.sleep(0)  # it waits
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    with pytest.raises(TableFull):
        client.drain()
    client.drain()


def test_await_that_ends_as_its_task_is_cancelled_leaves_the_refusal_to_the_next_call(
    refusing: tuple[RoleCluster, Client],
) -> None:
    cluster, client = refusing

    async def cancel() -> None:
        with cluster.frozen():
            ticket = push_rows(client)
            task = asyncio.ensure_future(outcome(ticket))
            await asyncio.sleep(0)
        while not ticket.done():
            pass
        wait_until(lambda: not waiting_threads())  # it has told the loop, which has not looked yet
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    with pytest.raises(TableFull):
        client.drain()


def test_await_raises_the_refusal_once(refusing: tuple[RoleCluster, Client]) -> None:
    _, client = refusing
    with pytest.raises(TableFull):
        asyncio.run(outcome(push_rows(client)))
    client.drain()


def test_program_ends_its_loop_while_an_awaited_step_waits_for_another_worker(
    pair: tuple[Client, Client],
) -> None:
    first, second = pair

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(first.tick(), 0.05)

    began = time.monotonic()
    asyncio.run(give_up())
    assert time.monotonic() - began < SOON_S
    wait_until(lambda: not waiting_threads())  # no task awaits it
    second.tick()
    assert first.pull("w").tolist() == [0.0] * 3


def test_awaited_tickets_take_no_thread_of_the_programs_executor(
    pair: tuple[Client, Client],
) -> None:
    first, second = pair
    executor_threads: set[int] = set()

    async def crowd() -> list[int]:
        loop = asyncio.get_running_loop()
        tickets = [first.push("w", np.ones(3)) for _ in range(100)] + [first.tick()]
        tasks = [asyncio.ensure_future(outcome(each)) for each in tickets]
        await loop.run_in_executor(None, lambda: executor_threads.add(threading.get_ident()))
        assert waiting_threads() == 1  # all of them are one step
        second.tick()
        return [each.version for each in await asyncio.gather(*tasks)]

    assert asyncio.run(crowd()) == [1] * 101
    assert len(executor_threads) == 1
    assert first.pull("w").tolist() == [100.0] * 3


def test_ticket_that_is_awaited_again_ends_with_its_step(pair: tuple[Client, Client]) -> None:
    first, second = pair

    async def several() -> int:
        first.push("w", np.ones(3))
        ticket = first.tick()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(outcome(ticket), 0.01)
        tasks = [asyncio.ensure_future(outcome(ticket)) for _ in range(3)]
        await asyncio.sleep(0)
        second.tick()
        return sum([each.version for each in await asyncio.gather(*tasks)])

    assert asyncio.run(several()) == 3


def test_await_times_out_as_a_result_does(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=2, policy=Sync())
    first = cluster.client(0, deadlines=structs.replace(DEADLINES, busy_s=0.2))
    second = cluster.client(1)
    in_threads(*(lambda c=c: c.define("w", np.zeros(3), rule=Add()) for c in (first, second)))
    first.push("w", np.ones(3))
    ticket = first.tick()
    first.timeout_s = 0.2
    with pytest.raises(PushTimeout, match=r"worker 1 \(at clock 0\)"):
        asyncio.run(outcome(ticket))
    first.timeout_s = WAIT_S
    second.tick()
    assert asyncio.run(outcome(ticket)).version == 1


@pytest.mark.parametrize("close", [Client.close, lambda client: client.connection.close()])
def test_await_of_a_client_that_closes_ends(
    pair: tuple[Client, Client], close: Callable[[Client], Any]
) -> None:
    first, _ = pair

    async def closed_meanwhile() -> None:
        task = asyncio.ensure_future(outcome(first.tick()))
        await asyncio.sleep(0)
        close(first)
        with pytest.raises(ClientClosed):
            await task

    asyncio.run(closed_meanwhile())
    wait_until(lambda: not waiting_threads())

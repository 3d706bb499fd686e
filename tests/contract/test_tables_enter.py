"""Workers that enter several groups at once that collect gradients: late, or after a rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster
from tests.contract.test_policies import scale
from tests.contract.test_tables import MakeCluster

from paramserve.client import BlockPush, Client, Ticket
from paramserve.client.table import TablePush
from paramserve.core.consistency import Sync
from paramserve.core.keyed.options import Zeros
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

SYNC = Sync(reduce="sum")
NAMES = ("words", "films")
ROW = np.ones((1, 2), np.float32)
Step = Callable[[Client], None]
Made = Callable[[int], RoleCluster]


@pytest.fixture(params=[1, 2], ids=["1 server", "2 servers"])
def make(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Made:
    return lambda workers: make_cluster("unix", servers=request.param, workers=workers, policy=SYNC)


def define(client: Client) -> Client:
    for name in NAMES:
        client.table(name, dim=2, rule=Add(), init=Zeros(), consistency=SYNC)
    client.define("w", np.zeros(4), rule=Add())
    return client


def tables(client: Client) -> None:
    """A step of two tables."""
    client.push_tables([TablePush(client.table(name), [1], ROW) for name in NAMES]).result()


def dense(client: Client) -> None:
    """A step of a table and of dense values."""
    block = next(b for b in client._exchange.blocks.values() if b.group_name == "default")
    slot = client.gradient_slot(block)
    slot[:] = 1.0
    push = TablePush(client.table("words"), [1], ROW)
    ticket = client.step("default", [BlockPush(block, slot)], pull=[block], tables=[push])
    ticket.result()
    ticket.release()


def ahead(client: Client) -> None:
    """As `tables`, one step ahead of the answers, as with overlap."""
    ticket = client.push_tables([TablePush(client.table(name), [1], ROW) for name in NAMES])
    before, AHEAD[client] = AHEAD.get(client), ticket
    if before is not None:
        before.result()


def apart(client: Client) -> None:
    """As `dense`, in a call for each group: first the dense values, although tables go first where
    one call has both."""
    block = next(b for b in client._exchange.blocks.values() if b.group_name == "default")
    slot = client.gradient_slot(block)
    slot[:] = 1.0
    ticket = client.step("default", [BlockPush(block, slot)], pull=[block])
    ticket.result()
    ticket.release()
    for name in NAMES:
        client.push_tables([TablePush(client.table(name), [1], ROW)]).result()


AHEAD: WeakKeyDictionary[Client, Ticket] = WeakKeyDictionary()
"""The last step of each client of `ahead`."""
GROUPS: dict[Step, Sequence[str]] = {
    tables: NAMES,
    ahead: NAMES,
    dense: ("words", "default"),
    apart: ("default", *NAMES),
}
STEPS = 5


@contextmanager
def others_step(client: Client, step: Step) -> Iterator[list[int]]:
    """Steps of another worker, until the block is left; how many there were."""
    stop, made = threading.Event(), [0]
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not stop.is_set():
                step(client)
                made[0] += 1
            for group in GROUPS[step]:
                client.rest(group)
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


def trained(guest: Client, others: Sequence[Client], step: Step) -> None:
    """A guest of all groups makes some steps while the others step; none of them is lost."""
    groups = GROUPS[step]
    with ExitStack() as stack:
        made = [stack.enter_context(others_step(other, step)) for other in others]
        for _ in range(STEPS):
            step(guest)
        for group in groups:
            guest.rest(group)
    steps = STEPS + sum(each[0] for each in made)
    assert [client.missed for client in (guest, *others)] == [0] * (1 + len(others))
    for group in set(groups) & set(NAMES):
        assert guest.table(group).pull([1]).tolist() == [[steps, steps]]


@pytest.mark.parametrize("step", GROUPS)
@pytest.mark.parametrize("rests", [0, 1])
def test_worker_that_rested_in_two_groups_steps_in_both_again(
    make: Made, step: Step, rests: int
) -> None:
    cluster = make(2)
    clients = [define(cluster.client(rank)) for rank in range(2)]
    for group in GROUPS[step]:
        clients[rests].rest(group)
    trained(clients[rests], [clients[1 - rests]], step)


@pytest.mark.parametrize("rests", range(2))
def test_worker_that_rested_in_one_of_two_groups_steps_in_both_again(
    make: Made, rests: int
) -> None:
    """The others go on with the group where it is waited for by its empty steps there."""
    cluster = make(2)
    other, resting = (define(cluster.client(rank)) for rank in range(2))
    resting.rest(NAMES[rests])
    with others_step(other, tables) as made:
        for _ in range(STEPS):
            tables(resting)
        for name in NAMES:
            resting.rest(name)
    assert other.table(NAMES[rests]).pull([1]).tolist() == [[made[0] + STEPS] * 2]


@pytest.mark.parametrize("step", [tables, dense, apart])
def test_workers_that_come_late_step_in_both_groups(make: Made, step: Step) -> None:
    """Two at once: each of them may be in a group already while the other one is not."""
    cluster = make(1)
    first = define(cluster.client(0))
    step(first)
    scale(cluster, 3)
    late = [define(cluster.client(rank)) for rank in (1, 2)]
    with others_step(first, step) as made, others_step(late[0], step) as its:
        for _ in range(STEPS):
            step(late[1])
        for group in GROUPS[step]:
            late[1].rest(group)
    assert [client.missed for client in (first, *late)] == [0, 0, 0]
    steps = 1 + made[0] + its[0] + STEPS
    assert first.table("words").pull([1]).tolist() == [[steps, steps]]

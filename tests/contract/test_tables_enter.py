"""Workers that enter several groups at once that collect gradients: late, or after a rest."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from weakref import WeakKeyDictionary

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster
from tests.contract.test_tables import MakeCluster
from tests.suites import each_case

from paramserve.client import BlockPush, Client, Ticket
from paramserve.client.rows import TablePush
from paramserve.consistency.built_in import Sync
from paramserve.core.table.options import Zeros
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

SYNC = Sync(reduce="sum")
NAMES = ("words", "films")
ROW = np.ones((1, 2), np.float32)
Step = Callable[[Client], None]
Made = Callable[[int], RoleCluster]


@pytest.fixture
def make(make_cluster: MakeCluster) -> Made:
    return lambda workers: make_cluster("unix", servers=2, workers=workers, policy=SYNC)


def define(client: Client) -> Client:
    for name in NAMES:
        client.table(name, dim=2, rule=Add(), init=Zeros(), consistency=SYNC)
    client.define("w", np.zeros(4), rule=Add())
    return client


def tables(client: Client) -> None:
    """A step of two tables."""
    client.push_tables([TablePush(client.table(name), [1], ROW) for name in NAMES]).result()


def three(client: Client) -> None:
    """A step of two tables and of dense values, in one call."""
    block = next(b for b in client.connection.exchange.blocks.values() if b.group_name == "default")
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    pushes = [TablePush(client.table(name), [1], ROW) for name in NAMES]
    ticket = client.dense.step("default", [BlockPush(block, slot)], pull=[block], tables=pushes)
    ticket.result()
    ticket.release()


def later(client: Client) -> None:
    """A step of a group that is there since all workers are."""
    client.push("later", np.ones(2))
    client.tick("later").result()


def ahead(client: Client) -> None:
    """As `tables`, one step ahead of the answers, as with overlap."""
    ticket = client.push_tables([TablePush(client.table(name), [1], ROW) for name in NAMES])
    before, AHEAD[client] = AHEAD.get(client), ticket
    if before is not None:
        before.result()


def apart(client: Client) -> None:
    """As `three`, in a call for each group: first the dense values, although tables go first where
    one call has both."""
    block = next(b for b in client.connection.exchange.blocks.values() if b.group_name == "default")
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    ticket = client.dense.step("default", [BlockPush(block, slot)], pull=[block])
    ticket.result()
    ticket.release()
    for name in NAMES:
        client.push_tables([TablePush(client.table(name), [1], ROW)]).result()


AHEAD: WeakKeyDictionary[Client, Ticket] = WeakKeyDictionary()
"""The last step of each client of `ahead`."""
GROUPS: dict[Step, Sequence[str]] = {
    tables: NAMES,
    ahead: NAMES,
    apart: ("default", *NAMES),
    three: (*NAMES, "default"),
}
STEPS = 5


@contextmanager
def others_step(
    client: Client, step: Step, groups: Sequence[str] | None = None
) -> Iterator[list[int]]:
    """Steps of another worker, until the block is left; how many there were."""
    stop, made = threading.Event(), [0]
    failed: list[Exception] = []

    def run() -> None:
        try:
            while not stop.is_set():
                step(client)
                made[0] += 1
            for group in groups or GROUPS[step]:
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


def trained(joiner: Client, others: Sequence[Client], step: Step) -> None:
    """A joiner of all groups makes some steps while the others step; none of them is lost."""
    groups = GROUPS[step]
    with ExitStack() as stack:
        made = [stack.enter_context(others_step(other, step)) for other in others]
        for _ in range(STEPS):
            step(joiner)
        for group in groups:
            joiner.rest(group)
    steps = STEPS + sum(each[0] for each in made)
    assert [client.steps.missed for client in (joiner, *others)] == [0] * (1 + len(others))
    for group in set(groups) & set(NAMES):
        assert joiner.table(group).pull([1]).tolist() == [[steps, steps]]


@each_case("step", GROUPS)
@each_case(("servers", "rests"), [(1, 0), (1, 1), (2, 0), (2, 1)])
def test_worker_that_rested_in_all_groups_steps_in_them_again(
    make_cluster: MakeCluster, servers: int, step: Step, rests: int
) -> None:
    cluster = make_cluster("unix", servers=servers, workers=2, policy=SYNC)
    clients = [define(cluster.client(rank)) for rank in range(2)]
    for group in GROUPS[step]:
        clients[rests].rest(group)
    trained(clients[rests], [clients[1 - rests]], step)


ALL = ("words", "films", "default")


@each_case("step", [three, apart])
@each_case("rest", [c for n in (1, 2) for c in combinations(ALL, n)], ids=lambda c: " ".join(c))
def test_worker_that_rested_in_some_of_three_groups_steps_in_all_again(
    make: Made, step: Step, rest: Sequence[str]
) -> None:
    """It ends the others' round with nothing, so its own steps are fewer than the clocks."""
    cluster = make(2)
    clients = [define(cluster.client(rank)) for rank in range(2)]
    tickets = [threading.Thread(target=step, args=(client,)) for client in clients]
    for thread in tickets:
        thread.start()
    for thread in tickets:
        thread.join()
    for group in rest:
        clients[1].rest(group)
    with others_step(clients[0], step) as made:
        for _ in range(STEPS):
            step(clients[1])
        for group in ALL:
            clients[1].rest(group)
    assert clients[1].steps.missed == 0
    for name in NAMES:
        assert clients[0].table(name).pull([1]).tolist() == [[2 + made[0] + STEPS] * 2]


def test_late_worker_counts_from_the_start_in_a_group_that_comes_later(make: Made) -> None:
    cluster = make(1)
    first = define(cluster.client(0))
    tables(first)
    cluster.scale(2)
    late = define(cluster.client(1))
    with others_step(first, tables):
        for _ in range(STEPS):
            tables(late)
        for name in NAMES:
            late.rest(name)
    for client in (first, late):
        client.define("later", np.zeros(2), rule=Add(), group="later")
    with others_step(first, later, ["later"]) as made:
        for _ in range(STEPS):
            later(late)
        late.rest("later")
    assert first.pull("later").tolist() == [STEPS + made[0]] * 2


def test_rest_in_one_group_stays_while_another_one_is_stepped(make: Made) -> None:
    """The others go on there without this worker until it steps there."""
    cluster = make(2)
    other, resting = (define(cluster.client(rank)) for rank in range(2))
    resting.rest(NAMES[0])
    first, second = (
        [TablePush(client.table(name), [1], ROW) for name in NAMES] for client in (other, resting)
    )
    for clock in range(3):
        both = [other.push_tables(first), resting.push_tables(second[1:])]
        for ticket in both:
            ticket.result()
        assert other.table(NAMES[0]).pull([1]).tolist() == [[clock + 1] * 2]
    with others_step(other, tables) as made:
        for _ in range(STEPS):
            tables(resting)
        for name in NAMES:
            resting.rest(name)
    assert other.table(NAMES[0]).pull([1]).tolist() == [[3 + made[0] + STEPS] * 2]


@each_case("own", [tables, ahead])
def test_group_where_no_rank_steps_the_others_is_entered_as_well(make: Made, own: Step) -> None:
    """Shards may then be a clock apart: of two servers, one decides it without this worker."""
    cluster = make(2)
    other, joiner = (define(cluster.client(rank)) for rank in range(2))
    other.rest(NAMES[0])
    for name in NAMES:
        joiner.rest(name)

    def alone(client: Client) -> None:
        client.push_tables([TablePush(client.table(NAMES[1]), [1], ROW)]).result()

    with others_step(other, alone, NAMES[1:]) as made:
        for _ in range(3 * STEPS):
            own(joiner)
        for name in NAMES:
            joiner.rest(name)
    assert joiner.table(NAMES[0]).pull([1]).tolist() == [[3 * STEPS] * 2]
    assert joiner.table(NAMES[1]).pull([1]).tolist() == [[3 * STEPS + made[0]] * 2]


@each_case("step", [three, apart])
def test_workers_that_come_late_step_in_both_groups(make: Made, step: Step) -> None:
    """Two at once: each of them may be in a group already while the other one is not."""
    cluster = make(1)
    first = define(cluster.client(0))
    step(first)
    cluster.scale(3)
    late = [define(cluster.client(rank)) for rank in (1, 2)]
    with others_step(first, step) as made, others_step(late[0], step) as its:
        for _ in range(STEPS):
            step(late[1])
        for group in GROUPS[step]:
            late[1].rest(group)
    assert [client.steps.missed for client in (first, *late)] == [0, 0, 0]
    steps = 1 + made[0] + its[0] + STEPS
    assert first.table("words").pull([1]).tolist() == [[steps, steps]]


def test_late_worker_enters_one_group_after_the_other_while_the_others_are_between_them(
    make: Made,
) -> None:
    """As one that makes two optimizers, whose groups the others step in two calls."""
    cluster = make(1)
    first = cluster.client(0)
    between, entered, names = threading.Event(), threading.Event(), ("a", "b")

    def define(client: Client, name: str) -> None:
        client.define(name, np.zeros(2), rule=Add(), group=name)

    def steps(client: Client) -> None:
        for clock in range(STEPS):
            for name in names:
                client.push_pull({name: np.ones(2)}, tick=True)
                if client is first and name == "a" and clock == 1:
                    between.set()
                    assert entered.wait(10.0)
        for name in names:
            client.rest(name)

    for name in names:
        define(first, name)
    thread = threading.Thread(target=steps, args=(first,))
    thread.start()
    assert between.wait(10.0)
    cluster.scale(2)
    late = cluster.client(1)
    for name in names:
        define(late, name)
        assert late.enter(name)
    entered.set()
    steps(late)
    thread.join()
    assert (first.steps.missed, late.steps.missed) == (0, 0)
    assert [late.pull(name)[0] for name in names] == [2.0 * STEPS] * 2

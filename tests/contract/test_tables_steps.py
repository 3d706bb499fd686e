"""Steps of tables: several in one message, with dense ones, under each policy, refused unsent."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, wait_until
from tests.contract.test_tables import DIM, MakeCluster, ones, users, whole
from tests.contract.test_tables_memory import in_use
from tests.suites import each_case

import paramserve as ps
from paramserve.client import BlockPush, Client, Ticket, keyed
from paramserve.client.rows import TablePush
from paramserve.client.table import Table
from paramserve.config import Limits
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Buffered, Sync
from paramserve.core.table.options import Normal, Zeros
from paramserve.errors import (
    ClientClosed,
    HyperMismatch,
    NonFinite,
    Overloaded,
    ParamServeError,
)
from paramserve.rules import SGD, Adagrad, Add
from paramserve.transport.link import Link

pytestmark = pytest.mark.usefixtures("tables_ready")


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    """Over one transport: how steps travel is in `test_step_of_tables_and_tensors_is_one_frame`."""
    return make_cluster("tcp", servers=2)


def two_tables(client: Client) -> tuple[Table, Table]:
    return (
        client.table("words", dim=2, rule=SGD(0.5), init=Zeros()),
        client.table("films", dim=3, rule=Add(), init=Zeros()),
    )


def versions(cluster: RoleCluster) -> list[dict[str, int]]:
    """By shard: how many updates each group has had."""
    return [
        {each.state.name: each.state.version for each in server.role.shard.groups.values()}
        for server in cluster.servers
    ]


class Frames:
    """Counts the frames with steps that each link sends: heartbeats come when they like."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[int] = []
        send = Link.send

        def counted(link: Link, header: bytes, *args: Any) -> None:
            if b"step" in header or b"several" in header:
                self.sent.append(id(link))
            send(link, header, *args)

        monkeypatch.setattr(Link, "send", counted)


# --- several at once ----------------------------------------------------------------------------


def test_too_many_tables_in_one_step_are_refused(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, films = two_tables(make_cluster("unix").client())
    monkeypatch.setattr(words.client.connection.exchange, "requests", 2)
    with pytest.raises(ValueError, match="2 tables, at most 1 go in one"):
        words.client.push_tables([TablePush(words), TablePush(films)])
    words.client.push_tables([TablePush(words)]).result()


def test_servers_with_a_low_limit_of_requests_take_reads_in_more_messages(
    make_cluster: MakeCluster,
) -> None:
    limits = Limits(outstanding_max=8)
    words, _ = two_tables(make_cluster("unix", limits=limits).client(limits=limits))
    reads = words.client.prefetch_tables([(words, [key]) for key in range(20)])
    assert len(reads) == 20
    words.client.push_tables([TablePush(words)]).result()


def test_rows_that_wait_for_a_tick_have_a_limit(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "STAGED_ROWS_MAX", 3)
    cluster = make_cluster("unix", workers=1)
    client = cluster.client(rank=0)
    words = client.table("words", dim=2, rule=SGD(0.5), init=Zeros(), consistency=Sync())
    words.push([1, 2], np.ones((2, 2)))
    with pytest.raises(Overloaded, match=r"2 rows.*wait for its tick, and 2 more.*client.tick"):
        words.push([3, 4], np.ones((2, 2)))
    words.push([3], np.ones((1, 2)))
    client.tick("words").result()
    assert sorted(words.keys()) == [1, 2, 3]


@each_case("leased", [True, False])
def test_step_of_tables_alone_counts_leased_samples_once_if_it_has_them(
    make_cluster: MakeCluster, leased: bool
) -> None:
    cluster = make_cluster("unix")
    client = cluster.client()
    words, films = two_tables(client)
    marks = iter([(7, 32), (7, 64)])
    client.steps.next_mark = lambda: next(marks)
    client.push_tables([TablePush(words), TablePush(films)], leased=leased).result()
    found = [
        (report.name, lease, samples)
        for beat in client.connection.reports()
        for report in beat.groups
        for _, lease, samples in report.marks
    ]
    assert found == ([("films", 7, 32)] * len(cluster.servers) if leased else [])


def test_step_of_two_tables_ends_the_clock_of_both(cluster: RoleCluster) -> None:
    client = cluster.client()
    words, films = two_tables(client)
    ticket = client.push_tables(
        [TablePush(words, [1, 1], ones(2, 2)), TablePush(films, [[5]], ones(1, 3)[None])]
    )
    ticket.result()
    assert (client.clock("words"), client.clock("films")) == (1, 1)
    assert words.pull([1])[0].tolist() == [-1.0] * 2
    assert films.pull([5])[0].tolist() == [1.0] * 3
    client.push_tables([TablePush(words), TablePush(films, [5], ones(1, 3))]).result()
    client.push_tables([TablePush(films, [5], ones(1, 3))], tick=False).result()
    assert (client.clock("words"), client.clock("films")) == (2, 2)
    assert films.pull([5])[0].tolist() == [3.0] * 3


@each_case("kind", ["unix", "tcp"])
def test_step_of_tables_and_tensors_is_one_frame_to_each_shard(
    make_cluster: MakeCluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(kind, servers=3)
    client = cluster.client()
    words, films = two_tables(client)
    dense = client.define("w", np.zeros(30_000), rule=Add())
    frames = Frames(monkeypatch)
    keys = np.arange(100)
    slot = client.dense.gradient_slot(dense)
    slot[:] = 1.0
    tables = [TablePush(words, keys, ones(100, 2)), TablePush(films, keys, ones(100, 3))]
    ticket = client.dense.step("default", [BlockPush(dense, slot)], pull=[dense], tables=tables)
    sent = list(frames.sent)
    outcome = ticket.result()
    assert (len(sent), len(set(sent))) == (3, 3)
    assert (outcome.values[dense.id] == 1.0).all()
    ticket.release()
    assert (words.pull(keys) == -0.5).all()
    assert (films.pull(keys) == 1.0).all()
    assert [client.clock(group) for group in ("default", "words", "films")] == [1, 1, 1]
    frames.sent.clear()
    client.push_tables([TablePush(words, keys, ones(100, 2)), TablePush(films)]).result()
    assert (len(frames.sent), len(set(frames.sent))) == (3, 3)


def test_step_with_one_bad_table_sends_nothing_of_the_others(cluster: RoleCluster) -> None:
    client = cluster.client()
    words, films = two_tables(client)
    dense = client.define("w", np.zeros(3), rule=Add())
    before = versions(cluster)
    bad = np.full((1, 3), np.nan)
    slot = client.dense.gradient_slot(dense)
    slot[:] = 1.0
    for use in (
        lambda: client.push_tables([TablePush(words, [1], ones(1, 2)), TablePush(films, [7], bad)]),
        lambda: client.dense.step(
            "default",
            [BlockPush(dense, slot)],
            tables=[TablePush(words, [1], ones(1, 2)), TablePush(films, [7], bad)],
        ),
    ):
        with pytest.raises(NonFinite, match=r"key 7 of table 'films'.*Applied: no"):
            use()
    with pytest.raises(ParamServeError):
        client.push_tables([TablePush(words, [1], ones(1, 2)), TablePush(films, [7], ones(2, 3))])
    assert versions(cluster) == before
    assert [client.clock(group) for group in ("default", "words", "films")] == [0, 0, 0]
    assert len(words) == 0
    client.push_tables([TablePush(words, [1], ones(1, 2)), TablePush(films, [7], ones(1, 3))])
    assert words.pull([1])[0].tolist() == [-0.5] * 2


def test_step_that_is_skipped_ends_the_clocks_and_changes_nothing(cluster: RoleCluster) -> None:
    client = cluster.client()
    words, films = two_tables(client)
    pushes = [TablePush(words, [1], ones(1, 2)), TablePush(films, [7], ones(1, 3))]
    assert client.push_tables(pushes, skip=True).result().skipped
    assert (len(words), len(films), client.clock("words"), client.clock("films")) == (0, 0, 1, 1)


def test_step_of_several_groups_is_skipped_where_one_of_them_is(
    make_cluster: MakeCluster,
) -> None:
    client = make_cluster("unix", servers=2).client()
    options: dict[str, Any] = {"dim": 2, "rule": Add(), "init": Zeros()}
    skips = client.table("skips", consistency=Async(on_nonfinite="skip"), **options)
    other = client.table("applies", **options)
    dense = client.define("w", np.zeros(2), rule=Add())
    bad = np.full((1, 2), np.nan, np.float32)
    for rows in (bad, ones(1, 2)):
        both = [TablePush(skips, [1], rows), TablePush(other, [1], ones(1, 2))]
        assert client.push_tables(both).result().skipped == (rows is bad)
        step = client.dense.step("default", [], pull=[dense], tables=both[:1])
        assert step.result().skipped == (rows is bad)
        step.release()
    assert (skips.pull([1]).tolist(), other.pull([1]).tolist()) == ([[2.0] * 2], [[2.0] * 2])


def test_many_tables_step_together_while_earlier_steps_are_on_their_way(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    tables = [client.table(f"t{n}", dim=2, rule=Add(), init=Zeros()) for n in range(20)]
    tickets = [
        client.push_tables([TablePush(table, [n, n + 1], ones(2, 2)) for table in tables])
        for n in range(8)
    ]
    for ticket in tickets:
        ticket.result()
    for table in tables[::7]:
        assert table.pull(np.arange(9))[:, 0].tolist() == [1.0] + [2.0] * 7 + [1.0]


def test_error_of_one_table_of_a_step_is_told_by_the_ticket_of_all(cluster: RoleCluster) -> None:
    client = cluster.client()
    small = client.table("small", dim=2, rule=Add(), max_bytes=1 << 15)
    other = client.table("other", dim=2, rule=Add(), init=Zeros())
    many = np.arange(10_000)
    ticket = client.push_tables(
        [TablePush(small, many, ones(many.size, 2)), TablePush(other, [1], ones(1, 2))]
    )
    with pytest.raises(ParamServeError, match="the table is full"):
        ticket.result()
    assert other.pull([1])[0].tolist() == [1.0, 1.0]
    client.push_tables([TablePush(other, [1], ones(1, 2))]).result()


# --- policies -----------------------------------------------------------------------------------


class Ranks:
    """A client of each rank, all with the same table."""

    def __init__(self, cluster: RoleCluster, workers: int, policy: Policy, **options: Any) -> None:
        self.clients = [cluster.client(rank) for rank in range(workers)]
        self.tables = [users(client, consistency=policy, **options) for client in self.clients]
        self.reader = cluster.client().table("users")

    def tick(self) -> list[Ticket]:
        return [client.tick("users") for client in self.clients]


def test_sync_equals_one_process_that_sums_in_rank_order(
    make_cluster: MakeCluster,
) -> None:
    rule, draw = Adagrad(lr=0.1), np.random.default_rng(3)
    cluster = make_cluster("unix", servers=2, workers=3)
    ranks = Ranks(cluster, 3, Sync(reduce="sum"), rule=rule, init=Normal())
    alone = users(make_cluster("unix").client(), rule=rule, init=Normal())
    for _ in range(6):
        keys = [draw.integers(0, 12, 10) for _ in range(3)]
        gradients = [draw.standard_normal((10, DIM)).astype(np.float32) for _ in range(3)]
        for rank in (2, 0, 1):
            ranks.tables[rank].push(keys[rank], gradients[rank])
        versions = [ticket.result().version for ticket in ranks.tick()]
        assert len(set(versions)) == 1
        sums = [np.zeros((12, DIM), np.float32) for _ in range(3)]
        for rank in range(3):
            for key, gradient in zip(keys[rank], gradients[rank], strict=True):
                sums[rank][key] += gradient
        total = (sums[0] + sums[1]) + sums[2]
        pushed = np.unique(np.concatenate(keys))
        alone.push(pushed, total[pushed]).result()
    for one, other in zip(whole(ranks.reader), whole(alone), strict=True):
        assert np.array_equal(one, other)


def test_sync_keeps_pushes_until_the_tick_and_their_tickets_tell_of_it(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = Ranks(cluster, 2, Sync(reduce="sum"), rule=Add(), init=Zeros())
    first, second = ranks.tables
    gradients = ones(2)
    tickets = [first.push([1, 2], gradients), first.push([2, 3], gradients)]
    gradients[:] = 100.0  # captured already
    assert not tickets[0].done()
    with pytest.raises(ClientClosed, match="was not ended"):
        tickets[0].result()
    assert len(ranks.reader) == 0
    ended = ranks.clients[0].tick("users")
    assert len(ranks.reader) == 0
    second.push([3], ones(1))
    ranks.clients[1].tick("users").result()
    assert [t.result().version for t in (ended, *tickets)] == [1] * 3
    assert ranks.reader.pull([1, 2, 3])[:, 0].tolist() == [1.0, 2.0, 2.0]


def test_sync_hyper_and_weight_of_a_kept_push_go_with_the_tick(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = Ranks(cluster, 2, Sync(), rule=SGD(1.0), init=Zeros())
    hyper = SGD(4.0).hyper()
    for rank, weight in enumerate((3.0, 1.0)):
        ranks.tables[rank].push([rank], ones(1), hyper=hyper, weight=weight)
    for ticket in ranks.tick():
        ticket.result()
    assert ranks.reader.pull([0, 1])[:, 0].tolist() == [-3.0, -1.0]
    ranks.tables[0].push([0], ones(1), weight=2.0)
    with pytest.raises(ValueError, match="weight"):
        ranks.tables[0].push([0], ones(1), weight=3.0)
    with pytest.raises(ValueError, match="weight"):
        ranks.clients[0].tick("users", weight=1.0)


def test_sync_refuses_different_hypers_of_one_step_and_of_one_clock(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = Ranks(cluster, 2, Sync(), rule=SGD(1.0), init=Zeros())
    ranks.tables[0].push([1], ones(1), hyper=SGD(4.0).hyper())
    with pytest.raises(ValueError, match="the same ones throughout"):
        ranks.tables[0].push([1], ones(1))
    ranks.tables[1].push([1], ones(1), hyper=SGD(5.0).hyper())
    for ticket in ranks.tick():
        with pytest.raises(HyperMismatch):
            ticket.result()
    assert len(ranks.reader) == 0


def test_sync_sum_that_is_not_finite_fails_the_tick_and_the_kept_pushes(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1)
    ranks = Ranks(cluster, 1, Sync(reduce="sum"), rule=Add(), init=Zeros())
    (table,), (client,) = ranks.tables, ranks.clients
    large = np.full((1, DIM), 3e38, np.float32)
    with pytest.raises(NonFinite, match="key 4 "):
        table.push([4], 10 * large.astype(float))
    tickets = [table.push([5], large), table.push([5], large)]
    with pytest.raises(NonFinite, match=r"key 5 of table 'users' on rank 0.*its sum with others"):
        client.tick("users")
    for ticket in tickets:
        with pytest.raises(NonFinite):
            ticket.result()
    table.push([6], ones(1))
    client.tick("users").result()
    assert ranks.reader.keys().tolist() == [6]


def test_sync_with_nan_is_skipped_as_a_clock_where_the_policy_says_so(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    ranks = Ranks(cluster, 2, Sync(reduce="sum", on_nonfinite="skip"), rule=Add(), init=Zeros())
    ranks.tables[0].push([1], np.full((1, DIM), np.nan))
    ranks.tables[1].push(np.arange(20), ones(20))
    assert [ticket.result().skipped for ticket in ranks.tick()] == [True, True]
    assert len(ranks.reader) == 0
    ranks.tables[1].push([1], ones(1))
    assert [ticket.result().skipped for ticket in ranks.tick()] == [False, False]
    assert ranks.reader.keys().tolist() == [1]


def test_sync_steps_of_two_tables_and_tensors_are_all_or_nothing(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2, policy=Sync(reduce="sum"))
    clients = [cluster.client(rank) for rank in range(2)]
    blocks = [client.define("w", np.zeros(4), rule=Add()) for client in clients]
    both = [
        (
            client.table("films", dim=3, rule=Add(), init=Zeros(), consistency=Async()),
            client.table("words", dim=2, rule=Add(), init=Zeros(), consistency=Sync(reduce="sum")),
        )
        for client in clients
    ]
    tickets = []
    for client, block, (films, words) in zip(clients, blocks, both, strict=True):
        slot = client.dense.gradient_slot(block)
        slot[:] = 1.0
        pushes = [TablePush(words, [1, 2], ones(2, 2)), TablePush(films, [1], ones(1, 3))]
        tickets.append(
            client.dense.step("default", [BlockPush(block, slot)], pull=[block], tables=pushes)
        )
        if client is clients[0]:
            wait_until(lambda: both[1][0].pull([1])[0, 0] == 1.0)
            assert (len(words), len(films)) == (0, 1), "words and tensors wait, films do not"
    for ticket, block in zip(tickets, blocks, strict=True):
        assert ticket.result().values[block.id].tolist() == [2.0] * 4
        ticket.release()
    films, words = both[0]
    assert words.pull([1, 2])[:, 0].tolist() == [2.0, 2.0]
    assert films.pull([1])[:, 0].tolist() == [2.0]


def test_sync_steps_that_name_the_tables_in_another_order_wait_for_no_ring(
    make_cluster: MakeCluster,
) -> None:
    """A step that is held holds what comes behind it: all workers have to send in one order."""
    cluster = make_cluster("unix", servers=2, workers=2)
    clients = [cluster.client(rank) for rank in range(2)]
    policy = Sync(reduce="sum")
    both = [
        [
            client.table(name, dim=2, rule=Add(), init=Zeros(), consistency=policy)
            for name in ("words", "films", "users")
        ]
        for client in clients
    ]
    for _ in range(2):
        tickets = [
            client.push_tables([TablePush(table, [1], ones(1, 2)) for table in tables])
            for client, tables in zip(clients, (both[0], both[1][::-1]), strict=True)
        ]
        for ticket in tickets:
            ticket.result(5.0)
    assert [table.pull([1])[0, 0] for table in both[0]] == [4.0] * 3


def test_pushes_of_several_tables_under_sync_wait_for_their_tick(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", servers=2, workers=1)
    client = cluster.client(0)
    policy = Sync(reduce="sum")
    words = client.table("words", dim=2, rule=Add(), init=Zeros(), consistency=policy)
    films = client.table("films", dim=3, rule=Add(), init=Zeros(), consistency=policy)
    for _ in range(2):
        client.push_tables(
            [TablePush(words, [1], ones(1, 2)), TablePush(films, [2], ones(1, 3))], tick=False
        )
    assert (len(words), len(films)) == (0, 0)
    client.push_tables([TablePush(words), TablePush(films, [2], ones(1, 3))]).result()
    assert (words.pull([1])[0, 0], films.pull([2])[0, 0]) == (2.0, 3.0)


def test_buffered_applies_the_mean_of_so_many(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=2)
    policy = Buffered(size=2, damping=None)
    ranks = Ranks(cluster, 2, policy, rule=Add(), init=Zeros())
    many = np.arange(40)
    ranks.tables[0].push(many, ones(40)).result()
    assert len(ranks.reader) == 0
    ranks.tables[1].push(many[::2], 3 * ones(20)).result()
    assert ranks.reader.pull(many)[:4, 0].tolist() == [2.0, 0.5, 2.0, 0.5]


# --- refused before they are sent -----------------------------------------------------------------


def two_sync_tables(client: Client) -> list[Table]:
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
    tables = two_sync_tables(client)
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
    words, films = two_sync_tables(client)
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
        patched.setattr(client.connection.exchange, "take_each", no_room)
        with pytest.raises(MemoryError):
            client.tick("users")
    table.push([2], ones(1))
    client.tick("users").result()
    with pytest.raises(ParamServeError, match=r"'users' was not sent: MemoryError.*Applied: no"):
        early.result()
    assert table.pull([1, 2])[:, 0].tolist() == [0.0, 1.0]

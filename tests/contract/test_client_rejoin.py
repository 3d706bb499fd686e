"""A worker that dies in mid-step and is started again, over sockets with 1 and 2 shards."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs
from tests.contract.role_cluster import DEADLINES, RoleCluster, wait_until
from tests.suites import each_case

from paramserve.client import BlockPush, Client, Ticket
from paramserve.client.exchange import Exchange
from paramserve.config import NO_CREDENTIALS, Deadlines, Limits
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import ParamServeError, PushTimeout, RankTaken, Timeout, WorkerFenced
from paramserve.launch.connect import Handle
from paramserve.messages import CoordinatorNotice, ServerBeat, ShardRequest, WorkerBeat
from paramserve.rules import Add
from paramserve.transport.control import ControlLink

LARGE = 20_000
STEPS = 5
MakeCluster = Callable[..., RoleCluster]


class Pair:
    """A cluster whose rank 1 may die and come again."""

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.first, self.second = cluster.client(0), cluster.client(1)
        for client in (self.first, self.second):
            client.define("w", np.zeros(LARGE), rule=Add())

    def dies(self) -> None:
        """As if its process had ended: the coordinator loses it without a word. What it has left to
        say to the shards is refused as an older incarnation's."""
        self.second.connection.control.close()
        wait_until(lambda: self.states(1) == {"restarting"})

    def comes_again(self) -> Client:
        return self.cluster.client(1)

    def states(self, rank: int) -> set[str]:
        """A rank's as the shards know it."""
        return {server.role.shard.sessions.members[rank].state for server in self.cluster.servers}

    def values(self) -> np.ndarray:
        with self.cluster.client() as reader:
            return reader.pull("w")

    def clocks(self, rank: int) -> list[int]:
        return [server.role.shard.groups[0].state.clocks[rank] for server in self.cluster.servers]


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(make_cluster: MakeCluster, shards: int) -> MakePair:
    def make(policy: Policy, *, restart_s: float = 30.0) -> Pair:
        return Pair(
            make_cluster(
                servers=shards,
                workers=2,
                policy=policy,
                restarts=True,
                deadlines=structs.replace(DEADLINES, restart_s=restart_s),
            )
        )

    return make


def gradient(rank: int, clock: int) -> float:
    """Of every (rank, clock) another digit of the sum."""
    return float(10 ** (2 * clock + rank))


def step(client: Client) -> Ticket:
    """The next step of a rank."""
    (block,) = client.blocks()
    slot = client.dense.gradient_slot(block)
    slot[:] = gradient(client.rank, client.clock())
    return client.dense.step("default", [BlockPush(block, slot)], pull=[block])


def every(clocks: int) -> float:
    """The sum with both ranks' gradients of each clock, once."""
    return sum(gradient(rank, clock) for rank in (0, 1) for clock in range(clocks))


def reach(client: Client, shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this client sends from now on reaches only so many of its shards."""
    exchange, transmit = client.connection.exchange, Exchange._transmit

    def lossy(shard: object, message: ShardRequest) -> None:
        if shard.number < shards:
            transmit(exchange, shard, message)

    monkeypatch.setattr(exchange, "_transmit", lossy)


@each_case("reached", [0, 1, 2])
def test_sync_every_clock_has_each_rank_once(
    make_pair: MakePair, shards: int, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker dies when its second step has reached none, one or all of the shards."""
    reached = min(reached, shards)
    pair = make_pair(Sync(reduce="sum"))
    tickets = [step(pair.first), step(pair.second)]
    for ticket in tickets:
        ticket.result()
    reach(pair.second, reached, monkeypatch)
    step(pair.second)
    wait_until(lambda: pair.cluster.held(1) == reached)
    pair.dies()
    new = pair.comes_again()
    assert new.connection.incarnation == 2
    assert new.clock() == (2 if reached == shards else 1)
    seen: list[tuple[int, float]] = []
    for client in (new, pair.first, new, pair.first, new, pair.first, new, pair.first):
        if client.clock() < STEPS:
            tickets.append(step(client))
    for ticket in tickets[2:]:
        outcome = ticket.result()
        (values,) = outcome.values.values()
        seen.append((outcome.version, float(values[0])))
        assert not outcome.skipped
        ticket.release()
    assert all(value == every(version) for version, value in seen)
    assert (pair.values() == every(STEPS)).all()
    assert [client.clock() for client in (pair.first, new)] == [STEPS] * 2


def test_sync_new_worker_reads_only_after_the_clock_that_has_its_predecessor(
    make_pair: MakePair, shards: int
) -> None:
    pair = make_pair(Sync(reduce="sum"))
    step(pair.second)
    wait_until(lambda: pair.cluster.held(1) == shards)
    pair.dies()
    new = pair.comes_again()
    assert new.clock() == 1
    with pytest.raises(ParamServeError, match="timed out"):
        new.pull("w", timeout_s=0.05)
    step(pair.first)
    assert (new.pull("w") == every(1)).all()


def test_sync_a_second_death_before_the_first_step_is_waited_for_too(
    make_pair: MakePair, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(Sync(reduce="sum"))
    for last in (False, False, True):
        reach(pair.second, 2 if last else 1, monkeypatch)
        if pair.second.clock() == 0:
            step(pair.second)
        wait_until(lambda: pair.cluster.held(1) >= 1)
        if not last:
            pair.dies()
            pair.second = pair.comes_again()
    assert pair.second.connection.incarnation == 3
    step(pair.first).result()
    assert (pair.values() == every(1)).all()


def test_async_no_worker_waits_and_what_one_shard_lacked_is_repeated(
    make_pair: MakePair, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(Async())
    for client in (pair.second, pair.second):
        step(client).result()
    reach(pair.second, 1, monkeypatch)
    step(pair.second)
    wait_until(lambda: pair.clocks(1)[0] == 3)
    pair.dies()
    for _ in range(STEPS):
        step(pair.first).result()
    new = pair.comes_again()
    lacking = shards == 2
    assert (new.clock(), new.steps.repeated) == ((2, 1) if lacking else (3, 0))
    while new.clock() < STEPS:
        step(new).result()
        assert min(pair.clocks(1)) == new.clock(), "no clock goes back"
    values = pair.values()
    assert values[-1] == every(STEPS)
    assert values[0] == every(STEPS) + (gradient(1, 2) if lacking else 0)


@each_case("policy", [Sync(reduce="sum"), Async()], ids=["sync", "async"])
def test_older_incarnation_is_refused_before_and_after_the_new_one_joins(
    make_pair: MakePair, policy: Policy
) -> None:
    pair = make_pair(policy)
    older = pair.second
    pair.dies()
    with pytest.raises(WorkerFenced, match=r"worker 1 \(incarnation 1\) is restarting.*no"):
        step_of_an_older_incarnation(older).result()
    new = pair.comes_again()
    with pytest.raises(WorkerFenced, match=r"which knows incarnation 2.*Applied: no"):
        step_of_an_older_incarnation(older).result()
    tickets = [step(pair.first), step(new)]
    for ticket in tickets:
        ticket.result()
    assert (pair.values() == every(1)).all()


def step_of_an_older_incarnation(client: Client) -> Ticket:
    """By what it knows already: it cannot ask the coordinator any more."""
    (block,) = client.connection.exchange.blocks.values()
    slot = client.dense.gradient_slot(block)
    slot[:] = 1e30
    return client.dense.step("default", [BlockPush(block, slot)])


def test_rank_of_a_living_worker_is_taken(make_pair: MakePair) -> None:
    pair = make_pair(Async())
    client = pair.second.connection.id
    text = rf"rank 1 is taken by a live worker \(client {client}, incarnation 1\), heard"
    with pytest.raises(RankTaken, match=text):
        pair.comes_again()
    with pytest.raises(ParamServeError, match=r"more ranks than workers.*2 workers"):
        pair.cluster.client(2)
    step(pair.second).result()


def test_sync_goes_on_without_a_worker_that_does_not_come_in_time(make_pair: MakePair) -> None:
    pair = make_pair(Sync(reduce="sum"), restart_s=0.3)
    ticket = step(pair.first)
    pair.dies()
    assert ticket.result().version == 1
    assert pair.states(1) == {"dead"}
    step(pair.first).result()
    new = pair.comes_again()
    assert (new.connection.incarnation, new.clock()) == (2, 2)
    assert new.enter()
    for each in [step(pair.first), step(new)]:
        each.result()
    assert (pair.values() == sum(gradient(0, c) for c in range(3)) + gradient(1, 2)).all()


def test_sync_waits_for_a_worker_that_is_being_restarted_until_the_driver_gives_it_up(
    make_pair: MakePair,
) -> None:
    pair = make_pair(Sync(reduce="sum"))
    ticket = step(pair.first)
    pair.dies()
    with pytest.raises(PushTimeout, match=r"worker 1 \(at clock 0\)"):
        ticket.result(0.1)
    pair.cluster.mark_dead(1)
    assert ticket.result().version == 1


def beating() -> int:
    return sum(thread.name == "paramserve-heartbeat" for thread in threading.enumerate())


def test_worker_gives_signs_of_life_while_it_asks_where_to_go_on(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(Async())
    pair.dies()
    reports, notify = Exchange.reports, ControlLink.notify
    old = {pair.first.connection.control, pair.second.connection.control}
    sent: list[bool] = []

    def noted(control: ControlLink, message: CoordinatorNotice, *, waits: bool = True) -> bool:
        told = notify(control, message, waits=waits)
        if isinstance(message, WorkerBeat) and control not in old:
            sent.append(told)
        return told

    def slow(exchange: Exchange, limit_s: float) -> list[ServerBeat]:
        wait_until(lambda: len(sent) >= 2)
        return reports(exchange, limit_s)

    monkeypatch.setattr(ControlLink, "notify", noted)
    monkeypatch.setattr(Exchange, "reports", slow)
    assert pair.comes_again().connection.incarnation == 2
    assert all(sent)


def test_time_that_reaching_the_servers_took_is_not_waited_again_for_what_they_have_done(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(Async())
    pair.dies()
    reach, reports = Exchange.__init__, Exchange.reports
    limits: list[float] = []

    def slow(exchange: Exchange, *arguments: object) -> None:
        reach(exchange, *arguments)
        time.sleep(0.2)

    def noted(exchange: Exchange, limit_s: float) -> list[ServerBeat]:
        limits.append(limit_s)
        return reports(exchange, limit_s)

    monkeypatch.setattr(Exchange, "__init__", slow)
    monkeypatch.setattr(Exchange, "reports", noted)
    pair.comes_again()
    (limit_s,) = limits
    assert limit_s <= DEADLINES.start_s - 0.2


def test_worker_that_cannot_go_on_gives_no_more_signs_of_life(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_pair(Async())
    pair.dies()
    before = beating()
    monkeypatch.setattr(Exchange, "reports", lambda exchange, limit_s: [])
    with pytest.raises(Timeout, match=r"rank 1 \(incarnation 2\).* 0 of"):
        pair.comes_again()
    assert beating() == before


def test_rank_that_comes_back_behind_the_others_is_told_what_it_leaves_out(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2, policy=Async())
    first, second = cluster.client(0), cluster.client(1)
    for client, steps in ((first, 2), (second, 3)):
        client.define("w", np.zeros(8), rule=Add())
        for _ in range(steps):
            client.push("w", np.ones(8), weight=None).result()
            client.tick()
    handle = Handle.of((), NO_CREDENTIALS, seed=0, limits=Limits(), deadlines=Deadlines())
    monkeypatch.setattr(handle, "_connect", lambda rank, workers: cluster.client(rank))

    def dies(client: Client) -> None:
        client.connection.control.close()
        wait_until(
            lambda: all(
                server.role.shard.sessions.members[1].state == "dead" for server in cluster.servers
            )
        )

    dies(second)
    with warnings.catch_warnings(action="error"):  # the slowest of the others is behind it
        back = handle.connect(1)
    assert back.clock == 2
    dies(back.client)
    for _ in range(7):
        first.tick()
    words = (
        r"rank 1 comes back .* had ended at clock 3 of group 'default' and goes on at 9.*--restart"
    )
    with pytest.warns(UserWarning, match=words):
        back = handle.connect(1)
    assert back.clock == 9

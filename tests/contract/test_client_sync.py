"""The client under Sync, with 1 and 2 shards: all ranks' gradients, or none.

The calls over each transport are in `test_client_contract.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, wait_until
from tests.suites import each_case

from paramserve.client import BlockPush, Client, Ticket
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import (
    HyperMismatch,
    NonFinite,
    NotAMember,
    ParamServeError,
    PullTimeout,
    PushTimeout,
    WorkerFenced,
)
from paramserve.rules import SGD, Add

LARGE = 20_000
WORKERS = 3


class Team:
    """A cluster with a client of each rank."""

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.ranks = [cluster.client(rank) for rank in range(WORKERS)]

    def define(self, rule: object = None, size: int = LARGE) -> None:
        rule = rule if rule is not None else Add()
        for client in self.ranks:
            client.define("w", np.zeros(size), rule=rule)

    def values(self) -> np.ndarray:
        reader = self.cluster.client()
        values = reader.pull("w")
        reader.close()
        return values

    def versions(self) -> list[int]:
        """Of the first group, on each shard."""
        return [server.role.shard.groups[0].state.version for server in self.cluster.servers]


MakeTeam = Callable[..., Team]


@pytest.fixture(params=[("unix", 2), ("tcp", 1)], ids=["unix-2", "tcp-1"])
def make_team(make_cluster: MakeCluster, request: pytest.FixtureRequest) -> MakeTeam:
    """Two shards agree on each clock, one decides alone; over which transport does not matter."""
    kind, shards = request.param

    def make(policy: Policy | None = None) -> Team:
        policy = policy if policy is not None else Sync(reduce="sum")
        return Team(make_cluster(kind, servers=shards, workers=WORKERS, policy=policy))

    return make


@pytest.fixture
def team(make_team: MakeTeam) -> Team:
    return make_team()


def gradient(rank: int, step: int, size: int = LARGE) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(size)


def step(client: Client, values: np.ndarray, **options: object) -> Ticket:
    """One step of the default group by block."""
    block = client.blocks()[0]
    slot = client.dense.gradient_slot(block)
    slot[:] = values
    hyper = options.pop("hyper", None)
    return client.dense.step("default", [BlockPush(block, slot, None, hyper)], **options)


# --- clocks -----------------------------------------------------------------------------------


@each_case("reduce", ["sum", "mean"])
def test_clocks_equal_one_process_that_sums_in_rank_order(make_team: MakeTeam, reduce: str) -> None:
    """3 ranks with 2 outstanding pushes each; equal to the last bit."""
    team = make_team(Sync(reduce=reduce))
    team.define(SGD(0.1, momentum=0.9))
    waiting: list[Ticket] = []
    for number in range(8):
        for rank in (2, 0, 1):
            waiting.append(step(team.ranks[rank], gradient(rank, number)))
        while len(waiting) > WORKERS:
            waiting.pop(0).result()
    versions = [ticket.result().version for ticket in waiting]
    expected, buffer = np.zeros(LARGE), np.zeros(LARGE)
    for number in range(8):
        total = gradient(0, number) + gradient(1, number) + gradient(2, number)
        if reduce == "mean":
            total = total * (1.0 / 3.0)
        buffer = total.copy() if number == 0 else 0.9 * buffer + total
        expected -= 0.1 * buffer
    assert versions == [8] * WORKERS
    assert np.array_equal(team.values(), expected)
    assert [client.clock() for client in team.ranks] == [8] * WORKERS


def test_pushes_by_name_add_up_until_the_tick(team: Team) -> None:
    team.define()
    tickets = []
    for client in team.ranks:
        tickets.append(client.push("w", np.ones(LARGE)))
        tickets.append(client.push("w", np.full(LARGE, 10.0, np.float32)))
    assert not any(ticket.done() for ticket in tickets)
    with pytest.raises(ParamServeError, match=r"not ended.*call client.tick"):
        tickets[0].result()
    assert (team.values() == 0.0).all()
    ends = [client.tick() for client in team.ranks]
    assert [ticket.result().version for ticket in (*ends, *tickets)] == [1] * 9
    assert (team.values() == 33.0).all()


def test_gradient_given_after_a_push_is_another_one(team: Team) -> None:
    team.define()
    for client in team.ranks:
        for number in (1.0, 2.0):
            array = client.gradient("w")
            array[:] = number
            client.push("w", array)
        client.tick()
    team.ranks[0].drain()
    assert (team.values() == 9.0).all()


def test_push_pull_with_tick_sees_all_ranks(team: Team) -> None:
    team.define()
    blocked = team.ranks[0]
    for client in team.ranks[1:]:
        client.push("w", np.ones(LARGE))
        client.tick()
    assert (blocked.push_pull({"w": np.ones(LARGE)})["w"] == 0.0).all()
    assert (blocked.push_pull({"w": np.ones(LARGE)}, tick=True)["w"] == 4.0).all()
    assert (team.ranks[1].pull("w") == 4.0).all()


def test_reader_without_a_rank_does_not_wait_and_cannot_push(team: Team) -> None:
    team.define()
    reader = team.cluster.client()
    step(team.ranks[0], np.ones(LARGE))
    assert (reader.pull("w") == 0.0).all()
    no_rank = "client without a rank pushed to group 'default'.*Applied: no.*client.assign"
    for tick in (False, True):
        with pytest.raises(NotAMember, match=no_rank):
            reader.push_pull({"w": np.ones(LARGE)}, tick=tick)
    with pytest.raises(NotAMember, match=no_rank):
        reader.push("w", np.ones(LARGE))
    with pytest.raises(NotAMember, match=r"rank -1.*live workers \[0, 1, 2\].*Applied: no"):
        reader.tick().result()
    assert not reader.steps.staged.unapplied()
    assert team.versions() == [0] * len(team.cluster.servers)


def test_tick_of_some_ranks_without_a_gradient_counts_as_zero(team: Team) -> None:
    team.define()
    ends = [client.tick() for client in team.ranks[:2]]
    team.ranks[2].push("w", np.ones(LARGE))
    ends.append(team.ranks[2].tick())
    assert [end.result().version for end in ends] == [1, 1, 1]
    assert (team.values() == 1.0).all()


# --- refused whole ----------------------------------------------------------------------------


def test_hyper_mismatch_names_ranks_and_values_and_applies_nothing(team: Team) -> None:
    team.define(SGD(0.1))
    rates = {0: 0.1, 1: 0.1, 2: 0.7}
    tickets = [
        step(client, np.ones(LARGE), hyper=(rates[rank], 0.0, 0.0, 0.0, 0.0, 0.0))
        for rank, client in enumerate(team.ranks)
    ]
    for ticket in tickets:
        with pytest.raises(
            HyperMismatch, match=r"lr: ranks 0, 1 have 0\.1, rank 2 has 0\.7 .*Applied: no"
        ):
            ticket.result()
    assert not team.values().any()
    assert team.versions() == [0] * len(team.cluster.servers)
    for ticket in [step(client, np.ones(LARGE)) for client in team.ranks]:
        assert ticket.result().version == 1
    assert np.allclose(team.values(), -0.3)


@each_case("policy", [Sync(), Async()], ids=["sync", "async"])
def test_nonfinite_gradient_is_refused_with_rank_and_name(
    make_team: MakeTeam, policy: Policy
) -> None:
    team = make_team(policy)
    team.define()
    client = team.ranks[1]
    client.define({"a": np.zeros(4), "b": np.zeros(LARGE)}, rule=Add())
    bad = np.ones(LARGE)
    bad[-1] = np.nan
    words = r"gradient of 'b' on rank 1 holds NaN or Inf.*Applied: no"
    with pytest.raises(NonFinite, match=words):
        client.push({"a": np.ones(4), "b": bad})
    with pytest.raises(NonFinite, match=words):
        client.push_pull({"a": np.ones(4), "b": bad}, tick=True)
    block = client.blocks()[1]
    slot = client.dense.gradient_slot(block)
    slot[:] = np.inf
    with pytest.raises(NonFinite, match="gradient of 'a' on rank 1"):
        client.dense.step("default", [BlockPush(block, slot)])
    assert client.clock() == 0
    assert team.versions() == [0] * len(team.cluster.servers)
    # What was refused left nothing behind that the next push would carry along.
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    ends = [client.dense.step("default", [BlockPush(block, slot)])]
    ends += [other.tick() for other in (team.ranks[0], team.ranks[2])]
    for end in ends:
        end.result()
    scale = 1.0 if isinstance(policy, Async) else 1.0 / 3.0
    assert np.allclose(client.pull("b"), scale)
    assert np.allclose(client.pull("a"), scale)


@pytest.mark.parametrize("ended", ["tick", "push_pull"])
def test_lent_gradient_written_to_after_its_push_is_refused_at_the_tick(
    team: Team, ended: str
) -> None:
    team.define()
    client = team.ranks[1]
    client.define("b", np.zeros(2), rule=Add())
    gradient = client.gradient("w")
    gradient[:] = 1.0
    ticket = client.push("w", gradient)
    gradient[-1] = np.nan
    words = r"gradient of 'w' on rank 1 holds NaN or Inf.*Applied: no"
    with pytest.raises(NonFinite, match=words):
        client.tick() if ended == "tick" else client.push_pull({"b": np.ones(2)}, tick=True)
    with pytest.raises(NonFinite, match=words):
        ticket.result()
    assert client.clock() == 0
    assert not team.values().any()
    for each in team.ranks:
        each.push("w", np.ones(LARGE))
    assert [end.result().version for end in [each.tick() for each in team.ranks]] == [1] * WORKERS
    assert (team.values() == WORKERS).all()


def test_refused_gradient_can_be_corrected_in_its_place(team: Team) -> None:
    team.define()
    client = team.ranks[0]
    array = client.gradient("w")
    array[:] = np.inf
    with pytest.raises(NonFinite):
        client.push("w", array)
    client.pull("w")
    array[:] = 1.0
    client.push("w", array)
    ends = [each.tick() for each in team.ranks]
    assert [end.result().version for end in ends] == [1] * WORKERS
    assert (team.values() == 1.0).all()


@each_case("kind_of_policy", [Sync, Async], ids=["sync", "async"])
def test_nonfinite_gradient_skipped_is_counted_on_all_shards_alike(
    make_team: MakeTeam, kind_of_policy: type[Sync] | type[Async]
) -> None:
    team = make_team(kind_of_policy(on_nonfinite="skip"))
    team.define()
    bad = np.ones(LARGE)
    bad[0] = np.nan
    tickets = [step(client, bad if client.rank == 1 else np.ones(LARGE)) for client in team.ranks]
    skipped = [ticket.result().skipped for ticket in tickets]
    sync = kind_of_policy is Sync
    assert skipped == ([True] * 3 if sync else [False, True, False])
    team.ranks[0].push("w", bad)
    ends = [client.tick() for client in team.ranks]
    assert [end.result().skipped for end in ends] == [sync] * 3
    expected = 0.0 if sync else 2.0
    assert (team.values() == expected).all()
    reports = team.ranks[0].connection.reports()
    assert [report.groups[0].skipped for report in reports] == [2] * len(team.cluster.servers)
    assert team.versions() == [int(expected)] * len(team.cluster.servers)


# --- who is late, leaves or dies --------------------------------------------------------------


def test_timeout_names_the_missing_workers_and_the_step_goes_on(team: Team) -> None:
    team.define()
    ticket = step(team.ranks[0], np.ones(LARGE))
    step(team.ranks[2], np.ones(LARGE))
    with pytest.raises(PushTimeout, match=r"rank 0 waited .*worker 1 \(at clock 0\).*unknown"):
        ticket.result(0.05)
    with pytest.raises(PullTimeout, match=r"worker 1 \(at clock 0\)"):
        team.ranks[2].pull("w", timeout_s=0.05)
    step(team.ranks[1], np.ones(LARGE))
    assert ticket.result().version == 1
    assert (team.ranks[2].pull("w") == 3.0).all()


def test_worker_that_leaves_does_not_hold_the_clock(team: Team) -> None:
    team.define()
    for client in team.ranks:
        step(client, np.ones(LARGE))
    team.ranks[0].drain()
    ticket = step(team.ranks[0], np.ones(LARGE))
    team.ranks[1].close()
    step(team.ranks[2], np.ones(LARGE))
    assert ticket.result().version == 2
    assert (team.values() == 5.0).all()


def test_worker_that_dies_is_fenced_and_does_not_hold_the_clock(team: Team) -> None:
    team.define()
    first, dead, last = team.ranks
    fenced = [step(dead, np.ones(LARGE)) for _ in range(2)]
    ticket = step(first, np.ones(LARGE))
    step(last, np.ones(LARGE))
    ticket.result()
    ticket = step(first, np.ones(LARGE))
    team.cluster.mark_dead(1)
    step(last, np.ones(LARGE))
    assert ticket.result().version == 2
    assert fenced[0].result().version == 1
    start = time.monotonic()
    with contextlib.suppress(WorkerFenced):
        fenced[1].result()  # it had arrived on all shards in time, or counts on none
    with pytest.raises(WorkerFenced, match="worker 1"):
        step(dead, np.ones(LARGE)).result()
    assert time.monotonic() - start < 2.0
    assert team.values()[0] in (5.0, 6.0)
    assert len(set(team.values())) == 1


def test_pipelined_steps_of_a_dead_worker_are_all_answered(team: Team) -> None:
    team.define()
    dead = team.ranks[1]
    tickets = [step(dead, np.ones(LARGE)) for _ in range(3)]
    wait_until(lambda: team.cluster.held(1) == len(team.cluster.servers))
    step(team.ranks[0], np.ones(LARGE)).done()
    team.cluster.mark_dead(1)
    step(team.ranks[2], np.ones(LARGE)).result()
    start = time.monotonic()
    assert tickets[0].result().version == 1
    for ticket in tickets[1:]:
        with pytest.raises(WorkerFenced):
            ticket.result()
    assert time.monotonic() - start < 2.0


def test_older_incarnation_is_fenced_by_a_newer_one(team: Team) -> None:
    team.define()
    old = team.ranks[1]
    with pytest.raises(ParamServeError, match=r"rank 1 is taken by a live worker"):
        team.cluster.client(1)
    team.cluster.mark_dead(1)
    new = team.cluster.client(1)
    assert (new.connection.incarnation, old.connection.incarnation) == (2, 1)
    wait_until(
        lambda: all(s.role.shard.sessions.members[1].incarnation == 2 for s in team.cluster.servers)
    )
    with pytest.raises(WorkerFenced, match=r"worker 1 \(incarnation 1\)"):
        step(old, np.ones(LARGE)).result()
    new.define("w", np.zeros(LARGE), rule=Add())
    tickets = [step(client, np.ones(LARGE)) for client in (team.ranks[0], new, team.ranks[2])]
    assert [ticket.result().version for ticket in tickets] == [1] * 3
    assert (team.values() == 3.0).all()

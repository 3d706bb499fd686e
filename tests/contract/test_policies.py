"""Policies on real servers: registered, groups' own, changed while running; who is left out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, wait_until
from tests.suites import each_case

from paramserve.client import Client, groups
from paramserve.config import NO_CREDENTIALS, ServerConfig
from paramserve.consistency.base import APPLY, DROP, GroupView, OnPush, Policy, Push
from paramserve.consistency.built_in import (
    Async,
    BoundedStaleness,
    Buffered,
    ElasticAverage,
    LocalSteps,
    Sync,
)
from paramserve.consistency.registry import registered, spec
from paramserve.errors import (
    DefineMismatch,
    NonFinite,
    RuleFailed,
    Timeout,
    UnknownName,
    UnknownRule,
)
from paramserve.messages import LogEntry, Switch
from paramserve.rules import Add, Array, PushInfo
from paramserve.rules.custom import CustomRule
from paramserve.server import ServerRole, process_role

SIZE = 20_000
"""Elements of float64: enough to lie on two shards."""
MakeCluster = Callable[..., RoleCluster]


@dataclass(frozen=True)
class IgnoreStragglers(Policy):
    """Drops the gradients of workers that are more than `behind` clocks behind the first one."""

    behind: int

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return DROP if max(group.clocks.values()) - push.clock > self.behind else APPLY


@dataclass(frozen=True)
class Patient(Sync):
    """Sync of a user's own: only the servers know it."""


def tenth(staleness: int) -> float:
    return 1.0 if staleness == 0 else 0.1


@dataclass(frozen=True)
class ByWeight(CustomRule):
    """Adds each gradient times the weight of its push."""

    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        value += push.weight * gradient


@dataclass(frozen=True)
class Fails(CustomRule):
    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        raise KeyError("thirteen")


@pytest.fixture
def make(make_cluster: MakeCluster, shards: int) -> Callable[..., RoleCluster]:
    """Clusters with 1 and 2 shards, over Unix sockets."""

    def made(policy: Policy | None = None, **options: Any) -> RoleCluster:
        return make_cluster(servers=shards, policy=policy, **options)

    return made


def team(cluster: RoleCluster, workers: int = 2, **options: Any) -> list[Client]:
    """A client of each rank, with one parameter that is defined."""
    clients = [cluster.client(rank) for rank in range(workers)]
    for client in clients:
        client.define("w", np.zeros(SIZE), rule=Add(), **options)
    return clients


def ones(factor: float = 1.0) -> Array:
    return np.full(SIZE, factor)


def ended(client: Client, gradient: float = 1.0, **options: Any) -> Any:
    """A step of one push and a tick, whose outcome is not waited for."""
    client.push("w", ones(gradient))
    return client.tick(**options)


def value(cluster: RoleCluster) -> float:
    with cluster.client() as reader:
        found = reader.pull("w")
    assert (found == found[0]).all()
    return float(found[0])


# --- registered ---------------------------------------------------------------------------------


def test_registered_policy_drops_what_it_says(make: MakeCluster) -> None:
    cluster = make(IgnoreStragglers(behind=1), workers=2, registers=[IgnoreStragglers])
    first, second = team(cluster)
    for _ in range(2):
        ended(first).result()
    outcomes = [
        second.push("w", ones(100.0)).result(),
        second.tick().result(),
        second.push("w", ones(10.0)).result(),
    ]
    assert [outcome.skipped for outcome in outcomes] == [True, False, False]
    assert value(cluster) == 12.0
    for beat in second.connection.reports():
        assert [(g.policy, g.dropped) for g in beat.groups] == [("IgnoreStragglers", ((1, 1),))]


def test_registered_function_damps_by_staleness(make: MakeCluster) -> None:
    cluster = make(Async(damping=tenth), workers=2, registers=[tenth])
    first, second = team(cluster)
    for client in (first, second):
        client.pull("w")
    for client in (first, second):
        client.push("w", ones(10.0)).result()
    assert value(cluster) == 11.0


def test_rule_and_policy_are_registered_together(make: MakeCluster) -> None:
    cluster = make(IgnoreStragglers(0), workers=1, registers=[ByWeight, IgnoreStragglers, tenth])
    client = cluster.client(0)
    client.define("w", np.zeros(SIZE), rule=ByWeight())
    client.push("w", ones(), weight=3.0).result()
    assert client.push_pull({"w": ones()}, weight=0.5)["w"][-1] == 3.5
    with pytest.raises(UnknownRule, match="'IgnoreStragglers'"):
        client.define("x", np.zeros(3), rule=UnderItsName())


@dataclass(frozen=True)
class UnderItsName(Add):
    """A rule that has the name of a policy."""

    name: ClassVar[str] = "IgnoreStragglers"


def test_policy_that_no_server_knows_is_refused_and_the_name_stays_free(make: MakeCluster) -> None:
    client = make().client()
    for policy in (IgnoreStragglers(1), Async(damping=tenth)):
        with pytest.raises(UnknownRule, match=r"IgnoreStragglers|tenth.*rules=\[tenth\]") as told:
            client.define("w", np.zeros(SIZE), rule=Add(), group="g", consistency=policy)
        assert told.value.applied == "no"
    client.define("w", np.ones(SIZE), rule=Add(), group="g", consistency=Buffered(size=2))
    assert client.steps.terms("g").policy == Buffered(size=2)
    with pytest.raises(UnknownRule, match="IgnoreStragglers"):
        client.set_consistency("g", IgnoreStragglers(1))


def test_server_does_not_start_with_a_policy_that_it_does_not_know() -> None:
    config = ServerConfig(0, 1, 1, (), "", spec(IgnoreStragglers(1)))

    async def start(*things: Any) -> ServerRole:
        return process_role(config, NO_CREDENTIALS, None, registered(things))

    with pytest.raises(UnknownRule, match=r"rules=\[IgnoreStragglers\]"):
        asyncio.run(start())
    assert asyncio.run(start(IgnoreStragglers)).shard.policy == IgnoreStragglers(1)


def test_client_goes_by_the_terms_of_a_policy_that_it_has_no_class_of(make: MakeCluster) -> None:
    cluster = make(Patient(on_nonfinite="skip"), workers=1, registers=[Patient])
    (client,) = team(cluster, 1)
    assert client.steps.terms() == (True, False, None)
    ticket = client.push("w", ones(np.nan))
    client.tick()
    assert ticket.result().skipped
    assert (client.steps.terms(), value(cluster)) == ((True, False, None), 0.0)


# --- a group's own --------------------------------------------------------------------------------


def test_groups_go_by_their_own_policies(make: MakeCluster) -> None:
    cluster = make(Async(), workers=2)
    first, second = team(cluster)
    for client in (first, second):
        client.define("s", np.zeros(3), rule=Add(), group="g", consistency=Sync(reduce="sum"))
    assert (first.steps.terms().collects, first.steps.terms("g").collects) == (False, True)
    first.push("w", ones()).result()
    first.push("s", np.ones(3))
    ticket = first.tick("g")
    assert second.pull("w")[0] == 1.0
    assert not ticket.done()
    second.tick("g")
    assert ticket.result().version == 1
    assert second.pull("s").tolist() == [1.0] * 3


def test_group_of_an_async_cluster_may_take_the_mean_of_local_steps(make: MakeCluster) -> None:
    cluster = make(Async(), workers=2)
    policy = LocalSteps(every=4)
    first, second = team(cluster, group="g", consistency=policy)
    assert first.steps.terms("g").policy == policy
    first.push("w", ones(2.0))
    ticket = first.tick("g")
    assert value(cluster) == 0.0
    assert not ticket.done()
    second.push("w", ones(4.0))
    second.tick("g").result()
    assert (ticket.result().version, value(cluster)) == (1, 3.0)


def test_group_of_a_collecting_cluster_may_skip_or_refuse_by_itself(make: MakeCluster) -> None:
    client = make(Sync(), workers=1).client(0)
    client.define("w", np.zeros(SIZE), rule=Add())
    own = Async(on_nonfinite="skip")
    client.define("s", np.zeros(3), rule=Add(), group="g", consistency=own)
    assert client.push("s", np.full(3, np.nan)).result().skipped
    with pytest.raises(NonFinite):
        client.push("w", ones(np.nan))
    assert client.push_pull({"s": np.ones(3)})["s"].tolist() == [1.0] * 3


def test_groups_policy_is_given_once_and_the_same_by_all(make: MakeCluster) -> None:
    cluster = make()
    client, other = cluster.client(), cluster.client()
    first = {"rule": Add(), "group": "g"}
    client.define("a", np.zeros(3), consistency=BoundedStaleness(2), **first)
    for policy in (Async(), BoundedStaleness(3)):
        with pytest.raises(DefineMismatch, match=r"group 'g' is defined with .*BoundedStaleness"):
            other.define("a", np.zeros(3), consistency=policy, **first)
        with pytest.raises(DefineMismatch, match="'g'"):
            other.directory.await_block({"a": (3,)}, dtype="float64", consistency=policy, **first)
    for policy in (None, BoundedStaleness(2)):
        other.define("a", np.zeros(3), consistency=policy, **first)
        other.directory.await_block({"a": (3,)}, dtype="float64", consistency=policy, **first)
        other.define("b", np.zeros(3), consistency=policy, **first)
    assert other.steps.terms("g").policy == BoundedStaleness(2)
    client.define("w", np.zeros(3), rule=Add())
    with pytest.raises(DefineMismatch, match="group 'default' is defined with the cluster's"):
        other.define("v", np.zeros(3), rule=Add(), consistency=BoundedStaleness(2))


# --- too late, later, resting, retiring ---------------------------------------------------------


def test_worker_that_comes_too_late_is_told_and_goes_on_with_the_others(make: MakeCluster) -> None:
    cluster = make(Sync(reduce="sum", backup=1), workers=2)
    fast, slow = team(cluster)
    for _ in range(3):
        assert not ended(fast).result().skipped
    outcome = ended(slow, 100.0).result()
    assert (outcome.skipped, slow.clock(), slow.steps.missed) == (True, 3, 2)
    outcome = ended(slow, 10.0).result()
    assert (outcome.skipped, slow.clock(), slow.steps.missed) == (False, 4, 2)
    assert (fast.steps.missed, value(cluster)) == (0, 13.0)


def test_worker_that_rests_holds_up_no_other_and_comes_back(make: MakeCluster) -> None:
    cluster = make(Sync(reduce="sum"), workers=2)
    first, second = team(cluster)
    tickets = [ended(first), ended(second)]
    second.rest()
    assert [ticket.done() for ticket in tickets] == [True, True], "it was drained first"
    for _ in range(3):
        ended(first).result()
    assert second.enter()
    both = [ended(first), ended(second, 100.0)]
    for ticket in both:
        assert not ticket.result().skipped
    assert first.clock() == second.clock()
    assert (second.steps.missed, value(cluster)) == (0, 2.0 + 3.0 + 101.0)
    with pytest.raises(UnknownName, match="group 'x'"):
        second.rest("x")


def test_rest_raises_what_was_refused_before_and_no_rank_rests(make: MakeCluster) -> None:
    client = make(workers=1, registers=[Fails]).client(0)
    client.define("w", np.zeros(SIZE), rule=Fails())
    client.push("w", ones())
    with pytest.raises(RuleFailed, match="thirteen"):
        client.rest()
    assert {group.clocks for beat in client.connection.reports() for group in beat.groups} == {
        ((0, 0),)
    }
    client.rest()
    assert {group.clocks for beat in client.connection.reports() for group in beat.groups} == {()}


def test_worker_that_joins_later_begins_where_the_others_are(make: MakeCluster) -> None:
    cluster = make(Sync(reduce="sum"), workers=1)
    (first,) = team(cluster, 1)
    for _ in range(5):
        ended(first).result()
    cluster.scale(2)
    late = cluster.client(1)
    assert late.clock() == 5
    late.define("w", np.zeros(SIZE), rule=Add())
    assert late.enter()
    tickets = ended(late), ended(first)
    for ticket in tickets:
        assert not ticket.result().skipped
    assert late.clock() == first.clock()
    assert (late.steps.missed, value(cluster)) == (0, 5.0 + 2.0)


def test_worker_that_joins_later_enters_with_its_first_step(make: MakeCluster) -> None:
    cluster = make(Sync(reduce="sum"), workers=1)
    (first,) = team(cluster, 1)
    cluster.scale(2)
    late = cluster.client(1)
    late.define("w", np.zeros(SIZE), rule=Add())
    late.push("w", ones(100.0))
    thread = threading.Thread(target=lambda: late.tick().result())
    thread.start()
    while thread.is_alive():
        ticket = ended(first)
        while thread.is_alive() and not ticket.done():
            time.sleep(0.001)
    thread.join()
    late.close()
    assert (late.steps.missed, value(cluster) - first.clock()) == (0, 100.0)


def test_worker_that_the_run_will_do_without_is_told(make: MakeCluster) -> None:
    cluster = make(Async(), workers=2)
    first, second = team(cluster)
    ended(second).result()
    assert not second.steps.retiring
    cluster.scale(1)
    wait_until(lambda: ended(second).result().version > 0 and second.steps.retiring)
    ended(first).result()
    assert not first.steps.retiring


# --- weights, factors, marks ----------------------------------------------------------------------


def test_weights_of_a_synchronous_step(make: MakeCluster) -> None:
    cluster = make(Sync(), workers=2)
    first, second = team(cluster)
    first.push("w", ones(1.0), weight=3.0)
    first.push("w", ones(1.0))
    with pytest.raises(ValueError, match=r"weight 3\.0, now 2\.0"):
        first.push("w", ones(), weight=2.0)
    with pytest.raises(ValueError, match=r"weight 3\.0, now 4\.0"):
        first.tick(weight=4.0)
    tickets = [first.tick(weight=3.0), ended(second, 6.0, weight=1.0)]
    for ticket in tickets:
        ticket.result()
    assert value(cluster) == pytest.approx((3 * 2 + 1 * 6) / 4)
    tickets = [ended(first, 4.0), ended(second, 2.0)]  # nothing is left of the weights before
    for ticket in tickets:
        ticket.result()
    assert value(cluster) == pytest.approx(3 + 3)


def test_weight_that_is_none_is_refused(make_cluster: MakeCluster) -> None:
    (client,) = team(make_cluster(workers=1), 1)
    uses: list[Callable[[float], Any]] = [
        lambda weight: client.push("w", ones(), weight=weight),
        lambda weight: client.push_pull({"w": ones()}, weight=weight),
        lambda weight: client.tick(weight=weight),
        lambda weight: setattr(client.steps, "factor", weight),
    ]
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        for use in uses:
            with pytest.raises(ValueError, match=r"(weight|factor) (of|must be)"):
                use(weight)
    assert client.pull("w")[0] == 0.0


@each_case("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_factor_multiplies_a_workers_gradients(make: MakeCluster, policy: Policy) -> None:
    cluster = make(policy, workers=2)
    first, second = team(cluster)
    second.steps.factor = 0.25
    tickets = [ended(first, 8.0), ended(second, 8.0)]
    for ticket in tickets:
        ticket.result()
    assert value(cluster) == 10.0


def test_mark_of_each_tick_is_reported_once_it_is_in_the_values(make: MakeCluster) -> None:
    cluster = make(Sync(), workers=2)
    first, second = team(cluster)
    marks = iter([(7, 1), None, (8, 2)])
    second.steps.next_mark = lambda: next(marks)
    second.pull("w")
    for _ in range(2):
        ended(first)
    for _ in range(2):
        last = ended(second)
    last.result()
    ended(second)
    for beat in first.connection.reports():
        assert [group.marks for group in beat.groups] == [((second.connection.id, 7, 1),)]
    ended(first).result()
    for beat in first.connection.reports():
        assert [group.marks for group in beat.groups] == [((second.connection.id, 8, 2),)]


# --- changes while running ------------------------------------------------------------------------


def rounds(clients: list[Client], until: int) -> None:
    """Steps of all, in turn, up to a clock."""
    while clients[0].clock() < until:
        for ticket in [ended(client) for client in clients]:
            ticket.result()


def test_change_takes_effect_at_one_clock_on_all_shards(make: MakeCluster) -> None:
    cluster = make(Async(), workers=2)
    clients = first, second = team(cluster)
    rounds([first, second], 3)
    clock = first.set_consistency("default", Sync(reduce="sum"))
    assert clock > 3
    assert not first.steps.terms().collects
    assert first.steps._terms.at(0, clock).collects, "no answer has to say so"
    while first.clock() < clock:
        ended(first).result()  # by the old policy: it waits for no worker
    assert first.steps.terms().collects
    assert second.clock() == 3
    waiting = ended(first)
    while second.clock() < clock:
        ended(second).result()
        assert not waiting.done()
    assert second.steps.terms().collects
    ended(second).result()
    assert waiting.result().version == 2 * clock + 1, "one update of both"
    assert value(cluster) == 2 * (clock + 1)
    back = second.set_consistency("default", Async())
    rounds(list(clients), back)
    ended(second).result()
    assert (second.clock(), value(cluster)) == (back + 1, 2 * back + 1)


def test_change_of_one_group_leaves_the_others_alone(make: MakeCluster) -> None:
    client = make(Async(), workers=1).client(0)
    for group in ("a", "b"):
        client.define(group, np.zeros(3), rule=Add(), group=group)
    clock = client.set_consistency("b", Sync())
    for group in ("a", "b"):
        for _ in range(clock):
            client.tick(group).result()
    assert (client.steps.terms("a").collects, client.steps.terms("b").collects) == (False, True)


def test_gradients_of_a_step_that_its_policy_changed_in_go_with_its_tick(
    make_cluster: MakeCluster,
) -> None:
    (client,) = team(make_cluster(workers=1, policy=Sync()), 1)
    clock = client.set_consistency("default", Async())
    rounds([client], clock - 1)
    client.push("w", ones())
    client.steps.advance_to("default", clock)  # as an answer may say
    client.push("w", ones())
    assert client.pull("w")[0] == clock - 1
    client.tick().result()
    assert client.pull("w")[0] == clock + 1


def test_worker_that_comes_again_knows_the_changed_policy(make: MakeCluster) -> None:
    cluster = make(Async(), workers=2, restarts=True)
    first, second = team(cluster)
    clock = first.set_consistency("default", Sync(reduce="sum"))
    rounds([first, second], clock + 1)
    second.close(leave=False)
    again = cluster.client(1)
    assert (again.connection.incarnation, again.clock()) == (2, clock + 1)
    again.define("w", np.zeros(SIZE), rule=Add())
    assert again.steps.terms().collects
    rounds([first, again], clock + 2)
    assert value(cluster) == 2 * (clock + 2)


@each_case("joins", ["again", "late"])
@each_case("collects", [True, False], ids=["sync between", "async between"])
def test_worker_that_comes_between_two_changes_steps_by_the_policy_in_between(
    make: MakeCluster, collects: bool, joins: str
) -> None:
    policies = (Async(), Sync(reduce="sum")) if collects else (Sync(reduce="sum"), Async())
    cluster = make(policies[0], workers=2, restarts=True)
    first, second = team(cluster)
    between = first.set_consistency("default", policies[1])
    rounds([first, second], between)
    until = second.set_consistency("default", policies[0])
    assert between < until
    if joins == "again":
        second.close(leave=False)
        other = cluster.client(1)
        workers = [first, other]
    else:
        cluster.scale(3)
        other = cluster.client(2)
        workers = [first, second, other]
    other.define("w", np.zeros(SIZE), rule=Add())
    assert other.clock() == between
    expected = 2 * between
    assert other.enter() is (joins == "late")
    while other.clock() < until + 2:
        assert other.steps.terms().collects == (collects == (other.clock() < until))
        assert other.steps.terms().refuses
        for ticket in [ended(client) for client in workers]:
            ticket.result()
        expected += len(workers)
    assert value(cluster) == expected


IMPOSSIBLE: list[tuple[Any, type[Exception], str]] = [
    ("async", TypeError, "consistency must be one of"),
    (Async, TypeError, "call it: ps.Async"),
    (Sync(backup=2), ValueError, "backup of Sync must be below the number of workers, 2"),
    (LocalSteps(every=2), ValueError, "LocalSteps cannot be changed to or from"),
    (ElasticAverage(rho=0.1), ValueError, "ElasticAverage cannot be changed"),
    (IgnoreStragglers(1), UnknownRule, "'IgnoreStragglers'"),
    (Async(damping=tenth), UnknownRule, "'tenth'"),
]


def test_change_to_what_cannot_be_is_refused(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(servers=2, workers=2)
    first, second = team(cluster)
    for policy, error, words in IMPOSSIBLE:
        with pytest.raises(error, match=words):
            first.set_consistency("default", policy)
        for beat in first.connection.reports():
            assert [group.change for group in beat.groups] == [None]
    rounds([first, second], 6)


def test_change_of_an_unknown_group_or_from_a_local_algorithm_is_refused(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(servers=2, workers=1)
    client = cluster.client(0)
    client.define("w", np.zeros(3), rule=Add(), consistency=LocalSteps(every=2))
    with pytest.raises(UnknownName, match="group 'x'"):
        client.set_consistency("x", Async())
    with pytest.raises(ValueError, match="LocalSteps cannot be changed to or from"):
        client.set_consistency("default", Async())


def test_change_that_a_shard_does_not_learn_names_it(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "CHANGE_POLL_S", 0.001)
    cluster = make_cluster(servers=2, workers=1)
    (client,) = team(cluster, 1)
    log = cluster.servers[1].role.shard.decisions
    take = log.on_entry

    def lose_switches(message: LogEntry) -> None:
        if not isinstance(message.decision, Switch):
            take(message)

    monkeypatch.setattr(log, "on_entry", lose_switches)
    with pytest.raises(Timeout, match=r"Sync for group 'default': shard 1 has not.*unknown"):
        client.set_consistency("default", Sync(), timeout_s=0.1)
    monkeypatch.undo()
    wait_until(
        lambda: all(g.change is not None for b in client.connection.reports() for g in b.groups)
    )

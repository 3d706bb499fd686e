"""Workers that live and do not step for long, as while they evaluate: who waits how long."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection

import numpy as np
import pytest
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import DEADLINES, RoleCluster, in_threads
from tests.suites import each_case

import paramserve as ps
from paramserve.client import Client, timeouts
from paramserve.config import Limits
from paramserve.errors import DefineTimeout, PushTimeout


def cluster_of_two(make: MakeCluster, busy_s: float) -> RoleCluster:
    deadlines = structs.replace(DEADLINES, request_s=0.2, busy_s=busy_s)
    return make("unix", servers=2, workers=2, policy=ps.Sync(), deadlines=deadlines)


def test_worker_that_evaluates_is_waited_for_while_it_lives(make_cluster: MakeCluster) -> None:
    waited = threading.Event()

    def train(worker: ps.Worker) -> float:
        client = worker.client
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
        if worker.rank == 0:
            assert waited.wait(10.0)  # the other one has waited as long as for a request
        elif worker.rank == 1:
            client.steps.waits.all_live = told(client.steps.waits.all_live)
        return float(client.push_pull({"w": np.ones(3)}, tick=True)["w"][0])

    def told(ask: Callable[..., bool]) -> Callable[..., bool]:
        def asked(ranks: object) -> bool:
            live = ask(ranks)
            waited.set()
            return live

        return asked

    with pytest.warns(
        UserWarning, match=r"rank 1 has waited .* for a step of rank 0; as long"
    ) as warned:
        found = Ranks(cluster_of_two(make_cluster, 10.0), train).start(0, 1).end()
    assert found == {0: 1.0, 1: 1.0}
    assert {each.filename for each in warned} == {__file__}, "the user's line"


@pytest.mark.parametrize(
    ("change", "busy_s", "knob"),
    [
        ("none", 0.3, r"raise deadlines=ps.Deadlines\(busy_s=...\)"),
        ("client", 10.0, r"raise deadlines=ps.Deadlines\(busy_s=...\)"),
        ("call", 10.0, "raise timeout_s"),
        ("dead", 10.0, r"raise deadlines=ps.Deadlines\(busy_s=...\)"),
    ],
)
@pytest.mark.filterwarnings("ignore:rank 1 has waited")
def test_wait_for_a_busy_worker_ends_and_names_what_to_raise(
    make_cluster: MakeCluster, change: str, busy_s: float, knob: str
) -> None:
    """It ends at `busy_s`, or at the caller's own limit, or where the worker is to be restarted."""
    done = threading.Event()
    deadlines = structs.replace(DEADLINES, request_s=0.2, busy_s=busy_s)
    cluster = make_cluster(
        "unix", workers=2, policy=ps.Sync(), deadlines=deadlines, restarts=change == "dead"
    )

    def train(worker: ps.Worker) -> None:
        client = worker.client
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
        if worker.rank == 0:
            if change == "dead":
                raise Killed
            assert done.wait(10.0)
            return
        if change == "client":
            client.timeout_s = 0.3
        ticket = client.push({"w": np.ones(3)})
        client.tick()
        try:
            ticket.result(0.1 if change == "call" else None)
        finally:
            done.set()

    with pytest.raises(PushTimeout, match=rf"worker 0 \(at clock 0\).*{knob}"):
        Ranks(cluster, train, again=False).start(0, 1).end()


@pytest.mark.filterwarnings("ignore:rank 1 has waited")
def test_wait_for_a_busy_worker_goes_on_while_the_servers_are_slow_to_say_so(
    make_cluster: MakeCluster,
) -> None:
    cluster = cluster_of_two(make_cluster, 10.0)
    evaluates, waits = (cluster.client(rank) for rank in range(2))
    for client in (evaluates, waits):
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
    waits.push({"w": np.ones(3)})
    ticket = waits.tick()
    thawed = threading.Event()

    def stand_still() -> None:
        with cluster.frozen():
            thawed.wait(1.5)  # past `request_s` and the second that an inquiry once had
        evaluates.push({"w": np.ones(3)})
        evaluates.tick()

    in_threads(stand_still, ticket.result)
    assert waits.pull("w").tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:rank 1 has waited")
@each_case(
    "call",
    [
        lambda client: client.assign("buffer", np.ones(2)),
        lambda client: client.drain(),
        lambda client: client.rest(),
    ],
    ids=["assign", "drain", "rest"],
)
def test_call_behind_a_step_that_waits_for_a_busy_worker_waits_as_long(
    make_cluster: MakeCluster, call: Callable[[Client], None]
) -> None:
    cluster = cluster_of_two(make_cluster, 10.0)
    evaluates, waits = (cluster.client(rank) for rank in range(2))
    for client in (evaluates, waits):
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
        client.define("buffer", np.zeros(2), group="buffers", timeout_s=10.0)
    waits.push({"w": np.ones(3)})
    waits.tick()
    asked = asked_of(waits)

    def step_late() -> None:
        assert asked.wait(10.0)  # the other one has waited as long as for a request
        evaluates.push({"w": np.ones(3)})
        evaluates.tick().result()

    in_threads(step_late, lambda: call(waits))
    assert evaluates.pull("w").tolist() == [1.0] * 3


@pytest.mark.filterwarnings("ignore:rank 1 has waited")
def test_step_for_which_a_busy_worker_has_left_no_room_waits_as_long(
    make_cluster: MakeCluster,
) -> None:
    deadlines = structs.replace(DEADLINES, request_s=0.2, busy_s=10.0)
    limits = Limits(outstanding_max=2)
    cluster = make_cluster("unix", workers=2, policy=ps.Sync(), deadlines=deadlines)
    evaluates, waits = cluster.client(0), cluster.client(1, limits=limits)
    for client in (evaluates, waits):
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
    asked = asked_of(waits)

    def step(client: Client) -> None:
        client.push({"w": np.ones(3)})
        client.tick()

    def step_late() -> None:
        assert asked.wait(10.0)
        for _ in range(3):
            step(evaluates)

    def step_ahead() -> None:
        for _ in range(3):
            step(waits)
        waits.drain()

    in_threads(step_late, step_ahead)
    evaluates.drain()
    assert evaluates.pull("w").tolist() == [3.0] * 3


@pytest.mark.filterwarnings("ignore:rank 1 has waited")
def test_worker_that_joins_waits_as_long_for_a_busy_worker(make_cluster: MakeCluster) -> None:
    cluster = cluster_of_two(make_cluster, 10.0)
    evaluates, enters = (cluster.client(rank) for rank in range(2))
    for client in (evaluates, enters):
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
    enters.rest()
    asked = asked_of(enters)

    def step_late() -> None:
        assert asked.wait(10.0)
        evaluates.push({"w": np.ones(3)})
        evaluates.tick().result(10.0)

    def enter() -> None:
        assert enters.enter(), "which waits for no other worker"
        enters.push({"w": np.ones(3)})
        enters.tick().result()

    in_threads(step_late, enter)
    assert evaluates.pull("w").tolist() == [1.0] * 3


def asked_of(client: Client) -> threading.Event:
    """Set when a client that waits has asked whether those that it waits for live."""
    asked = threading.Event()
    ask = client.steps.waits.all_live

    def told(ranks: Collection[int]) -> bool:
        live = ask(ranks)
        asked.set()
        return live

    client.steps.waits.all_live = told
    return asked


@each_case("timeout_s", [None, 10.0])
def test_wait_says_once_for_whom_it_is_and_how_long(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None
) -> None:
    monkeypatch.setattr(timeouts, "SAY_S", 0.05)
    said = list[str]()
    heard = threading.Event()

    def hear(text: str, **options: object) -> None:
        said.append(text)
        heard.set()

    monkeypatch.setattr(warnings, "warn", hear)
    cluster = cluster_of_two(make_cluster, 10.0)
    evaluates, waits = (cluster.client(rank) for rank in range(2))
    for client in (evaluates, waits):
        client.define("w", np.zeros(3), rule=ps.Add(), timeout_s=10.0)
    waits.push({"w": np.ones(3)})
    ticket = waits.tick()
    asked = asked_of(waits) if timeout_s is None else heard

    def step_late() -> None:
        assert heard.wait(10.0)
        assert asked.wait(10.0)  # past `request_s`
        evaluates.push({"w": np.ones(3)})
        evaluates.tick()

    in_threads(step_late, lambda: ticket.result(timeout_s))
    (text,) = said
    assert "rank 1 has waited 0 s in tick for a step of rank 0; " in text
    knob = "timeout_s=..."
    if timeout_s is None:
        knob = "deadlines=ps.Deadlines(busy_s=...) of the engine or ps.connect"
    assert text.endswith(f"it waits up to 10 s (change it with {knob})")


@each_case("lives", [True, False])
def test_rank_0_that_defines_late_is_waited_for_while_it_lives(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """As while it loads data before `worker.optimizer`."""
    monkeypatch.setattr(timeouts, "SAY_S", 0.1)
    cluster = cluster_of_two(make_cluster, 10.0)
    waits = cluster.client(1)

    def await_it() -> None:
        waits.directory.await_block({"w": (3,)}, dtype="float64", rule=ps.Add())

    if not lives:
        knob = r"rank 0, which defines it, or raise deadlines=ps.Deadlines\(request_s=...\)"
        with (
            pytest.warns(UserWarning, match="has waited 0 s for rank 0 to define group 'default'"),
            pytest.raises(DefineTimeout, match=rf"'w' was not defined in 0\.\d s.*{knob}"),
        ):
            await_it()
        return
    loads = cluster.client(0)
    asked = asked_of_connection(waits)

    def define_late() -> None:
        assert asked.wait(10.0)
        loads.define("w", np.zeros(3), rule=ps.Add())

    knob = r"\(change it with deadlines=ps.Deadlines\(busy_s=...\) of the engine or ps.connect\)"
    with pytest.warns(UserWarning, match=rf"up to 10 s {knob}$"):
        in_threads(define_late, await_it)
    assert waits.pull("w").tolist() == [0.0] * 3


def asked_of_connection(client: Client) -> threading.Event:
    """Set when a client has asked three times whether rank 0 lives: then `request_s` is over."""
    asks, asked = [0], threading.Event()
    ask = client.connection.all_live

    def told(ranks: Collection[int]) -> bool:
        asks[0] += 1
        if asks[0] == 3:
            asked.set()
        return ask(ranks)

    client.connection.all_live = told
    return asked

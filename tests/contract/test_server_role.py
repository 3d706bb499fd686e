"""The server around its shard: kernels, links to other servers; and calls to the coordinator."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import WAIT_S, in_threads, wait_until
from tests.suites import each_case

from paramserve import compiling
from paramserve.client import Client
from paramserve.config import NO_CREDENTIALS, Limits
from paramserve.consistency.built_in import Async, Buffered, Sync
from paramserve.core.sums import GradientBuffer
from paramserve.errors import (
    ClientClosed,
    CoordinatorGone,
    ParamServeError,
    ProtocolError,
    Timeout,
)
from paramserve.logs import event_of
from paramserve.messages import AskStatus, Found, Hello, Lookup, Record, Status, WorkerBeat
from paramserve.rules import SGD, Add
from paramserve.transport.control import ControlLink

# --- kernels ----------------------------------------------------------------------------------


class Compiler:
    """Stands in for the compiling of kernels; takes until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.error = error
        self.started, self.gate = threading.Event(), threading.Event()
        self.done = 0
        monkeypatch.setattr(compiling, "loaded", lambda dtype, rule: bool(self.done))
        monkeypatch.setattr(compiling, "load_kernels", self)

    def __call__(self, dtype: Any, rule: Any) -> None:
        self.started.set()
        self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        self.done += 1


@each_case("kind", ["unix", "tcp"])
def test_requests_wait_in_order_while_kernels_are_compiled(
    make_cluster: MakeCluster, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(kind)
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(100), rule=Add())
    compiler = Compiler(monkeypatch)
    thread = threading.Thread(target=lambda: client.define("v", np.ones(100), rule=SGD(0.1)))
    thread.start()
    assert compiler.started.wait(WAIT_S)
    tickets = [other.push("w", np.full(100, float(n))) for n in range(3)]
    gone = cluster.client()
    gone.connection.exchange.shards[0].link.close()  # what it had sent is dropped with it
    time.sleep(0.02)
    assert not any(ticket.done() for ticket in tickets)
    compiler.gate.set()
    assert [ticket.result().version for ticket in tickets] == [1, 2, 3]
    thread.join(WAIT_S)
    assert (client.pull("v") == 1.0).all()
    assert compiler.done == 1


def test_kernels_that_cannot_be_compiled_are_told_and_others_go_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix")
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    compiler = Compiler(monkeypatch, RuntimeError("no compiler"))
    compiler.gate.set()
    with pytest.raises(ParamServeError, match=r"could not compile.*no compiler"):
        client.define("v", np.ones(3), rule=SGD(0.1))
    assert other.push("w", np.ones(3)).result().version == 1
    compiler.error = None
    client.close()
    with cluster.client() as third:
        third.define("v", np.ones(3), rule=SGD(0.1))
        assert third.pull("v").tolist() == [1.0] * 3


# --- links between servers --------------------------------------------------------------------


def test_servers_find_each_other_again_when_their_link_breaks(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", servers=2, workers=1, policy=Sync())
    client = cluster.client(0)
    client.define("w", np.zeros(20_000), rule=Add())
    for step in range(1, 6):
        assert (client.push_pull({"w": np.ones(20_000)}, tick=True)["w"] == step).all()
        if step % 2:

            def cut() -> None:
                for running in cluster.servers:
                    for conn, party in list(running.role._parties.items()):
                        if party == 0:
                            conn.close()

            cluster.on_server(cut)


# --- calls to the coordinator -----------------------------------------------------------------


@pytest.fixture
def control(make_cluster: MakeCluster) -> ControlLink:
    cluster = make_cluster("unix")
    link = ControlLink.connect(
        [cluster.address],
        Hello("join"),
        credentials=NO_CREDENTIALS,
        limits=Limits(),
        timeout_s=WAIT_S,
    )
    cluster.closed_at_end.append(link)
    return link


def ask(link: ControlLink, timeout_s: float = WAIT_S) -> Status:
    return link.call(AskStatus(0), Status, timeout_s=timeout_s)


def test_calls_of_several_threads_get_their_own_answers(control: ControlLink) -> None:
    def many() -> None:
        for _ in range(20):
            assert ask(control).members == ()
            control.notify(WorkerBeat(0))

    in_threads(many, many, many)


def test_late_answer_to_a_call_is_not_taken_for_the_next(
    control: ControlLink,
) -> None:
    lookup = Lookup(0, ("nothing",), 0.5)
    with pytest.raises(Timeout, match=r"did not answer Lookup in 0\.0 s.*Applied: unknown"):
        control.call(lookup, Found, timeout_s=0.01, slack_s=0.0)
    time.sleep(0.6)
    assert ask(control).members == ()


def test_call_that_the_coordinator_cannot_read_is_a_protocol_error(control: ControlLink) -> None:
    bad = Lookup(0, (3,), 0.0)
    with pytest.raises(ProtocolError, match="a header was refused"):
        control.call(bad, Found, timeout_s=WAIT_S)
    with pytest.raises((CoordinatorGone, ClientClosed)):
        ask(control)


def test_call_waits_for_another_threads_call_no_longer_than_its_timeout(
    control: ControlLink,
) -> None:
    thread = threading.Thread(target=lambda: _quiet(control, Lookup(0, ("x",), 2.0)))
    calls = control._call
    thread.start()
    wait_until(lambda: control._call > calls)
    start = time.monotonic()
    with pytest.raises(Timeout):
        control.call(AskStatus(0), Status, timeout_s=0.05, slack_s=0.0)
    assert time.monotonic() - start < 1.0
    control.close()
    thread.join(1.0)
    assert not thread.is_alive()


def _quiet(control: ControlLink, message: Lookup) -> None:
    with pytest.raises(ClientClosed):
        control.call(message, Found, timeout_s=WAIT_S)


def test_notify_of_a_closed_link_is_false(control: ControlLink) -> None:
    assert control.notify(WorkerBeat(0)) is True
    control.close()
    control.close()
    assert control.notify(WorkerBeat(0)) is False


def test_records_reach_the_driver_with_the_heartbeat_and_at_the_end(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("unix", workers=1)
    worker = cluster.client(0)
    worker.define("w", np.zeros(2), rule=Add())
    worker.tick().result()
    worker.connection.log(1, {"loss": np.float32(0.5)})
    driver = ControlLink.connect(
        [cluster.address],
        Hello("driver"),
        credentials=NO_CREDENTIALS,
        limits=Limits(),
        timeout_s=WAIT_S,
    )
    wait_until(lambda: ask(driver).next_record == 1)
    worker.connection.log(1, {"loss": 0.25})
    worker.close()
    (first, second) = ask(driver).records
    assert isinstance(first, Record)
    assert (first.rank, first.clock, first.values) == (0, 1, {"loss": 0.5})
    assert second.values == {"loss": 0.25}
    assert ask(driver).members[0].state == "left"
    driver.close()


def test_heartbeat_goes_out_while_a_call_waits_for_its_answer(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1)
    worker = cluster.client(0)
    driver = cluster.client().connection.control
    thread = threading.Thread(target=lambda: _await_nothing(worker))
    calls = worker.connection.control._call
    thread.start()
    wait_until(lambda: worker.connection.control._call > calls)
    worker.connection.log(1, {"loss": 0.5})
    wait_until(lambda: ask(driver).next_record == 1)
    assert thread.is_alive()
    worker.close()
    thread.join(WAIT_S)


def _await_nothing(client: Client) -> None:
    with pytest.raises(ParamServeError):
        client.directory.await_block({"v": (2,)}, dtype="float64", rule=None)


def test_coordinator_that_ends_wakes_who_waits_for_it(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix")
    client = cluster.client()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            client.directory.await_block({"v": (2,)}, dtype="float64", rule=None)
        except ParamServeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    calls = client.connection.control._call
    thread.start()
    wait_until(lambda: client.connection.control._call > calls)
    cluster.coordinating.call(cluster._coordinator.close)
    thread.join(2.0)
    assert [type(error) for error in errors] == [CoordinatorGone]


# --- what the operator is told --------------------------------------------------------------------


def test_lost_buffer_is_logged_though_no_step_comes_that_is_refused(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError

    cluster = make_cluster(policy=Buffered(9, damping=None), workers=1)
    client = cluster.client(0)
    client.define("w", np.zeros(3), rule=Add())
    monkeypatch.setattr(GradientBuffer, "apply", fail)
    client.push("w", np.ones(3))
    client.tick().result(WAIT_S)
    until = client.set_consistency("default", Async())
    while client.clock() <= until:
        client.push("w", np.ones(3))
        client.tick().result(WAIT_S)
    (told,) = [each for each in caplog.records if event_of(each)["event"] == "buffer-lost"]
    assert told.levelname == "WARNING"
    assert "gradients of group 'default' that it had collected before" in told.getMessage()

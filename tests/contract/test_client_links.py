"""The client when connections break, servers end or do not answer, over all transports."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.echo_host import frame
from tests.contract.role_cluster import DEADLINES, WAIT_S, RoleCluster, taken, wait_until
from tests.suites import each_case

from paramserve.client import Client, Snapshots
from paramserve.config import NO_CREDENTIALS
from paramserve.consistency.built_in import Sync
from paramserve.core import shard_sessions
from paramserve.core.table.options import Constant
from paramserve.errors import (
    ClientClosed,
    CoordinatorGone,
    DefineTimeout,
    ParamServeError,
    PullTimeout,
    PushTimeout,
    ServerGone,
)
from paramserve.launch.reading import Watching
from paramserve.messages import Arenas, CoordinatorNotice, Hello, WorkerBeat, encode
from paramserve.rules import Add
from paramserve.transport.control import ControlLink

LARGE = 40_000
SOON_S = 2.0
BUSY_S = 3 * DEADLINES.reconnect_s
"""Within this time every client knows that a server is gone."""


@pytest.fixture(params=[("unix", 2), ("tcp", 1)], ids=["unix-2", "tcp-1"])
def remote(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> RoleCluster:
    """As `cluster`, where a server can stand still: over sockets."""
    kind, shards = request.param
    return make_cluster(kind, servers=shards)


# --- the connection ends, the server lives ----------------------------------------------------


def forget(cluster: RoleCluster, client: Client, shard: int) -> None:
    """End an idle client's connection to a shard, which then forgets it."""
    number, sessions = client.connection.id, cluster.servers[shard].role.shard.sessions
    cluster.cut(client, shard)
    wait_until(lambda: number not in sessions.by_client)
    client.connection.checks = False
    wait_until(lambda: client.connection.checks)  # a heartbeat later


@pytest.mark.usefixtures("tables_ready")
def test_idle_client_that_a_shard_has_forgotten_begins_a_new_session(
    cluster: RoleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_sessions, "SESSION_KEEP_S", 0.01)
    client = cluster.client()
    client.define("w", np.zeros(4), rule=Add())
    table = client.table("t", dim=2, rule=Add(), init=Constant(0.0))
    client.push("w", np.ones(4)).result()
    table.push([1], np.ones((1, 2))).result()
    before = client.connection.id
    for shard in range(len(cluster.servers)):
        forget(cluster, client, shard)
        client.push("w", np.ones(4)).result()
        table.push([1], np.ones((1, 2))).result()
    assert (client.pull("w") == 1.0 + len(cluster.servers)).all()
    assert (table.pull([1]) == 1.0 + len(cluster.servers)).all()
    assert client.connection.id > before
    assert not client.closed
    sessions = [each.role.shard.sessions for each in cluster.servers]
    wait_until(lambda: all([*each.by_client] == [client.connection.id] for each in sessions))
    client.close()
    wait_until(lambda: not any(each.by_client for each in sessions))


def test_snapshots_go_on_in_a_new_session(
    remote: RoleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_sessions, "SESSION_KEEP_S", 0.01)
    writer, client = remote.client(), remote.client()
    writer.define("w", np.zeros(4), rule=Add())
    watching = Watching("default", 1, 8, time.monotonic)
    assert watching.take(lambda: client) is None
    forget(remote, client, 0)
    assert watching.take(lambda: client) is None
    writer.push("w", np.ones(4)).result()
    found = []
    wait_until(lambda: bool(found.append(watching.take(lambda: client)) or found[-1]))
    np.testing.assert_array_equal(np.asarray(found[-1].state["w"]), np.ones(4))


def test_client_that_a_shard_has_forgotten_with_something_unanswered_is_closed(
    remote: RoleCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_sessions, "SESSION_KEEP_S", 0.01)
    client = remote.client()
    client.define("w", np.zeros(4), rule=Add())
    number, sessions = client.connection.id, remote.servers[0].role.shard.sessions
    with remote.frozen():
        client.push("w", np.ones(4))
        link = client.connection.exchange.shards[0].link
        assert link is not None
        with socket.socket(fileno=os.dup(link.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: number not in sessions.by_client)
    with pytest.raises(ClientClosed, match="was forgotten") as caught:
        client.pull("w")
    assert caught.value.applied == "unknown"
    assert client.closed


def test_pipelined_pushes_are_applied_once_through_reconnects(cluster: RoleCluster) -> None:
    client, other = cluster.client(), cluster.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    before = cluster.connects
    random = np.random.default_rng(1)
    tickets = []
    for _ in range(60):
        tickets.append(client.push("w", np.ones(LARGE)))
        if random.random() < 0.3:
            cluster.cut(client, int(random.integers(len(cluster.servers))))
    assert [ticket.result().version for ticket in tickets] == list(range(1, 61))
    assert (client.pull("w") == 60.0).all()
    assert (other.pull("w") == 60.0).all()
    assert cluster.connects > before + 5
    exchange = client.connection.exchange
    assert len(exchange._by_fileno) == len(cluster.servers)  # broken links are polled no more
    assert taken(client) == 0


def test_pull_goes_on_over_the_next_connection(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.full(LARGE, 3.0), rule=Add())
    for _ in range(5):
        for shard in range(len(cluster.servers)):
            cluster.cut(client, shard)
        assert (client.pull("w") == 3.0).all()


def test_reconnect_costs_no_busy_loop(remote: RoleCluster) -> None:
    client = remote.client()
    client.define("w", np.zeros(3), rule=Add())
    for shard in range(len(remote.servers)):
        remote.cut(client, shard)
    client.push("w", np.ones(3)).result()
    with remote.frozen():
        ticket = client.push("w", np.ones(3))
        used = time.thread_time()
        with pytest.raises(PushTimeout):
            ticket.result(0.1)
        assert time.thread_time() - used < 0.1
    assert ticket.result().version == 2


def test_arena_that_grows_after_a_cut_comes_with_the_next_connection(
    cluster: RoleCluster,
) -> None:
    client = cluster.client()
    client.define("small", np.zeros(3), rule=Add())
    for shard in range(len(cluster.servers)):
        cluster.cut(client, shard)
    client.define("w", np.ones(300_000), rule=Add())
    assert (client.push_pull({"w": np.ones(300_000)})["w"] == 2.0).all()
    assert client.pull("small").tolist() == [0.0] * 3


def test_questions_lost_with_a_connection_do_not_hang(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    for shard in range(len(cluster.servers)):
        cluster.cut(client, shard)
    start = time.monotonic()
    client.connection.reports()
    assert time.monotonic() - start < SOON_S
    assert len(client.connection.reports()) == len(cluster.servers)


@each_case("part", [1, 19, 25, -1], ids=["prelude", "most", "header", "payload"])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_client_that_vanishes_within_a_message_leaves_others_served(
    make_cluster: MakeCluster, part: int, kind: str
) -> None:
    cluster = make_cluster(kind)
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    shard = cluster.servers[0].role
    before = len(shard._parties)
    for number in range(20, 25):
        sock = cluster.peer()
        data = frame(encode(Hello("client", client=number)))
        if part < 0:
            data += frame(encode(Arenas(((1, 4096),))))
        data += frame(b"\x00" * 40, b"\x00" * (0 if part > 0 else 1000))
        sock.sendall(data[: len(data) - 1000 if part < 0 else 20 + 30 + part])
        wait_until(lambda n=number: n in shard._clients)
        sock.close()
    wait_until(lambda: len(shard._parties) == before)
    assert client.push("w", np.ones(3)).result().version == 1


# --- servers that end or stand still ----------------------------------------------------------


def gone(use: Callable[[], object], applied: str = "unknown") -> None:
    start = time.monotonic()
    with pytest.raises(ServerGone, match=rf"server of shard \d .*Applied: {applied}"):
        use()
    assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize("which", ["last", "all"])
def test_server_that_ends_is_gone_for_those_who_wait_and_for_every_later_call(
    remote: RoleCluster, which: str
) -> None:
    client, idle = remote.client(), remote.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    idle.pull("w")
    with remote.frozen():
        tickets = [client.push("w", np.ones(LARGE)) for _ in range(3)]
        pulled = []
        thread = threading.Thread(target=lambda: pulled.append(_error(lambda: client.pull("w"))))
        thread.start()
        count = len(remote.servers)
        for shard in range(count) if which == "all" else [count - 1]:
            remote.serving.loop.call_soon_threadsafe(remote.servers[shard].stop)
    for ticket in tickets:
        gone(ticket.result)
    thread.join(SOON_S)
    assert [type(error) for error in pulled] == [ServerGone]
    gone(lambda: idle.push_pull({"w": np.ones(LARGE)}))
    for use in (
        lambda: client.push("w", np.ones(LARGE)),
        lambda: client.pull("w"),
        lambda: client.assign("w", np.ones(LARGE)),
        lambda: client.push_pull({"w": np.ones(LARGE)}),
        lambda: client.tick(),
        lambda: client.connection.reports(),
        lambda: client.define("x", np.ones(2)),
        lambda: idle.pull("w"),
    ):
        gone(use, "no")
    start = time.monotonic()
    client.close()
    idle.close()
    assert time.monotonic() - start < SOON_S


def _error(use: Callable[[], object]) -> BaseException | None:
    try:
        use()
    except BaseException as error:
        return error
    return None


def test_sync_step_ends_when_the_other_shard_is_gone(make_cluster: MakeCluster, kind: str) -> None:
    """The shard that lives holds the step for ever: it waits for the dead one's part."""
    cluster = make_cluster(kind, servers=2, workers=2, policy=Sync())
    first, second = cluster.client(0), cluster.client(1)
    first.define("w", np.zeros(LARGE), rule=Add())
    first.push("w", np.ones(LARGE))
    ticket = first.tick()
    time.sleep(0.05)
    cluster.stop(1)
    gone(ticket.result)
    gone(lambda: first.pull("w"), "no")
    gone(lambda: second.pull("w"))


def test_growing_while_the_server_ends_is_server_gone(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(300_000), rule=Add())
    for shard in range(len(cluster.servers)):
        cluster.stop(shard)
    gone(lambda: client.push("w", np.ones(300_000)).result())
    gone(lambda: client.push("w", np.ones(300_000)), "no")


def test_growing_while_the_server_is_busy_waits_for_it(make_cluster: MakeCluster) -> None:
    """Busy for longer than a reconnect may take, as with a large update; but it lives."""
    cluster = make_cluster("unix", servers=2)
    client = cluster.client()
    client.define("w", np.zeros(60_000), rule=Add())
    pulled: list[object] = []
    with cluster.frozen():
        tickets = [client.push("w", np.ones(60_000)) for _ in range(2)]  # the arena is full
        thread = threading.Thread(target=lambda: pulled.append(_error(lambda: client.pull("w"))))
        thread.start()
        time.sleep(BUSY_S)
    thread.join(WAIT_S)
    assert pulled == [None]
    assert [ticket.result().version for ticket in tickets] == [1, 2]


def test_coordinator_that_ends_is_gone_for_what_needs_it_only(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    cluster.coordinating.call(cluster._coordinator.close)
    for server in cluster.servers:
        wait_until(server.role.ended.is_set)
    with pytest.raises(CoordinatorGone):
        client.define("v", np.zeros(3))
    assert client.push("w", np.ones(3)).result().version == 1


def test_timeout_frees_nothing_and_result_can_be_called_again(remote: RoleCluster) -> None:
    client = remote.client()
    client.define("w", np.zeros(LARGE), rule=Add())
    with remote.frozen():
        ticket = client.push("w", np.ones(LARGE))
        for _ in range(2):
            with pytest.raises(PushTimeout, match=r"push timed out.*Applied: unknown"):
                ticket.result(0.01)
        assert not ticket.done()
        in_use = taken(client)
        assert in_use == 1
    assert ticket.result().version == 1
    assert taken(client) == 0


def test_pull_that_timed_out_gives_its_memory_back_when_the_answer_comes(
    remote: RoleCluster,
) -> None:
    client = remote.client()
    client.define("w", np.full(LARGE, 2.0), rule=Add())
    with remote.frozen():
        with pytest.raises(PullTimeout, match=r"pull timed out.*Applied: no"):
            client.pull("w", timeout_s=0.01)
        assert taken(client) == 1
    for _ in range(3):
        assert (client.pull("w") == 2.0).all()
    client.drain()
    client.pull("w")
    assert taken(client) == 0


def test_every_call_has_its_timeout(remote: RoleCluster) -> None:
    client = remote.client()
    block = client.define("w", np.zeros(3), rule=Add())
    Snapshots(client).watch("default", 1)
    client.timeout_s = 0.02
    with remote.frozen():
        for use, error in (
            (lambda: client.define("x", np.zeros(2), rule=Add()), DefineTimeout),
            (lambda: client.assign("w", np.zeros(3)), PushTimeout),
            (lambda: client.dense.fetch(block, 0), PullTimeout),
            (lambda: Snapshots(client).take("default", 0), PullTimeout),
        ):
            with pytest.raises(error, match="timed out"):
                use()
        assert client.connection.reports() == []
    client.timeout_s = 5.0
    assert client.push_pull({"w": np.ones(3)})["w"].tolist() == [1.0] * 3
    client.pull("w")
    assert taken(client) == 0


def test_full_window_is_a_timeout_and_sends_nothing_anywhere(remote: RoleCluster) -> None:
    client = remote.client()
    client.define("w", np.zeros(20_000), rule=Add())
    client.timeout_s = 0.02
    with remote.frozen():
        for _ in range(4):
            client.push("w", np.ones(20_000))
        for _ in range(3):
            with pytest.raises(PushTimeout, match=r"left 4 calls unanswered.*Applied: no"):
                client.push("w", np.ones(20_000))
        assert taken(client) == 4
    client.timeout_s = 5.0
    client.push("w", np.ones(20_000))
    assert (client.pull("w") == 5.0).all()
    assert taken(client) == 0


# --- threads, forks, errors that were not read ------------------------------------------------


def test_close_by_another_thread_ends_every_wait(remote: RoleCluster) -> None:
    client = remote.client()
    client.define("w", np.zeros(3), rule=Add())
    errors: list[BaseException | None] = []

    def wait(use: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=lambda: errors.append(_error(use)))
        thread.start()
        return thread

    with remote.frozen():
        ticket = client.push("w", np.ones(3))
        threads = [
            wait(ticket.result),
            wait(ticket.result),
            wait(lambda: client.directory.await_block({"v": (2,)}, dtype="float64", rule=None)),
        ]
        time.sleep(0.02)
        start = time.monotonic()
        client.close()
        for thread in threads:
            thread.join(5)
        assert time.monotonic() - start < 3.0
    assert [type(error) for error in errors] == [ClientClosed] * 3


def test_forked_client_is_refused_and_the_parents_goes_on(remote: RoleCluster) -> None:
    client = remote.client()
    client.define("w", np.zeros(3), rule=Add())
    with remote.frozen():
        ticket = client.push("w", np.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
            child = os.fork()
        if not child:
            status = 1
            with contextlib.suppress(BaseException):
                status = _is_refused(client, ticket.result)
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ticket.result().version == 1
    assert client.push_pull({"w": np.ones(3)})["w"].tolist() == [2.0] * 3


def _is_refused(client: Client, result: Callable[[], object]) -> int:
    uses = (
        lambda: client.push("w", np.ones(3)),
        lambda: client.pull("w"),
        lambda: client.define("v", np.ones(2)),
        result,
    )
    for status, use in enumerate(uses, 2):
        error = _error(use)
        if not isinstance(error, ClientClosed) or "in the child" not in str(error):
            return status
    client.close()
    return 0 if client.closed else 9


def test_error_that_was_not_read_is_raised_by_the_next_call(cluster: RoleCluster) -> None:
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())

    def refused() -> object:
        """A push that only the server can refuse, as its checks are not those of the client."""
        for server in cluster.servers:
            block = next(iter(server.role.shard.blocks.values()))
            block.rule, kept = None, block.rule
        ticket = client.push("w", np.ones(3))
        while not ticket.done():
            pass
        for server in cluster.servers:
            next(iter(server.role.shard.blocks.values())).rule = kept
        return ticket

    for use in (
        lambda: client.push("w", np.ones(3)),
        lambda: client.pull("w"),
        lambda: client.assign("w", np.ones(3)),
        lambda: client.tick(),
        lambda: client.drain(),
    ):
        refused()
        with pytest.raises(ParamServeError, match="has no rule"):
            use()
        assert client.pull("w").tolist() == [0.0] * 3
    ticket = refused()
    for _ in range(2):
        with pytest.raises(ParamServeError, match="has no rule"):
            ticket.result()
    client.pull("w")
    assert taken(client) == 0


def test_deadlines_of_a_client_are_its_own(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", deadlines=DEADLINES)
    client = cluster.client(deadlines=structs.replace(DEADLINES, request_s=0.05, stall_s=0.05))
    client.define("w", np.zeros(3), rule=Add(), timeout_s=WAIT_S)
    with cluster.frozen(), pytest.raises(PullTimeout, match=r"waited \d\.\d s"):
        client.pull("w")
    assert client.timeout_s == 0.05


# --- a server that listens and does not answer ----------------------------------------------------


def cut_link(client: Client) -> None:
    """Break a client's link as the network does."""
    link = client.connection.exchange.shards[0].link
    assert link is not None
    link._sock.shutdown(socket.SHUT_RDWR)


@each_case("way", ["unix", "tcp", "both"])
def test_link_that_breaks_while_the_server_is_busy_is_made_anew(
    make_cluster: MakeCluster, way: str
) -> None:
    cluster = make_cluster("unix" if way == "unix" else "tcp")
    cluster.ways = "" if way == "both" else way
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with cluster.frozen():
        cut_link(client)
        wake = threading.Timer(BUSY_S, lambda: None)
        wake.start()
        ticket = client.push("w", np.ones(3))
        assert not ticket.done()
        wake.join(WAIT_S)
    assert ticket.result().version == 1
    assert client.pull("w").tolist() == [1.0] * 3


def test_server_that_ends_is_gone_also_where_its_other_address_needs_a_token(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("tcp")
    cluster.ways, cluster.credentials = "", NO_CREDENTIALS
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    cluster.stop()
    gone(lambda: client.push("w", np.ones(3)).result())


def test_server_that_does_not_answer_for_stall_s_is_gone(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("tcp", deadlines=structs.replace(DEADLINES, stall_s=BUSY_S))
    client = cluster.client()
    client.define("w", np.zeros(3), rule=Add())
    with cluster.frozen():
        cut_link(client)
        with pytest.raises(ServerGone, match="does not answer"):
            client.push("w", np.ones(3)).result()


# --- heartbeats -----------------------------------------------------------------------------------


RARE = structs.replace(DEADLINES, heartbeat_s=10 * WAIT_S, stall_s=20 * WAIT_S)


def test_client_sends_heartbeats_as_often_as_its_cluster_expects_them(
    make_cluster: Callable[..., RoleCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix", workers=1)
    notify = ControlLink.notify
    sent: list[ControlLink] = []

    def noted(control: ControlLink, message: CoordinatorNotice, **how: bool) -> bool:
        if isinstance(message, WorkerBeat):
            sent.append(control)
        return notify(control, message, **how)

    monkeypatch.setattr(ControlLink, "notify", noted)
    worker = cluster.client(0, deadlines=RARE)
    wait_until(lambda: sent.count(worker.connection.control) >= 3)

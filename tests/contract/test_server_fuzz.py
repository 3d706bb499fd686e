"""Random bytes and random messages to a real server and coordinator: they go on serving others.

`RoleCluster.close` fails a test in which anything was raised out of an event loop.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contract.conftest import MakeCluster
from tests.contract.echo_host import frame
from tests.contract.harness import HELLO, UNTRUSTED, Harness
from tests.contract.role_cluster import WAIT_S, wait_until
from tests.suites import each_case

from paramserve.client import Client, Ticket
from paramserve.config import CodecSpec, Limits, RuleSpec
from paramserve.consistency.built_in import Async, Sync
from paramserve.core.table.options import TableOptions, Zeros
from paramserve.errors import ParamServeError, PushTimeout, ServerGone
from paramserve.messages import (
    Acknowledge,
    Arenas,
    AskReport,
    AskStatus,
    Assign,
    BlockSpec,
    Bye,
    Commit,
    Contains,
    Define,
    Defined,
    Delete,
    Enlist,
    Fetch,
    Gradient,
    GroupMembership,
    Hello,
    Inquire,
    Join,
    Keys,
    Leave,
    LogEntry,
    Lookup,
    MarkDead,
    Piece,
    PlaceBlock,
    Prepare,
    Put,
    Read,
    ReadTarget,
    Record,
    Refused,
    Register,
    Scan,
    SentGradients,
    ServerBeat,
    Status,
    Step,
    TableSpec,
    TakeSnapshot,
    Vote,
    Watch,
    WorkerBeat,
    WorkerUsage,
    encode,
)
from paramserve.rules import SGD, Add
from paramserve.transport.arena import Arena
from paramserve.transport.link import Link

LIMITS = Limits(snapshots_max=4)
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(data=st.binary(max_size=200), known=st.booleans(), framed=st.booleans())
def test_random_bytes_leave_others_served(
    harness: Harness, data: bytes, known: bool, framed: bool
) -> None:
    sock = harness.cluster.peer()
    with contextlib.suppress(OSError):
        if known:
            sock.sendall(HELLO)
        sock.sendall(frame(data) if framed else data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    sock.close()
    harness.goes_on()


# --- messages that are well formed ------------------------------------------------------------


integers = st.integers(-3, 9) | st.sampled_from(
    [64, 128, 192, -64, 4096, 8191, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 63]
)
floats = st.floats(width=64) | st.sampled_from([0.0, 1.0, -1.0])
OURS = "of the test"
"""No text that is drawn has as many letters, but for one."""
texts = st.sampled_from(["default", "w", "", "x" * 600, "\x00"]) | st.text(max_size=5)


def tuples(each: st.SearchStrategy[Any], size: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(each, max_size=size).map(tuple)


actives = st.none() | tuples(integers)
rules = st.none() | st.builds(
    RuleSpec,
    st.sampled_from(["SGD", "Adam", "Add", "Evil", ""]),
    st.dictionaries(
        st.sampled_from(["lr", "momentum", "betas.0", "betas.x", "nesterov", "eps", "self"]),
        floats | st.booleans() | texts,
        max_size=3,
    ),
)
codecs = st.none() | st.builds(
    CodecSpec,
    st.sampled_from(["BFloat16", "Int8", "Int4", "Sign", "TopK", "PowerSGD", "Chain", "Evil", ""]),
    st.dictionaries(
        st.sampled_from(["block", "ratio", "rank", "rounding", "feedback", "even_local", "index"]),
        integers | floats | st.booleans() | texts,
        max_size=3,
    ),
)
halves = st.none() | st.sampled_from(["bfloat16", "float16", "float8", ""])
pieces = tuples(st.builds(Piece, texts, tuples(integers)))
dtypes = st.sampled_from(
    ["float64", "float32", "int64", "object", "f4,f4", "", "V9", "(3,)f4", "M8"]
)
specs = st.builds(
    BlockSpec, integers, integers, texts, dtypes, rules, pieces, tuples(integers)
) | st.builds(
    BlockSpec,
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(["default", "g"]),
    dtypes,
    rules,
    st.just((Piece("p", (4,)),)),
    st.just((0, 4)),
    push=codecs,
    pull=codecs,
    half=halves,
)
table_specs = st.builds(
    BlockSpec,
    st.integers(1, 4),
    st.integers(0, 2),
    st.sampled_from(["default", "g"]),
    st.just("float32") | dtypes,
    rules,
    st.just((Piece("g", (4,)),)),
    st.just(()) | tuples(integers),
    table=st.builds(
        TableSpec,
        st.just(4) | st.integers(-3, 9),
        st.sampled_from(["float32", "bfloat16", "float64", ""]),
        integers,
        st.just(TableOptions(Zeros()).to_spec()) | st.builds(RuleSpec, texts),
        st.integers(-3, 9),
    ),
    push=codecs,
    pull=codecs,
)
gradients = tuples(
    st.builds(
        Gradient,
        *(integers, integers, integers, actives, st.none() | tuples(floats, 6)),
        st.just(0) | integers,
    )
)
keys = st.builds(Keys, integers, integers, integers, integers)
places = tuples(st.builds(ReadTarget, integers, integers, integers, st.none() | keys))
fields = (integers, integers, integers, integers)
requests = st.one_of(
    st.builds(
        Step,
        *(integers, st.integers(0, 1) | integers, integers, st.booleans(), gradients, places),
        *(integers, floats, st.booleans(), floats),
    ),
    st.builds(Read, integers, st.integers(0, 6) | integers, st.integers(0, 1), integers, places),
    st.builds(Define, integers, specs | table_specs, integers, integers, integers),
    st.builds(Assign, *fields, integers, actives, actives),
    st.builds(Fetch, *fields, integers),
    st.builds(Scan, *fields, *fields[:3], st.booleans()),
    st.builds(Put, *fields, *fields[:2], st.booleans()),
    st.builds(Delete, *fields, integers),
    st.builds(Contains, *fields, integers),
    st.builds(Watch, *fields),
    st.builds(TakeSnapshot, integers, integers, integers, places),
    st.builds(Inquire, integers),
    st.just(Bye()),
)
refusals = st.none() | st.tuples(texts, texts, texts) | tuples(texts)
peers = st.one_of(
    st.builds(
        Vote,
        *(st.integers(0, 1) | integers, integers, integers, tuples(integers)),
        *(st.booleans(), st.booleans(), floats, floats, floats, refusals),
    ),
    st.builds(Prepare, st.integers(0, 1), integers, tuples(integers)),
    st.builds(
        LogEntry,
        st.integers(0, 9) | integers,
        st.builds(Commit, st.integers(0, 1), integers, tuples(integers), floats, refusals)
        | st.builds(GroupMembership, st.integers(0, 1), tuples(st.tuples(*[integers] * 4))),
    ),
    st.builds(Acknowledge, integers, integers),
)


def say(link: Link, message: Any, nbytes: int) -> bool:
    """Send a message, and wait until it was dealt with; False if that ended the connection."""
    link.send(encode(message), [(1, 64, nbytes)] if nbytes else ())
    link.send(encode(AskReport()))
    while True:
        header = link.receive(WAIT_S)
        assert header is not None, f"no answer after {message}"
        link.skip_payload()
        if msgspec.msgpack.decode(header)[0] == "server-beat":
            return True


def test_server_survives_random_requests(make_cluster: MakeCluster) -> None:
    """Random messages of a client with an arena, most with the right number, some with bytes."""

    @FUZZ
    @given(
        steps=st.lists(
            st.tuples(requests, st.booleans(), st.sampled_from([0, 0, 0, 1, 32, 64, 128])),
            min_size=1,
            max_size=6,
        )
    )
    def run(steps: list[tuple[Any, bool, int]]) -> None:
        nonlocal number
        number += 1
        arena = Arena.create(8192, 1)
        link = harness.untrusted(client=number, arenas=[arena] if kind == "unix" else [])
        link.arenas = {1: arena.memory}
        if not link.shared:
            link.send(encode(Arenas(((1, arena.nbytes),))))
        seq = 0
        for message, in_order, nbytes in steps:
            if in_order and hasattr(message, "seq") and not isinstance(message, Read):
                seq += 1
                message = msgspec.structs.replace(message, seq=seq)
            try:
                say(link, message, nbytes)
            except ConnectionError:
                break
        link.close()
        arena.close()
        harness.goes_on()

    for kind in ("unix", "tcp"):
        for policy in (Async(), Sync()):
            harness, number = (
                Harness(make_cluster(kind, workers=1, policy=policy, limits=LIMITS), rank=0),
                UNTRUSTED,
            )
            run()


def test_server_survives_random_messages_of_a_peer(make_cluster: MakeCluster) -> None:
    """As another server sends them; a clock that the peer decides is decided, and no more."""
    cluster = make_cluster("unix", workers=2, policy=Sync())
    first, second = cluster.client(0), cluster.client(1)
    first.define(OURS, np.zeros(8), rule=SGD(1.0))
    link = Link.connect(
        [each.address for each in cluster.servers[0].listeners],
        Hello("server", client=0),
        timeout_s=WAIT_S,
    )

    @FUZZ
    @given(messages=st.lists(peers, min_size=1, max_size=5), half=st.booleans())
    def run(messages: list[Any], half: bool) -> None:
        nonlocal link
        if half:
            first.push(OURS, np.zeros(8))
            ticket = first.tick()
        for message in messages:
            try:
                link.send(encode(message))
            except ConnectionError:
                link.close()
                link = Link.connect(
                    [each.address for each in cluster.servers[0].listeners],
                    Hello("server", client=0),
                    timeout_s=WAIT_S,
                )
        cluster.on_server(lambda: None)
        assert len(first.connection.reports()) == 1
        assert cluster.serving.errors == []
        if half:
            meet({first: ticket, second: second.tick()})

    run()
    link.close()


@each_case(
    "message",
    [
        LogEntry(1, Commit(0, 0, (), 0.0, ("NonFinite",))),
        Vote(0, 0, 0, (1, 2), True, False, 2.0, 0, refusal=("NonFinite", "why")),
    ],
    ids=["commit", "ready"],
)
def test_refusal_of_a_peer_that_lacks_a_part_is_not_taken(
    make_cluster: MakeCluster, message: Any
) -> None:
    cluster = make_cluster("unix", workers=2, policy=Sync(reduce="sum"))
    first, second = cluster.client(0), cluster.client(1)
    first.define(OURS, np.zeros(8), rule=Add())
    first.push(OURS, np.ones(8))
    ticket = first.tick()
    wait_until(lambda: cluster.held(0) == 1)
    link = Link.connect(
        [each.address for each in cluster.servers[0].listeners],
        Hello("server", client=0),
        timeout_s=WAIT_S,
    )
    link.send(encode(message))
    refused = msgspec.msgpack.decode(link.receive(WAIT_S) or b"", type=Refused)
    assert (refused.seq, refused.kind) == (0, "ProtocolError")
    with pytest.raises(ConnectionError):
        link.receive(WAIT_S)
    link.close()
    assert second.tick().result().version == ticket.result().version == 1
    assert (first.pull(OURS) == 1.0).all()


def meet(waiting: dict[Client, Ticket]) -> None:
    """End clocks until all are answered: after one that the peer decided, a worker that was in it
    alone has to end another one."""
    clients = tuple(waiting)
    for _ in range(20):
        for client, ticket in tuple(waiting.items()):
            try:
                ticket.result(0.1)
            except PushTimeout:
                continue
            except ServerGone:
                raise
            except ParamServeError:  # the peer said that it was refused
                pass
            del waiting[client]
        if not waiting:
            return
        waiting |= {client: client.tick() for client in clients if client not in waiting}
    raise AssertionError(f"ranks {[client.rank for client in waiting]} still wait")


sent = tuples(st.builds(SentGradients, texts, integers, integers, floats))
used = st.builds(WorkerUsage, floats, floats, floats, integers, floats)
calls = st.one_of(
    st.builds(Enlist, integers),
    st.builds(Register, integers, integers, integers, tuples(texts)),
    st.builds(Join, integers, integers, integers),
    st.builds(PlaceBlock, integers, texts, dtypes, rules, pieces, st.booleans(), floats),
    st.builds(Defined, integers, integers, integers),
    st.builds(Lookup, integers, st.none() | tuples(texts), floats),
    st.builds(Leave, integers),
    st.builds(MarkDead, integers, st.just("worker") | texts, integers, st.booleans()),
    st.builds(AskStatus, integers, integers),
    st.builds(
        WorkerBeat,
        integers,
        tuples(st.builds(Record, floats, integers, integers, st.just({"a": 1.0}))),
        integers,
        sent,
        st.none() | used,
    ),
    st.builds(ServerBeat, integers, st.just(()), integers, integers),
)


def test_coordinator_survives_random_calls(make_cluster: MakeCluster) -> None:
    harness = Harness(make_cluster("unix"))

    @FUZZ
    @given(
        messages=st.lists(calls, min_size=1, max_size=6),
        role=st.sampled_from(["join", "register", "driver"]),
    )
    def run(messages: list[Any], role: str) -> None:
        link = Link.connect([harness.cluster.address], Hello(role), timeout_s=WAIT_S)
        with contextlib.suppress(ConnectionError):
            for message in messages:
                link.send(encode(message))
            link.send(encode(AskStatus(-77)))
            while (header := link.receive(WAIT_S)) is not None:
                reply = msgspec.msgpack.decode(header)
                if reply[:2] == ["status-is", -77]:
                    break
        link.close()
        harness.member.blocks()
        assert harness.cluster.coordinating.errors == []
        harness.goes_on()

    run()


def test_coordinator_survives_what_workers_tell_of_their_gradients(
    make_cluster: MakeCluster,
) -> None:
    """A rank whose workers come and end, each of which tells anything."""
    cluster = make_cluster("unix", workers=1)
    harness = Harness(cluster)

    @FUZZ
    @given(told=st.lists(st.tuples(sent, used), min_size=1, max_size=4))
    def run(told: list[Any]) -> None:
        link = Link.connect([cluster.address], Hello("join"), timeout_s=WAIT_S)
        link.send(encode(Join(-76, 0, 0)))
        for each in told:
            link.send(encode(WorkerBeat(0, (), 0, *each)))
        link.send(encode(AskStatus(-77)))
        while (header := link.receive(WAIT_S)) is not None:
            if msgspec.msgpack.decode(header)[:2] == ["status-is", -77]:
                break
        status = msgspec.msgpack.decode(header or b"", type=Status)
        for rank, each in status.sent:
            assert rank == 0
            assert min(each.sent_bytes, each.plain_bytes, each.residual_norm) >= 0
            heard.append(each.sent_bytes)
        for rank, usage in status.usage:
            assert rank == 0
            assert usage == WorkerUsage() or min(usage.seconds, usage.waited_s) >= 0.0
            assert 0.0 <= usage.looped <= 1.0
        link.send(encode(Leave(-78)))
        while (header := link.receive(WAIT_S)) is not None:
            if msgspec.msgpack.decode(header)[:2] == ["ok", -78]:
                break
        link.close()
        assert cluster.coordinating.errors == []
        harness.goes_on()

    heard: list[int] = []
    run()
    assert len(heard) > 20, heard


@FUZZ
@given(data=st.binary(max_size=100), framed=st.booleans())
def test_coordinator_survives_random_bytes(harness: Harness, data: bytes, framed: bool) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(harness.cluster.address.removeprefix("unix:"))
    with contextlib.suppress(OSError):
        sock.sendall(frame(encode(Hello("join"))) + (frame(data) if framed else data))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    sock.close()
    harness.member.blocks()
    assert harness.cluster.coordinating.errors == []

"""What a real server and coordinator do with peers that send nonsense: cut off, others go on.

`RoleCluster.close` fails a test in which anything was raised out of an event loop.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.contract.echo_host import assert_cut_off, frame, read_frame
from tests.contract.role_cluster import WAIT_S, RoleCluster, wait_until

from paramserve.client import Client
from paramserve.config import Limits, PolicySpec
from paramserve.core.consistency import Async, Consistency, Sync
from paramserve.errors import (
    NotAuthenticated,
    Overloaded,
    ParamServeError,
    ProtocolError,
    WorkerFenced,
)
from paramserve.messages import (
    AskReport,
    AskStatus,
    Assign,
    BlockSpec,
    Bye,
    Commit,
    Define,
    Defined,
    Fetch,
    Gradient,
    Hello,
    Inquire,
    Join,
    Leave,
    Lookup,
    MarkDead,
    Piece,
    Place,
    PlaceBlock,
    Propose,
    Ready,
    Record,
    Refused,
    Register,
    ServerBeat,
    Step,
    TakeSnapshot,
    Watch,
    WorkerBeat,
    encode,
)
from paramserve.rules import SGD
from paramserve.transport.arena import Arena
from paramserve.transport.framing import PRELUDE
from paramserve.transport.link import Link

MakeCluster = Callable[..., RoleCluster]
STRANGER = 1000
"""The client number of who sends nonsense."""
FUZZ = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Town:
    """A cluster with a client that must be served whatever strangers do."""

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.citizen: Client = cluster.client()
        self.citizen.define({"w": np.zeros(8), "b": np.zeros(3)}, rule=SGD(1.0))
        self.pushes = 0

    def goes_on(self) -> None:
        """The other client is served, by every shard and by the coordinator."""
        self.citizen.push("w", np.zeros(8)).result(WAIT_S)
        self.citizen.pull("w")
        assert len(self.citizen.reports()) == len(self.cluster.servers)
        assert self.cluster.serving.errors == []

    def stranger(self, **hello: Any) -> Link:
        """A connection of somebody who is known, and may have an arena."""
        arenas = hello.pop("arenas", ())
        fields = {"role": "client", "client": STRANGER} | hello
        return Link.connect(
            [each for each in self.addresses if each.startswith(self.cluster.kind)],
            Hello(**fields),
            token=self.cluster.token,
            arenas=arenas,
            timeout_s=WAIT_S,
        )

    @property
    def addresses(self) -> Sequence[str]:
        return [each.address for each in self.cluster.servers[0].listeners]


@pytest.fixture(params=["unix", "tcp"])
def town(request: pytest.FixtureRequest, make_cluster: MakeCluster) -> Iterator[Town]:
    town = Town(make_cluster(request.param))
    yield town
    town.goes_on()


# --- who they are -----------------------------------------------------------------------------


def test_peer_without_the_token_learns_nothing(make_cluster: MakeCluster) -> None:
    town = Town(make_cluster("tcp"))
    address = next(each for each in town.addresses if each.startswith("tcp"))
    with pytest.raises(NotAuthenticated, match="refused this side's token"):
        Link.connect([address], Hello("client", 7), token=b"x" * 32, timeout_s=WAIT_S)
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    for data in (b"", frame(encode(Hello("client", 7))), b"\x00" * 64):
        with socket.create_connection((host, int(port))) as sock:
            sock.settimeout(WAIT_S)
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            received = b""
            with contextlib.suppress(ConnectionResetError):
                while part := sock.recv(4096):
                    received += part
            assert town.cluster.token not in received
            assert len(received) <= 72  # the challenge, and at most a refusal
    town.goes_on()


@pytest.mark.parametrize(
    ("hello", "error", "words"),
    [
        ({"role": "admin"}, ProtocolError, "came as 'admin'"),
        ({"client": 0}, ProtocolError, "'client' number 0"),
        ({"client": -3}, ProtocolError, "'client' number -3"),
        ({"role": "server", "client": 5}, ProtocolError, "'server' number 5"),
        ({"role": "attach"}, ProtocolError, "without a connection"),
        ({"window": 17}, Overloaded, "17 requests outstanding, outstanding_max is 16"),
        ({"window": 0}, Overloaded, "0 requests outstanding"),
        ({"window": -1}, Overloaded, "-1 requests outstanding"),
    ],
)
def test_hello_that_is_not_allowed_is_refused(
    town: Town, hello: dict[str, Any], error: type[ParamServeError], words: str
) -> None:
    parties = len(town.cluster.servers[0].role._parties)
    for _ in range(3):
        with pytest.raises(error, match=words):
            town.stranger(**hello)
    assert len(town.cluster.servers[0].role._parties) == parties  # nothing is kept of them


def test_older_incarnation_is_fenced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1)
    first = cluster.client(0)
    first.close()
    town = Town(cluster)
    second = cluster.client(0)
    assert second.incarnation == 2
    wait_until(lambda: cluster.servers[0].role.shard.members[0].incarnation == 2)
    with pytest.raises(WorkerFenced, match=r"worker 0 \(incarnation 1\).*knows incarnation 2"):
        town.stranger(client=first.id, rank=0, incarnation=1)
    assert second.push("w", np.zeros(8)).result().version == 1
    town.goes_on()


def test_another_clients_number_does_not_shut_it_out(town: Town) -> None:
    """The newest connection counts, since a reconnect looks the same; the client takes it back."""
    for _ in range(3):
        thief = town.stranger(client=town.citizen.id)
        town.citizen.pull("w")
        with pytest.raises(ConnectionError):
            thief.receive(WAIT_S)
        thief.close()
        town.goes_on()


def test_attached_arena_of_another_incarnation_is_refused(make_cluster: MakeCluster) -> None:
    town = Town(make_cluster("unix"))
    arena = Arena.create(4096, 1)
    with pytest.raises(ProtocolError, match="without a connection"):
        town.stranger(role="attach", client=town.citizen.id, incarnation=3, arenas=[arena])
    arena.close()
    town.goes_on()


# --- frames that are none ---------------------------------------------------------------------


HELLO = frame(encode(Hello("client", client=STRANGER)))
BAD_FRAMES = {
    "truncated prelude": (b"PSRV\x01", ""),
    "truncated header": (frame(encode(AskReport()))[:-1], ""),
    "magic": (PRELUDE.pack(b"HTTP", 1, 0, 1, 0) + b"x", "starts with b'HTTP'"),
    "version": (PRELUDE.pack(b"PSRV", 9, 0, 1, 0) + b"x", "protocol version 9"),
    "flags": (PRELUDE.pack(b"PSRV", 1, 7, 1, 0) + b"x", "7 in a field that must be 0"),
    "oversize header": (PRELUDE.pack(b"PSRV", 1, 0, 1 << 30, 0), "header of 1073741824 bytes"),
    "oversize payload": (PRELUDE.pack(b"PSRV", 1, 0, 1, 1 << 60), "payload of"),
    "no msgpack": (frame(b"\xc1\xc1\xc1"), "a header was refused"),
    "not a message": (frame(msgspec.msgpack.encode({"a": 1})), "a header was refused"),
    "unknown tag": (frame(msgspec.msgpack.encode(["boo", 1])), "a header was refused"),
    "a reply": (frame(encode(Refused(1, "a", "b", "c", "d"))), "a header was refused"),
    "too few fields": (frame(msgspec.msgpack.encode(["step", 1])), "a header was refused"),
    "text that is none": (frame(b"\x92\xa1\xff\x01"), "a header was refused"),
    "wrong type": (frame(msgspec.msgpack.encode(["inquire", "x"])), "a header was refused"),
    "trailing bytes": (frame(encode(AskReport()) + b"\x00"), "a header was refused"),
    "empty": (frame(b""), "a header was refused"),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_bad_frame_ends_its_connection_with_a_reason(town: Town, case: str) -> None:
    data, reason = BAD_FRAMES[case]
    sock = town.cluster.peer()
    sock.sendall(HELLO)
    read_frame(sock)
    sock.sendall(data)
    if not reason:
        sock.shutdown(socket.SHUT_WR)
    else:
        told = msgspec.msgpack.decode(read_frame(sock), type=Refused)
        assert (told.seq, told.kind, told.applied) == (0, "ProtocolError", "no")
        assert reason in told.failed
    assert_cut_off(sock)


def is_hello_with_bad_text(data: bytes) -> bool:
    """Such a hello raises out of `handshake.read_hello`, which is known and is mended there."""
    try:
        msgspec.msgpack.decode(data, type=Hello)
    except UnicodeDecodeError:
        return True
    except msgspec.MsgspecError:
        return False
    return False


@FUZZ
@given(data=st.binary(max_size=200), known=st.booleans(), framed=st.booleans())
def test_random_bytes_harm_nobody(town: Town, data: bytes, known: bool, framed: bool) -> None:
    assume(known or not is_hello_with_bad_text(data[20:] if not framed else data))
    sock = town.cluster.peer()
    with contextlib.suppress(OSError):
        if known:
            sock.sendall(HELLO)
        sock.sendall(frame(data) if framed else data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    sock.close()
    town.goes_on()


# --- messages that are well formed ------------------------------------------------------------


integers = st.integers(-3, 9) | st.sampled_from(
    [64, 128, 192, -64, 4096, 8191, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 63]
)
floats = st.floats(width=64) | st.sampled_from([0.0, 1.0, -1.0])
texts = st.sampled_from(["default", "w", "", "x" * 600, "\x00"]) | st.text(max_size=5)


def tuples(each: st.SearchStrategy[Any], size: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(each, max_size=size).map(tuple)


actives = st.none() | tuples(integers)
rules = st.none() | st.builds(
    PolicySpec,
    st.sampled_from(["SGD", "Adam", "Add", "Evil", ""]),
    st.dictionaries(
        st.sampled_from(["lr", "momentum", "betas.0", "betas.x", "nesterov", "eps", "self"]),
        floats | st.booleans() | texts,
        max_size=3,
    ),
)
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
)
gradients = tuples(
    st.builds(Gradient, integers, integers, integers, actives, st.none() | tuples(floats, 6))
)
places = tuples(st.builds(Place, integers, integers, integers))
fields = (integers, integers, integers, integers)
requests = st.one_of(
    st.builds(
        Step,
        *(integers, st.integers(0, 1) | integers, integers, st.booleans(), gradients, places),
        *(integers, floats, st.booleans(), floats),
    ),
    st.builds(Define, integers, specs, integers, integers, integers),
    st.builds(Assign, *fields, integers, actives, actives),
    st.builds(Fetch, *fields, integers),
    st.builds(Watch, *fields),
    st.builds(TakeSnapshot, integers, integers, integers, places),
    st.builds(Inquire, integers),
    st.just(Bye()),
)
peers = st.one_of(
    st.builds(
        Ready,
        *(st.integers(0, 1) | integers, integers, integers, tuples(integers)),
        *(st.booleans(), st.booleans(), floats, floats, floats, tuples(texts)),
    ),
    st.builds(Propose, st.integers(0, 1), integers, tuples(integers)),
    st.builds(Commit, st.integers(0, 1), integers, tuples(integers), floats, tuples(texts)),
)


def say(link: Link, message: Any, payload: int) -> bool:
    """Send a message, and wait until it was dealt with; False if that ended the connection."""
    link.send(encode(message), [np.zeros(payload, np.uint8)] if payload else ())
    link.send(encode(AskReport()))
    while True:
        header = link.receive(WAIT_S)
        assert header is not None, f"no answer after {message}"
        link.skip_payload()
        if msgspec.msgpack.decode(header)[0] == "server-beat":
            return True


def test_server_survives_random_requests(make_cluster: MakeCluster) -> None:
    """Random messages of a client with an arena, most with the right number, some with payloads."""

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
        link = town.stranger(client=number, arenas=[arena] if kind == "unix" else [])
        seq = 0
        for message, in_order, payload in steps:
            if in_order and hasattr(message, "seq"):
                seq += 1
                message = msgspec.structs.replace(message, seq=seq)
            try:
                say(link, message, payload)
            except ConnectionError:
                break
        link.close()
        arena.close()
        town.goes_on()

    for kind in ("unix", "tcp"):
        for policy in (Async(), Sync()):
            town, number = _town(make_cluster, kind, policy), STRANGER
            run()


def _town(make_cluster: MakeCluster, kind: str, policy: Consistency) -> Town:
    """Under Sync the citizen is the only worker, so that its clocks depend on nobody."""
    cluster = make_cluster(kind, workers=1, policy=policy, limits=Limits(snapshots_max=4))
    town = Town.__new__(Town)
    town.cluster, town.pushes = cluster, 0
    town.citizen = cluster.client(0)
    town.citizen.define({"w": np.zeros(8), "b": np.zeros(3)}, rule=SGD(1.0))

    def goes_on() -> None:
        town.citizen.push_pull({"w": np.zeros(8)}, tick=True, timeout_s=WAIT_S)
        assert len(town.citizen.reports()) == len(cluster.servers)
        assert cluster.serving.errors == []

    town.goes_on = goes_on  # type: ignore[method-assign]
    return town


def test_server_survives_random_messages_of_a_peer(make_cluster: MakeCluster) -> None:
    """As another server sends them; a clock that a stranger decides is decided, and no more."""
    cluster = make_cluster("unix", workers=2, policy=Sync())
    first, second = cluster.client(0), cluster.client(1)
    first.define("w", np.zeros(8), rule=SGD(1.0))
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
            first.push("w", np.zeros(8))
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
        assert len(first.reports()) == 1
        assert cluster.serving.errors == []
        if half:
            with contextlib.suppress(ParamServeError):
                second.tick().result(0.2)
            with contextlib.suppress(ParamServeError):
                ticket.result(0.2)

    run()
    link.close()


calls = st.one_of(
    st.builds(Register, integers, integers, integers, tuples(texts)),
    st.builds(Join, integers, integers, integers),
    st.builds(PlaceBlock, integers, texts, dtypes, rules, pieces, st.booleans(), floats),
    st.builds(Defined, integers, integers, integers),
    st.builds(Lookup, integers, st.none() | tuples(texts), floats),
    st.builds(Leave, integers),
    st.builds(MarkDead, integers, texts, integers),
    st.builds(AskStatus, integers, integers),
    st.builds(
        WorkerBeat,
        integers,
        tuples(st.builds(Record, floats, integers, integers, st.just({"a": 1.0}))),
    ),
    st.builds(ServerBeat, integers, st.just(()), integers, integers),
)


def test_coordinator_survives_random_calls(make_cluster: MakeCluster) -> None:
    town = Town(make_cluster("unix"))

    @FUZZ
    @given(
        messages=st.lists(calls, min_size=1, max_size=6), role=st.sampled_from(["client", "server"])
    )
    def run(messages: list[Any], role: str) -> None:
        link = Link.connect([town.cluster.address], Hello(role), timeout_s=WAIT_S)
        with contextlib.suppress(ConnectionError):
            for message in messages:
                link.send(encode(message))
            link.send(encode(AskStatus(-77)))
            while (header := link.receive(WAIT_S)) is not None:
                reply = msgspec.msgpack.decode(header)
                if reply[:2] == ["status-is", -77]:
                    break
        link.close()
        town.citizen.blocks()
        assert town.cluster.coordinating.errors == []
        town.goes_on()

    run()


@FUZZ
@given(data=st.binary(max_size=100), framed=st.booleans())
def test_coordinator_survives_random_bytes(town: Town, data: bytes, framed: bool) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S)
    sock.connect(town.cluster.address.removeprefix("unix:"))
    with contextlib.suppress(OSError):
        sock.sendall(frame(encode(Hello("client"))) + (frame(data) if framed else data))
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    sock.close()
    town.citizen.blocks()
    assert town.cluster.coordinating.errors == []


# --- nonsense that only a shard can see -------------------------------------------------------


def nonsense(seq: int) -> dict[str, tuple[Any, str, str]]:
    """Messages, the kind of their refusal and a word of it."""
    gradient = Gradient(0, 1, 64)
    step = Step(seq, 0, 0, False, (gradient,), ())

    def pushing(**fields: Any) -> Step:
        return msgspec.structs.replace(step, push=(msgspec.structs.replace(gradient, **fields),))

    return {
        "unaligned": (pushing(offset=65), "ShapeMismatch", "88 bytes at offset 65"),
        "negative offset": (pushing(offset=-64), "ShapeMismatch", "offset -64"),
        "past the arena": (pushing(offset=8192 - 64), "ShapeMismatch", "there are 8192"),
        "far past it": (pushing(offset=1 << 62), "ShapeMismatch", "there are 8192"),
        "unknown arena": (pushing(arena=9), "ShapeMismatch", "arena 9"),
        "no payload": (pushing(arena=0), "ShapeMismatch", "there are 0 bytes"),
        "unknown block": (pushing(block=99), "UnknownName", "no block 99"),
        "negative block": (pushing(block=-1), "UnknownName", "no block -1"),
        "unknown piece": (pushing(active=(5,)), "ShapeMismatch", "5"),
        "huge piece": (pushing(active=(1 << 62,)), "ShapeMismatch", "pieces"),
        "hyper": (pushing(hyper=(-1.0, 0, 0, 0, 0, 0)), "ParamServeError", "lr of SGD"),
        "hyper count": (pushing(hyper=(1.0,) * 50), "ParamServeError", "takes 6"),
        "unknown group": (Step(seq, 7, 0, False, (), ()), "UnknownName", "no group 7"),
        "pull past the arena": (
            Step(seq, 0, 0, False, (), (Place(0, 1, 8192),)),
            "ShapeMismatch",
            "offset 8192",
        ),
        "weight": (
            msgspec.structs.replace(step, weight=float("nan")),
            "ParamServeError",
            "weight nan",
        ),
        "clip": (
            msgspec.structs.replace(step, clip_norm=-1.0),
            "ParamServeError",
            "clip_norm -1.0",
        ),
        "counts": (
            Assign(seq, 0, 0, 1, 64, None, (1,) * 5000),
            "ShapeMismatch",
            "5000 counts",
        ),
        "field": (Fetch(seq, 0, 77, 1, 64), "ParamServeError", "number 77"),
        "not watched": (TakeSnapshot(seq, 0, 0, ()), "ParamServeError", "does not watch"),
        "other spec": (
            Define(seq, BlockSpec(0, 0, "default", "float64", None, (), (0, 0)), 9, 1, 64),
            "DefineMismatch",
            "block 0 is defined as",
        ),
        "huge define": (
            Define(
                seq,
                BlockSpec(
                    5, 0, "default", "float64", None, (Piece("p", (1 << 50,)),), (0, 1 << 50)
                ),
                1,
                1,
                64,
            ),
            "Overloaded",
            "no memory",
        ),
    }


@pytest.mark.parametrize("case", nonsense(0))
def test_nonsense_is_refused_with_its_number_and_the_connection_goes_on(
    make_cluster: MakeCluster, case: str
) -> None:
    town = Town(make_cluster("unix"))
    arena = Arena.create(8192, 1)
    link = town.stranger(arenas=[arena])
    for seq in (1, 2):
        message, kind, words = nonsense(seq)[case]
        link.send(encode(message))
        header = link.receive(WAIT_S)
        assert header is not None
        refused = msgspec.msgpack.decode(header, type=Refused)
        assert (refused.seq, refused.kind, refused.applied) == (seq, kind, "no")
        assert words in refused.failed
    link.close()
    arena.close()
    assert not town.citizen.pull("w").any()
    assert town.citizen.push("w", np.zeros(8)).result().version == 1


def test_number_out_of_order_cuts_the_connection(town: Town) -> None:
    link = town.stranger()
    link.send(encode(Fetch(5, 0, 0, 0, 0)))
    with pytest.raises(ConnectionError):
        link.receive(WAIT_S)
    link.close()


def test_more_than_the_window_cuts_the_connection(make_cluster: MakeCluster) -> None:
    town = _town(make_cluster, "unix", Sync())
    town.cluster.mark_dead(0)
    worker = town.cluster.client(0)
    link = town.stranger(client=worker.id, rank=0, incarnation=worker.incarnation, window=2)
    held = Step(0, 0, 5, False, (), (Place(0, 0, 0),))

    def flood() -> None:
        for seq in range(1, 10):
            link.send(encode(msgspec.structs.replace(held, seq=seq)))
            assert link.receive(0.05) is None

    with pytest.raises(ConnectionError):
        flood()
    link.close()

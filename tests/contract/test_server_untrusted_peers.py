"""What a real server and coordinator do with peers that send nonsense: cut off, others go on.

`RoleCluster.close` fails a test in which anything was raised out of an event loop.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.echo_host import assert_cut_off, frame, read_frame
from tests.contract.harness import HELLO, UNTRUSTED, Harness
from tests.contract.role_cluster import WAIT_S, wait_until
from tests.suites import each_case

from paramserve.config import Credentials, Limits
from paramserve.consistency.built_in import Sync
from paramserve.errors import (
    NotAuthenticated,
    Overloaded,
    ParamServeError,
    ProtocolError,
    WorkerFenced,
)
from paramserve.messages import (
    Arenas,
    AskReport,
    Assign,
    Batch,
    BlockSpec,
    Define,
    Fetch,
    Gradient,
    Hello,
    JoinGroup,
    Piece,
    ReadTarget,
    Refused,
    Step,
    TakeSnapshot,
    encode,
)
from paramserve.transport.arena import Arena
from paramserve.transport.link import Link

# --- who they are -----------------------------------------------------------------------------


def test_peer_without_the_token_learns_nothing(make_cluster: MakeCluster) -> None:
    harness = Harness(make_cluster("tcp"))
    listeners = harness.cluster.servers[0].listeners
    address = next(x.address for x in listeners if x.address.startswith("tcp"))
    wrong = Credentials(b"x" * 32)
    with pytest.raises(NotAuthenticated, match="refused this side's token"):
        Link.connect([address], Hello("client", 7), credentials=wrong, timeout_s=WAIT_S)
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
            assert harness.cluster.token not in received
            assert len(received) <= 72  # the challenge, and at most a refusal
    harness.goes_on()


@each_case(
    ("hello", "error", "words"),
    [
        ({"role": "admin"}, ProtocolError, "came as 'admin'"),
        ({"client": 0}, ProtocolError, "'client' number 0"),
        ({"client": -3}, ProtocolError, "'client' number -3"),
        ({"role": "server", "client": 5}, ProtocolError, "'server' number 5"),
        ({"role": "attach"}, ProtocolError, "without a connection"),
        ({"window": 257}, Overloaded, "257 requests outstanding, outstanding_max is 256"),
        ({"requests": 257}, Overloaded, "257 requests outstanding, outstanding_max is 256"),
        ({"window": 5, "requests": 4}, Overloaded, "5 calls with 4 requests outstanding"),
        ({"window": 0}, Overloaded, "0 requests outstanding"),
        ({"window": -1}, Overloaded, "-1 requests outstanding"),
    ],
)
def test_hello_that_is_not_allowed_is_refused(
    harness: Harness, hello: dict[str, Any], error: type[ParamServeError], words: str
) -> None:
    parties = len(harness.cluster.servers[0].role._parties)
    for _ in range(3):
        with pytest.raises(error, match=words):
            harness.untrusted(**hello)
    assert len(harness.cluster.servers[0].role._parties) == parties  # nothing is kept of them
    harness.goes_on()


def test_older_incarnation_is_fenced(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1)
    first = cluster.client(0)
    first.close()
    harness = Harness(cluster)
    second = cluster.client(0)
    assert second.connection.incarnation == 2
    wait_until(lambda: cluster.servers[0].role.shard.sessions.members[0].incarnation == 2)
    with pytest.raises(WorkerFenced, match=r"worker 0 \(incarnation 1\).*knows incarnation 2"):
        harness.untrusted(client=first.connection.id, rank=0, incarnation=1)
    assert second.push("w", np.zeros(8)).result().version == 1
    harness.goes_on()


def test_another_clients_number_does_not_shut_it_out(harness: Harness) -> None:
    """The newest connection counts, since a reconnect looks the same; the client takes it back."""
    for _ in range(3):
        thief = harness.untrusted(client=harness.member.connection.id)
        harness.member.pull("w")
        with pytest.raises(ConnectionError):
            thief.receive(WAIT_S)
        thief.close()
        harness.goes_on()


def test_attached_arena_of_another_incarnation_is_refused(make_cluster: MakeCluster) -> None:
    harness = Harness(make_cluster("unix"))
    arena = Arena.create(4096, 1)
    with pytest.raises(ProtocolError, match="without a connection"):
        harness.untrusted(
            role="attach", client=harness.member.connection.id, incarnation=3, arenas=[arena]
        )
    arena.close()
    harness.goes_on()


# --- frames that are none ---------------------------------------------------------------------


BAD_FRAMES = {
    "truncated prelude": (b"PSRV\x01", ""),
    "truncated header": (frame(encode(AskReport()))[:-1], ""),
    "no msgpack": (frame(b"\xc1\xc1\xc1"), "a header was refused"),
    "not a message": (frame(msgspec.msgpack.encode({"a": 1})), "a header was refused"),
    "unknown tag": (frame(msgspec.msgpack.encode(["boo", 1])), "a header was refused"),
    "a reply": (frame(encode(Refused(1, "a", "b", "c", "d"))), "a header was refused"),
    "too few fields": (frame(msgspec.msgpack.encode(["step", 1])), "a header was refused"),
    "text that is none": (frame(b"\x92\xa1\xff\x01"), "a header was refused"),
    "wrong type": (frame(msgspec.msgpack.encode(["inquire", "x"])), "a header was refused"),
    "definition in a batch": (
        frame(encode(Batch((Define(1, BlockSpec(0, 0, "g", "float32", None, (), ()), 1, 0, 0),)))),
        "a batch has a definition",
    ),
    "trailing bytes": (frame(encode(AskReport()) + b"\x00"), "a header was refused"),
    "empty": (frame(b""), "a header was refused"),
}


@each_case("case", BAD_FRAMES)
def test_bad_frame_ends_its_connection_with_a_reason(harness: Harness, case: str) -> None:
    data, reason = BAD_FRAMES[case]
    sock = harness.cluster.peer()
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
    harness.goes_on()


def test_hello_with_a_text_that_is_none_is_refused(harness: Harness) -> None:
    sock = harness.cluster.peer()
    sock.sendall(frame(b"\x92\xa5hello\xa1\xff"))
    told = msgspec.msgpack.decode(read_frame(sock), type=Refused)
    assert (told.seq, told.kind) == (0, "ProtocolError")
    assert_cut_off(sock)


# --- nonsense that only a shard can see -------------------------------------------------------


def nonsense(seq: int) -> dict[str, tuple[Any, str, str]]:
    """Messages, the kind of their refusal and a word of it."""
    return {**bad_gradients(seq), **bad_steps(seq), **bad_requests(seq)}


def bad_gradients(seq: int) -> dict[str, tuple[Any, str, str]]:
    gradient = Gradient(0, 1, 64)

    def pushing(**fields: Any) -> Step:
        return Step(seq, 0, 0, False, (msgspec.structs.replace(gradient, **fields),), ())

    def pulling(**fields: Any) -> Step:
        return Step(seq, 0, 0, False, (), (ReadTarget(0, 1, 64, **fields),))

    return {
        "unaligned": (pushing(offset=65), "ShapeMismatch", "88 bytes at offset 65"),
        "negative offset": (pushing(offset=-64), "ShapeMismatch", "offset -64"),
        "past the arena": (pushing(offset=8192 - 64), "ShapeMismatch", "there are 8192"),
        "far past it": (pushing(offset=1 << 62), "ShapeMismatch", "there are 8192"),
        "unknown arena": (pushing(arena=9), "ShapeMismatch", "arena 9"),
        "no arena": (pushing(arena=0), "ShapeMismatch", "there are 0 bytes"),
        "no room": (pulling(room=64), "ShapeMismatch", "without a codec of pulls"),
        "unknown block": (pushing(block=99), "UnknownName", "no block 99"),
        "negative block": (pushing(block=-1), "UnknownName", "no block -1"),
        "unknown piece": (pushing(active=(5,)), "ShapeMismatch", "5"),
        "huge piece": (pushing(active=(1 << 62,)), "ShapeMismatch", "pieces"),
        "hyper": (pushing(hyper=(-1.0, 0, 0, 0, 0, 0)), "ParamServeError", "lr of SGD"),
        "hyper count": (pushing(hyper=(1.0,) * 50), "ParamServeError", "takes 6"),
    }


def bad_steps(seq: int) -> dict[str, tuple[Any, str, str]]:
    step = Step(seq, 0, 0, False, (Gradient(0, 1, 64),), ())
    return {
        "unknown group": (Step(seq, 7, 0, False, (), ()), "UnknownName", "no group 7"),
        "pull past the arena": (
            Step(seq, 0, 0, False, (), (ReadTarget(0, 1, 8192),)),
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
    }


def bad_requests(seq: int) -> dict[str, tuple[Any, str, str]]:
    enormous = BlockSpec(5, 0, "default", "float64", None, (Piece("p", (1 << 50,)),), (0, 1 << 50))
    return {
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
            "is defined as block 0",
        ),
        "huge define": (Define(seq, enormous, 1, 1, 64), "Overloaded", "no memory"),
    }


@pytest.fixture
def one_harness(make_cluster: MakeCluster) -> Harness:
    return Harness(make_cluster("unix"))


@each_case(("number", "case"), enumerate(nonsense(0)))
def test_nonsense_is_refused_with_its_number_and_the_connection_goes_on(
    one_harness: Harness, number: int, case: str
) -> None:
    harness = one_harness
    arena = Arena.create(8192, 1)
    link = harness.untrusted(client=UNTRUSTED + number, arenas=[arena])
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
    assert not harness.member.pull("w").any()
    assert harness.member.push("w", np.zeros(8)).result().version == number + 1


TOO_MUCH = Limits().arena_bytes_max + 1
BAD_ARENAS: dict[str, tuple[tuple[tuple[int, int], ...], str, str]] = {
    "number 0": (((0, 4096),), "ProtocolError", "were named"),
    "twice": (((1, 4096), (1, 8192)), "ProtocolError", "were named"),
    "no bytes": (((1, 0),), "ProtocolError", "were named"),
    "below 0": (((1, -64),), "ProtocolError", "were named"),
    "too large": (((1, TOO_MUCH),), "Overloaded", f"1 arenas of {TOO_MUCH} bytes"),
    "together": (((1, TOO_MUCH - 64), (2, 64)), "Overloaded", f"2 arenas of {TOO_MUCH} bytes"),
    "too many": (tuple((n, 64) for n in range(1, 34)), "Overloaded", "33 arenas"),
}


@each_case("kind", ["unix", "tcp"])
def test_arenas_that_no_server_mirrors_end_the_link_and_others_go_on(
    make_cluster: MakeCluster, kind: str
) -> None:
    harness = Harness(make_cluster(kind))
    for arenas, error, words in BAD_ARENAS.values():
        link = harness.untrusted()
        link.send(encode(Arenas(((1, 4096),))))
        link.send(encode(Arenas(arenas)))
        header = link.receive(WAIT_S)
        assert header is not None
        told = msgspec.msgpack.decode(header, type=Refused)
        assert (told.seq, told.kind) == (0, error)
        assert words in told.failed
        with pytest.raises(ConnectionError):
            link.receive(WAIT_S)
        link.close()
        harness.goes_on()


def test_arenas_of_a_client_whose_memory_is_mapped_are_refused(one_harness: Harness) -> None:
    arena = Arena.create(8192, 1)
    link = one_harness.untrusted(arenas=[arena])
    link.send(encode(Arenas(((1, 4096),))))
    header = link.receive(WAIT_S)
    assert header is not None
    assert "need no mirror" in msgspec.msgpack.decode(header, type=Refused).failed
    with pytest.raises(ConnectionError):
        link.receive(WAIT_S)
    link.close()
    arena.close()
    one_harness.goes_on()


def test_bytes_for_no_arena_end_the_link_before_they_are_taken(make_cluster: MakeCluster) -> None:
    harness = Harness(make_cluster("tcp"))
    for run in ((2, 0, 64), (1, 4096, 1), (1, 0, 4097)):
        link = harness.untrusted()
        link.send(encode(Arenas(((1, 4096),))))
        link.arenas = {1: np.ones(8192, np.uint8), 2: np.ones(64, np.uint8)}
        link.send(encode(AskReport()), [run])
        header = link.receive(WAIT_S)
        assert header is not None
        told = msgspec.msgpack.decode(header, type=Refused)
        assert (told.seq, told.kind) == (0, "ProtocolError")
        assert f"offset {run[1]} of arena {run[0]}" in told.failed
        mirror = harness.cluster.servers[0].role.shard.sessions.by_client[UNTRUSTED].mirror
        assert not any(each.any() for each in mirror.arenas.values())
        link.close()
        harness.goes_on()


def test_number_out_of_order_cuts_the_connection(harness: Harness) -> None:
    link = harness.untrusted()
    link.send(encode(Fetch(5, 0, 0, 0, 0)))
    with pytest.raises(ConnectionError):
        link.receive(WAIT_S)
    link.close()


def test_more_than_the_window_cuts_the_connection(make_cluster: MakeCluster) -> None:
    harness = Harness(make_cluster("unix", workers=1, policy=Sync()), rank=0)
    harness.cluster.mark_dead(0)
    worker = harness.cluster.client(0)
    arena = Arena.create(8192, 1)
    link = harness.untrusted(
        client=worker.connection.id, rank=0, incarnation=2, window=2, arenas=[arena]
    )
    harness.cluster.servers[0].role.shard.sessions.by_client[worker.connection.id].requests = 4
    link.send(encode(JoinGroup(1, 0)))
    link.receive(WAIT_S)
    held = Step(0, 0, 5, False, (), (ReadTarget(0, 1, 64),))

    def flood() -> None:
        for seq in range(2, 11):
            link.send(encode(msgspec.structs.replace(held, seq=seq)))
            assert link.receive(0.05) is None

    with pytest.raises(ConnectionError):
        flood()
    link.close()

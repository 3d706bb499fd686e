"""What only a socket can suffer: peers that are no link, other users, other places.

Over all socket transports, byte by byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.contract.echo_host import (
    ARENA_BYTES,
    RUNS,
    STREAMS,
    TOKEN,
    WAIT_S,
    Host,
    MakeHost,
    assert_cut_off,
    assert_ends,
    frame,
    open_fds,
    ping,
    read_exactly,
    read_frame,
    refusal_before_the_end,
)
from tests.contract.role_cluster import wait_until
from tests.suites import each_case

from paramserve.config import NO_CREDENTIALS, Credentials, Limits
from paramserve.errors import (
    ConnectTimeout,
    NotAuthenticated,
    ParamServeError,
    ProtocolError,
)
from paramserve.messages import PROTOCOL_VERSION, Hello, Ok, Welcome, encode
from paramserve.transport import auth, dial, handshake, listener, tls
from paramserve.transport.arena import Arena
from paramserve.transport.framing import prelude
from paramserve.transport.link import Link
from paramserve.transport.listener import listen_tcp, listen_unix

KNOWN, WRONG = Credentials(TOKEN), Credentials(bytes(32))


@pytest.fixture(params=STREAMS)
def stream(request: pytest.FixtureRequest, make_host: MakeHost) -> Host:
    return make_host(request.param)


# --- what only a stream of bytes can suffer ------------------------------------------------------


def test_many_frames_in_one_write(stream: Host) -> None:
    sock = stream.known()
    expected = [b"%d" % i * (i % 40 + 1) for i in range(3000)]
    writer = threading.Thread(target=sock.sendall, args=(b"".join(map(frame, expected)),))
    writer.start()
    if stream.kind == "tls":  # One thread at a time; the system's buffers take it all.
        writer.join(WAIT_S)
    assert [read_frame(sock) for _ in expected] == expected
    writer.join(WAIT_S)
    sock.close()


def coming_back(header: bytes, nbytes: int) -> bytes:
    """A header that comes back with so many bytes of the start of arena 1."""
    return header + RUNS + encode(((1, 0, nbytes),))


def test_frames_that_come_byte_by_byte(stream: Host) -> None:
    sock = stream.known()
    for byte in frame(coming_back(b"drop by drop", 64), b"x" * 64) + frame(b"next"):
        sock.sendall(bytes([byte]))
    assert read_frame(sock)[:-28] == b"drop by drop"
    assert read_exactly(sock, 64) == b"x" * 64
    assert read_frame(sock) == b"next"
    sock.close()


def test_long_header_passes(stream: Host) -> None:
    link = stream.connect()
    ping(link, b"h" * 3_000_000)
    ping(link)
    link.close()


def test_frame_sent_together_with_the_hello_is_not_lost(stream: Host) -> None:
    sock = stream.proven()
    eager = frame(coming_back(b"eager", 64), b"p" * 64)
    sock.sendall(frame(encode(Hello("client"))) + eager + frame(b"second"))
    read_frame(sock)
    assert read_frame(sock)[:-28] == b"eager"
    assert read_exactly(sock, 64) == b"p" * 64
    assert read_frame(sock) == b"second"
    sock.close()


@each_case("part", [10, 20, 25, 20 + 6 + 100])
def test_client_that_vanishes_mid_message_is_only_closed(stream: Host, part: int) -> None:
    other = stream.connect(Hello("client", client=2))
    sock = stream.known(client=part)
    sock.sendall(frame(b"header", b"p" * 10_000)[:part])
    sock.close()
    stream.handler.wait(lambda: part in stream.handler.closed_by)
    assert b"header" not in stream.handler.headers
    ping(other)
    other.close()


def wrong_frames() -> list[tuple[bytes, str]]:
    good = frame(b"header")
    return [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "starts with b'GET '"),
        (good[:4] + b"\x09\0" + good[6:], f"version 9, this side speaks {PROTOCOL_VERSION}"),
        (prelude(1001, 0), "header of 1001 bytes, the limit is 1000"),
        (prelude(10, 4097), "payload of 4097 bytes, the limit is 4096"),
    ]


@each_case("kind", STREAMS)
def test_wrong_frame_is_cut_off_with_a_reason(make_host: MakeHost, kind: str) -> None:
    host = make_host(kind, Limits(header_bytes_max=1000, payload_bytes_max=4096))
    other = host.connect(Hello("client", client=2))
    for number, (data, says) in enumerate(wrong_frames(), 3):
        sock = host.known(client=number)
        sock.sendall(data[:20])
        assert says in refusal_before_the_end(sock).failed
        host.handler.wait(lambda n=number: host.handler.closed_by[-1:] == [n])
        ping(other)
    other.close()


@each_case(
    ("data", "says"),
    [
        (*wrong_frames()[0],),
        (*wrong_frames()[1],),
        (prelude(4096 - 19, 0), "header of 4077 bytes, the limit is 4076"),
        (prelude(10, 1), "payload of 1 bytes, the limit is 0"),
        (frame(b"\xc1\xc1\xc1"), "a hello was refused"),
        (frame(encode(Ok(1))), "a hello was refused"),
        (frame(encode(Hello("client", arenas=((1, 64),)))), "0 descriptors came with it"),
    ],
)
def test_wrong_hello_is_refused_with_a_reason(stream: Host, data: bytes, says: str) -> None:
    sock, refused = stream.proven(), stream.refused
    sock.sendall(data if data[:4] == b"PSRV" else data[:20])
    assert says in refusal_before_the_end(sock).failed
    assert stream.refused == refused + 1
    assert stream.handler.opened_by == []


def test_random_bytes_in_place_of_a_hello_are_refused(stream: Host) -> None:
    random = np.random.default_rng(1)
    for _ in range(20):
        sock = stream.proven()
        with contextlib.suppress(ConnectionError):
            sock.sendall(random.bytes(300))
            while sock.recv(4096):
                pass
        sock.close()
    wait_until(lambda: stream.refused == 20)
    link = stream.connect()
    ping(link)
    link.close()


@each_case("kind", STREAMS)
def test_flood_of_silent_peers_is_bounded(make_host: MakeHost, kind: str) -> None:
    host = make_host(kind, Limits(handshakes_max=4))
    before = open_fds()
    silent = [host.unproven() for _ in range(12)]
    wait_until(lambda: host.refused == 8)
    wait_until(lambda: open_fds() == before + len(silent) + 4)
    for sock in silent:
        sock.close()
    link = host.connect()
    ping(link)
    link.close()


@each_case("kind", STREAMS)
def test_silent_peer_is_closed_after_the_handshake_timeout(make_host: MakeHost, kind: str) -> None:
    host = make_host(kind, Limits(handshake_timeout_s=0.5))
    silent, half = host.unproven(), host.proven()
    half.sendall(frame(encode(Hello("client")))[:21])
    if kind != "unix":
        read_exactly(silent, auth.GREETING_BYTES)
    if kind == "tcp":
        read_exactly(silent, auth.NONCE_BYTES)
    assert_cut_off(silent)
    assert_cut_off(half)
    assert host.refused == 2
    assert host.handler.opened_by == []


@each_case("kind", STREAMS)
def test_connections_over_the_limit_are_closed(make_host: MakeHost, kind: str) -> None:
    host = make_host(kind, Limits(connections_max=2))
    links = [host.connect(), host.connect()]
    assert_cut_off(host.unproven())
    for link in links:
        ping(link)
        link.close()


@pytest.mark.parametrize("bug", ["in frame", "in opened"])
def test_bug_in_the_handler_ends_its_connection_and_is_reported(
    stream: Host, caplog: pytest.LogCaptureFixture, bug: str
) -> None:
    other = stream.connect(Hello("client", client=2))
    if bug == "in frame":
        link = stream.connect()
        link.send(b"bug")
        assert assert_ends(link) == []
        stream.handler.wait(lambda: stream.handler.closed_by == [1])
    else:
        sock = stream.proven()
        sock.sendall(frame(encode(Hello("bug"))))
        assert_cut_off(sock)
    wait_until(lambda: "ZeroDivisionError" in caplog.text)
    ping(other)
    other.close()


# --- TCP: the token ------------------------------------------------------------------------------


def test_peers_with_another_token_are_refused_and_logged_once_a_minute(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host("tcp")
    for number in range(1, 5):
        if number == 4:
            monkeypatch.setattr(listener, "_LOG_EVERY_S", 0.0)  # as if the minute were over
        with pytest.raises(NotAuthenticated, match="refused this side's token"):
            Link.connect([host.address], Hello("client"), credentials=WRONG, timeout_s=WAIT_S)
        wait_until(lambda number=number: host.refused == number)
    assert host.handler.opened_by == []
    told = (
        f"refused a peer from 127.0.0.1 at {host.address}: a client's proof of the token is wrong"
    )
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        told,
        f"{told}; 2 more from there since the last such line",
    ]


def test_peer_that_says_hello_without_the_token_is_not_read(make_host: MakeHost) -> None:
    host = make_host("tcp")
    sock = host.unproven()
    read_exactly(sock, auth.GREETING_BYTES + auth.NONCE_BYTES)
    sock.sendall(frame(encode(Hello("client"))).ljust(auth.ANSWER_BYTES, b"\0"))
    assert read_exactly(sock, auth.PROOF_BYTES) == auth.REFUSAL
    assert_cut_off(sock)
    assert (host.refused, host.handler.opened_by) == (1, [])


def test_server_without_the_token_gets_no_hello(make_host: MakeHost) -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        heard: list[bytes] = []

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(auth.greeting(tls=False) + bytes(32))
                read_exactly(sock, auth.ANSWER_BYTES)
                sock.sendall(b"p" * auth.PROOF_BYTES)
                heard.append(sock.recv(100))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = f"tcp:127.0.0.1:{impostor.getsockname()[1]}"
        with pytest.raises(NotAuthenticated, match="does not hold this cluster's token"):
            Link.connect([address], Hello("client"), credentials=KNOWN, timeout_s=WAIT_S)
        thread.join(WAIT_S)
    assert heard == [b""]


def test_tcp_without_a_token_is_not_dialled(make_host: MakeHost) -> None:
    host = make_host("tcp")
    with pytest.raises(NotAuthenticated, match="needs the cluster's token, and there is none"):
        Link.connect([host.address], Hello("client"), timeout_s=WAIT_S)
    assert host.refused == 0


def test_tcp_with_a_short_token_is_a_value_error(make_host: MakeHost) -> None:
    host = make_host("tcp")
    short = Credentials(b"secret")
    with pytest.raises(ValueError, match="at least 16 bytes, got 6"):
        Link.connect([host.address], Hello("client"), credentials=short, timeout_s=WAIT_S)


def test_unix_socket_beside_tcp_needs_no_token(make_host: MakeHost) -> None:
    unix, tcp = make_host("unix"), make_host("tcp")
    link = Link.connect([tcp.address, unix.address], Hello("client"), timeout_s=WAIT_S)
    assert link.address == unix.address
    ping(link)
    link.close()


@each_case("credentials", [KNOWN, NO_CREDENTIALS], ids=["token", "no token"])
def test_busy_unix_socket_beside_tcp_is_why_no_connection_was_made(
    tmp_path: Path, credentials: Credentials
) -> None:
    addresses = [f"unix:{tmp_path}/busy.sock", "tcp:127.0.0.1:1"]
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(f"{tmp_path}/busy.sock")
        busy.listen()
        with pytest.raises(ConnectTimeout, match=r"busy\.sock") as found:
            Link.connect(addresses, Hello("client"), credentials=credentials, timeout_s=0.05)
    assert dial.listens(found.value.__cause__)


def test_token_is_in_no_log_and_no_repr(
    make_host: MakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    host = make_host("tcp")
    link = host.connect()
    with pytest.raises(NotAuthenticated) as caught:
        Link.connect([host.address], Hello("client"), credentials=WRONG, timeout_s=WAIT_S)
    said = caplog.text + repr(link) + repr(host.listener) + str(caught.value)
    assert repr(TOKEN)[2:-1] not in said
    assert TOKEN.hex() not in said
    link.close()


# --- AF_UNIX: who, and whose memory --------------------------------------------------------------


def test_socket_file_is_private_and_unlinked(make_host: MakeHost) -> None:
    host = make_host("unix")
    mode = os.stat(host.path).st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    host.close()
    assert not os.path.exists(host.path)


def test_process_of_another_user_is_refused(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host("unix")
    monkeypatch.setattr(handshake.os, "geteuid", lambda: os.getuid() + 1)
    sock = host.unproven()
    assert_cut_off(sock)
    assert (host.refused, host.handler.opened_by) == (1, [])


def test_socket_of_another_user_is_not_spoken_to(
    make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host("unix")
    monkeypatch.setattr(dial.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(NotAuthenticated, match=r"user \d+ listens at unix:.*, this is user"):
        Link.connect([host.address], Hello("client"), timeout_s=WAIT_S)
    assert host.handler.opened_by == []


def test_server_that_reads_another_nonce_shares_no_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "other.sock")
    arena = Arena.create(ARENA_BYTES, 1)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def pretend() -> None:
            sock, _ = server.accept()
            with sock:
                read_frame(sock)
                sock.sendall(frame(encode(Welcome(bytes(16)))))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ProtocolError, match="the memory is not shared"):
            Link.connect([f"unix:{path}"], Hello("client"), arenas=[arena], timeout_s=WAIT_S)
        thread.join(WAIT_S)
    arena.close()


def test_unsealed_arena_is_refused_and_nothing_stays_open(make_host: MakeHost) -> None:
    host = make_host("unix")
    before = open_fds()
    sock = host.unproven()
    fd = os.memfd_create("x")
    os.ftruncate(fd, ARENA_BYTES)
    hello = frame(encode(Hello("client", arenas=((1, ARENA_BYTES),))))
    socket.send_fds(sock, [hello], [fd])
    assert "not sealed" in refusal_before_the_end(sock).failed
    os.close(fd)
    wait_until(lambda: open_fds() == before)


def test_more_descriptors_than_allowed_are_refused_and_closed(make_host: MakeHost) -> None:
    host = make_host("unix", Limits(arenas_max=2))
    arenas = [Arena.create(ARENA_BYTES, number) for number in range(1, 21)]
    before = open_fds()
    sock = host.unproven()
    named = tuple((arena.number, arena.nbytes) for arena in arenas)
    fds = [arena.fd for arena in arenas if arena.fd is not None]
    socket.send_fds(sock, [frame(encode(Hello("client", arenas=named)))], fds)
    assert "more than 2 descriptors" in refusal_before_the_end(sock).failed
    wait_until(lambda: open_fds() == before)
    for arena in arenas:
        arena.close()


def test_arenas_over_the_limit_of_bytes_are_refused(make_host: MakeHost) -> None:
    host = make_host("unix", Limits(arena_bytes_max=2 * ARENA_BYTES - 1))
    arenas = [Arena.create(ARENA_BYTES, number) for number in (1, 2)]
    with pytest.raises(ParamServeError, match=f"{ARENA_BYTES - 1} bytes are left"):
        host.connect(arenas=arenas)
    for arena in arenas:
        arena.close()


# --- reaching a peer -----------------------------------------------------------------------------


def test_unix_comes_first_and_tcp_is_the_way_out(
    make_host: MakeHost, caplog: pytest.LogCaptureFixture
) -> None:
    unix, tcp = make_host("unix"), make_host("tcp")
    addresses = [tcp.address, unix.address]
    link = Link.connect(addresses, Hello("client"), credentials=KNOWN, timeout_s=WAIT_S)
    assert link.address == unix.address
    link.close()
    assert caplog.text == ""
    unix.close()
    link = Link.connect(addresses, Hello("client"), credentials=KNOWN, timeout_s=WAIT_S)
    assert (link.address, link.shared) == (tcp.address, False)
    link.close()
    (record,) = caplog.records
    assert "No such file" in record.getMessage()


def test_peer_that_is_late_is_waited_for(make_host: MakeHost, tmp_path: Path) -> None:
    links: list[Link] = []
    address = f"unix:{tmp_path / 's.sock'}"

    def connect() -> None:
        links.append(Link.connect([address], Hello("client"), timeout_s=WAIT_S))

    thread = threading.Thread(target=connect)
    thread.start()
    time.sleep(0.05)
    make_host("unix")
    thread.join(WAIT_S)
    ping(links[0])
    links[0].close()


def test_no_listener_is_a_connect_timeout_that_says_so(tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'none.sock'}"
    with pytest.raises(ConnectTimeout, match=r"none.sock .*No such file.*; waited 0.1 s"):
        Link.connect([address], Hello("client"), timeout_s=0.1)


@each_case("address", ["", "unix:", "tcp:1.2.3.4", "tcp::80", "tcp:a:b", "udp:a:1"])
def test_address_that_is_none_is_a_value_error(address: str) -> None:
    with pytest.raises(ValueError, match="expected unix:<path>"):
        Link.connect([address], Hello("client"), credentials=KNOWN, timeout_s=1)


def test_place_that_is_taken_is_a_clear_error(stream: Host) -> None:
    place = stream.address.rpartition(":")[2]

    async def listen_again() -> None:
        if stream.kind == "unix":
            await listen_unix(place, stream.handler, Limits())
        else:
            await listen_tcp("127.0.0.1", int(place), KNOWN, stream.handler, Limits())

    with pytest.raises(ParamServeError, match="another process listens there") as caught:
        asyncio.run(listen_again())
    assert stream.address in str(caught.value)
    link = stream.connect()
    ping(link)
    link.close()


# --- crowds that prove nothing keep no other peer out ---------------------------------------------


PLACES = 4


@pytest.fixture(params=["tcp", "tls"])
def host(request: pytest.FixtureRequest, make_host: MakeHost) -> Host:
    return make_host(request.param, Limits(handshakes_max=PLACES, handshake_timeout_s=60.0))


def test_silent_peers_keep_no_client_out(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    silent = [host.unproven() for _ in range(3 * PLACES)]
    wait_until(lambda: host.refused == 2 * PLACES)
    links = [host.connect() for _ in range(PLACES)]
    for link in links:
        ping(link)
        link.close()
    assert host.refused == 2 * PLACES + 1, "one place is enough for those that prove themselves"
    told = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert ["4 of them from 127.0.0.1" in each.getMessage() for each in told] == [True]
    for sock in silent:
        sock.close()


def assert_open(sock: socket.socket) -> None:
    """The other end has sent nothing more, and has not closed."""
    sock.setblocking(False)
    with pytest.raises((BlockingIOError, ssl.SSLWantReadError)):
        sock.recv(1)


def from_address(host: Host, address: str) -> socket.socket:
    """A silent peer that comes from another address of this machine."""
    place = ("127.0.0.1", int(host.address.rpartition(":")[2]))
    sock = socket.create_connection(place, source_address=(address, 0), timeout=10.0)
    read_exactly(sock, auth.GREETING_BYTES)
    if host.kind == "tcp":
        read_exactly(sock, auth.NONCE_BYTES)
    return sock


def test_crowd_from_one_address_pushes_out_its_own(host: Host) -> None:
    other = from_address(host, "127.0.0.2")  # the oldest of all
    crowd = [from_address(host, "127.0.0.3") for _ in range(PLACES + 1)]
    assert_cut_off(crowd[0])
    assert_cut_off(crowd[1])
    assert_open(other)
    for sock in (other, *crowd):
        sock.close()


def test_peer_that_has_proved_itself_is_not_pushed_out(host: Host) -> None:
    known = [host.proven() for _ in range(PLACES)]
    assert_cut_off(host.unproven())
    for sock in known:
        assert_open(sock)
        sock.close()


def test_peer_is_served_while_handshakes_of_tls_keep_coming(make_host: MakeHost) -> None:
    host = make_host("tls", Limits(handshakes_max=PLACES))
    link = host.connect()
    over, floods = threading.Event(), 3
    done = [0] * floods

    def flood(number: int) -> None:
        assert host.credentials.tls is not None
        context = tls.client_context(host.credentials.tls)
        while not over.is_set():
            with contextlib.suppress(OSError), host.unproven() as sock:
                read_exactly(sock, auth.GREETING_BYTES)
                with context.wrap_socket(sock, server_hostname="127.0.0.1"):
                    done[number] += 1

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(floods)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: all(done))
        before = sum(done)
        for _ in range(20):
            ping(link)
        wait_until(lambda: sum(done) > before)
    finally:
        over.set()
        for thread in threads:
            thread.join(10.0)
    link.close()

"""What only TLS can suffer: certificates of all kinds, one side without it, broken handshakes.

That it carries frames is shown by the contract's suite, which runs over it as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from tests.contract.authorities import Authority, trusted_authority, trusted_tls
from tests.contract.echo_host import (
    TOKEN,
    WAIT_S,
    Host,
    MakeHost,
    assert_cut_off,
    assert_ends,
    frame,
    ping,
    read_exactly,
    read_parts,
    receive,
    send_parts,
)
from tests.contract.role_cluster import wait_until
from tests.suites import each_case

from paramserve.config import TLS, Credentials, Limits
from paramserve.errors import NotAuthenticated, ParamServeError, ProtocolError
from paramserve.messages import Hello, encode
from paramserve.transport import auth
from paramserve.transport.link import Link
from paramserve.transport.listener import listen_tcp
from paramserve.transport.tls import client_context, server_context

HOSTS = ("localhost", "127.0.0.1")
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture
def host(make_host: MakeHost) -> Host:
    return make_host("tls")


@pytest.fixture
def other_authority(tmp_path: Path) -> Authority:
    """An authority that no peer of the harness trusts."""
    directory = tmp_path / "other"
    directory.mkdir()
    return Authority(directory)


def connect(host: Host, tls: TLS | None, token: bytes = TOKEN) -> Link:
    return Link.connect(
        [host.address], Hello("client"), credentials=Credentials(token, tls), timeout_s=WAIT_S
    )


def assert_refused(host: Host, tls: TLS | None, says: str) -> None:
    """The dialling side is told why; the listener counts it, and goes on for others."""
    before = host.refused
    with pytest.raises(NotAuthenticated, match=says):
        connect(host, tls)
    wait_until(lambda: host.refused == before + 1)
    assert host.handler.opened_by == []
    good = connect(host, trusted_tls() if host.credentials.tls is not None else None)
    ping(good)
    good.close()


def at_version(tls: TLS, version: ssl.TLSVersion) -> TLS:
    """The same settings, in this process for this version of TLS only."""
    client_context(tls).maximum_version = client_context(tls).minimum_version = version
    return tls


def test_connection_is_of_kind_tcp_and_speaks_the_newest_version(host: Host) -> None:
    sock = host.known()
    assert host.handler.kinds == ["tcp"]
    assert isinstance(sock, ssl.SSLSocket)
    assert sock.version() == "TLSv1.3"
    sock.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_payloads_pass_in_either_version(host: Host, version: ssl.TLSVersion) -> None:
    link = connect(host, at_version(trusted_authority().issue(*HOSTS), version))
    data = np.arange(3_000_000, dtype=np.uint8)
    link.arenas = {1: np.zeros(data.size, np.uint8)}
    for _ in range(3):
        send_parts(link, b"payload", [data])
        link.send(b"behind")
        assert receive(link) == b"payload"
        assert np.array_equal(data, *read_parts(link, [data.size]))
        assert receive(link) == b"behind"
    link.close()


def test_older_version_is_refused(host: Host) -> None:
    with host.unproven() as sock:
        read_exactly(sock, auth.GREETING_BYTES)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(trusted_authority().path)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            context.minimum_version = ssl.TLSVersion.TLSv1_1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError, match="ALERT_PROTOCOL_VERSION"):
            context.wrap_socket(sock, server_hostname="localhost")
    wait_until(lambda: host.refused == 1)


def test_nothing_of_a_frame_can_be_read_on_the_way(host: Host) -> None:
    with Relay(host) as relay:
        link = relay.connect()
        ping(link, b"a word that no other may read")
        link.close()
    assert len(relay.seen) > 1000
    assert b"a word" not in relay.seen
    assert TOKEN not in relay.seen


def test_records_that_come_in_pieces_are_waited_for(host: Host) -> None:
    with Relay(host, pieces=True) as relay:
        link = relay.connect()
        data = np.arange(20_000, dtype=np.uint8)
        link.arenas = {1: np.zeros(data.size, np.uint8)}
        for _ in range(5):
            ping(link)
            send_parts(link, b"payload", [data])
            assert receive(link) == b"payload"
            assert np.array_equal(data, *read_parts(link, [data.size]))
        link.close()


class Relay:
    """Stands between a client and a host, passes everything on and writes it down.

    Args:
        pieces: passes on only the first bytes of what came, and the rest a moment later.
    """

    def __init__(self, host: Host, *, pieces: bool = False) -> None:
        self.seen = bytearray()
        self._host = host
        self._pieces = pieces
        self._server = socket.create_server(("127.0.0.1", 0))
        port = int(host.address.rpartition(":")[2])
        self._far = socket.create_connection(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._accept)

    def connect(self) -> Link:
        return Link.connect(
            [f"tcp:127.0.0.1:{self._server.getsockname()[1]}"],
            Hello("client"),
            credentials=self._host.credentials,
            timeout_s=WAIT_S,
        )

    def _accept(self) -> None:
        near, _ = self._server.accept()
        back = threading.Thread(target=self._pass, args=(self._far, near))
        back.start()
        self._pass(near, self._far)
        back.join(WAIT_S)
        near.close()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                if self._pieces:
                    target.sendall(data[:9])
                    time.sleep(0.002)
                    data = data[9:]
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(WAIT_S)
        self._far.close()
        self._server.close()


# --- whose certificate ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_clients_certificate_of_another_authority_is_refused(
    host: Host, other_authority: Authority, version: ssl.TLSVersion
) -> None:
    tls = at_version(other_authority.issue(*HOSTS, trusts=trusted_authority()), version)
    assert_refused(host, tls, "refused this side's certificate '.*cert1.pem': it is not signed")


@pytest.mark.parametrize("version", VERSIONS)
def test_servers_certificate_of_another_authority_is_refused(
    host: Host, other_authority: Authority, version: ssl.TLSVersion
) -> None:
    tls = at_version(trusted_authority().issue(*HOSTS, trusts=other_authority), version)
    assert_refused(host, tls, "the certificate of tcp:127.0.0.1:.* was refused: .*certificate")


def test_expired_certificate_of_a_client_is_refused(host: Host) -> None:
    tls = trusted_authority().issue(*HOSTS, not_after=yesterday())
    assert_refused(host, tls, "refused this side's certificate '.*': it has expired")


def test_expired_certificate_of_a_server_is_refused(make_host: MakeHost) -> None:
    old = trusted_authority().issue(*HOSTS, not_after=yesterday())
    host = make_host("tls", credentials=Credentials(TOKEN, old))
    with pytest.raises(NotAuthenticated, match=r"expired\. Applied: no\. To fix: renew"):
        connect(host, trusted_tls())
    wait_until(lambda: host.refused == 1)


def yesterday() -> datetime:
    return datetime.now(UTC) - timedelta(days=1)


@pytest.mark.parametrize("version", VERSIONS)
def test_client_without_a_certificate_is_refused(host: Host, version: ssl.TLSVersion) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(trusted_authority().path)
    context.maximum_version = version
    sock = host.unproven()
    read_exactly(sock, auth.GREETING_BYTES)
    with (
        pytest.raises(ssl.SSLError, match="ALERT"),
        context.wrap_socket(sock, server_hostname="localhost") as wrapped,
    ):
        wrapped.recv(1)
    sock.close()
    wait_until(lambda: host.refused == 1)
    assert_refused(host, None, "speaks TLS, and this side has no certificates")


def test_name_that_the_servers_certificate_lacks_is_refused(make_host: MakeHost) -> None:
    elsewhere = trusted_authority().issue("elsewhere.example")
    host = make_host("tls", credentials=Credentials(TOKEN, elsewhere))
    assert trusted_tls().check_host
    with pytest.raises(NotAuthenticated, match=r"127\.0\.0\.1.*turn check_host off"):
        connect(host, trusted_tls())
    link = connect(host, trusted_authority().issue(*HOSTS, check_host=False))
    ping(link)
    link.close()


def test_servers_certificate_is_checked_with_check_host_off(
    host: Host, other_authority: Authority
) -> None:
    tls = trusted_authority().issue(*HOSTS, trusts=other_authority, check_host=False)
    assert_refused(host, tls, "the certificate of tcp:127.0.0.1:.* was refused")


def test_certificate_does_not_stand_for_the_token(host: Host) -> None:
    with pytest.raises(NotAuthenticated, match="refused this side's token"):
        connect(host, trusted_tls(), bytes(32))
    wait_until(lambda: host.refused == 1)


# --- one side without TLS ------------------------------------------------------------------------


def test_plain_client_is_told_that_the_port_speaks_tls(host: Host) -> None:
    assert_refused(host, None, r"speaks TLS, .* To fix: give tls=TLS")


def test_tls_client_is_told_that_the_port_speaks_none(make_host: MakeHost) -> None:
    host = make_host("tcp")
    assert_refused(host, trusted_tls(), "does not speak TLS, and this side takes nothing else")


def test_greeting_that_promises_tls_and_goes_on_in_plain_text_is_a_protocol_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(auth.greeting(tls=True) + bytes(64))
                sock.recv(4096)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ProtocolError, match=r"the TLS handshake with tcp:.* failed"):
            Link.connect(
                [f"tcp:127.0.0.1:{impostor.getsockname()[1]}"],
                Hello("client"),
                credentials=Credentials(TOKEN, trusted_tls()),
                timeout_s=WAIT_S,
            )
        thread.join(WAIT_S)


# --- broken handshakes ---------------------------------------------------------------------------


def begun(host: Host) -> socket.socket:
    sock = host.unproven()
    assert auth.read_greeting(read_exactly(sock, auth.GREETING_BYTES))
    return sock


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(trusted_tls()).wrap_bio(incoming, outgoing, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def test_garbage_in_place_of_a_handshake_is_refused(host: Host) -> None:
    random = np.random.default_rng(1)
    broken = [random.bytes(300) for _ in range(10)]
    broken += [b"GET / HTTP/1.1\r\n\r\n" * 4, frame(encode(Hello("client"))) * 4]
    hello = client_hello()
    for place in (5, 20, 60, 100):
        broken.append(hello[:place] + b"\xff" * 8 + hello[place + 8 :])
    for number, data in enumerate(broken, 1):
        sock = begun(host)
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        sock.close()
        wait_until(lambda number=number: host.refused == number)
    link = host.connect()
    ping(link)
    link.close()


def test_handshake_that_stops_is_cut_off_and_delays_no_other_peer(make_host: MakeHost) -> None:
    host = make_host("tls", Limits(handshake_timeout_s=1.0))
    stopped = []
    for part in (1, 5, 50, None):
        stopped.append(begun(host))
        stopped[-1].sendall(client_hello()[:part])
    link = host.connect()
    ping(link)
    assert host.refused == 0
    for sock in stopped:
        with contextlib.suppress(ConnectionResetError):
            while sock.recv(4096):  # The server's own part of the handshake.
                pass
        sock.close()
    wait_until(lambda: host.refused == len(stopped))
    ping(link)
    link.close()


def test_peer_that_vanishes_within_the_handshake_is_refused(host: Host) -> None:
    for data in (b"", client_hello()[:50], client_hello()):
        sock = begun(host)
        sock.sendall(data)
        sock.close()
    wait_until(lambda: host.refused == 3)
    assert host.handler.opened_by == []


def test_listener_that_closes_ends_its_handshakes(host: Host) -> None:
    sock = begun(host)
    sock.sendall(client_hello()[:50])
    link = host.connect()
    ping(link)
    host.close()
    assert_cut_off(sock)
    link.close()


@pytest.mark.parametrize("at", [3, 2000, 40_000])
def test_record_that_was_changed_on_the_way_ends_the_connection(host: Host, at: int) -> None:
    other, sock = host.connect(), host.known(client=3)
    assert isinstance(sock, ssl.SSLSocket)
    sock.sendall(frame(b"header", b"p" * 50_000)[:at])
    socket.socket.send(sock, b"\x17\x03\x03\x00\x20" + bytes(32))
    host.handler.wait(lambda: host.handler.closed_by == [3])
    assert host.handler.headers == []
    ping(other)
    other.close()
    sock.close()


def test_link_whose_peer_sends_a_changed_record_ends_with_a_connection_error(host: Host) -> None:
    link = host.connect()
    ping(link)
    (conn,) = host.listener._connections
    host.on_loop(lambda: spoil(conn._sock))
    assert assert_ends(link) == []


async def spoil(sock: socket.socket) -> None:
    socket.socket.send(sock, b"\x17\x03\x03\x00\x20" + bytes(32))


# --- files ---------------------------------------------------------------------------------------


def spoiled(directory: Path) -> list[tuple[TLS, str]]:
    good, other = trusted_tls(), trusted_authority().issue(*HOSTS)
    garbage = directory / "garbage.pem"
    garbage.write_text("-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n")
    locked = directory / "locked.pem"
    locked.write_bytes(encrypted(Path(good.key).read_bytes()))
    nowhere, held = str(directory / "nowhere.pem"), str(garbage)
    return [
        (TLS(nowhere, good.key, good.authority), "certificate, '.*nowhere.pem', cannot be read"),
        (TLS(good.certificate, nowhere, good.authority), "key, '.*nowhere.pem', cannot be read"),
        (TLS(good.certificate, good.key, nowhere), "authority's .*nowhere.pem', cannot be read"),
        (TLS(held, good.key, good.authority), "certificate, '.*garbage.pem', holds no cert"),
        (TLS(good.certificate, held, good.authority), "key, '.*garbage.pem', is no private key"),
        (TLS(good.certificate, good.key, held), "authority's .*garbage.pem', holds no cert"),
        (TLS(good.certificate, other.key, good.authority), "key, .* does not belong to the cert"),
        (TLS(good.certificate, str(locked), good.authority), "'.*locked.pem', has a password"),
    ]


def encrypted(key: bytes) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return serialization.load_pem_private_key(key, None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )


@pytest.mark.parametrize("number", range(8))
def test_file_that_cannot_be_used_is_named_before_anything_is_dialled_or_listens(
    tmp_path: Path, host: Host, number: int
) -> None:
    tls, says = spoiled(tmp_path)[number]
    with pytest.raises(ParamServeError, match=says):
        connect(host, tls)
    assert (host.refused, len(host.listener._handshakes)) == (0, 0)
    with pytest.raises(ParamServeError, match=says):
        asyncio.run(listen_tcp("127.0.0.1", 0, Credentials(TOKEN, tls), host.handler, host.limits))


@each_case("context", [server_context, client_context])
def test_context_is_made_once(context: Callable[[TLS], ssl.SSLContext]) -> None:
    tls = trusted_authority().issue(*HOSTS)
    same = TLS(tls.certificate, tls.key, tls.authority)
    assert context(tls) is context(same)

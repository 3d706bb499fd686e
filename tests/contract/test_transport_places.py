"""Where peers meet: names outside the file system, IPv6, wildcards; and what TCP sockets are told.

Also the memory that payloads are received in, which a handler may keep.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
import time
from pathlib import Path

import pytest
from tests.contract.echo_host import (
    TOKEN,
    WAIT_S,
    Echo,
    MakeHost,
    ping,
)
from tests.needs import needs_ipv6
from tests.suites import each_case

from paramserve.config import NO_CREDENTIALS, Credentials, Deadlines, Limits
from paramserve.errors import ConnectTimeout, NotAuthenticated, ParamServeError
from paramserve.messages import Hello
from paramserve.transport import dial, tcp
from paramserve.transport.link import Link
from paramserve.transport.listener import Listener, listen, listen_tcp, listen_unix

KNOWN = Credentials(TOKEN)
TCP_KINDS = ("tcp", "tls")


async def served(listeners: list[Listener], expected: list[str] | None = None) -> None:
    """Each listener's address leads to it."""
    for listener in listeners:
        link = await asyncio.to_thread(
            Link.connect,
            [listener.address],
            Hello("client"),
            credentials=KNOWN,
            timeout_s=WAIT_S,
        )
        await asyncio.to_thread(ping, link)
        link.close()
        listener.close()
    if expected is not None:
        places = [listener.address.rpartition(":")[0] for listener in listeners]
        assert places == expected


# --- Unix sockets outside the file system --------------------------------------------------------


def test_abstract_socket_is_found_by_its_name_and_is_in_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"@paramserve-test-{time.monotonic_ns()}"

    async def run() -> None:
        listener = await listen_unix(name, Echo(), Limits())
        assert listener.address == f"unix:{name}"
        with pytest.raises(ParamServeError, match=f"{name}: another process listens there"):
            await listen_unix(name, Echo(), Limits())
        await served([listener])
        again = await listen_unix(name, Echo(), Limits())  # Gone with its socket.
        again.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == []


def test_abstract_socket_without_a_listener_is_a_connect_timeout() -> None:
    with pytest.raises(ConnectTimeout, match=r"unix:@nobody.*refused"):
        Link.connect(["unix:@nobody-is-here"], Hello("client"), timeout_s=0.05)


def test_abstract_socket_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"@paramserve-test-{time.monotonic_ns()}"

    async def run() -> None:
        listener = await listen_unix(name, Echo(), Limits())
        with socket.socket(socket.AF_UNIX) as sock:
            monkeypatch.setattr("os.geteuid", lambda: 12345)
            sock.connect("\0" + name[1:])
            while not listener.refused:
                await asyncio.sleep(0.001)
            assert sock.recv(1) == b""
        listener.close()

    asyncio.run(run())


def test_abstract_socket_elsewhere_than_on_linux_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dial, "HAS_ABSTRACT", False)
    with pytest.raises(ParamServeError, match="only Linux has sockets outside the file system"):
        Link.connect(["unix:@name"], Hello("client"), timeout_s=WAIT_S)
    with pytest.raises(ParamServeError, match="only Linux has sockets outside the file system"):
        asyncio.run(listen_unix("@name", Echo(), Limits()))


# --- listen: both kinds of socket, and what others are told --------------------------------------


def test_may_listen_is_false_only_where_no_process_does(tmp_path: Path) -> None:
    async def look() -> list[bool]:
        listeners = await listen(str(tmp_path), "s", "127.0.0.1:0", KNOWN, Echo(), Limits())
        gone = "unix:@paramserve-gone"
        unix, place = (each.address for each in listeners)
        found = []
        for addresses in ([unix], [gone, place], [gone], ["tcp:no-such-host.invalid:1"]):
            found.append(await asyncio.to_thread(dial.may_listen, addresses))
        for each in listeners:
            each.close()
        return [*found, await asyncio.to_thread(dial.may_listen, [unix, place])]

    assert asyncio.run(look()) == [True, True, False, True, False]


def test_listen_without_directory_or_bind_has_one_abstract_socket() -> None:
    async def run() -> None:
        listeners = await listen("", "s0", "", NO_CREDENTIALS, Echo(), Limits())
        assert [each.address.startswith("unix:@paramserve-") for each in listeners] == [True]
        await served(listeners)

    asyncio.run(run())


@each_case(
    ("bind", "advertise", "told"),
    [
        ("127.0.0.1:0", "", "tcp:127.0.0.1"),
        ("[::1]:0", "", "tcp:[::1]"),
        ("127.0.0.1:0", "localhost", "tcp:localhost"),
        ("0.0.0.0:0", "127.0.0.2", "tcp:127.0.0.2"),
        ("[::]:0", "::1", "tcp:[::1]"),
        ("[::]:0", "[::1]", "tcp:[::1]"),
        ("0.0.0.0:0", "", f"tcp:{tcp.reached_at('0.0.0.0')}"),
        ("[::]:0", "", f"tcp:[{tcp.reached_at('::')}]"),
    ],
)
def test_listen_tells_an_address_that_leads_to_it(
    tmp_path: Path, bind: str, advertise: str, told: str
) -> None:
    if "[" in bind:
        needs_ipv6()

    async def run() -> None:
        folder = str(tmp_path)
        listeners = await listen(folder, "c", bind, KNOWN, Echo(), Limits(), advertise=advertise)
        assert listeners[0].address == f"unix:{tmp_path}/c.sock"
        await served(listeners, ["unix", told])

    asyncio.run(run())


def test_listen_at_the_wildcard_of_ipv6_takes_both_kinds_of_peers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    needs_ipv6()

    async def run() -> None:
        listener, place = await listen_tcp("::", 0, KNOWN, Echo(), Limits(), advertise="::1")
        _, port = tcp.split_place(place)
        for host in ("127.0.0.1", "::1"):
            address = f"tcp:{tcp.join_place(host, port)}"
            connect = functools.partial(Link.connect, [address], Hello("client"), timeout_s=WAIT_S)
            (await asyncio.to_thread(connect, credentials=KNOWN)).close()
            with pytest.raises(NotAuthenticated):
                await asyncio.to_thread(connect, credentials=Credentials(bytes(32)))
        listener.close()

    asyncio.run(run())
    found = [message.split()[4] for message in caplog.messages if "refused a peer" in message]
    assert found == ["127.0.0.1", "::1"]


@each_case("bind", ["127.0.0.1", "::1:0", "127.0.0.1:http", "127.0.0.1:70000"])
def test_listen_bind_that_is_no_place_leaves_nothing(tmp_path: Path, bind: str) -> None:
    with pytest.raises(ValueError, match=r"expected host:port, or \[host\]:port"):
        asyncio.run(listen(str(tmp_path), "c", bind, KNOWN, Echo(), Limits()))
    assert list(tmp_path.iterdir()) == []


def test_listen_that_fails_over_tcp_leaves_no_unix_socket(tmp_path: Path) -> None:
    with pytest.raises(ParamServeError, match=r"could not listen at tcp:192\.0\.2\.1:0"):
        asyncio.run(listen(str(tmp_path), "c", "192.0.2.1:0", KNOWN, Echo(), Limits()))
    assert list(tmp_path.iterdir()) == []


# --- what TCP sockets are told -------------------------------------------------------------------


def told(sock: socket.socket) -> tuple[int, ...]:
    keep = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_NODELAY)
    return (
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        *(sock.getsockopt(socket.IPPROTO_TCP, option) for option in keep),
    )


@each_case(
    ("lost_s", "expected"),
    [
        (Deadlines().lost_s, (1, 1, 1, 2, 1)),
        (10.0, (1, 1, 1, 9, 1)),
        (0.2, (1, 1, 1, 1, 1)),
        (300.0, (1, 5, 5, 59, 1)),
    ],
)
@each_case("tls", [False, True])
def test_both_ends_notice_a_lost_host(
    make_host: MakeHost, tls: bool, lost_s: float, expected: tuple[int, ...]
) -> None:
    host = make_host("tls" if tls else "tcp")

    async def more() -> Listener:
        listener, _ = await listen_tcp(
            "127.0.0.1", 0, host.credentials, host.handler, Limits(), lost_s=lost_s
        )
        return listener

    listener = host.on_loop(more)
    assert isinstance(listener, Listener)
    link = Link.connect(
        [listener.address],
        Hello("client"),
        credentials=host.credentials,
        timeout_s=WAIT_S,
        lost_s=lost_s,
    )
    (conn,) = listener._connections
    for sock in (link._sock, conn._sock):
        assert told(sock) == expected
        assert tcp.lost_hosts._sockets[sock] == lost_s
        assert isinstance(sock, ssl.SSLSocket) is tls
        # It would end connections to peers that live and do not read: see `tcp`.
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    link.close()

    async def close() -> None:
        listener.close()

    host.on_loop(close)


@each_case("kind", TCP_KINDS)
def test_connection_that_is_cut_off_as_lost_ends_on_both_sides(
    make_host: MakeHost, kind: str
) -> None:
    host = make_host(kind)
    link, other = host.connect(Hello("client", client=1)), host.connect(Hello("client", client=2))
    (conn,) = [each for each in host.listener._connections if each.hello.client == 1]
    conn._sock.shutdown(socket.SHUT_RDWR)  # As `LostHosts.look` does, in another thread.
    with pytest.raises(ConnectionError):
        link.receive(WAIT_S)
    host.handler.wait(lambda: host.handler.closed_by == [1])
    ping(other)
    link.close()
    other.close()

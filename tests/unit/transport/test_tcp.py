"""Addresses as text, and when a host counts as lost."""

from __future__ import annotations

import socket
import struct

import pytest
from tests.suites import each_case

from paramserve.transport import tcp
from paramserve.transport.tcp import LostHosts, is_lost, join_place, reached_at, split_place


@each_case(
    ("place", "host", "port"),
    [
        ("10.0.0.1:80", "10.0.0.1", 80),
        ("name.example:65535", "name.example", 65535),
        ("[::1]:0", "::1", 0),
        ("[fe80::1%eth0]:7", "fe80::1%eth0", 7),
    ],
)
def test_split_place_undoes_join_place(place: str, host: str, port: int) -> None:
    assert split_place(place) == (host, port)
    assert join_place(host, port) == place


@each_case(
    "place",
    ["", "host", ":80", "host:", "host:x", "host:65536", "host:-1", "::1:80", "[]:80", "[::1]"],
)
def test_split_place_other_text_says_what_is_expected(place: str) -> None:
    with pytest.raises(ValueError, match=r"expected host:port, or \[host\]:port"):
        split_place(place)


def test_reached_at_bound_host_is_that_host() -> None:
    assert [reached_at(host) for host in ("10.1.2.3", "name", "::1")] == ["10.1.2.3", "name", "::1"]


@each_case(("wildcard", "family"), [("0.0.0.0", 2), ("::", 10)])
def test_reached_at_wildcard_is_an_address_of_its_family(wildcard: str, family: int) -> None:
    found = reached_at(wildcard)
    assert found != wildcard
    socket.inet_pton(family, found)


def info(unacked: int, last_ack_ms: int) -> bytes:
    """`struct tcp_info`: 8 bytes, then 32-bit fields; see linux/tcp.h."""
    fields = [0] * 24
    fields[4], fields[12] = unacked, last_ack_ms
    return struct.pack("8B24I", *[1] * 8, *fields)


def test_lost_host_has_data_on_its_way_and_no_acknowledgement() -> None:
    assert is_lost(info(unacked=1, last_ack_ms=3001), 3.0)


@each_case(
    "told",
    [
        info(unacked=0, last_ack_ms=60_000),  # A full window, or nothing to say: keepalive looks.
        info(unacked=9, last_ack_ms=2999),
        b"",
        bytes(8),
    ],
)
def test_living_host_is_not_lost(told: bytes) -> None:
    assert not is_lost(told, 3.0)


class Told(socket.socket):
    """A socket whose kernel says this."""

    told = info(0, 0)
    ended = False

    def getsockopt(self, *_: object) -> bytes:
        if self.fileno() < 0:
            raise OSError
        return self.told

    def shutdown(self, _: int) -> None:
        self.ended = True


class NoThread(LostHosts):
    """Only looks when it is told to."""

    def _run(self) -> None:
        pass


def test_look_ends_the_lost_connection_only() -> None:
    hosts = NoThread()
    with Told() as lost, Told() as living:
        hosts.watch(lost, 2.0)
        hosts.watch(living, 4.0)
        assert hosts.look() == 0.5
        assert (lost.ended, living.ended) == (False, False)
        lost.told = living.told = info(5, 2500)
        hosts.look()
        assert (lost.ended, living.ended) == (True, False)
        assert (hosts.ended(lost), hosts.ended(living)) == (True, False)


def test_look_forgets_closed_sockets() -> None:
    hosts = NoThread()
    sock = Told()
    hosts.watch(sock, 2.0)
    sock.close()
    assert hosts.look() is None
    assert hosts.look() is None


@each_case(
    ("kinds", "expected"),
    [
        ([socket.AF_INET6], socket.AF_INET6),
        ([socket.AF_INET6, socket.AF_INET], socket.AF_INET),
        ([socket.AF_INET], socket.AF_INET),
    ],
)
def test_name_is_listened_to_by_what_it_has(
    monkeypatch: pytest.MonkeyPatch, kinds: list[int], expected: int
) -> None:
    found = [(kind, 1, 6, "", ("x", 0)) for kind in kinds]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert tcp.family_of("name") == expected
    assert tcp.family_of("fe80::1%eth0") == socket.AF_INET6


def test_wildcard_of_ipv6_without_a_way_out_tells_that_of_ipv4(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def way_to(host: str) -> str:
        if ":" in host:
            raise OSError
        return "10.1.2.3"

    monkeypatch.setattr(tcp, "way_to", way_to)
    assert reached_at("::") == "10.1.2.3"
    assert reached_at("0.0.0.0") == "10.1.2.3"

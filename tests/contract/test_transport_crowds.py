"""Peers that connect and prove nothing keep no other one out."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.echo_host import (
    Host,
    MakeHost,
    assert_cut_off,
    hosts_in,
    ping,
    read_exactly,
    wait_until,
)

from paramserve.config import Limits
from paramserve.transport import auth

PLACES = 4


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[MakeHost]:
    with hosts_in(tmp_path) as make:
        yield make


@pytest.fixture(params=["tcp", "tls"])
def host(request: pytest.FixtureRequest, make_host: MakeHost) -> Host:
    return make_host(request.param, Limits(handshakes_max=PLACES, handshake_timeout_s=60.0))


def test_silent_peers_keep_no_client_out(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    silent = [host.stranger() for _ in range(3 * PLACES)]
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
    assert_cut_off(host.stranger())
    for sock in known:
        assert_open(sock)
        sock.close()

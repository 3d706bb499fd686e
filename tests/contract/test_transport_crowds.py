"""Peers that connect and prove nothing keep no other one out."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading

import pytest
from tests.contract.echo_host import (
    Host,
    MakeHost,
    assert_cut_off,
    ping,
    read_exactly,
)
from tests.contract.role_cluster import wait_until

from paramserve.config import Limits
from paramserve.transport import auth, tls

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

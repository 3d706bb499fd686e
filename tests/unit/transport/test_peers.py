"""Links to other servers: what is sent waits for a connection, keeps its order, and is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from paramserve.config import NO_CREDENTIALS, ConsistencySpec, ServerConfig
from paramserve.errors import ConnectTimeout
from paramserve.messages import Hello
from paramserve.transport import peers as module
from paramserve.transport.link import Link
from paramserve.transport.peers import LOOK_S, PeerLinks, dialer
from paramserve.virtual import VirtualClock
from paramserve_testing.loop import VirtualLoop

ADDRESSES = (("unix:a",), ("unix:b",))
CONNECT_S = 1.0


class Recorder:
    """A link that keeps what is sent, until it breaks."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.broken = self.closed = self.stuck = False

    def offer(self, header: bytes) -> bool:
        if self.broken:
            raise ConnectionResetError("gone")
        if self.stuck:
            return False
        self.sent.append(header)
        return True

    def flush(self) -> bool:
        return not self.stuck

    def close(self) -> None:
        self.closed = True


class Bench(VirtualLoop):
    """Links of shard 0, on a loop where connecting takes a second."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(), lambda: CONNECT_S)
        self.links: list[Recorder] = []
        self.asked: list[Sequence[str]] = []
        self.refused = False
        self.peers = PeerLinks(0, self.reach, self)

    def reach(self, addresses: Sequence[str], wanted: Callable[[], bool]) -> Recorder:
        self.asked.append(addresses)
        self.wanted = wanted
        if self.refused:
            raise ConnectTimeout("no process there", fix="wait")
        self.links.append(Recorder())
        return self.links[-1]

    def connect(self) -> None:
        self.clock.run(self.clock.now + CONNECT_S)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_send_before_the_addresses_are_known_waits_for_them(bench: Bench) -> None:
    bench.peers.send(1, b"first")
    bench.connect()
    assert bench.asked == []
    bench.peers.addresses = ADDRESSES
    bench.peers.send(1, b"second")
    bench.connect()
    assert bench.asked == [("unix:b",)]
    bench.peers.send(1, b"third")
    assert bench.links[0].sent == [b"first", b"second", b"third"]


def test_send_while_connecting_connects_once(bench: Bench) -> None:
    bench.peers.addresses = ADDRESSES
    for header in (b"first", b"second"):
        bench.peers.send(1, header)
    bench.connect()
    assert [link.sent for link in bench.links] == [[b"first", b"second"]]


def test_send_over_a_broken_link_goes_over_the_next_one(bench: Bench) -> None:
    bench.peers.addresses = ADDRESSES
    bench.peers.send(1, b"first")
    bench.connect()
    bench.links[0].broken = True
    bench.peers.send(1, b"second")
    assert bench.links[0].closed
    bench.connect()
    assert [link.sent for link in bench.links] == [[b"first"], [b"second"]]


def test_send_to_who_cannot_be_reached_tries_again_with_the_next_message(bench: Bench) -> None:
    bench.peers.addresses = ADDRESSES
    bench.refused = True
    bench.peers.send(1, b"first")
    bench.connect()
    bench.refused = False
    bench.peers.send(1, b"second")
    bench.connect()
    assert bench.links[0].sent == [b"first", b"second"]


def test_queue_past_its_limit_loses_the_oldest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "QUEUE_MAX", 2)
    for header in (b"first", b"second", b"third"):
        bench.peers.send(1, header)
    bench.peers.addresses = ADDRESSES
    bench.peers.send(1, b"fourth")
    bench.connect()
    assert bench.links[0].sent == [b"third", b"fourth"]


def test_close_ends_links_and_those_under_way(bench: Bench) -> None:
    bench.peers.addresses = ADDRESSES
    bench.peers.send(0, b"first")
    bench.connect()
    bench.peers.send(1, b"second")
    bench.peers.close()
    bench.connect()
    assert [(link.closed, link.sent) for link in bench.links] == [(True, [b"first"]), (True, [])]


def test_messages_to_a_server_that_takes_nothing_are_sent_in_order_when_it_does(
    bench: Bench,
) -> None:
    bench.peers.addresses = ADDRESSES
    bench.peers.send(1, b"first")
    bench.connect()
    (link,) = bench.links
    link.stuck = True
    for header in (b"second", b"third"):
        bench.peers.send(1, header)
    bench.clock.run(bench.clock.now + 10 * LOOK_S)
    assert link.sent == [b"first"]
    link.stuck = False
    bench.clock.run(bench.clock.now + LOOK_S)
    assert link.sent == [b"first", b"second", b"third"]


def test_close_ends_an_attempt_to_connect_without_a_warning(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.peers.addresses = ADDRESSES
    bench.refused = True
    bench.peers.send(1, b"first")
    bench.connect()
    assert bench.wanted()
    assert len(caplog.messages) == 1
    bench.peers.send(1, b"second")
    bench.peers.close()
    assert not bench.wanted()
    bench.connect()
    assert len(caplog.messages) == 1


def test_dialer_says_which_shard_of_which_cluster_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Sequence[str], Hello]] = []
    monkeypatch.setattr(Link, "connect", lambda to, hello, **_: asked.append((to, hello)))
    config = ServerConfig(0, 2, 1, (), "", ConsistencySpec("Async"), cluster=b"ours")
    dialer(config, NO_CREDENTIALS)(("unix:b",), lambda: True)
    assert asked == [(("unix:b",), Hello("server", client=0, cluster=b"ours"))]

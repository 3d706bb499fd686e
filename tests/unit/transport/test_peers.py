"""Links to other servers: what is sent waits for a connection, keeps its order, and is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import pytest

from paramserve.config import NO_CREDENTIALS, ConsistencySpec, ServerConfig
from paramserve.errors import ConnectTimeout
from paramserve.messages import Hello
from paramserve.transport import peers as module
from paramserve.transport.link import Link
from paramserve.transport.peers import PeerLinks

CONFIG = ServerConfig(0, 2, 1, (), "", ConsistencySpec("Async"), cluster=b"ours")
ADDRESSES = (("unix:a",), ("unix:b",))


class Recorder:
    """A link that keeps what is sent, until it breaks."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.broken = self.closed = False

    def offer(self, header: bytes) -> bool:
        if self.broken:
            raise ConnectionResetError("gone")
        self.sent.append(header)
        return True

    def flush(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class Bench:
    """Links of shard 0; connecting takes place when the test says so."""

    def __init__(self) -> None:
        self.links: list[Recorder] = []
        self.asked: list[tuple[Sequence[str], Hello]] = []
        self.tasks: list[Coroutine[Any, Any, None]] = []
        self.refused = False
        self.peers = PeerLinks(CONFIG, NO_CREDENTIALS, 1.0, self.tasks.append)

    def reach(self, addresses: Sequence[str], hello: Hello, **_: object) -> Recorder:
        self.asked.append((addresses, hello))
        if self.refused:
            raise ConnectTimeout("nobody there", fix="wait")
        self.links.append(Recorder())
        return self.links[-1]

    def connect(self) -> None:
        asyncio.run(self.tasks.pop(0))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench()
    monkeypatch.setattr(Link, "connect", made.reach)
    yield made
    for task in made.tasks:
        task.close()


def test_send_before_the_addresses_are_known_waits_for_them(bench: Bench) -> None:
    bench.peers.send(1, b"first")
    assert bench.tasks == []
    bench.peers.addresses = ADDRESSES
    bench.peers.send(1, b"second")
    bench.connect()
    assert bench.asked == [(("unix:b",), Hello("server", client=0, cluster=b"ours"))]
    bench.peers.send(1, b"third")
    assert bench.links[0].sent == [b"first", b"second", b"third"]


def test_send_while_connecting_connects_once(bench: Bench) -> None:
    bench.peers.addresses = ADDRESSES
    for header in (b"first", b"second"):
        bench.peers.send(1, header)
    assert len(bench.tasks) == 1
    bench.connect()
    assert bench.links[0].sent == [b"first", b"second"]


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

"""A coordinator or another server that stands still does not stop a server's loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.echo_host import Echo
from tests.contract.role_cluster import DEADLINES, LoopThread

from paramserve.config import NO_CREDENTIALS, ConsistencySpec, Limits, ServerConfig
from paramserve.rules import Add
from paramserve.transport import peers as module
from paramserve.transport.listener import Listener, listen_unix
from paramserve.transport.peers import PeerLinks, dialer

GROUPS = 150
"""A report of so many is about 15 KB: a socket's buffer holds some dozen of them."""
BEATS_S = 0.005
STALL_S = 1.0
"""Long enough for many more beats than a socket's buffer holds."""
WAIT_S = 10.0


@contextlib.contextmanager
def frozen(loop: LoopThread) -> Iterator[None]:
    """A loop stands still meanwhile, as under SIGSTOP."""
    asleep, wake = threading.Event(), threading.Event()

    def sleep() -> None:
        asleep.set()
        wake.wait(2 * WAIT_S)

    loop.loop.call_soon_threadsafe(sleep)
    asleep.wait(WAIT_S)
    try:
        yield
    finally:
        wake.set()


def test_pushes_go_on_while_the_coordinator_stands_still(make_cluster: MakeCluster) -> None:
    deadlines = structs.replace(DEADLINES, heartbeat_s=BEATS_S)
    cluster = make_cluster("unix", deadlines=deadlines)
    client = cluster.client(deadlines=DEADLINES)
    for number in range(GROUPS):
        client.define(f"w{number}", np.zeros(1), rule=Add(), group=f"a group with a name {number}")
    pushed = 0
    with frozen(cluster.coordinating):
        until = time.monotonic() + STALL_S
        while time.monotonic() < until:
            pushed += 1
            assert client.push("w0", np.ones(1)).result(3.0).version == pushed
    client.define("after", np.zeros(1), rule=Add())  # The coordinator understands what comes now.
    assert client.pull("w0").tolist() == [pushed]


class Sender(LoopThread):
    """Shard 0, which sends to shards 1 and 2."""

    def __init__(self, listeners: list[Listener]) -> None:
        super().__init__()
        config = ServerConfig(0, 3, 1, (), "", ConsistencySpec("Async"), cluster=b"ours")
        self.peers = PeerLinks(0, dialer(config, NO_CREDENTIALS), self.loop)
        self.peers.addresses = [(), *((each.address,) for each in listeners)]


class Receiver(Echo):
    """Another server."""

    def opened(self, *_: object) -> None:
        pass

    def frame(self, conn: object, header: bytes) -> None:
        with self.changed:
            self.headers.append(header)
            self.changed.notify_all()

    def closed(self, *_: object) -> None:
        pass


def test_messages_go_on_to_a_server_beside_one_that_stands_still(tmp_path: Path) -> None:
    loops, receivers = [LoopThread(), LoopThread()], [Receiver(), Receiver()]
    listeners = [
        loop.run(lambda r=receiver, n=number: listen_unix(str(tmp_path / f"{n}"), r, Limits()))
        for number, (loop, receiver) in enumerate(zip(loops, receivers, strict=True))
    ]
    sender = Sender(listeners)
    stuck, healthy = receivers
    for shard in (1, 2):
        sender.call(lambda s=shard: sender.peers.send(s, b"first"))
    for each in receivers:
        each.wait(lambda r=each: r.headers == [b"first"])
    count, filler = 2 * module.QUEUE_MAX, b"." * 4096

    def send_all() -> None:
        for number in range(count):
            for shard in (1, 2):
                sender.peers.send(shard, b"%d%s" % (number, filler))

    with frozen(loops[0]):
        sent = asyncio.run_coroutine_threadsafe(_async(send_all), sender.loop)
        sent.result(WAIT_S)
        healthy.wait(lambda: numbers(healthy)[-1:] == [count - 1])
    stuck.wait(lambda: numbers(stuck)[-1:] == [count - 1])
    arrived = numbers(stuck)
    assert arrived == sorted(arrived)
    assert module.QUEUE_MAX <= len(arrived) < count
    sender.call(sender.peers.close)
    for loop, listener in zip(loops, listeners, strict=True):
        loop.call(listener.close)
        loop.close()
    sender.close()


def test_closed_links_send_nothing_and_raise_nothing(tmp_path: Path) -> None:
    loop, receiver = LoopThread(), Receiver()
    listener = loop.run(lambda: listen_unix(str(tmp_path / "1"), receiver, Limits()))
    sender = Sender([listener, listener])
    sender.call(lambda: sender.peers.send(1, b"before"))
    receiver.wait(lambda: receiver.headers == [b"before"])
    sender.call(sender.peers.close)
    for shard in (1, 2):  # a link that stood, and one that was never asked for
        sender.call(lambda s=shard: sender.peers.send(s, b"after"))
    sender.close()
    loop.call(listener.close)
    loop.close()
    assert receiver.headers == [b"before"]
    assert not sender.errors


def numbers(receiver: Receiver) -> list[int]:
    return [int(each.rstrip(b".")) for each in receiver.headers[1:]]


async def _async(do: Callable[[], None]) -> None:
    do()

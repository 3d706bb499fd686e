"""A handler that sends each frame back, reachable over any transport, for the transport tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.contract.authorities import trusted_tls

from paramserve.config import Credentials, Limits
from paramserve.errors import (
    WorkerFenced,
)
from paramserve.messages import Hello, Ok, Refused, Run, Welcome, decoder, encode
from paramserve.transport.arena import Arena
from paramserve.transport.connection import Connection
from paramserve.transport.dial import dial
from paramserve.transport.framing import ByteArray, prelude
from paramserve.transport.link import Link
from paramserve.transport.listener import Listener, listen_tcp, listen_unix

TOKEN = secrets.token_bytes(32)
WAIT_S = 10.0
ARENA_BYTES = 1 << 16
RUNS = b" runs "
"""In a header, before the runs that are to come back."""
ECHO_BYTES = 32 << 20
"""Of the arena that runs travel from and to, where none is shared."""
STREAMS = ("unix", "tcp", "tls")


class Echo:
    """Sends each frame back; some hellos and headers make it do something else."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.opened_by: list[Hello] = []
        self.kinds: list[str] = []
        self.headers: list[bytes] = []
        self.closed_by: list[int] = []
        self.arenas: dict[int, ByteArray] = {}

    def opened(self, conn: Connection, hello: Hello) -> None:
        if hello.role == "server":
            raise WorkerFenced("this handler takes no servers", fix="be a client")
        if hello.role == "bug":
            raise ZeroDivisionError
        self.arenas.update(conn.arenas)
        if not conn.arenas:
            conn.arenas = {1: np.zeros(ECHO_BYTES, np.uint8)}
        with self.changed:
            self.opened_by.append(hello)
            self.kinds.append(conn.kind)
            self.changed.notify_all()
        if hello.rank == 77:
            conn.arenas[1][:3] = np.arange(3)
            conn.send(b"sent while opening", [(1, 0, 3)], conn.arenas)

    def frame(self, conn: Connection, header: bytes) -> None:
        with self.changed:
            self.headers.append(header)
            self.changed.notify_all()
        word, _, rest = header.partition(b" ")
        if word == b"decode":
            decoder(Ok).decode(rest)
        elif word == b"double":
            memory = self.arenas[int(rest)]
            np.multiply(memory, 2, out=memory)
            conn.send(b"doubled")
        elif word == b"flood":
            for _ in range(100):
                conn.send(b"drop", [(1, 0, int(rest))], conn.arenas)
        elif word == b"bug":
            raise ZeroDivisionError
        elif word == b"leave":
            conn.close()
        else:
            name, _, runs = header.partition(RUNS)
            conn.send(name, _decode_runs(runs) if runs else (), conn.arenas)

    def closed(self, conn: Connection) -> None:
        with self.changed:
            self.closed_by.append(conn.hello.client)
            for number in conn.arenas:
                self.arenas.pop(number, None)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


class Host:
    """A handler that can be reached over one transport."""

    def __init__(
        self, kind: str, directory: Path, limits: Limits, credentials: Credentials | None = None
    ) -> None:
        self.kind = kind
        usual = Credentials(TOKEN, trusted_tls() if kind == "tls" else None)
        self.credentials = credentials if credentials is not None else usual
        self.handler = Echo()
        self.limits = limits
        self.path = str(directory / "s.sock")
        self.shares_memory = kind == "unix"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.listener: Listener = self.on_loop(self._listen)
        self.address = self.listener.address

    async def _listen(self) -> Listener:
        if self.kind == "unix":
            return await listen_unix(self.path, self.handler, self.limits)
        listener, place = await listen_tcp(
            "127.0.0.1", 0, self.credentials, self.handler, self.limits
        )
        assert listener.address == f"tcp:{place}"
        return listener

    def on_loop(self, start: Callable[[], Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(start(), self._loop).result(WAIT_S)

    @property
    def refused(self) -> int:
        return self.listener.refused

    def connect(
        self,
        hello: Hello | None = None,
        *,
        arenas: list[Arena] | None = None,
        limits: Limits | None = None,
    ) -> Link:
        hello = hello if hello is not None else Hello("client", client=1)
        arenas = arenas if arenas is not None else []
        limits = limits if limits is not None else Limits()
        link = Link.connect(
            [self.address],
            hello,
            credentials=self.credentials,
            arenas=arenas,
            timeout_s=WAIT_S,
            limits=limits,
        )
        link.arenas = {1: np.zeros(ECHO_BYTES, np.uint8)}
        return link

    def unproven(self) -> socket.socket:
        """A socket that is connected and has said nothing."""
        place = self.address.partition(":")[2]
        if self.kind == "unix":
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(place)
        else:
            sock = socket.create_connection(("127.0.0.1", int(place.rpartition(":")[2])))
        sock.settimeout(WAIT_S)
        return sock

    def proven(self) -> socket.socket:
        """A socket whose uid or token was accepted and whose hello is to come."""
        sock = dial(self.address, self.credentials, time.monotonic() + WAIT_S)
        sock.settimeout(WAIT_S)
        return sock

    def known(self, client: int = 1) -> socket.socket:
        """A socket of a peer that has been welcomed."""
        sock = self.proven()
        sock.sendall(frame(encode(Hello("client", client=client))))
        assert msgspec.msgpack.decode(read_frame(sock), type=Welcome) == Welcome()
        return sock

    def close(self) -> None:
        async def stop() -> None:
            self.listener.close()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*tasks, return_exceptions=True)

        if self._loop.is_closed():
            return
        self.on_loop(stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


MakeHost = Callable[..., Host]


@contextlib.contextmanager
def hosts_in(directory: Path) -> Iterator[MakeHost]:
    """Gives a function that makes hosts, and closes them at the end."""
    hosts: list[Host] = []

    def make(
        kind: str, limits: Limits | None = None, credentials: Credentials | None = None
    ) -> Host:
        limits = limits if limits is not None else Limits()
        hosts.append(Host(kind, directory, limits, credentials))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def frame(header: bytes, payload: bytes = b"") -> bytes:
    """A frame as it travels, whose payload belongs to the start of arena 1."""
    if payload:
        header += struct.pack("<QQQI", 1, 0, len(payload), 1)
    return prelude(len(header), len(payload)) + header + payload


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError(data)
        data += part
    return data


def read_frame(sock: socket.socket) -> bytes:
    return read_exactly(sock, int.from_bytes(read_exactly(sock, 20)[8:12], "little"))


_decode_runs = msgspec.msgpack.Decoder(tuple[Run, ...]).decode


def send_parts(link: Link, header: bytes, parts: Sequence[ByteArray]) -> None:
    """Send a frame that comes back with these bytes, which lie in the link's arena meanwhile."""
    runs, start = [], 0
    for part in parts:
        link.arenas[1][start : start + part.size] = part
        runs.append((1, start, part.size))
        start += -(-part.size // 64) * 64
    link.send(header + RUNS + encode(tuple(runs)), runs)


def read_parts(link: Link, sizes: Sequence[int]) -> list[ByteArray]:
    """Read the bytes of such a frame, to where they were sent from."""
    link.arenas[1].fill(0)
    link.read_payload()
    parts, start = [], 0
    for size in sizes:
        parts.append(link.arenas[1][start : start + size].copy())
        start += -(-size // 64) * 64
    return parts


def receive(link: Link) -> bytes:
    header = link.receive(WAIT_S)
    assert header is not None
    return header


def ping(link: Link, header: bytes = b"ping") -> None:
    link.send(header)
    assert receive(link) == header


def refusal_before_the_end(sock: socket.socket) -> Refused:
    """What a peer is told before it is cut off."""
    refused = msgspec.msgpack.decode(read_frame(sock), type=Refused)
    assert refused.seq == 0
    assert_cut_off(sock)
    return refused


def assert_cut_off(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionResetError):
        assert sock.recv(1) == b""
    sock.close()


def assert_ends(link: Link) -> list[bytes]:
    """Read until the connection ends; what came before that."""
    headers = []
    with pytest.raises(ConnectionError):  # noqa: PT012 - reads until it raises
        while True:
            headers.append(receive(link))
            link.skip_payload()
    link.close()
    return headers


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))

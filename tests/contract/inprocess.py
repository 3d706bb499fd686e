"""A transport within one process: the client's thread calls the handler itself, under a lock.

Same methods and same refusals as over a socket; no bytes are framed and no peer proves itself.
Arenas are shared by reference, payloads copied once, replies queued until the client reads them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from paramserve.config import Limits
from paramserve.errors import ParamServeError
from paramserve.messages import Hello
from paramserve.transport import forks
from paramserve.transport.arena import Arena
from paramserve.transport.connection import Handler, as_refusable, refusal
from paramserve.transport.framing import (
    ByteArray,
    aligned_empty,
    header_not_sent,
    padded,
    parse_prelude,
    prelude,
)


class InProcessListener:
    """Lets links of this process reach a handler, one call at a time."""

    def __init__(self, handler: Handler, limits: Limits | None = None) -> None:
        self.address = "inprocess"
        self.handler = handler
        self.limits = limits if limits is not None else Limits()
        self._lock = threading.RLock()
        self._depth = 0
        self._ended: deque[InProcessConnection] = deque()
        self._connections: set[InProcessConnection] = set()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the handler; `closed` calls that became due are made at the end of the turn."""
        with self._lock:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                while not self._depth and self._ended:
                    self.handler.closed(self._ended.popleft())

    def add(self, conn: InProcessConnection) -> None:
        self._connections.add(conn)

    def remove(self, conn: InProcessConnection) -> None:
        if conn in self._connections:
            self._connections.remove(conn)
            self._ended.append(conn)

    def close(self) -> None:
        """End all connections; repeating is safe."""
        with self.turn():
            for conn in list(self._connections):
                conn.close()


class _Reply(NamedTuple):
    header: bytes
    payload: tuple[ByteArray, ...]
    nbytes: int


class _Mailbox:
    """Replies on their way to one link; the descriptor is readable while `get` would not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: deque[_Reply] = deque()
        self._nbytes = 0
        self._ended = False
        self._reading, self._writing = socket.socketpair()
        self._poll = select.poll()
        self._poll.register(self._reading, select.POLLIN)

    def fileno(self) -> int:
        return self._reading.fileno()

    def put(self, reply: _Reply, nbytes_max: int, replies_max: int) -> bool:
        """Queue a reply; False, and it is not queued, if more than `nbytes_max` lie unread, in
        more than `replies_max` frames."""
        with self._lock:
            if self._nbytes > nbytes_max and len(self._replies) > replies_max:
                return False
            if not self._ended:
                if not self._replies:
                    self._writing.send(b"\0")
                self._replies.append(reply)
                self._nbytes += reply.nbytes
            return True

    def end(self) -> None:
        with self._lock:
            if not self._ended and not self._replies:
                self._writing.send(b"\0")
            self._ended = True

    def get(self, timeout_s: float) -> _Reply | None:
        """The oldest reply. Raises `ConnectionResetError` when there is none and will be none."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                if self._replies:
                    reply = self._replies.popleft()
                    self._nbytes -= reply.nbytes
                    if not self._replies and not self._ended:
                        self._reading.recv(1)
                    return reply
                if self._ended:
                    raise ConnectionResetError("the peer closed the connection")
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(left * 1000):
                return None

    def close(self) -> None:
        """Give the descriptors back."""
        self._reading.close()
        self._writing.close()


class InProcessConnection:
    """The handler's end, with the methods of `Connection`."""

    def __init__(
        self,
        hello: Hello,
        arenas: dict[int, ByteArray],
        listener: InProcessListener,
        mailbox: _Mailbox,
    ) -> None:
        self.hello = hello
        self.kind = "inprocess"
        self.reset = False
        self.arenas = arenas
        self.shared = bool(arenas)
        self.closed = False
        self._listener = listener
        self._mailbox = mailbox

    def send(self, header: bytes, payload: Sequence[ByteArray] = ()) -> None:
        nbytes = len(header) + sum(padded(part.nbytes) for part in payload)
        reply = _Reply(header, tuple(payload), nbytes)
        limits = self._listener.limits
        if not self._mailbox.put(reply, limits.send_buffer_bytes_max, limits.outstanding_max):
            self.close()

    def refuse(self, error: ParamServeError) -> None:
        """Tell the link why, and end the connection."""
        self.send(refusal(error))
        self.close()

    def close(self) -> None:
        with self._listener.turn():
            if not self.closed:
                self.closed = True
                self._mailbox.end()
                self._listener.remove(self)


class InProcessLink:
    """The client's end, with the methods and attributes of `Link`."""

    def __init__(
        self, conn: InProcessConnection, listener: InProcessListener, mailbox: _Mailbox
    ) -> None:
        self.address = listener.address
        self.shared = conn.shared
        self.payload_bytes = 0
        self.more = True
        self._conn = conn
        self._listener = listener
        self._mailbox = mailbox
        self._payload: tuple[ByteArray, ...] = ()
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def connect(
        cls, listener: InProcessListener, hello: Hello, *, arenas: Sequence[Arena] = ()
    ) -> InProcessLink:
        """Open a connection to the listener's handler; arenas are shared by reference.

        Raises:
            ParamServeError: the handler refused the hello.
        """
        named = tuple((arena.number, arena.nbytes) for arena in arenas)
        hello = msgspec.structs.replace(hello, arenas=named, nonce=b"")
        mailbox = _Mailbox()
        memory = {arena.number: arena.memory for arena in arenas}
        conn = InProcessConnection(hello, memory, listener, mailbox)
        try:
            with listener.turn():
                listener.handler.opened(conn, hello)
                listener.add(conn)
                if conn.closed:
                    listener.remove(conn)
        except BaseException:
            mailbox.end()
            mailbox.close()
            raise
        link = cls(conn, listener, mailbox)
        forks.watch(link)
        return link

    def fileno(self) -> int:
        """A descriptor that is readable while a reply waits; -1 once closed."""
        return self._mailbox.fileno()

    def send(self, header: bytes, payload: Sequence[ByteArray] = ()) -> None:
        """As `Link.send`; the handler's `frame` has run when it returns."""
        self._check_usable()
        limits = self._listener.limits
        if len(header) > limits.header_bytes_max:
            raise header_not_sent(len(header), limits.header_bytes_max)
        data = _joined(payload)
        with self._listener.turn():
            if self._conn.closed:
                raise ConnectionResetError("the peer closed the connection")
            try:
                # A frame that has no prelude is refused as by its prelude.
                parse_prelude(
                    prelude(len(header), 0 if data is None else data.nbytes),
                    header_max=limits.header_bytes_max,
                    payload_max=limits.payload_bytes_max,
                )
                self._listener.handler.frame(self._conn, header, data)
            except (ParamServeError, msgspec.MsgspecError) as error:
                self._conn.refuse(as_refusable(error))
            except BaseException:
                self._conn.close()
                raise

    def offer(self, header: bytes) -> bool:
        """As `Link.offer`; nothing is ever left."""
        self.send(header)
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        """As `Link.receive`."""
        self._check_usable()
        if self.payload_bytes:
            raise RuntimeError("read or skip the payload before the next receive")
        try:
            reply = self._mailbox.get(timeout_s)
        except ConnectionResetError:
            self._check_usable()
            raise
        if reply is None:
            return None
        self._payload = reply.payload
        self.payload_bytes = sum(padded(part.nbytes) for part in reply.payload)
        return reply.header

    def buffered(self) -> bytes | None:
        """As `receive(0.0)`."""
        return self.receive(0.0)

    def read_payload(self, into: Sequence[ByteArray]) -> None:
        """As `Link.read_payload`."""
        total = sum(padded(part.nbytes) for part in into)
        if total != self.payload_bytes:
            raise ValueError(
                f"the payload has {self.payload_bytes} bytes, the arrays for it take {total}"
            )
        data = _joined(self._payload)
        start = 0
        for part in into:
            if data is not None:
                part[:] = data[start : start + part.nbytes]
            start += padded(part.nbytes)
        self.skip_payload()

    def skip_payload(self) -> None:
        """As `Link.skip_payload`."""
        self._payload, self.payload_bytes = (), 0

    def attach(self, arena: Arena, *, timeout_s: float) -> None:
        """As `Link.attach`; it never waits for more than the handler's turn."""
        if not self.shared:
            raise ValueError(f"the link to {self.address} shares no memory, send payloads instead")
        hello = msgspec.structs.replace(self._conn.hello, role="attach")
        InProcessLink.connect(self._listener, hello, arenas=[arena]).close()

    def close(self) -> None:
        """End the connection; repeating is safe."""
        if not self._closed:
            self._closed = True
            if os.getpid() == self._pid:
                self._conn.close()
            self._mailbox.close()

    def abandon(self) -> None:
        """Close the descriptors in a forked child."""
        self._closed = True
        self._mailbox.close()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise forks.forked(self.address, self._pid)
        if self._closed:
            raise forks.ended(self.address)


def _joined(parts: Sequence[ByteArray]) -> ByteArray | None:
    """The parts as they would lie on the wire, in new memory; None if they hold nothing."""
    total = sum(padded(part.nbytes) for part in parts)
    if not total:
        return None
    data = aligned_empty(total)
    start = 0
    for part in parts:
        np.copyto(data[start : start + part.nbytes], part)
        start += padded(part.nbytes)
    return data

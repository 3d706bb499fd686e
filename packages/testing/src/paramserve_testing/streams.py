"""Streams of the virtual network as the connections and links that drivers are given.

A stream does what a socket does; what its frames mean is left to the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from paramserve.errors import CoordinatorGone, ParamServeError
from paramserve.messages import (
    CoordinatorNotice,
    CoordinatorReply,
    Hello,
    Reconnect,
    Register,
    Run,
    ServerEnds,
    ServerNotice,
    Welcome,
    decoder,
    encode,
)
from paramserve.transport.connection import NO_ARENAS, Handler, Kind, as_refusable, refusal
from paramserve.transport.framing import ByteArray
from paramserve_testing.loop import VirtualLoop
from paramserve_testing.network import FAR, NEAR, Frame, Stream

UNREAD_MAX = 6
"""Frames that an end takes which does not read: as much as a socket's buffer holds."""

_decode_hello = decoder(Hello).decode
_decode_told = decoder(CoordinatorReply | ServerNotice).decode


class VirtualConnection:
    """A handler's end of a stream, with the methods of `Connection`."""

    def __init__(
        self, listener: VirtualListener, stream: Stream, kind: Kind, arenas: dict[int, ByteArray]
    ) -> None:
        self.hello = Hello("")
        self.kind: Kind = kind
        self.arenas = arenas
        self.shared = bool(arenas)
        self.reset = False
        self.stream = stream
        self.greeting = b""
        """The frame with the peer's hello, once it has come."""
        self.early: list[Frame] | None = []
        """What the handler sends while it is asked: it goes behind `Welcome`."""
        self.closed = False
        self._listener = listener

    def send(
        self, header: bytes, runs: Sequence[Run] = (), arenas: Mapping[int, ByteArray] = NO_ARENAS
    ) -> None:
        frame = Frame.carrying(header, runs, arenas)
        if self.early is not None:
            self.early.append(frame)
        else:
            self.stream.send(FAR, frame)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.stream.close(FAR)
            self._listener.forget(self)


class VirtualListener:
    """The end where streams reach a handler."""

    def __init__(self, place: str, handler: Handler, loop: VirtualLoop) -> None:
        self.place = place
        self._handler = handler
        self._loop = loop
        self._connections: dict[int, VirtualConnection] = {}

    def accept(
        self,
        stream: Stream,
        hello: Hello | None = None,
        kind: Kind = "tcp",
        arenas: dict[int, ByteArray] | None = None,
    ) -> None:
        """A peer opens a stream; who it is, `hello` says, or else its first frame."""
        connection = VirtualConnection(self, stream, kind, {} if arenas is None else arenas)
        self._connections[stream.number] = connection
        if hello is not None:
            connection.hello, connection.early = hello, None
            self._handler.opened(connection, hello)

    def received(self, stream: Stream, frame: Frame) -> None:
        if not self._loop.awake(self.received, stream, frame):
            return
        stream.taken(NEAR)
        connection = self._connections.get(stream.number)
        if connection is None or frame.header == connection.greeting:  # or it came twice
            return
        try:
            if connection.early is not None:
                self._open(connection, frame.header)
            else:
                frame.place(connection.arenas)
                self._handler.frame(connection, frame.header)
        except (ParamServeError, msgspec.MsgspecError) as error:
            stream.send(FAR, Frame(refusal(as_refusable(error))))
            connection.close()

    def _open(self, connection: VirtualConnection, header: bytes) -> None:
        hello = connection.hello = _decode_hello(header)
        self._handler.opened(connection, hello)
        connection.greeting = header
        early, connection.early = connection.early or (), None
        for frame in (Frame(encode(Welcome())), *early):
            connection.stream.send(FAR, frame)

    def lost(self, stream: Stream) -> None:
        if self._loop.awake(self.lost, stream):
            connection = self._connections.get(stream.number)
            if connection is not None:
                connection.reset = stream.broken and connection.kind == "tcp"
                connection.closed = True
                self.forget(connection)

    def forget(self, connection: VirtualConnection) -> None:
        """A connection has ended; the handler is told, if it knew of it."""
        del self._connections[connection.stream.number]
        if connection.early is None:
            self._loop.call_soon(lambda: self._handler.closed(connection))


class VirtualLink:
    """A server's end of a stream to another server, with the methods of `PeerLink`."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.stream: Stream | None = None
        self._lost = False

    def offer(self, header: bytes) -> bool:
        if not self.flush():
            return False
        assert self.stream is not None
        self.stream.send(NEAR, Frame(header))
        return True

    def flush(self) -> bool:
        if self._lost or self.stream is None:
            raise ConnectionResetError("the stream has ended")
        return self.stream.unread[NEAR] < UNREAD_MAX

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close(NEAR)

    def received(self, stream: Stream, frame: Frame) -> None:
        """`Welcome`; a server answers nothing else."""

    def lost(self, stream: Stream) -> None:
        self._lost = True


class VirtualControl:
    """A server's end of its stream to the coordinator, with the methods of `Control`.

    Args:
        dial: opens a stream.
        register: says which server this is.
    """

    def __init__(
        self,
        place: str,
        loop: VirtualLoop,
        dial: Callable[[VirtualControl], Stream],
        register: Register,
    ) -> None:
        self.place = place
        self._loop = loop
        self._dial = dial
        self._register = register
        self._came: list[ServerNotice] = []
        self._lost = self._closed = False
        self.stream = dial(self)
        self.stream.send(NEAR, Frame(encode(register)))

    def fileno(self) -> int:
        return -1 if self._closed else self.stream.number

    def notify(self, message: CoordinatorNotice | ServerEnds, /, *, waits: bool) -> bool:
        if waits:
            self._loop.freeze_while(self._is_full)
        elif not self.flush():
            return False
        self.stream.send(NEAR, Frame(encode(message)))
        return True

    def flush(self) -> bool:
        self._closed = self._closed or self._lost
        return not (self._closed or self._is_full())

    def _is_full(self) -> bool:
        """Whether a send would wait: the coordinator takes nothing."""
        return not self._lost and self.stream.unread[NEAR] >= UNREAD_MAX

    def read_notices(self) -> list[ServerNotice]:
        if self._lost:
            self._closed = True
            raise CoordinatorGone("the stream has ended", fix="none")
        came, self._came = self._came, []
        return came

    def restore(self, *, ended: Callable[[], bool]) -> bool:
        if ended():
            return False
        self.stream, self._lost, self._closed = self._dial(self), False, False
        known = self._register
        again = Reconnect(0, b"", shard=known.shard, pid=known.pid, addresses=known.addresses)
        self.stream.send(NEAR, Frame(encode(again)))
        return True

    def received(self, stream: Stream, frame: Frame) -> None:
        told = _decode_told(frame.header)
        if isinstance(told, ServerNotice) and stream is self.stream:
            self._came.append(told)
            self._loop.readable(stream.number)

    def lost(self, stream: Stream) -> None:
        if stream is self.stream:
            self._lost = True
            self._loop.readable(stream.number)

"""The server's end of one connection: frames in to a handler, frames out without waiting.

`StreamConnection` works on a nonblocking socket with the event loop's readiness callbacks, not on
an asyncio transport: a payload is sent from its arrays (asyncio would copy what the socket does not
take at once), and a small frame there and back takes 18.1 us instead of 18.4. The same holds under
TLS: see `tls.TlsSocket`.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Final, Literal, Protocol

import msgspec

from paramserve.config import Limits
from paramserve.errors import Overloaded, ParamServeError, ProtocolError
from paramserve.messages import Hello, Refused, Welcome, encode
from paramserve.transport.buffers import Buffers
from paramserve.transport.framing import (
    IO_PARTS_MAX,
    PRELUDE_BYTES,
    ByteArray,
    FrameReader,
    drop,
    on_wire,
    prelude,
)
from paramserve.transport.timing import Loop
from paramserve.transport.tls import TlsSocket, pending

logger = logging.getLogger("paramserve")

Kind = Literal["unix", "tcp"]

_READ_AT_ONCE: Final = 4 << 20
"""Bytes of one payload before other connections get their turn."""


class Connection(Protocol):
    """What a handler sees of a peer, over any transport."""

    hello: Hello
    kind: Kind
    arenas: dict[int, ByteArray]
    """The peer's shared memory by number; a handler may add those of an "attach" connection."""
    shared: bool
    """Whether payloads can lie in shared memory."""
    reset: bool
    """Whether it was ended by a reset, as the network may: that does not tell how the peer is."""

    def send(self, header: bytes, payload: Sequence[ByteArray] = ()) -> None:
        """Send one frame; never waits.

        The arrays of the payload are handed over: they must not change afterwards. Each is padded
        to `ALIGN` on the wire. On a closed connection this does nothing. While a peer has left more
        than `send_buffer_bytes_max` of earlier frames unread, nothing more is read from it, so that
        what it may have unanswered bounds what waits for it. Past `outstanding_max` frames more
        than that, which it cannot have asked for, it is cut off.
        """

    def close(self) -> None:
        """End the connection now; what the peer has not been able to take is dropped."""


class Socket(Protocol):
    """A connected, nonblocking socket, as far as `StreamConnection` uses it."""

    def fileno(self) -> int: ...

    def send(self, data: bytes, /) -> int: ...

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def close(self) -> None: ...


class Handler(Protocol):
    """What a listener calls. All calls come one at a time, from the loop that listens."""

    def opened(self, conn: Connection, hello: Hello) -> None:
        """A peer that belongs here said hello. What is sent now arrives behind `Welcome`.

        May raise `ParamServeError`: the peer gets it as `Refused` with number 0 and is closed, and
        the handler is not called for it again.
        """

    def frame(self, conn: Connection, header: bytes, payload: ByteArray | None) -> None:
        """A frame came. The payload is the handler's to keep, its first byte aligned to `ALIGN`.

        May raise `ParamServeError` or msgspec's errors for a header that is not valid: the peer
        gets `Refused` with number 0 and is cut off.
        """

    def closed(self, conn: Connection) -> None:
        """Called once for each opened connection after its end, however it ended.

        Never from within another call to the handler.
        """


def refusal(error: ParamServeError) -> bytes:
    """The header that tells a peer why its connection ends."""
    kind = type(error).__name__
    return encode(Refused(0, kind, error.failed, error.applied, error.fix))


def as_refusable(error: ParamServeError | msgspec.MsgspecError) -> ParamServeError:
    """Error in a form that can be sent to a peer."""
    if isinstance(error, ParamServeError):
        return error
    return ProtocolError(
        f"a header was refused: {error}", fix="run the same version of paramserve on both sides"
    )


class StreamConnection:
    """A `Connection` over a socket whose peer is known."""

    def __init__(
        self,
        sock: Socket,
        kind: Kind,
        hello: Hello,
        arenas: dict[int, ByteArray],
        handler: Handler,
        limits: Limits,
        buffers: Buffers,
        on_end: Callable[[StreamConnection], None],
        loop: Loop,
    ) -> None:
        self.hello = hello
        self.kind: Kind = kind
        self.arenas = arenas
        self.shared = bool(arenas)
        self.reset = False
        self._sock = sock
        self._fd = sock.fileno()
        self._handler = handler
        self._limits = limits
        self._buffers = buffers
        self._on_end = on_end
        self._loop = loop
        self._reader = FrameReader(limits.header_bytes_max, limits.payload_bytes_max)
        # The frame whose payload is still arriving.
        self._header = b""
        self._payload: ByteArray | None = None
        self._payload_rest = memoryview(b"")
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._writing = False
        self._hides = isinstance(sock, TlsSocket)
        """Whether it may hold bytes that the selector does not know of."""
        self._again = False
        self._paused = False
        """Whether nothing is read, because the peer has left too much unread."""
        self._past_limit = 0
        """Frames that were queued since then."""
        self._started = False
        self._closed = False

    def open(self, welcome: Welcome) -> None:
        """Ask the handler, then answer the peer's hello and begin to read."""
        header = encode(welcome)
        self._enqueue([memoryview(prelude(len(header), 0) + header)])
        try:
            self._handler.opened(self, self.hello)
        except ParamServeError as error:
            self._queue.clear()
            self.refuse(error)
            return
        except BaseException:
            self._end("the handler failed")
            raise
        self._started = True
        if self._closed:
            self._loop.call_soon(partial(self._handler.closed, self))
            return
        if not self._paused:
            self._loop.add_reader(self._fd, self._readable)
        self._writable()
        self._come_back()

    def send(self, header: bytes, payload: Sequence[ByteArray] = ()) -> None:
        views, total = on_wire(payload) if payload else ([], 0)
        length = len(header)
        data = prelude(length, total) + header
        if self._queue or not self._started or self._closed:
            self._enqueue([memoryview(data), *views])
            return
        try:
            if views:
                count = self._sock.sendmsg([memoryview(data), *views[: IO_PARTS_MAX - 1]])
            else:
                count = self._sock.send(data)
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._fail(error)
            return
        if count < PRELUDE_BYTES + length + total:
            rest = deque([memoryview(data), *views])
            drop(rest, count)
            self._enqueue(rest)

    def close(self) -> None:
        self._end("closed by this side")

    def abandon(self) -> None:
        """Close the descriptor in a forked child; the parent's connection goes on."""
        self._closed = True
        self._sock.close()

    def _enqueue(self, views: Iterable[memoryview]) -> None:
        """Put a frame behind what waits; try to write if nothing does."""
        if self._closed:
            return
        if self._paused:
            self._past_limit += 1
            if self._past_limit > self._limits.outstanding_max:
                self._end(f"the peer left {self._queued_bytes} bytes unread")
                return
        first = not self._queue
        self._queue.extend(views)
        self._queued_bytes += sum(map(len, views))
        if first and self._started:
            self._writable()
        if self._is_full() and not self._paused and not self._closed:
            self._paused, self._past_limit = True, 0
            self._loop.remove_reader(self._fd)

    def _is_full(self) -> bool:
        return self._queued_bytes > self._limits.send_buffer_bytes_max

    def _resume(self) -> None:
        """Read on, if the peer has read; first what had come before the pause."""
        if self._closed or not self._paused or self._is_full():
            return
        self._paused = False
        if self._payload is None:
            self._frames(0)
        if not self._closed and not self._paused:
            self._loop.add_reader(self._fd, self._readable)
            self._come_back()

    def _writable(self) -> None:
        try:
            count = self._sock.sendmsg(islice(self._queue, IO_PARTS_MAX))
        except BlockingIOError:
            count = 0
        except OSError as error:
            self._fail(error)
            return
        self._queued_bytes -= count
        drop(self._queue, count)
        if self._paused and not self._is_full():
            self._loop.call_soon(self._resume)
        if bool(self._queue) == self._writing:
            return
        self._writing = not self._writing
        if self._writing:
            self._loop.add_writer(self._fd, self._writable)
        else:
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        """Read once, and hand over what is whole."""
        if self._payload is not None:
            self._read_payload()
        else:
            reader = self._reader
            try:
                count = self._sock.recv_into(reader.space() if reader.end else reader.buffer)
            except BlockingIOError:
                pass
            except OSError as error:
                self._fail(error)
            else:
                if count:
                    self._frames(count)
                else:
                    self._end("the peer closed")
        if self._hides:
            self._come_back()

    def _come_back(self) -> None:
        """Read on soon if there is something that the selector does not know of."""
        if not self._again and not self._closed and not self._paused and pending(self._sock):
            self._again = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._again = False
        if not self._closed and not self._paused:
            self._readable()

    def _frames(self, count: int) -> None:
        """Hand over the frames that are here, after `count` more bytes."""
        reader = self._reader
        try:
            header = reader.filled(count)
            while header is not None:
                if reader.payload_bytes:
                    if not self._begin_payload(header, reader.payload_bytes):
                        return
                else:
                    self._handler.frame(self, header, None)
                if not reader.end or self._closed or self._paused:
                    return
                header = reader.next()
        except (ParamServeError, msgspec.MsgspecError) as error:
            self.refuse(as_refusable(error))
        except BaseException:
            self._end("the handler failed")
            raise

    def _begin_payload(self, header: bytes, size: int) -> bool:
        """Make room for a payload; True if all of it had come and was handed over."""
        try:
            payload = self._buffers.take(size)
        except MemoryError:
            raise Overloaded(
                f"no memory for a payload of {size} bytes", fix="send less at once, or add memory"
            ) from None
        rest = payload.data
        size_read = self._reader.take(rest)
        if size_read == size:
            self._handler.frame(self, header, payload)
            return True
        self._header, self._payload, self._payload_rest = header, payload, rest[size_read:]
        return False

    def _read_payload(self) -> None:
        rest, budget = self._payload_rest, _READ_AT_ONCE
        try:
            while rest and budget > 0:
                count = self._sock.recv_into(rest[:budget])
                if not count:
                    self._end("the peer closed within a payload")
                    return
                rest, budget = rest[count:], budget - count
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(error)
            return
        if rest:
            self._payload_rest = rest
            return
        self._payload_rest = memoryview(b"")  # Even an empty rest would hold the buffer.
        del rest
        payload, self._payload = self._payload, None
        try:
            self._handler.frame(self, self._header, payload)
        except (ParamServeError, msgspec.MsgspecError) as error:
            self.refuse(as_refusable(error))
        except BaseException:
            self._end("the handler failed")
            raise

    def refuse(self, error: ParamServeError) -> None:
        """Tell the peer why, as far as its socket takes it at once, and end the connection."""
        if self._closed:
            return
        if not self._queue:
            header = refusal(error)
            try:
                self._sock.send(prelude(len(header), 0) + header)
            except OSError as failed:
                logger.debug("could not tell a %s peer why it is cut off: %s", self.kind, failed)
        self._end(str(error))

    def _fail(self, error: OSError) -> None:
        # Over TCP a process that ends closes its connections; a reset is the network's, or comes
        # from a process that ended with bytes unread.
        self.reset = self.kind == "tcp" and isinstance(error, ConnectionResetError)
        self._end(str(error))

    def _end(self, reason: str) -> None:
        if self._closed:
            return
        self._closed = True
        logger.debug("a %s connection of client %d ended: %s", self.kind, self.hello.client, reason)
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._queue.clear()
        self._queued_bytes = 0
        self._payload = None
        self._payload_rest = memoryview(b"")
        if self._started:
            self._loop.call_soon(partial(self._handler.closed, self))
        self._on_end(self)


def take_arenas(main: Connection, attached: Connection, limits: Limits) -> None:
    """Move the arenas of another connection to the client's main connection.

    Raises:
        Overloaded: the client would have too many, or too much mapped. Nothing was moved.
    """
    both = {**main.arenas, **attached.arenas}
    total = sum(arena.nbytes for arena in both.values())
    if total > limits.arena_bytes_max or len(both) > limits.arenas_max:
        raise Overloaded(
            f"client {main.hello.client} would have {len(both)} arenas of {total} bytes mapped, "
            f"arenas_max is {limits.arenas_max}, arena_bytes_max {limits.arena_bytes_max}",
            fix="use smaller blocks or fewer outstanding steps, or raise the limit",
        )
    main.arenas.update(attached.arenas)

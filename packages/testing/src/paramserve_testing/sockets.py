"""A server's end of a stream as a socket: bytes come and go in pieces, and it holds little.

The connections that ship (`transport.connection`) read and write it: their queue for a peer that
reads slowly, and what they read of such a peer meanwhile, are those of a real run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import numpy as np

from paramserve.config import Limits
from paramserve.messages import Hello, Welcome, decoder
from paramserve.transport.connection import Handler, Kind, StreamConnection
from paramserve.transport.framing import (
    PRELUDE_BYTES,
    RUN,
    RUNS,
    ByteArray,
    parse_prelude,
    prelude,
    split,
)
from paramserve_testing.loop import VirtualLoop
from paramserve_testing.network import FAR, NEAR, Frame, Stream

PIECE_BYTES = 48 << 10
"""A socket takes up to so many bytes at once."""
HEADER_BYTES_MAX = PAYLOAD_BYTES_MAX = 1 << 30

_decode_hello = decoder(Hello).decode


class VirtualSocket:
    """The far end of a stream, with the methods of a nonblocking socket.

    Args:
        random: draws how much is taken at once.
    """

    def __init__(self, stream: Stream, loop: VirtualLoop, random: Random) -> None:
        self._stream = stream
        self._loop = loop
        self._random = random
        self._came = deque[memoryview]()
        """The rest of each frame that was not read to its end."""
        self._going = bytearray()
        """Bytes of a frame that was not written to its end."""
        self._ended = self._closed = False
        stream.on_room[FAR] = self._told
        loop.files[self.fileno()] = self

    # --- what the stream tells ----------------------------------------------------------

    def came(self, frame: Frame) -> None:
        """A frame has come."""
        header, payload = frame.header, b""
        if frame.payload is not None:
            table = [RUN.pack(*run) for run in frame.runs]
            header = b"".join((header, *table, RUNS.pack(len(table))))
            payload = frame.payload.tobytes()
        data = prelude(len(header), len(payload)) + header + payload
        self._came.append(memoryview(data))
        self._told()

    def ended(self) -> None:
        """The stream has ended."""
        self._ended = True
        self._told()

    def _told(self) -> None:
        """Notify that the socket may be readable or writable now."""
        if not self._closed:
            self._loop.changed(self.fileno())

    @property
    def readable(self) -> bool:
        return bool(self._came) or self._ended

    @property
    def writable(self) -> bool:
        return self._ended or not self._stream.full(FAR)

    # --- as a socket --------------------------------------------------------------------

    def fileno(self) -> int:
        return self._stream.number

    def recv_into(self, buffer: memoryview, /) -> int:
        if not self._came:
            if not self._ended:
                raise BlockingIOError
            if self._stream.broken:
                raise ConnectionResetError("the stream has broken")
            return 0
        limit = min(len(buffer), self._random.randint(1, PIECE_BYTES))
        done = 0
        while self._came and done < limit:
            piece = self._came[0][: limit - done]
            buffer[done : done + len(piece)] = piece
            done += len(piece)
            self._came[0] = self._came[0][len(piece) :]
            if not self._came[0]:
                self._came.popleft()
                self._stream.taken(NEAR)
        return done

    def send(self, data: bytes, /) -> int:
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, buffers: Iterable[memoryview], /) -> int:
        if self._ended:
            raise ConnectionResetError if self._stream.broken else BrokenPipeError
        if not self.writable:
            raise BlockingIOError
        left = taken = self._random.randint(1, PIECE_BYTES)
        for each in buffers:
            piece = each.cast("B")[:left]
            self._going += piece
            left -= len(piece)
            if not left:
                break
        self._send_frames()
        return taken - left

    def _send_frames(self) -> None:
        """Send the frames that are whole."""
        while len(self._going) >= PRELUDE_BYTES:
            header_bytes, payload_bytes = parse_prelude(
                self._going, header_max=HEADER_BYTES_MAX, payload_max=PAYLOAD_BYTES_MAX
            )
            behind = PRELUDE_BYTES + header_bytes
            if len(self._going) < behind + payload_bytes:
                return
            header = bytes(self._going[PRELUDE_BYTES:behind])
            frame = Frame(header)
            if payload_bytes:
                payload = np.frombuffer(self._going[behind : behind + payload_bytes], np.uint8)
                header, runs = split(header, payload_bytes)
                frame = Frame(header, payload, runs)
            del self._going[: behind + payload_bytes]
            self._stream.send(FAR, frame)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            del self._loop.files[self.fileno()]
            self._stream.close(FAR)


class SocketListener:
    """The end where streams reach a handler, through sockets and the connections that ship.

    Args:
        limits: of the connections.
        random: of the sockets.
    """

    def __init__(
        self, place: str, handler: Handler, loop: VirtualLoop, limits: Limits, random: Random
    ) -> None:
        self.place = place
        self._handler = handler
        self._loop = loop
        self._limits = limits
        self._random = random
        self._peers: dict[int, _Peer] = {}
        """Peers by number of their stream."""

    def accept(
        self, stream: Stream, kind: Kind = "tcp", arenas: dict[int, ByteArray] | None = None
    ) -> None:
        """A peer opens a stream; who it is, its first frame says."""
        sock = VirtualSocket(stream, self._loop, self._random)
        self._peers[stream.number] = _Peer(sock, kind, {} if arenas is None else arenas)

    def received(self, stream: Stream, frame: Frame) -> None:
        peer = self._peers.get(stream.number)
        if peer is None or frame.header == peer.greeting:  # closed here, or it came twice
            stream.taken(NEAR)
        elif peer.greeting:
            peer.sock.came(frame)
        elif self._loop.awake(self.received, stream, frame):
            stream.taken(NEAR)
            peer.greeting = frame.header
            self._open(stream.number, peer)

    def _open(self, number: int, peer: _Peer) -> None:
        connection = StreamConnection(
            peer.sock,
            peer.kind,
            _decode_hello(peer.greeting),
            peer.arenas,
            self._handler,
            self._limits,
            lambda connection: self._forget(number),
            self._loop,
        )
        connection.open(Welcome())

    def _forget(self, number: int) -> None:
        del self._peers[number]

    def lost(self, stream: Stream) -> None:
        peer = self._peers.get(stream.number)
        if peer is not None:
            peer.sock.ended()


@dataclass
class _Peer:
    """Peer that has opened a stream."""

    sock: VirtualSocket
    kind: Kind
    arenas: dict[int, ByteArray]
    greeting: bytes = b""
    """The frame with its hello, once it has come."""

"""The client's end of a simulated connection, with the methods and attributes of `Link`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from paramserve.errors import ClientClosed
from paramserve.messages import Arenas, Hello, Refused, Run, Welcome, decoder, encode
from paramserve.transport.arena import Arena
from paramserve.transport.hello import check_answer
from paramserve_testing.network import FAR, NEAR, Bytes, Frame, Stream

if TYPE_CHECKING:
    from paramserve_testing.fiber import Fiber

LOOK_S = 1e-3
"""How often a send that waits looks whether the server takes it."""

_is_answer = decoder(Welcome | Refused).decode
_are_arenas = decoder(Arenas).decode


class VirtualLink:
    """One connection to a shard.

    Args:
        stream: whose other end is the server's; its owner tells this object what comes.
        memory: what the server maps: arenas by number. Those that are attached are added.
        sent: is called after each message, before the caller goes on.
    """

    payload_bytes = 0
    more = True
    while_blocked: Callable[[], None] | None = None
    io_timeout_s = 0.0

    def __init__(
        self,
        address: str,
        stream: Stream,
        fiber: Fiber,
        memory: dict[int, Bytes],
        sent: Callable[[VirtualLink], None],
    ) -> None:
        self.address = address
        self.stream = stream
        self.shared = bool(memory)
        self._memory = memory
        self._fiber = fiber
        self._sent = sent
        self._frames: deque[Frame] = deque()
        self.arenas: Mapping[int, Bytes] = {}
        self._carrying = Frame(b"")
        """The frame whose header came last."""
        self._ended = self._closed = self._welcomed = self.broken_off = False

    # --- what the stream tells ----------------------------------------------------------

    def received(self, frame: Frame) -> None:
        """A frame has come. A stream may repeat one; a socket would not repeat the welcome."""
        if self._closed:
            return
        if _is_welcome(frame.header):
            if self._welcomed:
                self.stream.taken(FAR)
                return
            self._welcomed = True
        self._frames.append(frame)
        self._fiber.wake()

    def lost(self) -> None:
        """The stream has ended."""
        self._ended = True
        self._fiber.wake()

    @property
    def readable(self) -> bool:
        return bool(self._frames) or self._ended

    # --- as `Link` ----------------------------------------------------------------------

    def greet(self, hello: Hello, until_s: float, now: Callable[[], float]) -> None:
        """Say hello and wait for the answer.

        Raises:
            ConnectionError, TimeoutError: there was none.
            ParamServeError: the server refused the hello; this is its error.
        """
        self.stream.send(NEAR, Frame(encode(msgspec.structs.replace(hello, arenas=()))))
        while (header := self.receive(0.0)) is None:
            if now() >= until_s:
                raise TimeoutError("no answer to the hello in time")
            self._fiber.wait_until(until_s)
        check_answer(header, b"")

    def fileno(self) -> int:
        return -1 if self._closed else self.stream.number

    def send(self, header: bytes, runs: Sequence[Run] = ()) -> None:
        self._check()
        self._wait_to_send()
        if self._ended:
            raise ConnectionResetError("the peer closed the connection")
        frame = Frame.carrying(header, runs, self.arenas)
        self.stream.send(NEAR, frame, numbered=not _names_arenas(header))
        self._sent(self)

    def _wait_to_send(self) -> None:
        """Wait while the server takes nothing, and read meanwhile what it sends."""
        while self.stream.full(NEAR) and not self._ended:
            if self._frames and self.while_blocked is not None:
                self.while_blocked()
            self._fiber.wait(LOOK_S)
            self._check()

    def offer(self, header: bytes) -> bool:
        self._check()
        if not self._ended:
            self.stream.send(NEAR, Frame(header))
        return True

    def receive(self, timeout_s: float) -> bytes | None:
        self._check()
        if self.payload_bytes:
            raise RuntimeError("read or skip the payload before the next receive")
        if self._frames:
            frame = self._frames.popleft()
            self.stream.taken(FAR)
            self._carrying = frame
            self.payload_bytes = 0 if frame.payload is None else frame.payload.size
            return frame.header
        if self._ended:
            raise ConnectionResetError("the peer closed the connection")
        return None

    def buffered(self) -> bytes | None:
        return self.receive(0.0) if self._frames else None

    def read_payload(self) -> None:
        self._carrying.place(self.arenas)
        self.payload_bytes = 0

    def skip_payload(self) -> None:
        self.payload_bytes = 0

    def attach(self, arena: Arena, *, timeout_s: float) -> None:
        self._memory[arena.number] = arena.memory

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.stream.close(NEAR)

    def break_off(self) -> None:
        """Break the link within a frame: later calls raise `ConnectionError`."""
        self.broken_off = True
        self.stream.cut()

    def _check(self) -> None:
        if self.broken_off:
            raise ConnectionAbortedError("broken off: a call was interrupted within a message")
        if self._closed:
            raise ClientClosed("the link was closed", fix="none")


def _is_welcome(header: bytes) -> bool:
    try:
        return isinstance(_is_answer(header), Welcome)
    except msgspec.MsgspecError:
        return False


def _names_arenas(header: bytes) -> bool:
    try:
        return bool(_are_arenas(header))
    except msgspec.MsgspecError:
        return False

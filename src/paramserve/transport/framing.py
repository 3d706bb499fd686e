"""Frames as bytes: the fixed prelude, its checks, and cutting a byte stream into frames.

A frame is a prelude, a header (one message in msgpack) and a payload: bytes of the client's arenas,
which both ends have. Behind the message a table names these runs of bytes, and how many they are.
This module holds no socket; it reads no message, so it decides only on sizes and places.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from paramserve.errors import ProtocolError
from paramserve.messages import PROTOCOL_VERSION, Run

ByteArray = npt.NDArray[np.uint8]

MAGIC: Final = b"PSRV"
PRELUDE: Final = struct.Struct("<4sHHIQ")
"""Magic, protocol version, 0, header bytes, payload bytes."""
PRELUDE_BYTES: Final = PRELUDE.size
BUFFER_BYTES: Final = 64 << 10
"""What one read may take; a longer header gets a buffer of its own while it arrives."""
IO_PARTS_MAX: Final = 64
"""Pieces of memory in one scatter-gather call (Linux allows 1024)."""
RUN: Final = struct.Struct("<QQQ")
"""A run of bytes: its arena, where it begins there, and its bytes."""
RUNS: Final = struct.Struct("<I")
"""How many runs stand before it."""
RUNS_MAX: Final = 1 << 17
"""Most runs of one frame; each costs a server ten times the bytes that name it."""

# The first three fields as one number: a frame is accepted by one comparison.
_WORDS: Final = struct.Struct("<QIQ")
_FIRST: Final = int.from_bytes(PRELUDE.pack(MAGIC, PROTOCOL_VERSION, 0, 0, 0)[:8], "little")

_unpack_from = _WORDS.unpack_from

prelude: Callable[[int, int], bytes] = partial(_WORDS.pack, _FIRST)
"""The bytes in front of a header and a payload of these sizes."""


def parse_prelude(
    buffer: bytes | bytearray | memoryview, *, header_max: int, payload_max: int, start: int = 0
) -> tuple[int, int]:
    """Check the prelude at `start` and return (header bytes, payload bytes).

    Raises:
        ProtocolError: wrong magic or version, or a size over its limit. Nothing was read past it.
    """
    first, header_bytes, payload_bytes = _unpack_from(buffer, start)
    if first != _FIRST or header_bytes > header_max or payload_bytes > payload_max:
        raise _refusal(bytes(buffer[start : start + PRELUDE_BYTES]), header_max, payload_max)
    return header_bytes, payload_bytes


def header_not_sent(size: int, limit: int) -> ProtocolError:
    """The error for a header that this side does not even send."""
    return ProtocolError(
        f"a header of {size} bytes was not sent, the limit is {limit}",
        fix="send fewer names at once, or raise header_bytes_max",
    )


def _refusal(data: bytes, header_max: int, payload_max: int) -> ProtocolError:
    magic, version, zero, header_bytes, payload_bytes = PRELUDE.unpack(data)
    if magic != MAGIC:
        what, fix = f"starts with {magic!r}, not with {MAGIC!r}", "connect only paramserve here"
    elif version != PROTOCOL_VERSION:
        what = f"has protocol version {version}, this side speaks {PROTOCOL_VERSION}"
        fix = "run the same version of paramserve on both sides"
    elif zero != 0:
        what, fix = f"has {zero} in a field that must be 0", "run the same version on both sides"
    elif header_bytes > header_max:
        what = f"has a header of {header_bytes} bytes, the limit is {header_max}"
        fix = "send fewer names at once, or raise header_bytes_max"
    else:
        what = f"has a payload of {payload_bytes} bytes, the limit is {payload_max}"
        fix = "send less at once, or raise payload_bytes_max"
    return ProtocolError(f"a frame was refused: it {what}", fix=fix)


def framed(
    header: bytes, runs: Sequence[Run], arenas: Mapping[int, ByteArray]
) -> tuple[list[memoryview], int]:
    """A frame with these runs of arenas, in pieces, without a copy of them; and its bytes."""
    views, table, count, total = [memoryview(b"")], b"", 0, 0
    for run in runs:
        arena, start, nbytes = run
        if nbytes:
            views.append(arenas[arena].data[start : start + nbytes])
            table += RUN.pack(*run)
            count, total = count + 1, total + nbytes
    if count:
        header = b"".join((header, table, RUNS.pack(count)))
    views[0] = memoryview(prelude(len(header), total) + header)
    return views, len(views[0]) + total


def split(data: bytes, payload_bytes: int) -> tuple[bytes, tuple[Run, ...]]:
    """The message of a frame with a payload, and the runs that it names.

    Raises:
        ProtocolError: it does not name as many bytes as the payload has.
    """
    end = len(data) - RUNS.size
    count = RUNS.unpack_from(data, end)[0] if end >= 0 else 0
    start = end - RUN.size * count
    if start >= 0 and count <= RUNS_MAX:
        runs: tuple[Run, ...] = tuple(RUN.iter_unpack(data[start:end]))
        total = 0
        for _, _, nbytes in runs:
            total += nbytes
        if total == payload_bytes:
            return data[:start], runs
    raise ProtocolError(
        f"a frame was refused: its {count} runs do not name the {payload_bytes} bytes that follow, "
        f"or are more than {RUNS_MAX}",
        fix="run the same version of paramserve on both sides",
    )


def located(runs: Sequence[Run], arenas: Mapping[int, ByteArray]) -> deque[memoryview]:
    """The memory that the runs of a peer's frame name, but for those without a byte.

    Raises:
        ProtocolError: one does not lie in an arena.
    """
    views: deque[memoryview] = deque()
    for arena, start, nbytes in runs:
        have = arenas[arena].size if arena in arenas else 0
        if start + nbytes > have:
            raise ProtocolError(
                f"a frame was refused: it has {nbytes} bytes for offset {start} of arena {arena}, "
                f"which has {have} bytes here",
                fix="run the same version of paramserve on both sides",
            )
        if nbytes:
            views.append(arenas[arena].data[start : start + nbytes])
    return views


def drop(views: deque[memoryview], count: int) -> None:
    """Take the first `count` bytes, which are done, off a queue of memory."""
    while count:
        size = len(views[0])
        if size > count:
            views[0] = views[0][count:]
            return
        views.popleft()
        count -= size


class FrameReader:
    """Cuts a stream into frames: `space()` says where bytes go, `filled(n)` that n have come.

    It returns headers. The payload of the frame whose header came last is `payload_bytes` long and
    must be taken by the caller (`place` moves what has been read of it; the rest is still to come)
    before `next` is asked for another header. At most one header over `BUFFER_BYTES` is held.

    Attributes:
        runs: of that payload.
        buffer: where the next bytes belong, if `end` is 0.
        end: bytes of it up to the last that came; 0 where all were handed over.
    """

    def __init__(self, header_max: int, payload_max: int) -> None:
        self.payload_bytes = 0
        self.runs: tuple[Run, ...] = ()
        self._header_max = header_max
        self._payload_max = payload_max
        self._usual = memoryview(bytearray(BUFFER_BYTES))
        self.buffer = self._usual
        self._start = 0
        self.end = 0

    def space(self) -> memoryview:
        """Memory for the next bytes of the stream; never empty."""
        end = self.end
        return self.buffer[end:] if end else self.buffer

    def filled(self, count: int) -> bytes | None:
        """Note that `count` bytes were put into `space()`; return the next header, if it is whole.

        Raises:
            ProtocolError: as `parse_prelude`. The stream cannot be read any further.
        """
        start = self._start
        end = self.end = self.end + count
        have = end - start
        if have < PRELUDE_BYTES:
            if have:
                self._make_room(PRELUDE_BYTES)
            return None
        first, header_bytes, payload_bytes = _unpack_from(self.buffer, start)
        if first != _FIRST or header_bytes > self._header_max or payload_bytes > self._payload_max:
            data = bytes(self.buffer[start : start + PRELUDE_BYTES])
            raise _refusal(data, self._header_max, self._payload_max)
        start += PRELUDE_BYTES
        stop = start + header_bytes
        if stop > end:
            self._make_room(PRELUDE_BYTES + header_bytes)
            return None
        header = bytes(self.buffer[start:stop])
        self.payload_bytes = payload_bytes
        if stop == end:
            self._start = self.end = 0
            self.buffer = self._usual
        else:
            self._start = stop
        if payload_bytes:
            header, self.runs = split(header, payload_bytes)
        return header

    def more(self, count: int) -> None:
        """Note that `count` bytes of a payload, and what follows it, were put into `space()`."""
        self.end += count

    def next(self) -> bytes | None:
        """The header of the next frame if all of it is here."""
        return self.filled(0)

    def place(self, views: deque[memoryview]) -> None:
        """Move bytes of a payload that were read past a header to where they belong; `views` says
        where the rest does."""
        while views and self.end:
            into, start = views[0], self._start
            stop = min(start + len(into), self.end)
            into[: stop - start] = self.buffer[start:stop]
            self._start = stop
            if stop == self.end:
                self._start = self.end = 0
                self.buffer = self._usual
            if stop - start < len(into):
                views[0] = into[stop - start :]
            else:
                views.popleft()

    def _make_room(self, size: int) -> None:
        """Let the unfinished frame's first `size` bytes fit, moving what is here if need be."""
        if size <= len(self.buffer) - self._start:
            return
        rest = bytes(self.buffer[self._start : self.end])
        if size > len(self.buffer):
            self.buffer = memoryview(bytearray(size))
        self.buffer[: len(rest)] = rest
        self._start, self.end = 0, len(rest)

"""What processes print, as whole lines in this process's own output, each with a label in front.

The standard streams of a child are pipes. One thread of this process reads them, and writes each
line when it is whole to `sys.stdout` or `sys.stderr` as they are at that moment: a terminal, a
file, a notebook's cell. So lines of several processes do not mix, by whatever means a process
writes them, and what it wrote before a sudden death is shown.

A progress bar redraws its line by carriage returns. Of such a line the present state is shown now
and then, and its last one.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import sys
import threading
import time
from typing import Literal, TextIO

from paramserve.engine.prepared import above_standard

StreamName = Literal["stdout", "stderr"]

READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 16
"""A longer line is shown in parts of this size."""
UNENDED_S = 1.0
"""A line whose end does not come is shown after this long."""
REDRAWN_S = 5.0
"""Seconds between two states of a line that is redrawn."""
WRITE_BYTES = 1 << 12
"""A pipe that is ready takes this much without blocking: POSIX's PIPE_BUF on Linux."""
READS_AT_END = 32
"""Reads of `READ_BYTES` of each stream at the close: more than a pipe holds, and no more, since a
process left behind may write on."""
READER_S = 300.0
"""How long `close` waits for a terminal or pipe whose reader takes nothing, as a pager does that
stands still. While it takes something, and before the close, there is no limit."""
LOOK_S = 0.5
"""Seconds between two looks whether that time is over."""


class Lines:
    """Cuts what comes from one stream into whole lines. Pure: the time is an argument."""

    def __init__(self, label: str) -> None:
        self._label = label.encode()
        self._rest = b""
        """Bytes of a line that has not ended."""
        self._began = 0.0
        """When it did."""
        self._shown_at = -math.inf
        """When a state of a redrawn line was shown last."""
        self._shown_unended = False

    @property
    def due_at(self) -> float:
        """When `unended` is to be asked; infinite: there is nothing."""
        if not self._rest:
            return math.inf
        due_at = self._began + UNENDED_S
        return max(due_at, self._shown_at + REDRAWN_S) if b"\r" in self._rest else due_at

    def take(self, data: bytes, now: float) -> bytes:
        """The lines that are whole now, with their ends."""
        if self._shown_unended and data[:1] == b"\n":  # its end has been shown already
            data = data[1:]
        self._shown_unended = False
        *whole, rest = (self._rest + data).split(b"\n")
        lines = [self._line(line) for line in whole]
        if whole or not self._rest:
            self._began = now
        while len(rest) > LINE_BYTES_MAX:
            lines.append(self._line(rest[:LINE_BYTES_MAX]))
            rest = rest[LINE_BYTES_MAX:]
        if b"\r" in rest:  # what was drawn over is discarded, but for the marks that it is redrawn
            rest = b"\r" + _visible(rest) + b"\r" * rest.endswith(b"\r")
        self._rest = rest
        return b"".join(lines)

    def unended(self, now: float) -> bytes:
        """The line that has not ended, as a line; nothing if there is none."""
        line = _visible(self._rest)
        if b"\r" in self._rest:
            self._shown_at = now
        self._rest = b""
        if not line:
            return b""
        self._shown_unended = True
        return self._line(line)

    def _line(self, line: bytes) -> bytes:
        text = _visible(line)
        return (self._label + text if text else self._label.rstrip()) + b"\n"


def _visible(line: bytes) -> bytes:
    """What a terminal shows of a line that is redrawn: what was drawn last, if it is not blank."""
    if b"\r" not in line:
        return line
    parts = [part for part in line.split(b"\r") if part.strip()]
    return parts[-1] if parts else b""


class Stream:
    """The reading end of one stream of a process."""

    def __init__(self, fd: int, name: StreamName, label: str) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.name: StreamName = name
        self.lines = Lines(label)

    def read(self) -> bytes | None:
        """What has come, up to a bound; empty: nothing; None: nothing will."""
        try:
            return os.read(self.fd, READ_BYTES) or None
        except BlockingIOError:
            return b""
        except OSError:
            return None


class Output:
    """Shows what the processes of a fleet print. `attach` and `close` are for any thread.

    A stream is read until its end. That may come after its process's own: what a worker has started
    in a session of its own prints on.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._streams: dict[Stream, None] = {}
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        os.set_blocking(self._wake, False)
        self._closed = False
        self._freed = False
        self._thread: threading.Thread | None = None
        self._moved_at = 0.0
        """When a reader took something, or the close began."""
        self._given_up = False
        self._dropped = 0
        """Bytes that no reader took."""

    def attach(self, label: str) -> list[int]:
        """The descriptors of stdout and stderr for a new process, which the caller closes when the
        process has them."""
        theirs: list[int] = []
        names: tuple[StreamName, ...] = ("stdout", "stderr")
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="paramserve-output", daemon=True
                )
                self._thread.start()
            for name in names:
                try:
                    ours, other = map(above_standard, os.pipe())
                except OSError:
                    for fd in theirs:  # the reading end sees its end, and goes
                        os.close(fd)
                    raise
                theirs.append(other)
                stream = Stream(ours, name, label)
                self._streams[stream] = None
                self._selector.register(ours, selectors.EVENT_READ, stream)
        return theirs

    def close(self) -> None:
        """Show what is left of all, and end the thread. Waits for a slow reader; what one does not
        take that takes nothing for `READER_S` is lost, which standard error says. May be
        repeated."""
        with self._lock:
            if self._closed:
                return
            self._moved_at = time.monotonic()
            self._closed = True
            thread = self._thread
        self._wake_up()
        if thread is None:
            self._free()
            return
        look_s = min(LOOK_S, READER_S)
        while thread.is_alive() and self._left_s() > -2 * look_s:
            thread.join(look_s)
        if thread.is_alive():  # in a write that blocks by itself; it ends when that returns
            self._given_up = True
        if self._given_up:
            write_line(
                f"paramserve: the reader of the output took nothing for {READER_S:g} s: at least "
                f"{self._dropped} bytes that processes printed are not shown\n"
            )

    def _left_s(self) -> float:
        """How long a reader that takes nothing is still waited for."""
        return self._moved_at + READER_S - time.monotonic() if self._closed else math.inf

    def _free(self) -> None:
        with self._lock:
            self._freed = True
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)

    def _wake_up(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if not self._freed:
                os.write(self._wake, b"w")

    def _run(self) -> None:
        try:
            self._show_all()
        finally:
            self._free()

    def _show_all(self) -> None:
        while not (self._closed and not self._streams):
            due_at = min((each.lines.due_at for each in tuple(self._streams)), default=math.inf)
            left_s = max(due_at - time.monotonic(), 0.0) if due_at < math.inf else None
            for key, _ in self._selector.select(left_s):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, READ_BYTES)
                else:
                    self._show(key.data)
            now = time.monotonic()
            for stream in tuple(self._streams):
                if self._closed:
                    any(not self._show(stream) for _ in range(READS_AT_END))
                    self._drop(stream)
                elif stream.lines.due_at <= now:
                    self._write(stream.name, stream.lines.unended(now))

    def _show(self, stream: Stream) -> bool:
        """Show what has come from a stream; whether anything has."""
        data = stream.read() if stream in self._streams else b""
        if data is None:
            self._drop(stream)
        elif data:
            self._write(stream.name, stream.lines.take(data, time.monotonic()))
        return bool(data)

    def _drop(self, stream: Stream) -> None:
        """No more will come."""
        if stream not in self._streams:
            return
        with self._lock:
            del self._streams[stream]
            self._selector.unregister(stream.fd)
        os.close(stream.fd)
        self._write(stream.name, stream.lines.unended(time.monotonic()))

    def _write(self, name: StreamName, data: bytes) -> None:
        """Write whole lines to this process's stream of that name, as it is now."""
        if self._given_up:
            self._dropped += len(data)
        elif data:
            self._write_to(name, data)

    def _write_to(self, name: StreamName, data: bytes) -> None:
        stream = getattr(sys, name)
        # A program must not end because its output cannot be shown: a closed terminal, a full disk,
        # a stream of the user's that raises.
        with contextlib.suppress(Exception):
            if stream is not None and stream is getattr(sys, f"__{name}__"):
                # Past its buffer, so that it does not come between two parts of a line of our own.
                self._write_by(stream.fileno(), memoryview(data))
            elif stream is not None:
                stream.write(data.decode("utf-8", "replace"))
                stream.flush()
                self._moved_at = time.monotonic()

    def _write_by(self, fd: int, rest: memoryview) -> None:
        """Write in pieces, each when it is taken."""
        while rest:
            if not select.select([], [fd], [], min(LOOK_S, READER_S))[1]:
                if self._left_s() <= 0:
                    self._given_up = True
                    self._dropped += len(rest)
                    return
                continue
            with contextlib.suppress(BlockingIOError):
                rest = rest[os.write(fd, rest[:WRITE_BYTES]) :]
                self._moved_at = time.monotonic()


def write_line(line: str) -> None:
    """Write a line to this process's standard error, unless its reader takes nothing."""
    stream: TextIO | None = sys.stderr
    with contextlib.suppress(Exception):
        if stream is None:
            return
        own = stream is sys.__stderr__
        if own and not select.select([], [stream.fileno()], [], 0.0)[1]:
            return
        stream.write(line)
        stream.flush()

"""Lines of several processes stay whole, by whatever pieces they come."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import threading
import time

import pytest
from tests.suites import each_case

from paramserve.engine import output
from paramserve.engine.output import LINE_BYTES_MAX, REDRAWN_S, UNENDED_S, Lines, Output

LONG_S = 10.0


def shown(label: str, *pieces: bytes) -> bytes:
    lines = Lines(label)
    return b"".join(lines.take(piece, 0.0) for piece in pieces) + lines.unended(0.0)


@each_case(
    ("pieces", "expected"),
    [
        ((b"one\ntwo\n",), b"[a] one\n[a] two\n"),
        ((b"o", b"ne", b"\n", b"two\nth"), b"[a] one\n[a] two\n[a] th\n"),
        ((b"\n", b"  x \n"), b"[a]\n[a]   x \n"),
        ((b"one\r\ntwo\r", b"\n"), b"[a] one\n[a] two\n"),
        ((b"\r 1%", b"\r 2%", b"\r 3%\n", b"done\n"), b"[a]  3%\n[a] done\n"),
        ((b"1%\r", b"2%\r", b"3%\r\n"), b"[a] 3%\n"),
        ((b"\r 1%", b"\r", b"    ", b"\r", b"done\n"), b"[a] done\n"),
    ],
)
def test_lines_are_whole(pieces: tuple[bytes, ...], expected: bytes) -> None:
    assert shown("[a] ", *pieces) == expected


def test_lines_without_a_label_are_as_they_came() -> None:
    assert shown("", b"on", b"e\n\nlast") == b"one\n\nlast\n"


def test_line_that_does_not_end_is_shown_and_its_end_is_no_line_of_its_own() -> None:
    lines = Lines("[a] ")
    assert lines.take(b"wait", 5.0) == b""
    assert lines.take(b"ing", 5.5) == b""
    assert lines.due_at == 5.0 + UNENDED_S
    assert lines.unended(6.0) == b"[a] waiting\n"
    assert lines.due_at == float("inf")
    assert lines.take(b"\ndone\n", 7.0) == b"[a] done\n"


def test_redrawn_line_is_shown_now_and_then() -> None:
    lines, told = Lines("[a] "), []
    for tenth in range(101):
        now = tenth / 10
        assert lines.take(b"\r%d%%" % tenth, now) == b""
        if lines.due_at <= now:
            told.append((now, lines.unended(now)))
    assert [line for _, line in told] == [b"[a] 10%\n", b"[a] 60%\n"]
    assert told[1][0] - told[0][0] == pytest.approx(REDRAWN_S, abs=0.11)
    assert lines.take(b"\n", 11.0) == b"[a] 100%\n"


def test_memory_of_one_line_is_bounded() -> None:
    lines = Lines("")
    parts = [lines.take(b"x" * 40_000, 0.0) for _ in range(10)] + [lines.unended(0.0)]
    assert max(len(part) for part in parts) <= 2 * LINE_BYTES_MAX
    assert b"".join(parts).replace(b"\n", b"") == b"x" * 400_000
    for _ in range(1000):
        lines.take(b"\r" + b"y" * 1000, 0.0)
    assert len(lines.unended(0.0)) == 1001


def test_output_shows_lines_of_many_writers_whole_and_what_was_written_last() -> None:
    pump, target = Output(), io.StringIO()
    with contextlib.redirect_stdout(target):
        writers = []
        for number in range(4):
            fds = pump.attach(f"[{number}] ")
            os.close(fds[1])

            def write(fd: int = fds[0], number: int = number) -> None:
                for step in range(200):
                    for piece in (b"rank ", b"%d" % number, b" step ", b"%d" % step, b"\n"):
                        os.write(fd, piece)
                os.write(fd, b"dies in the mid")
                os.close(fd)

            writers.append(threading.Thread(target=write))
            writers[-1].start()
        for thread in writers:
            thread.join(LONG_S)
        pump.close()
    told = target.getvalue().splitlines()
    for number in range(4):
        mine = [line for line in told if line.startswith(f"[{number}] ")]
        steps = [f"[{number}] rank {number} step {step}" for step in range(200)]
        assert mine == [*steps, f"[{number}] dies in the mid"]
    assert len(told) == 4 * 201


def test_output_shows_a_line_soon_and_an_unended_one_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "UNENDED_S", 0.05)
    pump, target = Output(), io.StringIO()
    with contextlib.redirect_stderr(target):
        fds = pump.attach("")
        os.write(fds[1], b"whole\npart")
        until = time.monotonic() + LONG_S
        while target.getvalue() != "whole\npart\n" and time.monotonic() < until:
            time.sleep(0.001)
        pump.close()
    assert target.getvalue() == "whole\npart\n"
    for fd in fds:
        os.close(fd)


def test_output_goes_on_where_it_cannot_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("no display")

    pump = Output()
    fds = pump.attach("")
    for stream in (None, Breaks()):
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(20):  # more than a pipe holds
            os.write(fds[0], b"x" * 8000 + b"\n")
    for fd in fds:
        os.close(fd)
    pump.close()
    pump.close()


def test_output_shows_what_is_left_at_the_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "READ_BYTES", 8)
    pump, target = Output(), io.StringIO()
    with contextlib.redirect_stdout(target):
        fds = pump.attach("")
        os.write(fds[0], b"a line\n" * 30)
        pump.close()
    assert target.getvalue() == "a line\n" * 30
    for fd in fds:
        os.close(fd)


def standard_pipe(monkeypatch: pytest.MonkeyPatch) -> int:
    """Make this process's stdout a pipe; its reading end."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    for name in ("stdout", "__stdout__"):
        monkeypatch.setattr(sys, name, stream)
    return reading


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


LINES = b"a line of some twenty\n" * 2700
"""Two of them are more than a pipe holds, and one is less."""


def test_close_waits_for_a_reader_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "READER_S", 0.2, raising=False)
    reading, got = standard_pipe(monkeypatch), bytearray()

    def read() -> None:
        while len(got) < 2 * len(LINES):
            time.sleep(0.04)
            if not (data := os.read(reading, 4000)):
                return
            got.extend(data)

    pump = Output()
    for fd in [*pump.attach("")[:1], *pump.attach("")[:1]]:
        os.write(fd, LINES)
        os.close(fd)
    reader = threading.Thread(target=read)
    reader.start()
    pump.close()
    assert "paramserve-output" not in [thread.name for thread in threading.enumerate()]
    sys.stdout.close()
    reader.join(LONG_S)
    os.close(reading)
    assert bytes(got) == 2 * LINES


def test_close_tells_what_a_reader_that_stands_still_has_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "READER_S", 0.1, raising=False)
    target = io.StringIO()
    monkeypatch.setattr(sys, "stderr", target)
    files = open_files()
    reading = standard_pipe(monkeypatch)
    pump = Output()
    for pair in (pump.attach(""), pump.attach("")):
        os.write(pair[0], LINES)
        for fd in pair:
            os.close(fd)
    pump.close()
    sys.stdout.close()
    taken = 0
    while data := os.read(reading, 1 << 16):
        taken += len(data)
    os.close(reading)
    assert taken < 2 * len(LINES)
    assert f"at least {2 * len(LINES) - taken} bytes that processes printed" in target.getvalue()
    assert open_files() == files


def test_attach_leaves_no_file_open_where_the_second_pipe_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, pump = open_files(), Output()
    pipes = [os.pipe()]

    def pipe() -> tuple[int, int]:
        if not pipes:
            raise OSError(errno.EMFILE, "too many open files")
        return pipes.pop()

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="too many"):
        pump.attach("")
    pump.close()
    assert open_files() == files

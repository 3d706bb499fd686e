"""What runs in a child process before and around its entry.

It reads what the driver left in an inherited descriptor, watches the driver, ignores Ctrl-C (the
driver decides), turns SIGTERM into an orderly exit and an exception into the report "failed".
Little is imported here, because every process of a run waits for it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import BinaryIO, NoReturn

import msgspec

from paramserve.engine.base import Failure

EXIT_FAILED = 1
EXIT_DRIVER_GONE = 3
EXIT_TERMINATED = 128 + signal.SIGTERM
"""Exit code after an orderly end by SIGTERM, as shells count it."""

REPORT_HEAD_BYTES = 12
"""A report is its kind's length (4 bytes, little-endian), its body's (8), its kind, its body."""


class Package(msgspec.Struct, frozen=True, array_like=True):
    """What the driver leaves for a child. It never travels over a socket."""

    name: str
    entry: str
    payload: bytes
    secret: bytes
    directory: str


@dataclass(frozen=True)
class Bootstrap:
    """What an entry is given."""

    name: str
    payload: bytes = field(repr=False)
    secret: bytes = field(repr=False)
    report: Callable[[str, bytes], None]
    """Tell the driver; returns when the driver's pipe has taken it. Callable from any thread."""
    on_orphaned: Callable[[Callable[[], None]], None]
    """Register what is still to be done when the driver dies; the process exits right after."""


class _Reports:
    """The pipe to the driver, one whole report at a time."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._lock = threading.Lock()

    def send(self, kind: str, body: bytes) -> None:
        name = kind.encode()
        head = len(name).to_bytes(4, "little") + len(body).to_bytes(8, "little")
        with self._lock:
            for part in (head + name, body):
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(self.fd, rest) :]


class _DriverWatch:
    """Ends this process when the driver is gone, whatever the main thread does.

    A pidfd tells of the driver's death at once. The report pipe has no reader any more when the
    driver is gone, unless something that the driver forked still holds it: it is the second
    sign, and the only one where there are no pidfds. The kernel's parent-death signal is no
    choice: it follows the thread that forked, and a driver's threads come and go.
    """

    def __init__(self, driver: int, reports: int) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._poll = select.poll()
        self._poll.register(reports, 0)  # only errors: its reader is gone
        self._alive = True
        if hasattr(os, "pidfd_open"):
            try:
                self._poll.register(os.pidfd_open(driver), select.POLLIN)
            except OSError:
                self._alive = False
        # The parent is asked after the pidfd is open: before, the number may be a stranger's.
        self._alive = self._alive and os.getppid() == driver

    def add(self, callback: Callable[[], None]) -> None:
        self._callbacks.append(callback)

    def start(self) -> None:
        if not self._alive:
            self._end()
        threading.Thread(target=self._wait, name="driver-watch", daemon=True).start()

    def _wait(self) -> None:
        self._poll.poll()
        self._end()

    def _end(self) -> NoReturn:
        try:
            for callback in self._callbacks:
                callback()
        finally:
            with contextlib.suppress(OSError):  # with what it started itself, if it leads them
                os.killpg(os.getpid(), signal.SIGKILL)
            os._exit(EXIT_DRIVER_GONE)


def main(source: BinaryIO, reports_fd: int, driver: int) -> None:
    """Run the entry that `source` names; the first thing that a child process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminated)
    os.set_inheritable(reports_fd, False)
    with source:
        package = msgspec.msgpack.decode(source.read(), type=Package)
    sys.argv = [package.name]
    for stream in (sys.stdout, sys.stderr):  # lines of several processes, each line whole
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # TextIOWrapper here
    reports = _Reports(reports_fd)
    watch = _DriverWatch(driver, reports_fd)
    if package.directory:
        watch.add(lambda: _remove(package.directory))
    watch.start()
    boot = Bootstrap(package.name, package.payload, package.secret, reports.send, watch.add)
    try:
        module, _, function = package.entry.partition(":")
        getattr(importlib.import_module(module), function)(boot)
    except SystemExit:
        raise
    except BaseException as error:
        reports.send("failed", _describe(error))
        sys.exit(EXIT_FAILED)
    finally:
        # It is ending by itself: an exception in the middle of the interpreter's own end helps
        # nobody, and the driver kills what takes too long.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _terminated(signum: int, frame: object) -> None:
    sys.exit(EXIT_TERMINATED)


def _describe(error: BaseException) -> bytes:
    import traceback

    text = "".join(traceback.format_exception(error))
    return msgspec.msgpack.encode(Failure(type(error).__name__, str(error), text))


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)

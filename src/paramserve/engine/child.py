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
from types import FrameType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import msgspec

from paramserve.config import Credentials
from paramserve.engine.base import Failure

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

EXIT_FAILED = 1
EXIT_DRIVER_GONE = 3
EXIT_UNKNOWN = 255
"""Exit status of a process whose own one was collected by other code or by the system."""
FINALIZERS = ("__del__", "_remove")
"""Functions that Python calls where no exception gets out; the second is of `weakref`."""
AGAIN_S = 0.01
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
    code: bytes
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
    on_stop: Callable[[Callable[[], None]], None]
    """Register what makes the entry end in order; it may be called from any thread, or between
    two instructions of the main one. Without it a stop raises `SystemExit` in the entry."""
    load: Callable[[], Any] = lambda: None
    """The code that the owner registered (`Role.code`), unpickled; None if there is none."""
    host: str = ""
    """This node's address for the others; empty: all processes share this one."""

    @property
    def credentials(self) -> Credentials:
        return Credentials.decode(self.secret)


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

    def __init__(self, driver: int, reports: int, driver_fd: int | None) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._poll = select.poll()
        self._poll.register(reports, 0)  # only errors: its reader is gone
        self._alive = True
        if driver_fd is not None:
            self._poll.register(driver_fd, select.POLLIN)
            return
        if hasattr(os, "pidfd_open"):
            try:
                self._poll.register(os.pidfd_open(driver), select.POLLIN)
            except OSError:
                self._alive = False
        # The parent is asked after the pidfd is open: before, the number may be another process's.
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


def main(source: BinaryIO, reports_fd: int, driver: int, driver_fd: int | None = None) -> None:
    """Run the entry that `source` names; the first thing that a child process does.

    Args:
        driver: its pid.
        driver_fd: a pidfd of it, in a process that is no child of the driver.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stopping = Stopping()
    stop_on_sigterm(stopping)
    os.set_inheritable(reports_fd, False)
    with source:
        package = msgspec.msgpack.decode(source.read(), type=Package)
    sys.argv = [package.name]
    for stream in (sys.stdout, sys.stderr):  # lines of several processes, each line whole
        if stream is not None:  # closed
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # TextIOWrapper
    _buffer_c_by_line()
    reports = _Reports(reports_fd)
    watch = _DriverWatch(driver, reports_fd, driver_fd)
    if package.directory:
        watch.add(lambda: _remove(package.directory))
    watch.start()
    boot = Bootstrap(
        package.name,
        package.payload,
        package.secret,
        reports.send,
        watch.add,
        stopping.add,
        lambda: load(package.code),
    )
    try:
        find(package.entry)(boot)
    except SystemExit:
        raise
    except BaseException as error:
        reports.send("failed", describe(error))
        sys.exit(EXIT_FAILED)
    finally:
        # It is ending by itself: an exception in the middle of the interpreter's own end tells
        # the driver nothing, and the driver kills what takes too long. The first line is no call:
        # a signal is handled before it or behind it, and then changes nothing.
        stopping.over = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _buffer_c_by_line() -> None:
    """Have C code's output leave this process at each line's end, as Python's does: into a pipe the
    C library would keep some kilobytes."""
    import ctypes

    with contextlib.suppress(Exception):  # another C library
        library = ctypes.CDLL(None)
        library.setlinebuf(ctypes.c_void_p.in_dll(library, "stdout"))


def flush_c() -> None:
    """Write out what C code has printed: for a process that ends without the C library's help."""
    import ctypes

    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


def call_soon(loop: AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Have a loop call this, from any thread; a loop that has ended does not need it."""
    with contextlib.suppress(RuntimeError):  # closed
        loop.call_soon_threadsafe(callback)


class Stopping:
    """What is done when the driver asks for an end in order."""

    def __init__(self) -> None:
        self._callback: Callable[[], None] | None = None
        self._requested = False
        self.over = False
        """The entry has ended: there is nothing left to stop."""

    def add(self, callback: Callable[[], None]) -> None:
        """Call this at a stop from now on; at once if one was wanted before."""
        self._callback = callback
        if self._requested:
            callback()

    def stop(self) -> None:
        """End the entry: by its own callback, else by `SystemExit` in the calling thread."""
        if self.over:
            return
        self._requested = True
        if self._callback is None:
            sys.exit(EXIT_TERMINATED)
        self._callback()


def stop_on_sigterm(stopping: Stopping) -> None:
    """Stop when the driver asks for it. Python drops what is raised in a finalizer or a callback of
    a weak reference, so there the signal comes once more a little later."""

    def stop(signum: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name not in FINALIZERS:
            frame = frame.f_back
        if frame is None:
            stopping.stop()
        else:
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), signal.SIGTERM))
            again.daemon = True
            again.start()

    signal.signal(signal.SIGTERM, stop)


def find(entry: str) -> Callable[[Bootstrap], None]:
    """The function that "package.module:function" names."""
    module, _, function = entry.partition(":")
    entry_function: Callable[[Bootstrap], None] = getattr(importlib.import_module(module), function)
    return entry_function


def load(code: bytes) -> Any:
    """Unpickle what the owner registered. It came from the driver by a way of the engine's own
    (an inherited descriptor, an actor's argument), never through a socket of ours."""
    if not code:
        return None
    import cloudpickle

    return cloudpickle.loads(code)


def describe(error: BaseException) -> bytes:
    """The body of the report "failed"."""
    import traceback

    from paramserve.errors import ParamServeError

    whole = "".join(traceback.format_exception(error))
    message = "".join(traceback.format_exception_only(error))
    notes = getattr(error, "__notes__", ())
    parts = [
        type(error).__name__,
        "\n".join([str(error), *notes]),
        whole.removesuffix(message),
    ]
    if isinstance(error, ParamServeError):
        parts += ["\n".join([error.failed, *notes]), error.fix, error.applied]
    # A file name that the locale cannot decode has letters that cannot be sent.
    encoded = (part.encode("utf-8", "backslashreplace").decode() for part in parts)
    return msgspec.msgpack.encode(Failure(*encoded))


def _remove(directory: str) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)

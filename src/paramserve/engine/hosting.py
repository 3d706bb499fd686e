"""What runs around an entry in a process that another system started, and that is only called.

Such a process (a Ray actor) has its own main thread and its own signals: the entry runs in a
thread, what it reports waits here until the driver has taken it, and a stop is a call. The process
ends when the driver, having heard how the entry ended, kills it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec import structs

from paramserve.engine.child import (
    EXIT_FAILED,
    EXIT_TERMINATED,
    Bootstrap,
    Package,
    Stopping,
    describe,
    find,
    load,
)


class HostReport(NamedTuple):
    """Answer to `Host.poll`."""

    pid: int
    node: str
    """The cluster's name of the node that it runs on."""
    reports: list[tuple[str, bytes]]
    """Kind and body, in order."""
    status: int | None
    """The exit code; all reports came before. None: the entry runs, or has yet to start."""


class Stopped(SystemExit):
    """Raised in an entry that registered nothing to be stopped by."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)


def silence_stops() -> None:
    """Show no traceback of a stop that comes when its entry has ended, in this process from now
    on: threading is silent for a SystemExit, but not for a class derived from it."""
    show_default = threading.excepthook

    def show(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, Stopped):
            show_default(args)

    threading.excepthook = show


class _ThreadStopping(Stopping):
    """Stop request for an entry that runs in a thread; see `Stopping`."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, thread: threading.Thread) -> bool:
        """Start the entry's thread, unless a stop came first."""
        with self._lock:
            if not self._requested:
                thread.start()
                self._thread = thread
            return not self._requested

    def stop(self) -> None:
        with self._lock:
            again, self._requested = self._requested, True
        if self._callback is not None:
            self._callback()
        elif self._thread is not None and self._thread.ident is not None and not again:
            # Seen when the thread executes Python next: a C call that waits goes on. The driver
            # kills what does not end in time.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._thread.ident), ctypes.py_object(Stopped)
            )


class Host:
    """One process: `run` is called once, `hear` again and again, each in a thread of its own.

    Args:
        name: of the role.
        address: of this node, for other nodes.
        node: the cluster's name of this node.
    """

    def __init__(self, name: str, address: str, node: str) -> None:
        self._name = name
        self._address = address
        self._node = node
        self._stopping = _ThreadStopping()
        self._changed = threading.Condition()
        self._reports: list[tuple[str, bytes]] = []
        self._acknowledged = 0
        self._hearers = 0
        self._ended_with: int | None = None
        self._status: int | None = None

    def __repr__(self) -> str:
        """Ray puts this before each line that the process prints."""
        return self._name

    def run(
        self, package: bytes, secret: bytes, environment: Mapping[str, str], path: Sequence[str]
    ) -> None:
        """Run the entry; returns when it has ended.

        Args:
            package: a `child.Package` without its secret.
            secret: of the role.
            environment: set before the entry's module is imported.
            path: where the driver finds modules; this process looks there last.
        """
        os.environ.update(environment)
        sys.path += [folder for folder in path if folder not in sys.path]
        sys.argv = [self._name]
        whole = structs.replace(msgspec.msgpack.decode(package, type=Package), secret=secret)
        thread = threading.Thread(target=self._enter, args=(whole,), name=self._name, daemon=True)
        if self._stopping.start(thread):
            thread.join()
        for stream in (sys.stdout, sys.stderr):  # what comes next is a kill
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        with self._changed:
            # The exception that stops an entry may have come when it had just ended.
            self._status = self._ended_with if self._ended_with is not None else EXIT_TERMINATED
            self._changed.notify_all()

    def poll(self, acknowledged: int) -> HostReport:
        """Wait for reports that come after the first `acknowledged`, or for the end.

        Repeating a call is safe: what was told is kept until a later call shows that it arrived.
        Only the last call is answered with reports.

        Args:
            acknowledged: how many have arrived; -1: return at once, to tell that the process is up.
        """
        with self._changed:
            self._hearers += 1
            me = self._hearers
            self._changed.notify_all()
            if acknowledged < 0:
                return HostReport(os.getpid(), self._node, [], None)
            del self._reports[: acknowledged - self._acknowledged]
            self._acknowledged = acknowledged
            self._changed.wait_for(
                lambda: self._reports or self._status is not None or me != self._hearers
            )
            if me != self._hearers:
                return HostReport(os.getpid(), self._node, [], None)
            return HostReport(os.getpid(), self._node, list(self._reports), self._status)

    def linger(self) -> None:
        """Never return: this call fails when the process is gone."""
        threading.Event().wait()

    def stop(self) -> None:
        self._stopping.stop()

    def _report(self, kind: str, body: bytes) -> None:
        with self._changed:
            self._reports.append((kind, bytes(body)))
            self._changed.notify_all()

    def _enter(self, package: Package) -> None:
        boot = Bootstrap(
            package.name,
            package.payload,
            package.secret,
            self._report,
            lambda callback: None,  # the cluster ends this process with the driver
            self._stopping.add,
            lambda: load(package.code),
            self._address,
        )
        try:
            find(package.entry)(boot)
            self._ended_with = 0
        except SystemExit as error:
            self._ended_with = _exit_code(error)
        except BaseException as error:
            self._report("failed", describe(error))
            self._ended_with = EXIT_FAILED


def _exit_code(error: SystemExit) -> int:
    """Exit code of a `SystemExit`, as the interpreter computes it for a whole process."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1

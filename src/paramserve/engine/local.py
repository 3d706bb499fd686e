"""The `Local` engine: child processes of the driver, on this machine.

A child gets its instructions by an inherited descriptor without a name, never by argv or
environment, and reports over a pipe. What it prints, this process shows (`output.py`). It leads a
process group of its own, so that what it started itself (DataLoader workers) ends with it, and so
that a terminal's Ctrl-C reaches the driver only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import BinaryIO, ClassVar

import msgspec

from paramserve.config import TLS, Deadlines, Limits, check_count, check_settings
from paramserve.engine import names
from paramserve.engine.base import Ended, Event, Reported, Role
from paramserve.engine.child import EXIT_UNKNOWN, REPORT_HEAD_BYTES, Package
from paramserve.engine.output import Output
from paramserve.engine.prepared import (
    Forked,
    PreparedProcess,
    above_standard,
    search_path,
    start_python,
    surroundings,
)

_START = """\
import os, sys
source = os.fdopen({source}, "rb")
path = source.read(int(source.readline()))
sys.path[:] = os.fsdecode(path).split("\\0")
from paramserve.engine.child import main
main(source, {reports}, {driver})
"""
"""Sets the driver's `sys.path` first: the package and the user's modules may lie anywhere on it."""

WHY_UNKNOWN = (
    "which stands for any end: other code has collected the status, or this process ignores SIGCHLD"
)
READ_BYTES = 1 << 20
POLL_S = 0.05
"""How often children are asked for where the system has no pidfd (macOS)."""
PREPARED_FROM = 3
"""Least processes that are forked from a prepared one; fewer are started quicker by themselves."""
PREPARED_MAX = 2
"""One for the servers, and one for workers that have more threads; what differs from both, as the
environment may after a change of the driver's, is started afresh."""
CLOSE_S = 10.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a debugger)."""


@dataclass(frozen=True)
class Local:
    """Start processes as children of this one.

    Args:
        python: the interpreter; this process's own if None.
        threads_per_worker: of numpy, torch and numba in a run; max(1, cores // workers) if None.
        show_rank: whether each line that a process prints begins with which one it is, as in
            "[rank 0] "; lines are whole in any case.
        deadlines: how long each wait may take; `ps.Deadlines()` if None.
        limits: bounds on memory, messages and connections; `ps.Limits()` if None.
    Raises:
        TypeError, ValueError: a setting that means nothing.
    """

    reads_refs: ClassVar[bool] = False
    python: str | None = None
    _: KW_ONLY
    threads_per_worker: int | None = None
    show_rank: bool = True
    deadlines: Deadlines | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        if self.threads_per_worker is not None:
            check_count("threads_per_worker", self.threads_per_worker)
        if not isinstance(self.show_rank, bool):
            raise TypeError(f"show_rank must be True or False, not {self.show_rank!r}")
        check_settings("deadlines", self.deadlines, Deadlines)
        check_settings("limits", self.limits, Limits)

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> LocalFleet:
        """A new, empty fleet. The caller closes it; every machine has room for all roles."""
        python = self.python if self.python is not None else sys.executable
        forks = len(roles) >= PREPARED_FROM
        return LocalFleet(python, environment, forks=forks, show_rank=self.show_rank)

    def publish(self, name: str, data: bytes) -> Callable[[], None]:
        """Publish for other processes of this user on this machine; see `base.Engine`."""
        return names.publish(name, data)

    def find(self, name: str) -> bytes | None:
        """What a living process of this user has published on this machine."""
        return names.find(name)


class LocalProcess:
    """A child process. See `base.Process`."""

    def __init__(
        self,
        name: str,
        popen: subprocess.Popen[bytes] | Forked,
        reports_fd: int,
    ) -> None:
        self.name = name
        self.why = ""
        self._popen = popen
        self._status: int | None = None
        self._ended = threading.Condition()
        self._received = bytearray()
        self.reports_fd = reports_fd
        self.pidfd = _pidfd_of(popen.pid)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_status(self) -> int | None:
        self._reap()
        return self._status

    def interrupt(self) -> None:
        with self._ended:
            if self._status is None:
                self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        with self._ended:
            if self._status is None:
                self._kill_group()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the exit status; None if it still runs after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        pause_s = POLL_S / 64
        while self.exit_status is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            with self._ended:
                self._ended.wait(min(left_s, pause_s))
            pause_s = min(2 * pause_s, POLL_S)
        return self._status

    def drain(self) -> tuple[list[Reported], bool]:
        """Whole reports that have come, and whether more can come."""
        more = True
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.reports_fd, READ_BYTES):
                self._received += data
            more = False
        reports = []
        while (report := self._next_report()) is not None:
            reports.append(report)
        return reports, more

    def _next_report(self) -> Reported | None:
        if len(self._received) < REPORT_HEAD_BYTES:
            return None
        name_end = REPORT_HEAD_BYTES + int.from_bytes(self._received[:4], "little")
        end = name_end + int.from_bytes(self._received[4:REPORT_HEAD_BYTES], "little")
        if len(self._received) < end:
            return None
        kind = self._received[REPORT_HEAD_BYTES:name_end].decode()
        body = bytes(self._received[name_end:end])
        del self._received[:end]
        return Reported(self, kind, body)

    def _reap(self) -> None:
        """Note the exit status if it has ended, and end what it left behind.

        The process group is killed before the zombie is collected: until then no other process can
        get its number. Without `waitid` (macOS before Python 3.13) it is killed right after.
        """
        with self._ended:
            if self._status is not None:
                return
            if isinstance(self._popen, subprocess.Popen) and hasattr(os, "waitid"):
                try:
                    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                    if os.waitid(os.P_PID, self.pid, options) is not None:
                        self._kill_group()
                except ChildProcessError:  # its number may be another process's by now
                    self._popen.poll()
                    self._status, self.why = EXIT_UNKNOWN, WHY_UNKNOWN
                    self._ended.notify_all()
                    return
            self._status = self._popen.poll()
            if self._status is not None:
                if isinstance(self._popen, Forked):
                    self.why = self._popen.why
                elif not hasattr(os, "waitid"):
                    self._kill_group()
                self._ended.notify_all()

    def _kill_group(self) -> None:
        if isinstance(self._popen, Forked):
            self._popen.kill_group()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a zombie
            os.killpg(self.pid, signal.SIGKILL)


class LocalFleet:
    """Children of this process, and of a process that is prepared to fork them. See `base.Fleet`.

    Args:
        environment: of every process, under that of its role.
        forks: whether to start processes as forks of prepared ones, where that can be done.
        show_rank: as of `Local`.
    """

    shares_host = True
    tls: TLS | None = None

    def __init__(
        self,
        python: str,
        environment: Mapping[str, str],
        *,
        forks: bool = False,
        show_rank: bool = True,
    ) -> None:
        self._python = python
        self._environment = environment
        self._forks = forks and hasattr(os, "pidfd_open")
        self._show_rank = show_rank
        self._prepared: list[PreparedProcess] = []
        self._one_ended = False
        """True: no prepared process is made any more, since a restarted process would wait."""
        self._selector = selectors.DefaultSelector()
        self._output = Output()
        self._running: list[LocalProcess] = []
        self._lock = threading.Lock()
        self._closed = False

    def launch(self, role: Role) -> LocalProcess:
        with self._lock:
            if self._closed:
                raise RuntimeError("this fleet is closed")
            process = self._spawn(role)
            self._selector.register(process.reports_fd, selectors.EVENT_READ)
            if process.pidfd is not None:
                self._selector.register(process.pidfd, selectors.EVENT_READ)
            return process

    def make_room(self, roles: Sequence[Role]) -> None:
        """Return at once: every machine has room."""
        if self._closed:
            raise RuntimeError("this fleet is closed")

    def give_back(self, names: Sequence[str]) -> None:
        """Nothing is kept."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What has happened since the last call; waits up to `timeout_s` if nothing has."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if any(process.pidfd is None for process in self._running):
                left_s = min(left_s, POLL_S)
            self._selector.select(left_s)
            events = [event for process in tuple(self._running) for event in self._look(process)]
            if events or time.monotonic() >= deadline:
                return events

    def close(self) -> None:
        """Kill what still runs, wait for its end and free every descriptor. May be repeated."""
        with self._lock:
            self._closed = True
            try:
                for process in self._running:
                    process.kill()
                deadline = time.monotonic() + CLOSE_S
                for process in tuple(self._running):
                    process.wait(deadline - time.monotonic())
                    self._forget(process)
            finally:
                for prepared in self._prepared:
                    prepared.close()
                self._selector.close()
                self._output.close()

    def _look(self, process: LocalProcess) -> list[Event]:
        status = process.exit_status  # asked before the reports: an end is told after them
        reports, more = process.drain()
        if not more:
            with contextlib.suppress(KeyError):
                self._selector.unregister(process.reports_fd)
        if status is None:
            return [*reports]
        with self._lock:
            self._one_ended = True
            self._forget(process)
        return [*reports, Ended(process, status)]

    def _forget(self, process: LocalProcess) -> None:
        self._running.remove(process)
        for fd in (process.reports_fd, process.pidfd):
            if fd is not None:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(fd)
                os.close(fd)

    def _spawn(self, role: Role) -> LocalProcess:
        """Start a process, and count it among those that `close` ends: an exception that comes in
        between closes its pipe, and so it ends by itself."""
        before = len(self._running)
        reports_fd, child_reports_fd = map(above_standard, os.pipe())
        os.set_blocking(reports_fd, False)
        child_streams: list[int] = []
        try:
            child_streams = self._output.attach(role.label if self._show_rank else "")
            with _parcel(role) as source:
                fds = (source.fileno(), child_reports_fd, *child_streams)
                popen = self._fork(role, fds) or self._start(role, fds)
            self._running.append(LocalProcess(role.name, popen, reports_fd))
        except BaseException:
            if len(self._running) == before:
                os.close(reports_fd)
            raise
        finally:
            for fd in (child_reports_fd, *child_streams):
                os.close(fd)
        return self._running[-1]

    def _fork(self, role: Role, fds: Sequence[int]) -> Forked | None:
        """A fork of a prepared process; None: it is to be started afresh.

        Args:
            fds: as `ForkRequest` has them.
        """
        if not self._forks:
            return None
        environment = self._environment_of(role)
        target = surroundings(self._python, environment)
        prepared = next((each for each in self._prepared if each.surroundings == target), None)
        if prepared is None:
            if len(self._prepared) == PREPARED_MAX or self._one_ended:
                return None
            prepared = PreparedProcess(self._python, environment)
            self._prepared.append(prepared)
        if not prepared.usable:
            return None
        return prepared.fork(role.name, role.entry, role.imports, fds)

    def _start(self, role: Role, fds: Sequence[int]) -> subprocess.Popen[bytes]:
        source, reports, *streams = fds
        start = _START.format(source=source, reports=reports, driver=os.getpid())
        environment = self._environment_of(role)
        return start_python(self._python, start, role.name, environment, (source, reports), streams)

    def _environment_of(self, role: Role) -> dict[str, str]:
        return {**self._environment, **role.environment}


def _parcel(role: Role) -> BinaryIO:
    """A file without a name that holds what the child needs, at its start.

    Not a pipe: a pipe takes 64 KiB and then waits for a child that has yet to start.
    """
    path = search_path()
    package = Package(role.name, role.entry, role.payload, role.secret, role.code, role.directory)
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("paramserve")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    parcel = os.fdopen(above_standard(fd), "w+b")
    parcel.write(b"%d\n" % len(path) + path)
    parcel.write(msgspec.msgpack.encode(package))
    parcel.seek(0)
    return parcel


def _pidfd_of(pid: int) -> int | None:
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # forbidden in this container
        return None

"""A prepared process: it has imported what the processes of a run need, and forks them.

Each process of a run imports numpy, Numba and paramserve, and workers torch as well: 0.7 to 3 s of
processor time. A fork of a process that has done so costs milliseconds. A fork is used only where
it equals a fresh start: while the driver's environment, working directory and module path are
those that the prepared process was started with (`surroundings`), and only where importing has
started no thread of Python's (numeric libraries end their own before a fork) and has not
initialised CUDA. Otherwise the caller starts a fresh interpreter.

The prepared process is a child of the driver, and the parent of what it forks: it waits for them on
the driver's behalf (`Forked.poll`). It ends with the driver, or when the driver closes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NoReturn

import msgspec

from paramserve.engine.child import EXIT_FAILED, EXIT_UNKNOWN, flush_c, main

logger = logging.getLogger("paramserve")

_START = """\
import gc, os, sys
gc.disable()
sys.path[:] = os.fsdecode({path!r}).split("\\0")
from paramserve.engine.prepared import serve
serve({control}, {driver})
"""
"""Imports make no garbage worth a search: torch takes a third longer with the collector."""
IMPORT_S = 60.0
"""The first fork waits for the imports: torch takes seconds, on a busy machine some ten."""
ANSWER_S = 5.0
"""A later one, and the status of a process, wait for nothing but the prepared process's turn."""
MESSAGE_BYTES = 1 << 16
DESCRIPTORS = 4
STDOUT, STDERR = 1, 2


class ForkRequest(msgspec.Struct, tag="fork"):
    """Fork a process; four descriptors come along: its `Package`, and its pipes for reports,
    stdout and stderr.

    Attributes:
        name: for process lists.
        module: of its entry, imported before the fork.
        imports: further modules to import before it.
    """

    name: str
    module: str
    imports: tuple[str, ...]


class Collect(msgspec.Struct, tag="collect"):
    """Wait for a process that has ended."""

    pid: int


class Answer(msgspec.Struct):
    """Answer to a request: a pid or an exit status; a reason if it could not be done."""

    number: int
    failed: str = ""


_requests = msgspec.msgpack.Decoder(ForkRequest | Collect)
_answers = msgspec.msgpack.Decoder(Answer)


# --- the driver's side ---------------------------------------------------------------------------


def surroundings(python: str, environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a fresh process would take over from this one, but for its streams, which are pipes of
    its own; None in it where it cannot be told."""
    try:
        here = os.getcwd()
    except OSError:  # removed
        here = None
    return (python, {**os.environ, **environment}, here, list(sys.path))


def search_path() -> bytes:
    """Path where this process finds modules, for a child: the same bytes of each name. Entries that
    are no strings are left out, as Python ignores them, too."""
    return os.fsencode("\0".join(entry for entry in sys.path if isinstance(entry, str)))


def inherited(fd: int) -> int | None:
    """What a child gets in this place: this process's own stream (None); nothing if it is closed.

    A file that was opened since then, and so has its number, is not inheritable, as a stream is.
    """
    try:
        return None if os.get_inheritable(fd) else subprocess.DEVNULL
    except OSError:
        return subprocess.DEVNULL


def above_standard(fd: int) -> int:
    """Duplicate of a descriptor that no standard stream of a child takes the place of."""
    if fd > STDERR:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, STDERR + 1)
    finally:
        os.close(fd)


def start_python(
    python: str,
    code: str,
    name: str,
    environment: Mapping[str, str],
    fds: tuple[int, ...],
    streams: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Run code in a fresh interpreter that leads a process group of its own and inherits `fds`.

    Args:
        environment: on top of this process's own.
        streams: its stdout and stderr; this process's own if left out.
    """
    stdout, stderr = streams if streams else map(inherited, (STDOUT, STDERR))
    return subprocess.Popen(
        [python, "-c", code, f"paramserve {name}"],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=fds,
        env={**os.environ, **environment},
        process_group=0,
    )


class PreparedProcess:
    """A prepared process, from the driver's side. For any thread.

    Attributes:
        surroundings: that its forks have; see there.
        usable: whether it forks; False for ever once it could not.
    """

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        self.surroundings = surroundings(python, environment)
        self.usable = True
        self._lock = threading.Lock()
        self._imported: set[str] = set()
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs = socket.socket(fileno=above_standard(other.detach()))
        start = _START.format(path=search_path(), control=theirs.fileno(), driver=os.getpid())
        try:
            self._popen = start_python(python, start, "prepared", environment, (theirs.fileno(),))
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def fork(
        self, name: str, entry: str, imports: tuple[str, ...], fds: Sequence[int]
    ) -> Forked | None:
        """A process that runs an entry; None: it cannot be forked, start a fresh one.

        Waits until the prepared process has imported what the entry needs.

        Args:
            fds: as `ForkRequest` has them.
        """
        request = ForkRequest(name, entry.partition(":")[0], imports)
        limit_s = ANSWER_S if {request.module, *imports} <= self._imported else IMPORT_S
        answer = self._ask(request, limit_s, list(fds))
        if answer is None:
            return None
        self._imported.update((request.module, *imports))
        if answer.failed:
            self.usable = False
            logger.warning("paramserve: processes are started one by one: %s", answer.failed)
            return None
        return Forked(self, answer.number)

    def collect(self, pid: int) -> int | None:
        """The exit status of a forked process that has ended; None: nothing can tell."""
        answer = self._ask(Collect(pid), ANSWER_S)
        return answer.number if answer is not None and not answer.failed else None

    def close(self) -> None:
        """End it. What it has forked and was not collected goes on, without a parent."""
        with self._lock:
            self.usable = False
            self._control.close()
            self._popen.kill()  # it holds nothing, and an interpreter's end in order takes time
            self._popen.wait()

    def _ask(
        self, request: ForkRequest | Collect, limit_s: float, fds: list[int] | None = None
    ) -> Answer | None:
        """Ask for an answer; None: the process is gone, or hangs, and is not asked again."""
        with self._lock:
            if self._control.fileno() < 0:
                return None
            answer = None
            try:
                self._control.settimeout(limit_s)
                socket.send_fds(self._control, [msgspec.msgpack.encode(request)], fds or [])
                if data := self._control.recv(MESSAGE_BYTES):
                    answer = _answers.decode(data)
            except OSError as error:
                logger.warning("paramserve: the prepared process does not answer: %s", error)
            finally:
                if answer is None:  # also after an interrupt: a late answer would be the next one's
                    self.usable = False
                    self._control.close()
                    self._popen.kill()
            return answer


class Forked:
    """A forked process, with what is used of `subprocess.Popen`. Linux only: it needs pidfds.

    Attributes:
        why: why its exit status is unknown, if it is.
    """

    def __init__(self, parent: PreparedProcess, pid: int) -> None:
        self.pid = pid
        self.why = ""
        self._parent = parent
        # Nothing else can get its number before it is collected, as long as its parent lives.
        self._pidfd = os.pidfd_open(pid)
        self._ending = select.poll()
        self._ending.register(self._pidfd, select.POLLIN)
        self._status: int | None = None

    def kill_group(self) -> None:
        """Kill it and what it has started; alone where its parent is gone, since nothing keeps its
        number from others then."""
        with contextlib.suppress(ProcessLookupError):
            if self._parent.alive:
                os.killpg(self.pid, signal.SIGKILL)
            elif self._status is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def poll(self) -> int | None:
        """Exit status; None: it runs. What is left of its process group is killed before."""
        if self._status is None and self._ending.poll(0):
            if self._parent.alive:
                self.kill_group()
            status = self._parent.collect(self.pid)
            if status is None:
                self.why = "which stands for any end: the process that had forked it is gone"
            self._status = status if status is not None else EXIT_UNKNOWN
            os.close(self._pidfd)
        return self._status

    def send_signal(self, number: int) -> None:
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


# --- the prepared process itself -----------------------------------------------------------------


def serve(control_fd: int, driver: int) -> None:
    """Fork what is asked for, until the driver closes or dies; each forked process runs its entry
    and ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a driver may ignore it, and that is inherited
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    driver_fd = os.pidfd_open(driver)
    if os.getppid() != driver:
        os._exit(0)
    ready = select.poll()
    for fd in (control_fd, driver_fd):
        ready.register(fd, select.POLLIN)
    while True:
        ready_fds = [fd for fd, _ in ready.poll()]
        if driver_fd in ready_fds:
            os._exit(0)
        data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, DESCRIPTORS)
        if not data:
            os._exit(0)
        request = _requests.decode(data)
        answer = _collect(request.pid) if isinstance(request, Collect) else _fork(request, fds)
        if answer is None:
            break
        try:
            control.send(msgspec.msgpack.encode(answer))
        except OSError:  # the driver is gone
            os._exit(0)
    source_fd, reports_fd, *streams = fds
    gc.enable()
    os.setpgid(0, 0)
    control.close()
    for theirs, standard in zip(streams, (STDOUT, STDERR), strict=True):
        os.dup2(theirs, standard)
        os.close(theirs)
    os.set_inheritable(source_fd, False)
    _show(request.name)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all would draw the same; `random` does so itself
    source = os.fdopen(source_fd, "rb")
    source.seek(0)
    source.read(int(source.readline()))  # the module path, which is this process's own
    _end(_run(source, reports_fd, driver, driver_fd))


def _run(source: BinaryIO, reports_fd: int, driver: int, driver_fd: int) -> int:
    """Run the entry; the exit status, as the interpreter would tell it."""
    try:
        main(source, reports_fd, driver, driver_fd)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return EXIT_FAILED
    except BaseException:
        traceback.print_exc()
        return EXIT_FAILED
    return 0


def _end(status: int) -> NoReturn:
    """End as an interpreter does, but without taking every module apart: that writes to each page
    of memory which the forks share, and takes as long as the imports did. Threads are waited for,
    exit handlers run, streams are flushed."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls, too
        atexit._run_exitfuncs()
    finally:
        _flush()
        os._exit(status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    flush_c()


def _fork(request: ForkRequest, fds: list[int]) -> Answer | None:
    """Fork; None in the process that is new."""
    failed = _prepare(request) if len(fds) == DESCRIPTORS else "it has too many open files"
    pid = 0
    if not failed:
        gc.freeze()  # a fork's collector would write to, and so copy, each page of what is imported
        try:
            pid = os.fork()
        except OSError as error:
            failed = f"it cannot be forked: {error}"
    if not failed and pid == 0:
        return None
    if pid:
        with contextlib.suppress(OSError):  # the new process does so, too; one of them is first
            os.setpgid(pid, pid)
    for fd in fds:
        os.close(fd)
    return Answer(pid, failed)


def _collect(pid: int) -> Answer:
    try:
        return Answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    except ChildProcessError as error:
        return Answer(0, str(error))


def _prepare(request: ForkRequest) -> str:
    """Import what the process will need; why it must not be forked, or nothing."""
    for name in (*request.imports, request.module):
        # What fails here fails in the process again, and is told there.
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            if name == request.module and hasattr(module, "prepare_process"):
                module.prepare_process()
    if threading.active_count() > 1:
        names = ", ".join(each.name for each in threading.enumerate()[1:])
        return f"importing {request.module} has started a thread ({names})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return f"importing {request.module} has initialised CUDA, which a fork cannot use"
    _flush()
    return ""


def _show(name: str) -> None:
    """Put a name into process lists: over this process's own arguments, which Python has read.

    Where the last byte of them is not 0 any more, the kernel shows what stands before the first 0.
    Source: Linux, fs/proc/base.c, get_mm_proctitle.
    """
    import ctypes

    with contextlib.suppress(Exception):
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        title = f"paramserve {name}".encode()[: end - start - 2]
        ctypes.memmove(start, title.ljust(end - start - 1, b"\0") + b".", end - start)

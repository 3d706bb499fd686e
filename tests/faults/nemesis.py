"""What happens to a run under the nemesis: disturbances that are made from a seed, and their doing.

`plan` is pure. `Nemesis` does what is planned to the processes of one driver: it stops and
continues them, shuts down one of their connections (a copy of its descriptor is enough for that),
occupies listeners, joins where it must be refused, has workers log, kills.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import psutil
import pytest
from tests.faults.nemesis_victims import ANSWERED, DEADLINES, LOGGED, STOP, TO_LOG, Config, board_of

from paramserve.errors import ParamServeError, RankTaken
from paramserve.launch.connect import Handle
from paramserve.messages import Hello
from paramserve.transport.control import ControlLink

GOES_ON_S = 60.0
"""How long a run may take to show, after a disturbance, that it goes on; machines may be slow."""
STARTS_WITHIN_S = 150.0
"""Seconds from the start of the driver until each worker has taken steps."""
STEPS_BETWEEN = 2
"""Answered additions of each worker that show it."""
SILENT_CONNECTIONS = 100
RECORDS = 3000
"""That each worker logs in a flood; a tenth of what the coordinator keeps is not enough."""
LONG_S = 1.25 * DEADLINES.stall_s
"""A pause of the whole machine, after which everything looks overdue."""
SHORT_S = 0.2 * DEADLINES.stall_s
"""A pause of some processes, which nothing may take for an end."""
PIDFD_GETFD = 438
"""Number of the system call, on every architecture. Source: pidfd_getfd(2)."""

MARKER = "PARAMSERVE_NEMESIS_RUN"
"""Name in the environment of all processes of one run."""

INNER = ("reset", "silent", "flood")
"""What may happen while processes are stopped."""
KINDS = ("pause", "freeze", "reset", "join", "silent", "flood", "kill")
ENDS = ("finish", "interrupt", "alarm", "kill driver", "kill server")


class Event(NamedTuple):
    """One disturbance."""

    kind: str
    whom: tuple[str, ...] = ()
    """Processes, as they are named; for a reset the process and what it is connected to."""
    seconds: float = 0.0
    inner: Event | None = None  # type: ignore[misc]  # mypy knows no recursive named tuples
    """Happens while `whom` is stopped."""

    def __str__(self) -> str:
        meanwhile = f", meanwhile {self.inner}" if self.inner is not None else ""
        lasts = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.kind} {', '.join(self.whom)}{lasts}{meanwhile}"


def plan(seed: int, events: int) -> tuple[Config, list[Event]]:
    """A run and what happens to it; the last event ends it."""
    rng = random.Random(seed)
    config = Config(
        workers=rng.choice((2, 3)),
        servers=rng.choice((1, 2)),
        policy=rng.choice(("async", "sync", "bounded")),
        deaths=rng.choice(("continue", "restart")),
    )
    alive = list(range(config.workers))
    found = [_event(rng, config, alive, rng.choice(KINDS)) for _ in range(events)]
    end = ENDS[seed % len(ENDS)]
    whom = (f"server {rng.randrange(config.servers)}",) if end == "kill server" else ()
    return config, [*found, Event(end, whom)]


def _event(rng: random.Random, config: Config, alive: list[int], kind: str) -> Event:
    names = ["coordinator", *(f"server {n}" for n in range(config.servers))]
    names += [f"worker {rank}" for rank in alive]
    if kind in ("pause", "freeze"):
        whom = ["driver", *names]
        if kind == "pause":
            whom = rng.sample(whom, rng.randint(1, len(whom)))
        seconds = LONG_S if kind == "freeze" else rng.uniform(0.05, SHORT_S)
        inner = None
        if rng.random() < 0.4:
            inner = _event(rng, config, alive, rng.choice([k for k in INNER if k in KINDS]))
        return Event(kind, tuple(whom), seconds, inner)
    if kind == "reset":
        # None to the coordinator: on one machine its end means that of the process.
        ends = [(f"worker {r}", f"s{n}") for r in alive for n in range(config.servers)]
        return Event(kind, rng.choice(ends))
    if kind == "kill":
        if config.deaths == "continue" and len(alive) == 1:
            return _event(rng, config, alive, "reset")
        victim = rng.choice(alive)
        if config.deaths == "continue":
            alive.remove(victim)
        return Event(kind, (f"worker {victim}",))
    return Event(kind)


class Nemesis:
    """Does what was planned to the run of one driver.

    Attributes:
        killed: ranks of workers that it has killed, one entry for each time.
    """

    def __init__(self, driver: psutil.Process, folder: Path, config: Config) -> None:
        self.killed: list[int] = []
        self.board: npt.NDArray[np.int64] = board_of(folder, config.workers)
        self._driver = driver
        self._folder = folder
        self._config = config
        self._held: list[socket.socket] = []

    def do(self, event: Event) -> None:
        """Let it happen; returns when it is over."""
        if event.kind in ("pause", "freeze"):
            self._pause(event)
        elif event.kind == "reset":
            self._reset(*event.whom)
        elif event.kind == "kill":
            (victim,) = event.whom
            rank = int(victim.split()[1])
            if self._config.deaths == "continue":
                self.killed.append(rank)
            before = self._process(victim)
            before.kill()
            if self._config.deaths == "restart":
                self.until(lambda: self._process(victim) != before, f"{victim} is not restarted")
        elif event.kind == "join":
            self._join()
        elif event.kind == "silent":
            self._occupy()
        elif event.kind == "flood":
            self.board[:, TO_LOG] += RECORDS
        else:
            self._end(event)

    def goes_on(self, within_s: float = GOES_ON_S) -> None:
        """Check that every worker that was not killed for good takes further steps."""
        there = [rank for rank in range(self._config.workers) if rank not in self.killed]
        aims = {rank: self.board[rank, ANSWERED] + STEPS_BETWEEN for rank in there}

        def done() -> bool:
            return all(self.board[rank, ANSWERED] >= aim for rank, aim in aims.items())

        self.until(done, f"not all of {there} go on to {aims}", within_s)
        flooding = [rank for rank in there if self.board[rank, LOGGED] < self.board[rank, TO_LOG]]
        self.until(
            lambda: np.array_equal(self.board[flooding, LOGGED], self.board[flooding, TO_LOG]),
            f"{flooding} do not finish their records",
        )
        self.release()

    def release(self) -> None:
        """Close the connections that were left open."""
        while self._held:
            self._held.pop().close()

    def processes(self) -> dict[str, psutil.Process]:
        """The driver and the run's processes by name, as far as they run. The prepared process that
        forks the others stands in between; it is none of them."""
        found = {"driver": self._driver}
        for child in self._driver.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                name = " ".join(child.cmdline()).rpartition("paramserve ")[2]
                if name.partition(" ")[0] in ("coordinator", "server", "worker"):
                    found[name] = child
        return found

    def until(
        self, true: Callable[[], object], otherwise: str, within_s: float = GOES_ON_S
    ) -> None:
        """Wait until something holds, and no longer than the driver lives."""
        deadline = time.monotonic() + within_s
        while not true():
            assert self._driver.status() != psutil.STATUS_ZOMBIE, f"the driver ended: {otherwise}"
            assert time.monotonic() < deadline, f"for {within_s} s: {otherwise}"
            time.sleep(0.02)

    def _process(self, name: str) -> psutil.Process:
        found: list[psutil.Process] = []
        self.until(
            lambda: found.extend(filter(None, [self.processes().get(name)])) or found,
            f"there is no {name}",
        )
        return found[0]

    def _pause(self, event: Event) -> None:
        running = self.processes()
        whom = [running[name] for name in event.whom if name in running]
        with _stopped(whom):
            if event.inner is not None:
                self.do(event.inner)
            time.sleep(event.seconds)

    def _reset(self, name: str, to: str) -> None:
        process = self._process(name)
        suffix = f"/{to}.sock".encode()
        self.until(
            lambda: any(_shut(process.pid, fd, suffix) for fd in _sockets(process.pid)),
            f"{name} has no connection to {to}",
        )

    def _join(self) -> None:
        """Take the rank of a living worker, and leave as a server that never registers."""
        handle = Handle.decode((self._folder / "handle").read_bytes())
        packed = handle._packed  # what a server that joins is given
        with pytest.raises(RankTaken):
            handle.connect(rank=min(set(range(self._config.workers)) - set(self.killed)))
        control = ControlLink.connect(
            handle.addresses,
            Hello("register"),
            credentials=packed.credentials,
            limits=packed.limits,
            timeout_s=GOES_ON_S,
            lost_s=GOES_ON_S,
        )
        with contextlib.suppress(ParamServeError):
            control.close()

    def _occupy(self) -> None:
        """Connect to every listener and say nothing, or the beginning of something."""
        handle = Handle.decode((self._folder / "handle").read_bytes())
        for listener in Path(handle.addresses[0].removeprefix("unix:")).parent.glob("*.sock"):
            for number in range(SILENT_CONNECTIONS):
                silent = socket.socket(socket.AF_UNIX)
                silent.setblocking(False)
                self._held.append(silent)
                with contextlib.suppress(BlockingIOError, ConnectionError):  # its queue is full
                    silent.connect(os.fspath(listener))
                    silent.send(b"\0" * (number % 3))

    def _end(self, event: Event) -> None:
        if event.kind == "finish":
            self.board[:, STOP] = 1
        elif event.kind == "kill server":
            self._process(*event.whom).kill()
        else:
            numbers = {
                "interrupt": signal.SIGINT,
                "alarm": signal.SIGALRM,
                "kill driver": signal.SIGKILL,
            }
            self._driver.send_signal(numbers[event.kind])


@contextlib.contextmanager
def _stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Within the block these do not run."""
    try:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _sockets(pid: int) -> list[int]:
    found = []
    for name in sorted(os.listdir(f"/proc/{pid}/fd"), key=int):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                found.append(int(name))
    return found


def _shut(pid: int, fd: int, suffix: bytes) -> bool:
    """Shut a socket of another process down, if it is connected to an address that ends so."""
    pidfd = os.pidfd_open(pid)
    try:
        copy = _libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if copy < 0:  # closed since
        return False
    with socket.socket(fileno=copy) as connection:
        try:
            if connection.family != socket.AF_UNIX:
                return False
            peer = connection.getpeername()
            if not os.fsencode(peer).endswith(suffix):
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens, or is closed already
            return False
    return True


_libc = ctypes.CDLL(None, use_errno=True)


def left_of(marker: str) -> list[str]:
    """Processes with this in their environment, which children inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARKER) == marker:
                found.append(f"{process.pid}: {process.status()} {process.cmdline()[-1:]}")
    return found

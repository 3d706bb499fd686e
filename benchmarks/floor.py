"""Floors: the same memory traffic, or the same computing, by bare processes without a server."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.workloads import (
    Call,
    Dense,
    FirstStep,
    Gate,
    Latency,
    Mnist,
    Span,
    Start,
    Trainer,
    medians,
    per_second,
    until_told,
)

PING_BYTES = 64
"""About the header of a small request."""
PING_START_S = 30.0


def team(work: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Call `work(rank, *arguments)` in `count` fresh processes at once; their results by rank.

    Every call must meet the others at a gate: that makes each process take exactly one.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        found = [pool.submit(work, rank, *arguments) for rank in range(count)]
        return [one.result() for one in found]


class Values:
    """Numbers in shared memory, in parts, each with a lock: what servers would own."""

    def __init__(self, name: str, scratch: Path, parts: int, part: int, dtype: str) -> None:
        self._memory = SharedMemory(name)
        whole: np.ndarray[Any, Any] = np.ndarray(parts * part, dtype, self._memory.buf)
        self.parts = np.split(whole, parts)
        self._locks = [(scratch / f"lock{number}").open("w") for number in range(parts)]

    def add(self, number: int, gradient: np.ndarray[Any, Any]) -> None:
        """Add to one part, alone: without the lock some additions would be lost."""
        lock = self._locks[number]
        fcntl.flock(lock, fcntl.LOCK_EX)
        self.parts[number] += gradient
        fcntl.flock(lock, fcntl.LOCK_UN)


@contextlib.contextmanager
def shared(nbytes: int) -> Iterator[SharedMemory]:
    """Zeroed shared memory that is gone afterwards."""
    memory = SharedMemory(create=True, size=nbytes)
    try:
        np.ndarray(nbytes, np.uint8, memory.buf).fill(0)
        yield memory
    finally:
        memory.close()
        memory.unlink()


def dense(load: Dense, scratch: Path) -> dict[str, float]:
    """Counted for each push+pull of n bytes: n read and n written to copy the values out, n
    written to fill the gradient, 2n read and n written to add it: 6n bytes in all.
    """
    with shared(load.part * load.servers * 8) as memory:
        spans = team(_dense_worker, load.workers, load, scratch, memory.name)
        total = np.ndarray(load.part * load.servers, np.float64, memory.buf)
        if not (total == load.expected).all():
            raise AssertionError(f"values are {total[0]}, expected {load.expected}")
        del total
    return {"per_s": per_second(spans, load.workers * load.steps)}


def _dense_worker(rank: int, load: Dense, scratch: Path, name: str) -> Span:
    values = Values(name, scratch, load.servers, load.part, "f8")
    own = np.empty((load.servers, load.part))
    gradient = np.empty((load.servers, load.part))
    order = [(rank + number) % load.servers for number in range(load.servers)]

    def step() -> None:
        for number in order:
            np.copyto(own[number], values.parts[number])
        gradient.fill(1.0)
        for number in order:
            values.add(number, gradient[number])

    return run_together(Gate(scratch, load.workers), step, load.warm_steps, load.steps)


def run_together(
    gate: Gate,
    step: Callable[[], Any],
    warm_steps: int,
    steps: int,
    settle: Callable[[], Any] = lambda: None,
) -> Span:
    """Warm up, meet the others, then do the counted steps.

    Args:
        settle: returns when all that the steps sent is applied.
    """
    for _ in range(warm_steps):
        step()
    settle()
    gate.meet("begin")
    began = time.monotonic()
    for _ in range(steps):
        step()
    settle()
    return began, time.monotonic()


def latency(load: Latency, scratch: Path) -> dict[str, float]:
    """Add to the shared array and copy it out: 3n bytes read or written to add, 2n to copy."""
    with shared(load.large * 4) as memory:
        alone = team(_large_alone, 1, load, scratch, memory.name)[0]
        spans = team(_large_worker, load.workers, load, scratch, memory.name)
    with shared(load.names * load.name_size * 4) as memory:
        names = team(_names_alone, 1, load, scratch, memory.name)[0]
    many = per_second(spans, load.workers * load.worker_calls)
    return {"large": alone, "worker_calls": many, "names": names}


def _add_and_copy(load: Latency, scratch: Path, name: str) -> tuple[Call, Call]:
    """The step, and what fills its gradient."""
    values = Values(name, scratch, 1, load.large, "f4")
    own, gradient = np.empty(load.large, np.float32), np.empty(load.large, np.float32)

    def step() -> None:
        values.add(0, gradient)
        np.copyto(own, values.parts[0])

    return step, lambda: gradient.fill(1.0)


def _large_alone(rank: int, load: Latency, scratch: Path, name: str) -> float:
    step, fill = _add_and_copy(load, scratch, name)
    return medians({"": step}, load.large_calls, before={"": fill})[""]


def _names_alone(rank: int, load: Latency, scratch: Path, name: str) -> float:
    """Each array by itself: added in shared memory, copied out."""
    held = Values(name, scratch, 1, load.names * load.name_size, "f4")
    values = np.split(held.parts[0], load.names)
    own = [np.empty(load.name_size, np.float32) for _ in values]
    gradients = [np.ones(load.name_size, np.float32) for _ in values]

    def step() -> None:
        for value, gradient, copy in zip(values, gradients, own, strict=True):
            value += gradient
            np.copyto(copy, value)

    return medians({"": step}, load.name_calls, block=10)[""]


def _large_worker(rank: int, load: Latency, scratch: Path, name: str) -> Span:
    step, fill = _add_and_copy(load, scratch, name)

    def whole() -> None:
        fill()
        step()

    return run_together(Gate(scratch, load.workers), whole, 20, load.worker_calls)


def mnist(load: Mnist, scratch: Path) -> dict[str, float]:
    """Each process trains a model of its own with torch's SGD."""
    spans = team(_mnist_worker, load.workers, load, scratch)
    return {"per_s": per_second(spans, load.workers * load.steps)}


def _mnist_worker(rank: int, load: Mnist, scratch: Path) -> Span:
    import torch

    trainer = Trainer(load, rank)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=load.lr)
    return trainer.train(load, optimizer.step, Gate(scratch, load.workers))


def start(load: Start, scratch: Path) -> dict[str, float]:
    """Start as many Python processes as ours (with its coordinator) that only import numpy."""
    command = [sys.executable, "-c", "import numpy"]
    count = load.workers + load.servers + 1
    calls: dict[str, Call] = {
        "seconds": lambda: _all_run(command, count),
        "one": lambda: _all_run(command, 1),
    }
    return medians(calls, load.repeats, block=1)


def _all_run(command: Sequence[str], count: int) -> None:
    for process in [subprocess.Popen(command) for _ in range(count)]:
        if process.wait() != 0:
            raise RuntimeError(f"{command} ended with {process.returncode}")


def first_step(load: FirstStep, scratch: Path) -> dict[str, float]:
    """One process that trains alone: it imports torch, and steps with torch's SGD."""
    program = f"from benchmarks import floor; floor.train_once({load.images})"
    return {"seconds": median(until_told(program) for _ in range(load.repeats))}


def train_once(images: int) -> None:
    import torch

    trainer = Trainer(Mnist(images=images), 0)
    optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.01)
    trainer.backward()
    optimizer.step()
    print(time.monotonic())


# --- a bare ping -----------------------------------------------------------------------------


@contextlib.contextmanager
def ping_server(scratch: Path) -> Iterator[str]:
    """A process on a core of its own that sends back what comes, and sleeps until it comes."""
    path = str(scratch / "ping")
    process = multiprocessing.get_context("spawn").Process(target=_serve_pings, args=(path,))
    process.start()
    try:
        yield path
    finally:
        process.kill()
        process.join()


def _serve_pings(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        send_back(listener.accept()[0])


def send_back(sock: socket.socket) -> None:
    """Be the partner of a `Ping`."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    while message := sock.recv(PING_BYTES):
        sock.sendall(message)


def reach_ping(path: str) -> socket.socket:
    """A connection to the process of `ping_server`."""
    sock = socket.socket(socket.AF_UNIX)
    deadline = time.monotonic() + PING_START_S
    while True:
        try:
            sock.connect(path)
            return sock
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Ping:
    """One message of 64 bytes at a time to a bare process and back; both sleep until it comes.

    Two processes that talk by turns are put on one core by the system, where neither has to be
    woken from a halt. They stand for a client and a server, which both compute: so this end runs on
    another core than the partner while it pings.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._message = bytes(PING_BYTES)
        self._cores = os.sched_getaffinity(0)
        self._moved = False

    def begin(self) -> None:
        """Go to the core where this end runs."""
        if not self._moved:
            self._moved = True
            os.sched_setaffinity(0, {min(self._cores)})

    def end(self) -> None:
        """Let the system choose the core again."""
        if self._moved:
            self._moved = False
            os.sched_setaffinity(0, self._cores)

    def __call__(self) -> None:
        """Send one message and wait for it to come back."""
        self._socket.sendall(self._message)
        self._socket.recv(PING_BYTES)

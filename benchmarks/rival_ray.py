"""Rival: plain Ray actors, a server actor that holds numpy arrays, worker actors that call it.

What makes it fast, and is done here: arrays as direct arguments and results (over 100 KiB Ray
carries them through its object store without a copy on the reading side), calls to all servers
at once with one `ray.get`, pushes left on their way while the next pull is asked for (Ray keeps
the order of one caller's calls), push and pull in one call where the workload allows it, workers
that run their own loop instead of a driver that schedules every step, no retries.

Ray's workers run 15 nicer than all else unless told: `harness._environment` tells them not to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from benchmarks.workloads import (
    Call,
    Dense,
    Gate,
    Latency,
    Mnist,
    Span,
    Start,
    Trainer,
    fresh,
    latencies,
    medians,
    per_second,
    timed,
)

Array = np.ndarray[Any, Any]

FITTED_STORE_BYTES = 1_000_000_000
"""Holds what the dense workload has on its way at one time, so that its pages are used again."""


@contextlib.contextmanager
def session(scratch: Path, store_bytes: int | None = None) -> Iterator[None]:
    """Ray on this machine, its object store as large as Ray makes it unless told."""
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=store_bytes,
        _temp_dir=str(scratch / "r"),
    )
    try:
        yield
    finally:
        ray.shutdown()


class Server:
    """Values on one server actor; calls run one after the other."""

    def __init__(self, values: Array) -> None:
        self._values = values.copy()  # what came through the object store is read-only
        self._pushes = 0

    def pull(self) -> Array:
        return self._values

    def push(self, gradient: Array) -> None:
        self._values += gradient

    def push_pull(self, gradient: Array) -> Array:
        self._values += gradient
        return self._values

    def step(self, gradient: Array, lr: float) -> Array:
        """One asynchronous step of SGD."""
        self._values -= lr * gradient
        self._pushes += 1
        return self._values

    def pushes(self) -> int:
        return self._pushes


class NamesServer:
    """Many small arrays that go together."""

    def __init__(self, load: Latency) -> None:
        self._values = [np.zeros(load.name_size, np.float32) for _ in range(load.names)]

    def push_pull_all(self, gradients: Sequence[Array]) -> Sequence[Array]:
        for value, gradient in zip(self._values, gradients, strict=True):
            value += gradient
        return self._values


class SyncServer:
    """Values after the gradients of all workers, summed, are applied. An asyncio actor."""

    def __init__(self, values: Array, workers: int) -> None:
        self._values = values.copy()
        self._sum = np.zeros_like(values)
        self._workers = workers
        self._came = 0
        self._pushes = 0
        self._all_came = asyncio.Event()

    async def step(self, gradient: Array, lr: float) -> Array:
        self._sum += gradient
        self._came += 1
        self._pushes += 1
        if self._came < self._workers:
            await self._all_came.wait()
            return self._values
        self._values = self._values - lr * self._sum
        self._sum[:] = 0
        self._came = 0
        self._all_came.set()
        self._all_came = asyncio.Event()
        return self._values

    async def pushes(self) -> int:
        return self._pushes


class Worker:
    """A worker actor; each method is one workload."""

    def __init__(self, rank: int, servers: Sequence[Any]) -> None:
        self._rank = rank
        self._servers = servers

    def niceness(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def dense(self, load: Dense, steps: int) -> Span:
        gradients = [np.empty(load.part) for _ in self._servers]
        sent: list[Any] = []
        began = time.monotonic()
        for _ in range(steps):
            pulled = ray.get([server.pull.remote() for server in self._servers])
            ray.get(sent)
            for gradient in gradients:
                gradient.fill(1.0)
            sent = [
                server.push.remote(gradient)
                for server, gradient in zip(self._servers, gradients, strict=True)
            ]
            del pulled  # its place in the object store is free again
        ray.get(sent)
        return began, time.monotonic()

    def latency(self, load: Latency, name: str, size: int) -> dict[str, float]:
        step, fill = self._push_pull(size)
        return latencies(load, name, {name: step}, {name: fill})

    def names(self, load: Latency) -> float:
        gradients = [np.ones(load.name_size, np.float32) for _ in range(load.names)]
        method = self._servers[0].push_pull_all
        step = {"": lambda: ray.get(method.remote(gradients))}
        return medians(step, load.name_calls, block=10)[""]

    def many(self, size: int, calls: int) -> Span:
        step, fill = self._push_pull(size)
        began = time.monotonic()
        for _ in range(calls):
            fill()
            step()
        return began, time.monotonic()

    def _push_pull(self, size: int) -> tuple[Call, Call]:
        """The call, and what fills its gradient."""
        gradient = np.empty(size, np.float32)
        method = self._servers[0].push_pull
        return lambda: ray.get(method.remote(gradient)), lambda: gradient.fill(1.0)

    def mnist(self, load: Mnist, scratch: Path) -> Span:
        trainer = Trainer(load, self._rank)
        values, gradients = trainer.values.numpy(), trainer.gradients.numpy()
        method = self._servers[0].step

        def exchange() -> None:
            values[:] = ray.get(method.remote(gradients, load.lr))

        return trainer.train(load, exchange, Gate(scratch, load.workers))


def actor(kind: type[Any], *arguments: Any) -> Any:
    """An actor that takes no core from Ray's count and is not restarted."""
    return ray.remote(num_cpus=0, max_restarts=0)(kind).remote(*arguments)


def _servers(values: Sequence[Array]) -> list[Any]:
    return [actor(Server, part) for part in values]


def _workers(count: int, servers: Sequence[Any]) -> list[Any]:
    """Worker actors that are ready and as nice as this process."""
    workers = [actor(Worker, rank, servers) for rank in range(count)]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = ray.get([worker.niceness.remote() for worker in workers])
    if set(found) != {own}:
        raise RuntimeError(f"Ray's workers have niceness {found}, this process {own}")
    return workers


def _end(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def dense(load: Dense, scratch: Path) -> dict[str, float]:
    """With the object store that `ray.init()` makes (30% of memory): every value has new pages."""
    return _dense(load, scratch, None)


def dense_fitted(load: Dense, scratch: Path) -> dict[str, float]:
    """With an object store fitted to this very workload."""
    return _dense(load, scratch, FITTED_STORE_BYTES)


def _dense(load: Dense, scratch: Path, store_bytes: int | None) -> dict[str, float]:
    with session(scratch, store_bytes):
        servers = _servers([np.zeros(load.part)] * load.servers)
        workers = _workers(load.workers, servers)
        ray.get([worker.dense.remote(load, load.warm_steps) for worker in workers])
        spans = ray.get([worker.dense.remote(load, load.steps) for worker in workers])
        for values in ray.get([server.pull.remote() for server in servers]):
            if not (values == load.expected).all():
                raise AssertionError(f"values are {values[0]}, expected {load.expected}")
    return {"per_s": per_second(spans, load.workers * load.steps)}


def latency(load: Latency, scratch: Path) -> dict[str, float]:
    """`ray.get` of one method that adds and returns the values."""
    figures: dict[str, float] = {}
    with session(scratch):
        for name, size in (("small", load.small), ("large", load.large)):
            servers = _servers([np.zeros(size, np.float32)])
            workers = _workers(1, servers)
            figures |= ray.get(workers[0].latency.remote(load, name, size))
            _end(servers + workers)
        servers = [actor(NamesServer, load)]
        workers = _workers(1, servers)
        figures["names"] = ray.get(workers[0].names.remote(load))
        _end(servers + workers)
        servers = _servers([np.zeros(load.large, np.float32)])
        workers = _workers(load.workers, servers)
        ray.get([worker.many.remote(load.large, 20) for worker in workers])
        spans = ray.get([w.many.remote(load.large, load.worker_calls) for w in workers])
    return figures | {"worker_calls": per_second(spans, load.workers * load.worker_calls)}


def mnist(load: Mnist, scratch: Path) -> dict[str, float]:
    """One call for each step; synchronously the server's method waits for all workers."""
    values = Trainer(load, 0).values.numpy()
    figures: dict[str, float] = {}
    with session(scratch):
        for name, servers in (
            ("async", _servers([values])),
            ("sync", [actor(SyncServer, values, load.workers)]),
        ):
            if name not in load.ways:
                continue
            workers = _workers(load.workers, servers)
            folder = fresh(scratch, name)
            spans = ray.get([worker.mnist.remote(load, folder) for worker in workers])
            expected = load.workers * (load.steps + load.warm_steps)
            if ray.get(servers[0].pushes.remote()) != expected:
                raise AssertionError(f"not {expected} pushes were applied")
            figures[f"{name}_per_s"] = per_second(spans, load.workers * load.steps)
            _end(servers + workers)
    return figures


def start(load: Start, scratch: Path) -> dict[str, float]:
    """`ray.init`, an empty method on as many actors as we have processes, `ray.shutdown`."""

    def run(folder: Path) -> None:
        with session(folder):
            actors = _servers([np.zeros(1)] * (load.workers + load.servers))
            ray.get([actor.pull.remote() for actor in actors])

    folders = [fresh(scratch, str(number)) for number in range(load.repeats)]
    return {"seconds": median(timed(partial(run, folder)) for folder in folders)}

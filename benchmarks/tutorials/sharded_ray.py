"""100 MB of float64 over K server actors of plain Ray: N worker actors push it and pull it.

python -m benchmarks.tutorials.sharded_ray --servers 2 --workers 2
python -m benchmarks.tutorials.sharded_ray --servers 2 --workers 2 --sync
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from benchmarks.tutorials.quiet import ray_session

MB = 1_000_000


@ray.remote
class Server:
    """A part of the vector."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size)

    def push(self, gradient: np.ndarray) -> None:
        self.values += gradient

    def pull(self) -> np.ndarray:
        return self.values


@ray.remote
class Worker:
    """Pushes ones to all servers and pulls the values from all."""

    def __init__(self, servers: Sequence[Any], sizes: Sequence[int]) -> None:
        self.servers = servers
        self.gradients = [np.empty(size) for size in sizes]

    def push(self) -> None:
        for gradient in self.gradients:
            gradient.fill(1.0)
        parts = zip(self.servers, self.gradients, strict=True)
        ray.get([server.push.remote(gradient) for server, gradient in parts])

    def pull(self) -> None:
        ray.get([server.pull.remote() for server in self.servers])

    def train(self, steps: int) -> None:
        """Asynchronously: without waiting for the other workers."""
        for _ in range(steps):
            self.push()
            self.pull()


def start(servers: int, workers: int, size: int) -> tuple[list[Any], list[Any]]:
    """The actors, each server with its part of the vector."""
    sizes = [len(part) for part in np.array_split(np.empty(size), servers)]
    holding = [Server.remote(part) for part in sizes]
    return holding, [Worker.remote(holding, sizes) for _ in range(workers)]


def train_async(workers: Sequence[Any], steps: int) -> None:
    ray.get([worker.train.remote(steps) for worker in workers])


def train_sync(workers: Sequence[Any], steps: int) -> None:
    for _ in range(steps):
        ray.get([worker.push.remote() for worker in workers])  # everybody's gradients are there
        ray.get([worker.pull.remote() for worker in workers])


def measure(servers: int, workers: int, megabytes: int, steps: int, sync: bool) -> float:
    """Updates per second after one step to warm up; every number counts all pushes."""
    train = train_sync if sync else train_async
    holding, training = start(servers, workers, megabytes * MB // 8)
    train(training, 1)
    began = time.monotonic()
    train(training, steps)
    seconds = time.monotonic() - began
    for server in holding:
        values = ray.get(server.pull.remote())
        if not (values == workers * (steps + 1)).all():
            raise AssertionError(f"the vector is not {workers * (steps + 1)} everywhere: {values}")
    for actor in holding + training:
        ray.kill(actor)
    return workers * steps / seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--megabytes", type=int, default=100)
    add("--servers", type=int, default=2)
    add("--workers", type=int, default=2)
    add("--steps", type=int, default=5, help="of each worker (default 5)")
    add("--sync", action="store_true", help="all workers' gradients together, in step")
    options = parser.parse_args(argv)
    with ray_session():
        speed = measure(**vars(options))
    policy = "sync" if options.sync else "async"
    print(
        f"{options.megabytes} MB, {policy}, {options.servers} servers, {options.workers} workers: "
        f"{speed:.1f} updates per second"
    )


if __name__ == "__main__":
    main()

"""A vector of ten on a server actor of plain Ray, to which two workers add ones in a loop.

This process looks at the vector while they run, first on one server, then spread over two.

    python -m benchmarks.tutorials.vector_ray
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from benchmarks.tutorials.quiet import ray_session

SIZE = 10
WORKERS = 2
LOOK_S = 0.5


@ray.remote
class Server:
    """A part of the vector."""

    def __init__(self, size: int) -> None:
        self.vector = np.zeros(size)

    def push(self, values: np.ndarray) -> None:
        self.vector += values

    def pull(self) -> np.ndarray:
        return self.vector


@ray.remote
def train(servers: Sequence[Any], steps: int, pause_s: float) -> None:
    """What each of the workers does."""
    parts = np.array_split(np.ones(SIZE), len(servers))
    for _ in range(steps):
        time.sleep(pause_s)  # here a gradient would be computed
        for server, part in zip(servers, parts, strict=True):
            server.push.remote(part)
    pull(servers)  # calls of one caller keep their order: all pushes are done


def pull(servers: Sequence[Any]) -> np.ndarray:
    """The whole vector."""
    return np.concatenate(ray.get([server.pull.remote() for server in servers]))


def start(servers: int) -> list[Any]:
    """The servers, each with its part of the vector."""
    return [Server.remote(len(part)) for part in np.array_split(np.zeros(SIZE), servers)]


def run(servers: int, steps: int, pause_s: float) -> None:
    """What this process does: start them, look at the vector until they are done."""
    print(f"two workers, servers: {servers}")
    actors = start(servers)
    running = [train.remote(actors, steps, pause_s) for _ in range(WORKERS)]
    while running:
        done, running = ray.wait(running, num_returns=len(running), timeout=LOOK_S)
        ray.get(done)  # raises what they raised
        print("the vector:", pull(actors))
    print("at the end:", pull(actors))


def pushes_per_s(servers: int, steps: int, warm_steps: int) -> float:
    """Speed of workers without a pause, once their processes run; checks the vector."""
    actors = start(servers)
    ray.get([train.remote(actors, warm_steps, 0.0) for _ in range(WORKERS)])
    began = time.monotonic()
    ray.get([train.remote(actors, steps, 0.0) for _ in range(WORKERS)])
    seconds = time.monotonic() - began
    if not (pull(actors) == WORKERS * (warm_steps + steps)).all():
        raise AssertionError(f"pushes were lost: {pull(actors)}")
    return WORKERS * steps / seconds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each worker (default 20)")
    parser.add_argument("--pause-s", type=float, default=0.1, help="between them (default 0.1)")
    options = parser.parse_args(argv)
    with ray_session():
        for servers in (1, 2):
            run(servers, options.steps, options.pause_s)
            speed = pushes_per_s(servers, 100 * options.steps, options.steps)
            print(f"without a pause: {speed:,.0f} pushes per second")


if __name__ == "__main__":
    main()

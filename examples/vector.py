"""The smallest parameter server: a vector of ten, to which two workers add ones in a loop.

This process looks at the vector while they run, first on one server, then spread over two.

    python examples/vector.py
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import paramserve as ps


def train(worker: ps.Worker, steps: int, pause_s: float) -> None:
    """What each of the workers does."""
    worker.client.define("vector", np.zeros(10), rule=ps.Add())
    for _ in range(steps):
        time.sleep(pause_s)  # here a gradient would be computed
        worker.client.push("vector", np.ones(10))


def run(servers: int, steps: int, pause_s: float) -> None:
    """What this process does: start them, look at the vector until they are done."""
    print(f"two workers, servers: {servers}")
    policy = ps.Async()
    job = ps.start(train, args=(steps, pause_s), workers=2, servers=servers, consistency=policy)
    for snapshot in job.snapshots(every=10, name="default"):
        print(f"after {snapshot.version} pushes:", snapshot.state["vector"])
    print("at the end:", job.wait().state_dict("default")["vector"])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="of each worker (default 20)")
    parser.add_argument("--pause-s", type=float, default=0.1, help="between them (default 0.1)")
    options = parser.parse_args(argv)
    for servers in (1, 2):
        run(servers, options.steps, options.pause_s)


if __name__ == "__main__":
    main()

"""A linear regression without torch, synchronously and then asynchronously.

Four workers have a part of the data each. They pull the weights, compute the gradient of the mean
squared error on a batch in numpy, and push it; the servers apply SGD.

    python examples/linear_regression.py
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

import paramserve as ps

FEATURES = 50
SAMPLES = 2_000
WORKERS = 4
STEPS = 150
BATCH = 32
LR = 0.02

Array = npt.NDArray[Any]


def dataset(part: int) -> tuple[Array, Array, Array]:
    """Inputs [SAMPLES, FEATURES], targets [SAMPLES] with noise, and the true weights [FEATURES]."""
    truth = np.random.default_rng(0).normal(size=FEATURES)
    random = np.random.default_rng(1 + part)
    inputs = random.normal(size=(SAMPLES, FEATURES))
    return inputs, inputs @ truth + 0.1 * random.normal(size=SAMPLES), truth


def train(worker: ps.Worker) -> tuple[float, float]:
    """One worker's part: returns its loss before and after."""
    inputs, targets, _ = dataset(worker.rank)
    client = worker.client
    client.define("w", np.zeros(FEATURES), rule=ps.SGD(lr=LR))
    weights = client.pull("w")
    first = float(np.mean((inputs @ weights - targets) ** 2))
    random = np.random.default_rng((worker.seed, worker.rank))
    for _ in range(STEPS):
        rows = random.integers(SAMPLES, size=BATCH)
        error = inputs[rows] @ weights - targets[rows]
        gradient = 2.0 / BATCH * (error @ inputs[rows])
        weights = client.push_pull({"w": gradient}, tick=True)["w"]
        worker.log(loss=float(np.mean(error**2)))
    return first, float(np.mean((inputs @ weights - targets) ** 2))


def main() -> None:
    console = Console()
    console.print(
        f"Linear regression, {FEATURES} weights on 2 servers, {WORKERS} workers, {STEPS} steps each"
    )
    table = Table("run", "loss before", "loss after", "distance to the truth", "staleness")
    for name, policy in (("sync", ps.Sync(reduce="mean")), ("async", ps.Async())):
        result = ps.run(train, workers=WORKERS, servers=2, consistency=policy, seed=0)
        before, after = np.mean(list(result.returns.values()), axis=0)
        distance = np.linalg.norm(np.asarray(result.state_dict("default")["w"]) - dataset(0)[2])
        stale = max((each.max for each in result.staleness.values()), default=0)
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{distance:.3f}", f"up to {stale}")
    console.print(table)


if __name__ == "__main__":
    main()

"""Training functions for runs with real processes. Imports no torch: workers start fast.

They import this module by name. What they tell the test while they run goes through a named pipe,
so that a test acts at a step and does not sleep and hope.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import Any, NoReturn

import numpy as np

import paramserve as ps
from paramserve.core.partition import PIECE_BYTES_MIN

SIZE = 3 * PIECE_BYTES_MIN // 4
"""Parameters in float32, so many that three servers have some: first the weights and biases of a
softmax regression on MNIST."""
STEPS = 100_000
"""More than any test waits for."""


def tell(pipe: str, text: str) -> None:
    """Write one line to a named pipe."""
    with open(pipe, "w") as file:
        file.write(text + "\n")


def regress(worker: ps.Worker, pipe: str = "", at: int = -1, steps: int = STEPS) -> int:
    """Softmax regression on images like MNIST's; the first rank tells when it has done `at`."""
    random = np.random.default_rng((worker.seed, worker.rank))
    images = random.random((512, 784), dtype=np.float32)
    labels = random.integers(10, size=512)
    client = worker.client
    client.define("w", np.zeros(SIZE, np.float32), rule=ps.SGD(lr=0.01))
    flat = client.pull("w")
    for step in range(steps):
        if step == at and worker.rank == 0:
            tell(pipe, "here")
        rows = random.integers(512, size=32)
        weights, bias = flat[:7840].reshape(784, 10), flat[7840:7850]
        scores = images[rows] @ weights + bias
        share = np.exp(scores - scores.max(1, keepdims=True))
        share /= share.sum(1, keepdims=True)
        share[np.arange(32), labels[rows]] -= 1
        gradient = np.zeros(SIZE, np.float32)
        gradient[:7850] = np.concatenate([(images[rows].T @ share).ravel(), share.sum(0)]) / 32
        flat = client.push_pull({"w": gradient}, tick=True)["w"]
        worker.log(norm=float(np.abs(flat).sum()))
    return step + 1


def count(worker: ps.Worker, steps: int = 20) -> list[float]:
    """Add ones; what is there at the end says how often that was applied."""
    client = worker.client
    client.define("w", np.zeros(3), rule=ps.Add())
    for _ in range(steps):
        client.push_pull({"w": np.ones(3)}, tick=True)
    found: list[float] = client.pull("w").tolist()
    return found


def count_by_rank(worker: ps.Worker) -> int:
    """Rank r ends after 5 * (r + 1) steps; the others go on."""
    count(worker, 5 * (worker.rank + 1))
    return worker.clock


def surroundings(worker: ps.Worker) -> tuple[int, dict[str, str], list[str], list[str]]:
    """The seed, environment, argv and loaded modules of a worker."""
    return worker.seed, dict(os.environ), sys.argv, sorted(sys.modules)


def fail_on(worker: ps.Worker, rank: int, step: int) -> int:
    """One rank raises at a step."""
    for done in range(20):
        if (worker.rank, done) == (rank, step):
            raise LookupError(f"no batch {step}")
        count(worker, 1)
    return worker.clock


def exit_early(worker: ps.Worker) -> NoReturn:
    """Leave without returning."""
    sys.exit(0)


def sleep_forever(worker: ps.Worker, pipe: str = "") -> None:
    """Do nothing, for as long as it is let."""
    if pipe:
        tell(pipe, "here")
    while True:
        time.sleep(60)


def returns_what_cannot_travel(worker: ps.Worker) -> Any:
    return (each for each in ())


def ignore_the_end(worker: ps.Worker, pipe: str) -> None:
    """Do nothing, and go on with it when asked to end."""
    tell(pipe, "here")
    while True:
        with contextlib.suppress(SystemExit):
            time.sleep(60)

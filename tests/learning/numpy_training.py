"""A training function without arguments, in a module that agents import: without torch, and with
results that are plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import paramserve as ps

SAMPLES, FEATURES, BATCH, STEPS = 256, 12, 16, 20


@dataclass(frozen=True)
class Halved(ps.CustomRule):
    """Subtracts half of the gradient: exact, so that a test can tell it from all others."""

    name = "halved"

    def update(
        self,
        value: npt.NDArray[np.float32],
        gradient: npt.NDArray[np.float32],
        state: object,
        push: ps.PushInfo,
    ) -> None:
        value -= gradient / 2


def train(worker: ps.Worker) -> list[float]:
    """Linear regression by Adam; each rank has its own samples. Returns the losses."""
    random = np.random.default_rng((worker.seed, worker.rank))
    inputs = random.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    targets = inputs @ np.arange(FEATURES, dtype=np.float32)
    worker.client.define("w", np.zeros(FEATURES, np.float32), rule=ps.Adam(lr=0.3))
    weights = worker.client.pull("w")
    losses = []
    for _ in range(STEPS):
        rows = random.integers(SAMPLES, size=BATCH)
        wrong = inputs[rows] @ weights - targets[rows]
        losses.append(float((wrong**2).mean()))
        gradient = (inputs[rows].T @ wrong * (2 / BATCH)).astype(np.float32)
        weights = worker.client.push_pull({"w": gradient}, tick=True)["w"]
    return losses


def train_by_rule(worker: ps.Worker) -> int:
    """Three steps with a rule of one's own; each adds -0.5 under Sync's mean."""
    worker.client.define("w", np.zeros(4, np.float32), rule=Halved())
    for _ in range(3):
        worker.client.push_pull({"w": np.ones(4, np.float32)}, tick=True)
    return worker.rank

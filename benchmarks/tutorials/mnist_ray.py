"""MNIST with plain Ray actors: a server actor holds the model, the driver moves the gradients.

Synchronously the server applies the gradients of all workers together; asynchronously it applies
each one as `ray.wait` returns it.

    python -m benchmarks.tutorials.mnist_ray --data digits
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from torch.nn import functional as F

import datasets
from benchmarks.tutorials.quiet import ray_session
from mnist import ConvNet, accuracy, testset

Weights = Mapping[str, np.ndarray]
Gradients = list[np.ndarray]


@ray.remote
class Server:
    """The model and its optimizer."""

    def __init__(self, lr: float) -> None:
        self.model = ConvNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)

    def weights(self) -> Weights:
        return {name: value.numpy() for name, value in self.model.state_dict().items()}

    def apply(self, *gradients: Gradients) -> Weights:
        """One step with the sum of these workers' gradients."""
        for parameter, *parts in zip(self.model.parameters(), *gradients, strict=True):
            parameter.grad = torch.from_numpy(np.sum(parts, axis=0))
        self.optimizer.step()
        return self.weights()


@ray.remote
class Worker:
    """A copy of the model and the data."""

    def __init__(self, rank: int, folder: Path, batch_size: int) -> None:
        torch.manual_seed(rank)  # or all workers would draw the same batches
        data = datasets.load(folder)
        self.images, self.labels = datasets.tensors(data.train_images, data.train_labels).tensors
        self.batch_size = batch_size
        self.model = ConvNet()

    def gradients(self, weights: Weights) -> Gradients:
        self.model.load_state_dict({name: torch.as_tensor(one) for name, one in weights.items()})
        rows = torch.randint(len(self.images), (self.batch_size,))
        self.model.zero_grad()
        F.nll_loss(self.model(self.images[rows]), self.labels[rows]).backward()
        return [parameter.grad.numpy() for parameter in self.model.parameters()]


def start(workers: int, folder: Path, batch_size: int, lr: float) -> tuple[Any, list[Any]]:
    """The actors."""
    return Server.remote(lr), [Worker.remote(rank, folder, batch_size) for rank in range(workers)]


def train_sync(server: Any, workers: Sequence[Any], steps: int) -> Weights:
    """Each step applies one gradient of every worker."""
    weights = server.weights.remote()
    for _ in range(steps):
        weights = server.apply.remote(*[worker.gradients.remote(weights) for worker in workers])
    return ray.get(weights)


def train_async(server: Any, workers: Sequence[Any], steps: int) -> Weights:
    """Apply as many gradients, each when it arrives; a worker goes on with the values after it."""
    weights = server.weights.remote()
    pending = {worker.gradients.remote(weights): worker for worker in workers}
    for _ in range(steps * len(workers)):
        (done,), _ = ray.wait(list(pending))
        worker = pending.pop(done)
        weights = server.apply.remote(done)
        pending[worker.gradients.remote(weights)] = worker
    return ray.get(weights)


TRAIN = {"sync": train_sync, "async": train_async}


def measure(
    policy: str, workers: int, folder: Path, steps: int, batch_size: int, lr: float
) -> tuple[float, Weights]:
    """Steps per second over all workers after two to warm up, and the values at the end."""
    server, training = start(workers, folder, batch_size, lr)
    TRAIN[policy](server, training, 2)
    began = time.monotonic()
    weights = TRAIN[policy](server, training, steps)
    seconds = time.monotonic() - began
    for actor in (server, *training):
        ray.kill(actor)
    return workers * steps / seconds, weights


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--steps", type=int, default=200, help="of each worker (default 200)")
    add("--batch-size", type=int, default=128)
    add("--lr", type=float, default=0.01)
    add("--data", help="folder with the IDX files, or 'digits'; default: find or fetch MNIST")
    options = parser.parse_args(argv)
    folder = datasets.fetch(options.data)
    common = options.workers, folder, options.steps, options.batch_size, options.lr
    with ray_session():
        for policy in TRAIN:
            speed, weights = measure(policy, *common)
            reached = accuracy(
                {name: one.copy() for name, one in weights.items()}, *testset(folder)
            )
            print(f"{policy}: {reached:.2%} of the test images, {speed:,.0f} steps per second")


if __name__ == "__main__":
    main()

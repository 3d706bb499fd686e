"""Train a ConvNet on MNIST through a parameter server: first synchronously, then asynchronously.

Each run is done twice: once while this process evaluates snapshots of the servers' values, which
gives the accuracy curves, and once undisturbed, which gives steps per second.

    python examples/mnist.py --workers 2 --servers 1
    python examples/mnist.py --engine ray
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.nn import functional as F

import datasets
import paramserve as ps
import report
from arguments import count
from ending import exit_code
from engines import ENGINES, engine_of
from paramserve.observe import watch

EVERY = 10
"""The servers keep a snapshot of every tenth version."""
KEPT = 64
"""At most this many wait to be evaluated; it takes a while on a busy machine."""
EVALUATED = 1024
"""Test images on which a snapshot is evaluated; the end of a run uses all 10,000."""


class ConvNet(nn.Module):
    """One convolution and one linear layer: 1,960 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, kernel_size=3)
        self.linear = nn.Linear(192, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(F.max_pool2d(self.conv(images), 3))
        return F.log_softmax(self.linear(hidden.flatten(1)), dim=1)


def train(
    worker: ps.Worker, folder: Path, steps: int, batch_size: int, lr: float
) -> tuple[float, float]:
    """What each worker does; returns when it began and ended its steps, by the machine's clock."""
    data = datasets.load(folder)
    dataset = datasets.tensors(data.train_images, data.train_labels)
    model = ConvNet()
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=lr))
    began = time.monotonic()
    for images, labels in worker.loader(dataset, batch_size=batch_size, steps=steps):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()  # push gradients, pull values
        worker.log(loss=loss)
    return began, time.monotonic()


def accuracy(state: Mapping[str, Any], images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images that a ConvNet with these values names rightly."""
    model = ConvNet()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    with torch.inference_mode():
        return (model(images).argmax(1) == labels).float().mean().item()


def staleness(result: ps.Result) -> tuple[float, int]:
    """Mean and largest over the pushes of all ranks."""
    ranks = result.staleness.values()
    pushes = sum(rank.pushes for rank in ranks)
    return sum(rank.mean * rank.pushes for rank in ranks) / pushes, max(rank.max for rank in ranks)


def curve(found: Mapping[int, float], logged: Sequence[float], updates: int) -> list[report.Point]:
    """Accuracy by version, with the time at which the workers had made that many updates.

    That is when their logs say so: this process may have read the snapshot later.
    """
    share = len(logged) / updates
    return [
        report.Point(version, logged[max(round(version * share), 1) - 1] - logged[0], value)
        for version, value in found.items()
    ]


def run(
    name: str, consistency: Any, steps: int, updates: int, folder: Path, options: argparse.Namespace
) -> report.Run:
    """Train with evaluation, then without; each worker does `steps`, which are `updates`."""
    images, labels = testset(folder)

    def start() -> ps.Job:
        return ps.start(
            train,
            args=(folder, steps, options.batch_size, options.lr),
            workers=options.workers,
            servers=options.servers,
            consistency=consistency,
            engine=engine_of(options.engine),
            seed=options.seed,
        )

    found = {}
    job = start()
    with watch(job):
        for snapshot in job.snapshots(every=EVERY, keep=KEPT):
            shown = images[:EVALUATED], labels[:EVALUATED]
            found[snapshot.version] = accuracy(snapshot.state, *shown)
        result = job.wait()
    undisturbed = start().wait()
    began, ended = zip(*undisturbed.returns.values(), strict=True)
    batches = steps * options.workers
    return report.Run(
        name=name,
        updates=updates,
        batches=batches,
        accuracy=accuracy(result.state_dict(), images, labels),
        batches_per_second=batches / (max(ended) - min(began)),
        staleness=staleness(undisturbed),
        curve=curve(found, sorted(record.time_s for record in result.metrics), updates),
    )


def serial(steps: int, folder: Path, options: argparse.Namespace) -> report.Run:
    """Train on as many batches in this process, without a parameter server."""
    data = datasets.load(folder)
    images, labels = datasets.tensors(data.train_images, data.train_labels).tensors
    torch.manual_seed(options.seed)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    began = time.monotonic()
    for _ in range(steps):
        rows = torch.randint(len(images), (options.batch_size,))
        optimizer.zero_grad()
        F.nll_loss(model(images[rows]), labels[rows]).backward()
        optimizer.step()
    speed = steps / (time.monotonic() - began)
    reached = accuracy(model.state_dict(), *testset(folder))
    return report.Run("serial", steps, steps, reached, speed)


def testset(folder: Path) -> tuple[torch.Tensor, ...]:
    """Images and labels of the test set."""
    data = datasets.load(folder)
    return datasets.tensors(data.test_images, data.test_labels).tensors


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--engine", choices=ENGINES, default="local")
    add("--workers", type=count, default=2)
    add("--servers", type=count, default=1)
    add("--sync-steps", type=count, default=200, help="synchronous steps (default 200)")
    add("--async-updates", type=count, default=400, help="over all workers (default 400)")
    add("--batch-size", type=count, default=128)
    add("--lr", type=float, default=0.01)
    add("--data", help="folder with the IDX files, or 'digits'; default: find or fetch MNIST")
    add("--out", type=Path, default=Path("runs"), help="where the results go (default runs/)")
    add("--seed", type=int, default=0)
    add("--serial", action="store_true", help="add a run in one process without a server")
    return parser.parse_args(argv)


@exit_code
def main(argv: list[str] | None = None) -> None:
    """Train, print the table, write curves and picture into a new folder of `--out`."""
    options = parse(argv)
    torch.set_num_threads(1)
    console = Console()
    runs = train_all(options)
    console.print(report.table(runs))
    saved = report.save(runs, options.out / time.strftime("mnist-%Y%m%d-%H%M%S"))
    console.print(f"Curves and picture: {saved}")


def train_all(options: argparse.Namespace) -> list[report.Run]:
    """The runs of the table, in its order."""
    folder = datasets.fetch(options.data)
    steps, share = options.sync_steps, max(options.async_updates // options.workers, 1)
    updates = share * options.workers
    runs = [
        run("sync", ps.Sync(reduce="sum"), steps, steps, folder, options),
        run("async", ps.Async(), share, updates, folder, options),
    ]
    if options.serial:
        runs.append(serial(updates, folder, options))
    return runs


if __name__ == "__main__":
    raise SystemExit(main())

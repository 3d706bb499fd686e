"""MNIST with plain torch RPC: rank 0 holds the model, the others push gradients and pull values.

The server collects a batch of gradients before it steps: those of all workers (synchronously), or
each by itself (asynchronously).

    python -m benchmarks.tutorials.mnist_rpc --data digits
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import multiprocessing
from torch.distributed import rpc
from torch.nn import functional as F

import datasets
from benchmarks.tutorials.quiet import loopback
from mnist import ConvNet, accuracy, testset

Weights = dict[str, torch.Tensor]
Span = tuple[float, float]
POLICIES = ("sync", "async")


class Server:
    """The model and its optimizer; many threads of RPC call it at a time."""

    def __init__(self, lr: float, together: int) -> None:
        self.model = ConvNet()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.lock = threading.Lock()
        self.together = together
        self.came = 0
        self.updated: torch.futures.Future[Weights] = torch.futures.Future()

    def weights(self) -> Weights:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    @staticmethod
    @rpc.functions.async_execution
    def push_pull(
        reference: rpc.RRef, gradients: Sequence[torch.Tensor]
    ) -> torch.futures.Future[Weights]:
        """The values after the gradients that belong together are applied."""
        self = reference.local_value()
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad += gradient
            self.came += 1
            updated = self.updated
            if self.came == self.together:
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                self.came = 0
                self.updated = torch.futures.Future()
                updated.set_result(self.weights())
        return updated


def train(server: rpc.RRef, rank: int, folder: Path, steps: int, batch_size: int) -> Span:
    """What each worker does; returns when it began and ended its steps."""
    torch.manual_seed(rank)  # or all workers would draw the same batches
    data = datasets.load(folder)
    images, labels = datasets.tensors(data.train_images, data.train_labels).tensors
    model = ConvNet()
    model.load_state_dict(server.rpc_sync().weights())
    began = time.monotonic()
    for _ in range(steps):
        rows = torch.randint(len(images), (batch_size,))
        model.zero_grad()
        F.nll_loss(model(images[rows]), labels[rows]).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        weights = rpc.rpc_sync(server.owner(), Server.push_pull, args=(server, gradients))
        model.load_state_dict(weights)
    return began, time.monotonic()


def join(rank: int, world: int, rendezvous: str) -> None:
    """Be a member: rank 0 is the server, the others train."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{rendezvous}")
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=world, rpc_backend_options=options)


def work(number: int, world: int, rendezvous: str) -> None:
    """A worker's process: does what it is asked until all are done."""
    join(number + 1, world, rendezvous)
    rpc.shutdown()


@contextlib.contextmanager
def members(workers: int) -> Iterator[None]:
    """Start the others and be rank 0 until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        place = workers + 1, f"{scratch}/rendezvous"
        others = multiprocessing.spawn(work, place, nprocs=workers, join=False)
        join(0, *place)
        yield
        rpc.shutdown()
        while not others.join():
            pass


def run(
    policy: str, workers: int, folder: Path, steps: int, batch_size: int, lr: float
) -> tuple[list[Span], Weights]:
    """Be the server: the workers' times, and the values at the end."""
    server = rpc.RRef(Server(lr, together=workers if policy == "sync" else 1))
    asked = [
        rpc.rpc_async(f"rank{rank}", train, (server, rank, folder, steps, batch_size), timeout=0)
        for rank in range(1, workers + 1)
    ]
    return torch.futures.wait_all(asked), server.local_value().weights()


def measure(
    policy: str, workers: int, folder: Path, steps: int, batch_size: int, lr: float
) -> tuple[float, Weights]:
    """Steps per second over all workers after two to warm up, and the values at the end."""
    run(policy, workers, folder, 2, batch_size, lr)
    spans, weights = run(policy, workers, folder, steps, batch_size, lr)
    began, ended = zip(*spans, strict=True)
    return workers * steps / (max(ended) - min(began)), weights


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
    loopback()
    with members(options.workers):
        for policy in POLICIES:
            speed, weights = measure(policy, *common)
            reached = accuracy(weights, *testset(folder))
            print(f"{policy}: {reached:.2%} of the test images, {speed:,.0f} steps per second")


if __name__ == "__main__":
    main()

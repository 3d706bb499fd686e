"""The language model with plain Ray actors: asynchronous, Adam on the server actor.

python -m benchmarks.tutorials.language_model_ray
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import ray
import torch
from torch.nn import functional as F

import datasets
from benchmarks.tutorials.quiet import ray_session
from language_model import LanguageModel, Sizes, Words, numbered, perplexity, pieces, unigram

Weights = Mapping[str, np.ndarray]
Gradients = list[np.ndarray]


@ray.remote
class Server:
    """The model and its optimizer."""

    def __init__(self, sizes: Sizes, lr: float) -> None:
        self.model = LanguageModel(sizes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def weights(self) -> Weights:
        return {name: value.numpy() for name, value in self.model.state_dict().items()}

    def apply(self, gradients: Gradients) -> Weights:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = torch.as_tensor(gradient)
        self.optimizer.step()
        return self.weights()


@ray.remote
class Worker:
    """A copy of the model and the text."""

    def __init__(self, rank: int, words: Words, sizes: Sizes, length: int, batch_size: int) -> None:
        torch.manual_seed(rank)  # or all workers would draw the same batches
        self.inputs, self.targets = pieces(words, length)
        self.batch_size = batch_size
        self.model = LanguageModel(sizes)

    def gradients(self, weights: Weights) -> Gradients:
        self.model.load_state_dict({name: torch.as_tensor(one) for name, one in weights.items()})
        rows = torch.randint(len(self.inputs), (self.batch_size,))
        self.model.zero_grad()
        scores = self.model(self.inputs[rows]).flatten(0, 1)
        F.cross_entropy(scores, self.targets[rows].flatten()).backward()
        return [parameter.grad.numpy() for parameter in self.model.parameters()]


def start(
    workers: int, words: Words, sizes: Sizes, length: int, batch_size: int, lr: float
) -> tuple[Any, list[Any]]:
    """The actors."""
    text = ray.put(words)  # once for all workers
    training = [Worker.remote(rank, text, sizes, length, batch_size) for rank in range(workers)]
    return Server.remote(sizes, lr), training


def train(server: Any, workers: Sequence[Any], steps: int) -> Weights:
    """Each gradient is applied when it comes; its worker goes on with the values after it."""
    weights = server.weights.remote()
    pending = {worker.gradients.remote(weights): worker for worker in workers}
    for _ in range(steps * len(workers)):
        (done,), _ = ray.wait(list(pending))
        worker = pending.pop(done)
        weights = server.apply.remote(done)
        pending[worker.gradients.remote(weights)] = worker
    return ray.get(weights)


def measure(
    workers: int, words: Words, sizes: Sizes, steps: int, length: int, batch_size: int, lr: float
) -> tuple[float, Weights]:
    """Steps per second over all workers after one to warm up, and the values at the end."""
    server, training = start(workers, words, sizes, length, batch_size, lr)
    train(server, training, 1)
    began = time.monotonic()
    weights = train(server, training, steps)
    seconds = time.monotonic() - began
    for actor in (server, *training):
        ray.kill(actor)
    return workers * steps / seconds, weights


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workers", type=int, default=2)
    add("--steps", type=int, default=400, help="of each worker (default 400)")
    add("--vocabulary", type=int, default=10_000, help="words, with <unk> (default 10,000)")
    add("--embedding", type=int, default=256)
    add("--hidden", type=int, default=512)
    add("--words", type=int, help="of the text; default: all of them")
    add("--batch-size", type=int, default=20, help="pieces of the text (default 20)")
    add("--length", type=int, default=20, help="words of a piece (default 20)")
    add("--lr", type=float, default=1e-3)
    add("--data", help="folder with the texts; default: find or fetch them")
    options = parser.parse_args(argv)
    plays = datasets.read_plays(datasets.fetch_plays(options.data))
    text = numbered(plays, options.vocabulary, options.words)
    sizes = Sizes(text.vocabulary, options.embedding, options.hidden)
    with ray_session():
        speed, weights = measure(
            options.workers,
            text.train,
            sizes,
            options.steps,
            options.length,
            options.batch_size,
            options.lr,
        )
        inputs, targets = pieces(text.held_out, options.length)
        reached = perplexity(
            {name: one.copy() for name, one in weights.items()}, sizes, inputs, targets
        )
    base = unigram(text, targets)
    print(
        f"Held-out perplexity: {reached:,.1f}; of the unigram model: {base:,.1f}; "
        f"{speed:,.1f} steps per second"
    )


if __name__ == "__main__":
    main()

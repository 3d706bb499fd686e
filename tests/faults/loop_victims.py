"""A training function whose values count its samples, in every form of loop; its rank 1 may die."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paramserve as ps

SIZE, BATCH, EPOCHS, WORKERS = 48, 4, 3, 2
OF_EPOCH = SIZE // (WORKERS * BATCH)
"""Batches of a rank with an equal share."""
SLOW_S = 0.02


@dataclass(frozen=True)
class Loop:
    """How a program goes through its samples.

    Attributes:
        form: of the loop.
        optimizers: which of two step with a batch: "one", "both", "in turn".
        reduces: whether the ranks reduce a value behind each epoch.
        dies_at: steps after which rank 1 is killed, once; -1: it is not.
        slow: the rank that the others do not wait for under a partial policy; -1: none.
        options: of the loader.
    """

    form: str
    shards: str = "static"
    optimizers: str = "one"
    reduces: bool = False
    dies_at: int = -1
    slow: int = -1
    epochs: int = EPOCHS
    options: dict[str, Any] = field(default_factory=dict)


def rounds(worker: ps.Worker, loop: Loop) -> Iterator[Iterator[Any]]:
    """The batches of each round of the loop."""
    own = torch.arange(SIZE).chunk(WORKERS)[worker.rank % WORKERS]
    data = TensorDataset(own if loop.shards == "own" else torch.arange(SIZE))
    options: dict[str, Any] = {"batch_size": BATCH, "shards": loop.shards, **loop.options}
    if loop.form == "one loop":
        yield iter(worker.loader(data, epochs=loop.epochs, **options))
    elif loop.form == "steps":
        yield iter(worker.loader(data, steps=loop.epochs * OF_EPOCH, **options))
    elif loop.form == "a new loader":
        for _ in range(loop.epochs):
            yield iter(worker.loader(data, **options))
    else:
        loader = worker.loader(data, **options)
        for _ in loader.epochs(loop.epochs) if loop.form == "epochs" else range(loop.epochs):
            yield iter(loader)


def train(worker: ps.Worker, loop: Loop) -> dict[str, Any]:
    """What this rank's last incarnation has done: its clocks, its steps, what it has reduced."""
    counts = {name: nn.Parameter(torch.zeros(SIZE)) for name in ("first", "second")}
    if loop.optimizers == "one":
        del counts["second"]
    models = {name: nn.ParameterList([param]) for name, param in counts.items()}
    optimizers = {
        name: worker.optimizer(
            each, torch.optim.SGD(each.parameters(), lr=1.0), name=name, weight=1.0
        )
        for name, each in models.items()
    }
    done, reduced = 0, []
    for batches in rounds(worker, loop):
        for (batch,) in batches:
            number = sum(worker.client.clock(name) for name in optimizers)
            names = [*optimizers]
            if loop.optimizers == "in turn":
                names = [names[number % 2]]
            if worker.rank == loop.slow:
                time.sleep(SLOW_S)
            for name in names:
                optimizers[name].zero_grad()
                (-counts[name][batch].sum()).backward()
                optimizers[name].step()
            done += 1
            if (worker.rank, worker.incarnation, done) == (1, 1, loop.dies_at):
                os.kill(os.getpid(), signal.SIGKILL)
        if loop.reduces:
            reduced.append(worker.all_reduce(float(worker.rank), op="max"))
    clocks = [worker.client.clock(name) for name in optimizers]
    return {"clocks": clocks, "done": done, "reduced": reduced, "missed": worker.missed}

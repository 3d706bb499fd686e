"""Training functions that count: each sample's parameter is how often it is in the values."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIZE = 90


class Numbers(Dataset[int]):
    """Sample i is i."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


class Counts(nn.Module):
    """A step of SGD with lr 1 on the sum of losses adds 1 for each sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SIZE))

    def losses(self, batch: torch.Tensor) -> torch.Tensor:
        return -self.seen[batch]


def count(
    worker: Any,
    *,
    name: str = "model",
    consistency: Any = None,
    epochs: int = 2,
    own: bool = False,
    num_workers: int = 0,
    dies_at: int = 0,
    overlap: bool = False,
    weighted: bool = False,
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0),
    others_wait_for: str = "",
    **options: Any,
) -> list[int]:
    """Step with each batch of a leased loader.

    Args:
        name: of the group, whose policy is `consistency` if that is not the run's.
        own: over a `DataLoader` of one's own.
        dies_at: step of rank 1, from 1, that is its first incarnation's last: with `overlap` the
            process ends while that step is on its way, else before it.
        weighted: step with the mean loss, and leave it to the optimizer to weigh it.
        seconds: that a sample takes, by rank.
        others_wait_for: a path. The other ranks begin when rank 1 makes this file, in its last
            step: else they might take all samples before it has so many.
    Returns:
        The size of each batch.
    """
    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight = None if weighted else 1.0
    settings = {"name": name, "consistency": consistency}
    worker.optimizer(model, optimizer, overlap=overlap, weight=weight, **settings)
    options = {"batch_size": 4, "epochs": epochs, **options}
    if own:
        sampler = worker.sampler(Numbers(), shards="dynamic", **options)
        loading = DataLoader(Numbers(), batch_sampler=sampler, num_workers=num_workers)
        loader = sampler.until_done(loading)
    else:
        loader = worker.loader(Numbers(), shards="dynamic", num_workers=num_workers, **options)
    sizes: list[int] = []
    while others_wait_for and worker.rank != 1 and not Path(others_wait_for).exists():
        time.sleep(0.005)
    for batch in loader:
        time.sleep(len(batch) * seconds[worker.rank])
        sizes.append(len(batch))
        dies = worker.rank == 1 and worker.incarnation == 1 and len(sizes) == dies_at
        if dies and not overlap:
            os.kill(os.getpid(), signal.SIGKILL)
        if dies and others_wait_for:
            Path(others_wait_for).touch()
        optimizer.zero_grad()
        losses = model.losses(batch)
        (losses.mean() if weighted else losses.sum()).backward()
        optimizer.step()
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
    return sizes


def count_in_turn(worker: Any, cases: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Count with one loader after the other, each for a group of its own."""
    return {name: count(worker, name=name, **options) for name, options in cases.items()}

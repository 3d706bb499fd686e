"""Training that goes on from checkpoints: with all that a worker's own state is made of."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import Dataset

import paramserve as ps

PAUSE_S = 0.004


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Draws from Python's and numpy's generators when a sample is loaded, as transforms do."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        sample = torch.linspace(-1, 1, 8) * (1 + index % 7) + random.random()
        return sample + float(np.random.rand()), torch.tensor([index / 96])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.out = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.dropout(F.relu(self.norm(self.first(x))), 0.2, self.training))


def digest(*parts: Any) -> str:
    """Digest of tensors and numbers, bit by bit."""
    found = hashlib.sha256()
    for part in parts:
        for name, value in part.items():
            found.update(name.encode())
            found.update(np.asarray(value).tobytes())
    return found.hexdigest()


STEPS_OF_EPOCH = 6


def train(worker: ps.Worker, epochs: int, told: str = "") -> dict[str, Any]:
    """Adam with dropout, BatchNorm, shuffling, transforms that draw, a schedule, and a generator of
    the program's own.

    Args:
        told: a file that rank 0 writes its clock to at each step, which then takes a while.

    Returns:
        Of this rank: sha256 of the model and the optimizer's state, and what its generators draw.
    """
    own = torch.Generator().manual_seed(worker.rank)
    own.set_state(worker.saved("own", own.get_state()))
    worker.save("own", own.get_state)
    losses = worker.saved("losses", [])
    worker.save("losses", lambda: losses)
    model = Net()
    adam = Adam(model.parameters(), lr=0.01)
    schedule = ExponentialLR(adam, 0.9)
    optimizer = worker.optimizer(model, adam, schedulers=[schedule])
    loader = worker.loader(Noisy(), batch_size=8)
    for _ in loader.epochs(epochs):
        for inputs, goals in loader:
            if told:
                time.sleep(PAUSE_S)
                if worker.rank == 0:
                    Path(told).write_text(f"{worker.clock:9}")
            optimizer.zero_grad()
            weight = torch.rand(1, generator=own)
            loss = (weight * (model(inputs) - goals).square()).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        schedule.step()
    state = {
        f"{index}.{name}": value
        for index, each in enumerate(optimizer.state_dict()["state"].values())
        for name, value in each.items()
    }
    return {
        "clock": worker.clock,
        "model": digest(model.state_dict()),
        "state": digest(state),
        "losses": losses,
        "rate": optimizer.param_groups[0]["lr"],
        "drawn": (random.random(), float(np.random.rand()), float(torch.rand(1))),
        "own": float(torch.rand(1, generator=own)),
    }

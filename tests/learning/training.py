"""Models, data and training functions of the tests in this folder; workers import this module."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from tests.unit.pytorch.hosts import host
from torch import nn
from torch.utils.data import TensorDataset

from paramserve.client.loop_progress import LoopProgress
from paramserve.pytorch.loader import load

SEEDS = (1, 2, 3)
BATCH = 16
STEPS = 8

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6),
}


def dataset(samples: int = 1600) -> TensorDataset:
    """Ten patterns of 12 x 12 under noise as strong as they are."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 12, 12, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    noise = torch.randn(samples, 1, 12, 12, generator=generator)
    return TensorDataset(patterns[labels] + noise, labels)


class ConvNet(nn.Module):
    """The ConvNet of the demo, wider: 84 KB, so that two servers share it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.conv = nn.Conv2d(1, 8, 3)
            self.hidden = nn.Linear(72, 256)
            self.out = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(F.max_pool2d(self.conv(images), 3)).flatten(1)
        return F.log_softmax(self.out(F.relu(self.hidden(features))), dim=1)


class NormNet(nn.Module):
    """BatchNorm, tied layers and a frozen layer, which is the same with every seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.fixed = nn.Linear(144, 32)
            torch.manual_seed(seed)
            self.norm = nn.BatchNorm1d(32)
            self.first = nn.Linear(32, 32)
            self.second = nn.Linear(32, 32)
            self.out = nn.Linear(32, 10)
        self.second.weight = self.first.weight
        self.fixed.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.relu(self.norm(self.fixed(images.flatten(1))))
        features = F.relu(self.second(F.relu(self.first(features))))
        return F.log_softmax(self.out(features), dim=1)


def part_of(rank: int, workers: int, seed: int) -> Any:
    """What the loader needs of a worker."""
    client: Any = SimpleNamespace(
        rank=rank,
        connection=SimpleNamespace(before=0, restarts=False, incarnation=1),
        steps=SimpleNamespace(loop=LoopProgress(), clocks={}, missed_by={}),
    )
    return host(client, rank=rank, workers=workers, seed=seed)


def run_name(kind: str, seed: int) -> str:
    return f"{kind}-{seed}"


def train_all(worker: Any) -> None:
    """One after the other, every optimizer with every seed, each as a group of its own; then
    weighted gradients."""
    for kind, build in OPTIMIZERS.items():
        for seed in SEEDS:
            model = ConvNet(seed if worker.rank == 0 else 99)
            optimizer = worker.optimizer(model, build(model), name=run_name(kind, seed))
            mine = part_of(worker.rank, worker.workers, seed)
            for images, labels in load(mine, dataset(), batch_size=BATCH, steps=STEPS):
                optimizer.zero_grad()
                F.nll_loss(model(images), labels).backward()
                optimizer.step()
    train_weighted(worker)


def train_from_loader(worker: Any) -> list[float]:
    """Train as a user writes it: values and batches are drawn from the run's seed. Returns the
    losses."""
    model = ConvNet(int(torch.randint(1 << 30, ())))
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    losses = []
    for images, labels in worker.loader(dataset(), batch_size=BATCH, steps=STEPS):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_weighted(worker: Any) -> None:
    """Rank r has r + 1 times as many samples in each step; its weight says so. Clipped."""
    model = ConvNet(5)
    sizes: list[int] = []
    optimizer = worker.optimizer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        name="weighted",
        weight=lambda: sizes[-1],
        clip_norm=0.2,
    )
    for images, labels in weighted_batches(worker.rank):
        sizes.append(len(labels))
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()


def weighted_batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    size = 8 * (rank + 1)
    return [dataset()[100 * k + 30 * rank : 100 * k + 30 * rank + size] for k in range(STEPS)]


def train_to_learn(worker: Any) -> None:
    """Long enough to learn. One process on the joined batches gets 98% of the samples right, also
    with gradients that are 3 updates old; with momentum 0.9 these would give 28%.
    """
    model = ConvNet(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.5)
    worker.optimizer(model, optimizer, overlap=True)
    for images, labels in worker.loader(dataset(), batch_size=32, steps=150):
        optimizer.zero_grad()
        loss = F.nll_loss(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        worker.log(loss=loss)


def accuracy(model: nn.Module) -> float:
    images, labels = dataset().tensors
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def train_norm_net(worker: Any) -> Any:
    """GradScaler, a group added later, a round trip of the state; returns what rank 0 ends with."""
    model = NormNet(worker.rank + 1)
    first = [*model.norm.parameters(), *model.first.parameters(), model.second.bias]
    optimizer = worker.optimizer(model, torch.optim.AdamW(first, lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (images, labels) in enumerate(worker.loader(dataset(), batch_size=32, steps=24)):
        if step == 5:
            optimizer.add_param_group({"params": model.out.parameters(), "lr": 0.02})
        if step == 15:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
        scaler.scale(F.nll_loss(model(images), labels)).backward()
        if step == 10 and worker.rank == 1:
            model.out.bias.grad[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    state = optimizer.state_dict()
    steps = [int(entry["step"]) for entry in state["state"].values()]
    return {name: value.numpy() for name, value in model.state_dict().items()}, steps

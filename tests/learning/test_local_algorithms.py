"""Own steps in whole runs: LocalSteps is a sequential program, ElasticAverage learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.learning import training
from torch import nn

import paramserve as ps
from paramserve.consistency.built_in import ElasticAverage, LocalSteps
from paramserve.pytorch.loader import load

WORKERS = 2
EVERY = 4
STEPS = 18
"""Four exchanges, and a rest of two steps."""
SEED = 3
LR = 0.05
Arrays = dict[str, Any]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)


def own_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor
) -> None:
    optimizer.zero_grad()
    F.nll_loss(model(images), labels).backward()
    optimizer.step()


def train_local(worker: Any) -> tuple[Arrays, int]:
    """Returns the values after the last whole exchange, and the steps of the local state."""
    model = training.ConvNet(5 if worker.rank == 0 else 99)
    optimizer = worker.optimizer(model, adam(model))
    values: Arrays = {}
    batches = worker.loader(training.dataset(), batch_size=training.BATCH, steps=STEPS)
    for step, batch in enumerate(batches, 1):
        own_step(model, optimizer, *batch)
        if step % EVERY == 0:
            values = {name: value.numpy().copy() for name, value in model.state_dict().items()}
    return values, int(optimizer.state_dict()["state"][0]["step"])


def sequential() -> dict[str, torch.Tensor]:
    """DiLoCo of two workers as one program."""
    center = training.ConvNet(5)
    outer = torch.optim.SGD(center.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    models = [training.ConvNet(5) for _ in range(WORKERS)]
    optimizers = [adam(model) for model in models]
    loaders = [
        load(
            training.part_of(rank, WORKERS, SEED),
            training.dataset(),
            batch_size=training.BATCH,
            steps=STEPS,
        )
        for rank in range(WORKERS)
    ]
    for step, batches in enumerate(zip(*loaders, strict=True), 1):
        for model, optimizer, batch in zip(models, optimizers, batches, strict=True):
            own_step(model, optimizer, *batch)
        if step % EVERY and step < STEPS:
            continue
        for param, *ends in zip(
            center.parameters(), *(model.parameters() for model in models), strict=True
        ):
            param.grad = torch.stack([(param - end).detach() for end in ends]).mean(0)
        outer.step()
        for model in models:
            model.load_state_dict(center.state_dict())
    return center.state_dict()


def test_local_steps_equal_a_sequential_program() -> None:
    result = ps.run(
        train_local,
        workers=WORKERS,
        servers=2,
        consistency=LocalSteps(every=EVERY),
        seed=SEED,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    (first, steps), (second, other_steps) = result.returns[0], result.returns[1]
    assert steps == other_steps == STEPS, "each worker's own state"
    for name, value in first.items():
        assert (value == second[name]).all(), name
    trained = result.state_dict()
    for name, value in sequential().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(trained[name], torch.from_numpy(first[name])), "the rest counts"


def train_elastic(worker: Any) -> float:
    """Returns the share that the worker's own values get right."""
    model = training.ConvNet(1)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    for batch in worker.loader(training.dataset(), batch_size=32, steps=150):
        own_step(model, optimizer, *batch)
    return training.accuracy(model)


@pytest.mark.slow
def test_elastic_average_center_learns() -> None:
    result = ps.run(
        train_elastic,
        workers=WORKERS,
        servers=2,
        consistency=ElasticAverage(rho=0.9 / WORKERS / LR, every=EVERY),
        seed=SEED,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )
    center = training.ConvNet(1)
    assert training.accuracy(center) < 0.3, "guessing gives 0.1"
    center.load_state_dict(result.state_dict())
    assert training.accuracy(center) > 0.8
    assert all(own > 0.8 for own in result.returns.values())

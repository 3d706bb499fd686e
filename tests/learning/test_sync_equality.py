"""A synchronous run is the sequential computation: to the bit, and to rounding the joined batch."""

from __future__ import annotations

import functools
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.learning import training
from tests.suites import each_case

import paramserve as ps
from paramserve.pytorch.loader import load
from paramserve.rules.adam import Adam
from paramserve.rules.base import PushInfo, Run
from paramserve.rules.sgd import SGD

WORKERS = 3
CASES = list(product(training.OPTIMIZERS, training.SEEDS))
RULES = {"SGD": SGD(lr=0.05, momentum=0.9), "Adam": Adam(lr=1e-3, eps=1e-6)}
Values = dict[str, torch.Tensor]


@functools.cache
def run_with(servers: int) -> ps.Result:
    return ps.run(
        training.train_all,
        workers=WORKERS,
        servers=servers,
        consistency=ps.Sync(reduce="mean"),
        seed=1,
        engine=ps.Local(threads_per_worker=1),
        timeout_s=100,
    )


@pytest.fixture(params=[1, 2], ids=["1 server", "2 servers"])
def run(request: pytest.FixtureRequest) -> ps.Result:
    return run_with(request.param)


def batches(seed: int) -> list[tuple[tuple[torch.Tensor, torch.Tensor], ...]]:
    """For each step, every rank's batch."""
    loaders = [
        load(
            training.part_of(rank, WORKERS, seed),
            training.dataset(),
            batch_size=training.BATCH,
            steps=training.STEPS,
        )
        for rank in range(WORKERS)
    ]
    return list(zip(*loaders, strict=True))


def gradient_of(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    model.zero_grad()
    F.nll_loss(model(images), labels).backward()
    return torch.cat([param.grad.flatten() for param in model.parameters()]).numpy()


def sequential(kind: str, seed: int) -> Values:
    """One process: sums the ranks' gradients in rank order, then applies the same rule."""
    rule = RULES[kind]
    model = training.ConvNet(seed)
    value = torch.cat([param.detach().flatten() for param in model.parameters()]).numpy()
    state = rule.init_state(value.size, value.dtype)
    rule.prepare(value.dtype)
    for step, ranks in enumerate(batches(seed)):
        total, *others = [gradient_of(model, *batch) for batch in ranks]
        for other in others:
            total += other
        push = PushInfo(0, step, step, 0, float(WORKERS), 1.0 / WORKERS)
        rule.apply(value, total, state, rule.hyper(), [Run(0, value.size, step)], push)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(value), model.parameters())
        for param in model.parameters():
            param.data = param.data.clone()
    return model.state_dict()


def joined(kind: str, seed: int) -> Values:
    """Plain torch on the joined batch."""
    model = training.ConvNet(seed)
    optimizer = training.OPTIMIZERS[kind](model)
    for ranks in batches(seed):
        images = torch.cat([images for images, _ in ranks])
        labels = torch.cat([labels for _, labels in ranks])
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(("kind", "seed"), CASES)
def test_sync_equals_the_sum_in_rank_order_bit_by_bit(run: ps.Result, kind: str, seed: int) -> None:
    trained = run.state_dict(training.run_name(kind, seed))
    expected = sequential(kind, seed)
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(trained[name], value), name


@each_case(("kind", "seed"), CASES)
def test_sync_equals_torch_on_the_joined_batch(run: ps.Result, kind: str, seed: int) -> None:
    trained = run.state_dict(training.run_name(kind, seed))
    for name, value in joined(kind, seed).items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)


def test_sync_same_run_again_is_bitwise_equal() -> None:
    first, second = (
        ps.run(
            training.train_from_loader,
            workers=2,  # the order of three is in the tests above
            servers=2,
            consistency=ps.Sync(reduce="mean"),
            seed=11,
            engine=ps.Local(threads_per_worker=1),
            timeout_s=100,
        )
        for _ in range(2)
    )
    assert first.returns == second.returns
    values = first.state_dict()
    assert values.keys() == second.state_dict().keys()
    for name, value in values.items():
        assert torch.equal(second.state_dict()[name], value), name


def test_sync_weight_and_clip_norm_equal_torch_on_the_joined_batch(run: ps.Result) -> None:
    trained = run.state_dict("weighted")
    model = training.ConvNet(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ranks = [training.weighted_batches(rank) for rank in range(WORKERS)]
    for step in range(training.STEPS):
        images = torch.cat([each[step][0] for each in ranks])
        labels = torch.cat([each[step][1] for each in ranks])
        optimizer.zero_grad()
        F.nll_loss(model(images), labels).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        assert norm > 0.2, "the test is about clipping"
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=1e-4, atol=1e-6)

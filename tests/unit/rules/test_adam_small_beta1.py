"""Adam's mean of gradients where beta1 is small: a large gradient leaves no rounding behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.rules.rows_in_memory import PUSH, Rows

from paramserve.rules import Adam, Array, Run

GRADIENTS = [1e4, 1e-4, -3.0, 1e-4]
"""float32 has no 1e4 + 1e-4."""


def by_torch(beta1: float, gradients: list[Array]) -> Array:
    parameter = torch.zeros(gradients[0].size, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(beta1, 0.999), foreach=False)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    mean: Array = optimizer.state[parameter]["exp_avg"].numpy()
    return mean


def by_lerp(beta1: float, gradients: list[Array]) -> Array:
    """torch's formula, each operation rounded."""
    mean, weight = np.zeros_like(gradients[0]), np.float32(1.0 - beta1)
    for gradient in gradients:
        if weight < 0.5:
            mean = mean + weight * (gradient - mean)
        else:
            mean = gradient - (gradient - mean) * (np.float32(1) - weight)
    return mean


@pytest.mark.parametrize("beta1", [0.0, 0.3, 0.5, 0.51, 0.9])
def test_mean_of_gradients_is_the_one_that_torchs_lerp_gives(beta1: float) -> None:
    factors = np.random.default_rng(0).uniform(0.5, 1.5, 19)
    gradients = [(each * factors).astype(np.float32) for each in GRADIENTS]
    rule = Adam(lr=0.1, betas=(beta1, 0.999))
    rule.prepare(np.dtype(np.float32))
    value = np.zeros(19, np.float32)
    mean, square = rule.init_state(19, value.dtype)
    rows = Rows(rule, dim=19)
    for count, gradient in enumerate(gradients):
        rule.apply(value, gradient, (mean, square), rule.hyper(), [Run(0, 19, count)], PUSH)
        rows.push([2], gradient[None])
    expected = by_lerp(beta1, gradients)
    assert mean.tolist() == expected.tolist()
    assert rows.floats[2, 19:38].tolist() == expected.tolist()
    np.testing.assert_allclose(mean, by_torch(beta1, gradients), rtol=5e-7)
    if beta1 == 0.0:
        assert mean.tolist() == gradients[-1].tolist()

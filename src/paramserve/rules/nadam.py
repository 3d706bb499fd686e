"""NAdam, as `torch.optim.NAdam` computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.adam import WithBetas
from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, FRACTION, NOT_NEGATIVE, Allowed, Numbers, State

NEGLIGIBLE = 1e-18
"""1 less a product below this is 1, in float64: later factors change nothing."""


@dataclass(frozen=True)
class NAdam(WithBetas):
    """Adam with Nesterov's momentum.

    In this order: `maximize` negates the gradient g; weight decay is g += weight_decay * value,
    or, with `decoupled`, value *= 1 - lr * weight_decay;
    exp_avg += (1 - beta1) * (g - exp_avg); exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g;
    in update t, counted from 1, with mu(t) = beta1 * (1 - 0.5 * 0.96^(t * momentum_decay)), P(t)
    the product of mu(1) to mu(t), and root = sqrt(exp_avg_sq / (1 - beta2^t)) + eps,
    value -= lr * (1 - mu(t)) / (1 - P(t)) * g / root
    + lr * mu(t + 1) / (1 - P(t + 1)) * exp_avg / root.

    P(t) is of the hyper-parameters of this update: torch, which keeps the product, differs where
    beta1 or `momentum_decay` change within the first few hundred updates.

    Example:
        >>> client.define("w", np.zeros(3), rule=NAdam(lr=2e-3))

    Raises:
        ValueError: a number is out of its range.
    Source: torch.optim.NAdam; Dozat, *Incorporating Nesterov Momentum into Adam*, ICLR workshop
        2016.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3
    decoupled: bool = False
    maximize: bool = False

    name: ClassVar[str] = "NAdam"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "beta1": FRACTION,
        "beta2": FRACTION,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "momentum_decay": NOT_NEGATIVE,
        "decoupled": FLAG,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, beta1, beta2, eps, weight_decay, momentum_decay, decoupled, maximize = hyper
        updates = float(count + 1)
        product, mu, following, t = 1.0, 0.0, 0.0, 0
        while t < count + 1 and product > NEGLIGIBLE:
            t += 1
            product *= beta1 * (1.0 - 0.5 * 0.96 ** (float(t) * momentum_decay))
        mu = beta1 * (1.0 - 0.5 * 0.96 ** (updates * momentum_decay))
        following = beta1 * (1.0 - 0.5 * 0.96 ** ((updates + 1.0) * momentum_decay))
        near = lr * (1.0 - mu) / (1.0 - product)
        far = lr * following / (1.0 - product * following)
        root = math.sqrt(1.0 - beta2**updates)
        decay, shrink = (0.0, 1.0 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
        signed = -scale if maximize else scale
        return signed, decay, shrink, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, near, far

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, decay, shrink, take1, beta2, take2, root, eps, near, far = coefficients
        c, wd, keep, t1 = kind(scale), kind(decay), kind(shrink), kind(take1)
        b2, t2, r, e = kind(beta2), kind(take2), kind(root), kind(eps)
        by_gradient, by_mean = kind(near), kind(far)
        from_gradient = t1 >= kind(0.5)
        way = t1 - kind(1.0) if from_gradient else t1
        mean, square = state
        for i in range(value.size):
            d = c * gradient[i] + wd * value[i]
            mi = (d if from_gradient else mean[i]) + way * (d - mean[i])
            si = b2 * square[i] + t2 * d * d
            mean[i] = mi
            square[i] = si
            below = np.sqrt(si) / r + e
            value[i] = keep * value[i] - (by_gradient * d + by_mean * mi) / below

    def counted(self, hyper: Hyper) -> bool:
        """Each row is corrected for its own start."""
        return True

    def product(self, count: int) -> float:
        """P of so many updates: what torch keeps as `mu_product`."""
        product = 1.0
        for t in range(1, count + 1):
            product *= self.betas[0] * (1.0 - 0.5 * 0.96 ** (t * self.momentum_decay))
            if product < NEGLIGIBLE:
                break
        return product

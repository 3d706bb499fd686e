"""LAMB: Adam whose step is as large as each tensor asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.adam import WithBetas
from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, FRACTION, NOT_NEGATIVE, Allowed, Numbers, State


@dataclass(frozen=True)
class LAMB(WithBetas):
    """Adam's direction, scaled to the norm of the tensor that it changes: for large batches.

    In this order: `maximize` negates the gradient g; exp_avg = beta1 * exp_avg + (1 - beta1) * g;
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g; in update t, counted from 1,
    r = exp_avg / (1 - beta1^t) / (sqrt(exp_avg_sq / (1 - beta2^t)) + eps) + weight_decay * value;
    value -= lr * ratio * r, where ratio is the L2 norm of the tensor divided by that of r, and 1
    where one of them is 0. Norms are summed in float64.

    Each tensor is whole on one server. Only for dense parameters.

    Example:
        >>> client.define("w", np.ones(3), rule=LAMB(lr=1e-3, weight_decay=0.01))

    Raises:
        ValueError: a number is out of its range; or a table is defined with it.
    Source: You et al., *Large Batch Optimization for Deep Learning*, ICLR 2020 (arXiv 1904.00962),
        algorithm 2, with phi the identity.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    name: ClassVar[str] = "LAMB"
    whole_tensors: ClassVar[bool] = True
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "beta1": FRACTION,
        "beta2": FRACTION,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, beta1, beta2, eps, decay, maximize = hyper
        updates = float(count + 1)
        start, root = 1.0 - beta1**updates, math.sqrt(1.0 - beta2**updates)
        signed = -scale if maximize else scale
        return signed, beta1, 1.0 - beta1, beta2, 1.0 - beta2, start, root, eps, decay, lr

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, beta1, take1, beta2, take2, _, _, _, _, _ = coefficients
        c, b1, t1, b2, t2 = kind(scale), kind(beta1), kind(take1), kind(beta2), kind(take2)
        mean, square = state
        for i in range(value.size):
            d = c * gradient[i]
            mean[i] = b1 * mean[i] + t1 * d
            square[i] = b2 * square[i] + t2 * d * d

    @staticmethod
    def direction(value: Array, state: State, coefficients: Numbers, out: Array) -> None:
        kind = value.dtype.type
        _, _, _, _, _, start, root, eps, decay, _ = coefficients
        s, r, e, wd = kind(start), kind(root), kind(eps), kind(decay)
        mean, square = state
        for i in range(value.size):
            out[i] = mean[i] / s / (np.sqrt(square[i]) / r + e) + wd * value[i]

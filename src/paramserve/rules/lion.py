"""Lion: steps of one size, in the direction of a momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.adam import WithBetas
from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, FRACTION, NOT_NEGATIVE, Allowed, Numbers, State


@dataclass(frozen=True)
class Lion(WithBetas):
    """value -= lr * sign of the momentum and the gradient, with one array of state.

    In this order: `maximize` negates the gradient g; value *= 1 - lr * weight_decay;
    value -= lr * sign(beta1 * exp_avg + (1 - beta1) * g);
    exp_avg = beta2 * exp_avg + (1 - beta2) * g. Its paper takes an `lr` of a third to a tenth of
    AdamW's, and a `weight_decay` so many times as large.

    Example:
        >>> client.define("w", np.zeros(3), rule=Lion(lr=1e-4, weight_decay=0.1))

    Raises:
        ValueError: a number is out of its range.
    Source: Chen et al., *Symbolic Discovery of Optimization Algorithms*, NeurIPS 2023 (arXiv
        2302.06675), program 1.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    maximize: bool = False

    name: ClassVar[str] = "Lion"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "beta1": FRACTION,
        "beta2": FRACTION,
        "weight_decay": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, beta1, beta2, decay, maximize = hyper
        signed = -scale if maximize else scale
        return signed, 1.0 - lr * decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, shrink, beta1, take1, beta2, take2, lr = coefficients
        c, keep, b1, t1 = kind(scale), kind(shrink), kind(beta1), kind(take1)
        b2, t2, rate, zero = kind(beta2), kind(take2), kind(lr), kind(0.0)
        mean = state[0]
        for i in range(value.size):
            d, m = c * gradient[i], mean[i]
            way = b1 * m + t1 * d
            sign = kind(way > zero) - kind(way < zero)
            value[i] = keep * value[i] - rate * sign
            mean[i] = b2 * m + t2 * d

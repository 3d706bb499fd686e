"""Adadelta, as `torch.optim.Adadelta` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State

WITHIN_ONE = Allowed("from 0 to 1", lambda x: 0.0 <= x <= 1.0)


@dataclass(frozen=True)
class Adadelta(BuiltIn):
    """Steps as large as the last ones were, for the size that gradients had.

    In this order: `maximize` negates the gradient g; g += weight_decay * value;
    square_avg = rho * square_avg + (1 - rho) * g * g;
    delta = sqrt(acc_delta + eps) / sqrt(square_avg + eps) * g;
    acc_delta = rho * acc_delta + (1 - rho) * delta * delta; value -= lr * delta.

    Example:
        >>> client.define("w", np.zeros(3), rule=Adadelta(rho=0.95))

    Raises:
        ValueError: a number is out of its range.
    Source: torch.optim.Adadelta; Zeiler, 2012 (arXiv 1212.5701).
    """

    lr: float = 1.0
    rho: float = 0.9
    eps: float = 1e-6
    weight_decay: float = 0.0
    maximize: bool = False

    name: ClassVar[str] = "Adadelta"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "rho": WITHIN_ONE,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("square_avg", "acc_delta")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, rho, eps, decay, maximize = hyper
        return -scale if maximize else scale, decay, rho, 1.0 - rho, eps, lr

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, decay, keep, take, eps, lr = coefficients
        c, wd, old, new, e, rate = (
            kind(scale),
            kind(decay),
            kind(keep),
            kind(take),
            kind(eps),
            kind(lr),
        )
        square, moved = state
        for i in range(value.size):
            d = c * gradient[i] + wd * value[i]
            s = old * square[i] + new * d * d
            square[i] = s
            delta = np.sqrt(moved[i] + e) / np.sqrt(s + e) * d
            moved[i] = old * moved[i] + new * delta * delta
            value[i] -= rate * delta

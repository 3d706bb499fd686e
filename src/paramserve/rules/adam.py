"""Adam and AdamW, as `torch.optim.Adam` computes them; and what rules with two betas share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, FRACTION, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State


class WithBetas(BuiltIn):
    """Base of rules with `betas`: a pair as a field, two numbers of the hyper tuple."""

    betas: tuple[float, float]

    def __post_init__(self) -> None:
        if not isinstance(self.betas, tuple | list):
            raise TypeError(f"betas of {self.name} must be two numbers, not {self.betas!r}")
        if len(self.betas) != 2:
            raise ValueError(f"betas of {self.name} must be two numbers, not {self.betas!r}")
        object.__setattr__(self, "betas", tuple(self.betas))
        super().__post_init__()

    def hyper(self) -> Hyper:
        pair = dict(zip(("beta1", "beta2"), self.betas, strict=True))
        names = self.hyper_names
        return tuple(float(pair[n] if n in pair else getattr(self, n)) for n in names)


@dataclass(frozen=True)
class Adam(WithBetas):
    """value -= lr * mean of gradients / root of their mean square, each corrected for its start.

    In this order: `maximize` negates the gradient g; weight decay is g += weight_decay * value,
    or, with `decoupled` (AdamW), value *= 1 - lr * weight_decay;
    exp_avg += (1 - beta1) * (g - exp_avg); exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g * g;
    in update t, counted from 1,
    value -= lr / (1 - beta1^t) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^t) + eps).

    Example:
        >>> client.define("w", np.zeros(3), rule=Adam(lr=1e-3, weight_decay=0.01, decoupled=True))

    Raises:
        ValueError: a number is out of its range.
    Source: torch.optim.Adam and AdamW without amsgrad; Kingma and Ba, ICLR 2015; Loshchilov and
        Hutter, ICLR 2019.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False
    maximize: bool = False

    name: ClassVar[str] = "Adam"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "beta1": FRACTION,
        "beta2": FRACTION,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "decoupled": FLAG,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize = hyper
        updates = float(count + 1)
        root = math.sqrt(1.0 - beta2**updates)
        step = lr / (1.0 - beta1**updates)
        decay, shrink = (0.0, 1.0 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
        signed = -scale if maximize else scale
        return signed, decay, shrink, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, step

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        # For a `take1` of 0.5 or more torch's lerp computes the mean from the gradient.
        kind = value.dtype.type
        scale, decay, shrink, take1, beta2, take2, root, eps, step = coefficients
        c, wd, keep, rate = kind(scale), kind(decay), kind(shrink), kind(step)
        t1, b2, t2, r, e = kind(take1), kind(beta2), kind(take2), kind(root), kind(eps)
        near = t1 >= kind(0.5)
        way = t1 - kind(1.0) if near else t1
        mean, square = state
        for i in range(value.size):
            d = c * gradient[i] + wd * value[i]
            mi = (d if near else mean[i]) + way * (d - mean[i])
            si = b2 * square[i] + t2 * d * d
            mean[i] = mi
            square[i] = si
            value[i] = keep * value[i] - rate * (mi / (np.sqrt(si) / r + e))

    def counted(self, hyper: Hyper) -> bool:
        """Each row is corrected for its own start: what is called lazy Adam."""
        return True

"""Adamax, as `torch.optim.Adamax` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.adam import WithBetas
from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, FRACTION, NOT_NEGATIVE, Allowed, Numbers, State


@dataclass(frozen=True)
class Adamax(WithBetas):
    """Adam with the largest size of late gradients in the place of their root mean square.

    In this order: `maximize` negates the gradient g; g += weight_decay * value;
    exp_avg += (1 - beta1) * (g - exp_avg); exp_inf = max(beta2 * exp_inf, |g| + eps); in update t,
    counted from 1, value -= lr / (1 - beta1^t) * exp_avg / exp_inf.

    Example:
        >>> client.define("w", np.zeros(3), rule=Adamax(lr=2e-3))

    Raises:
        ValueError: a number is out of its range.
    Source: torch.optim.Adamax; Kingma and Ba, ICLR 2015, section 7.1.
    """

    lr: float = 2e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False

    name: ClassVar[str] = "Adamax"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "beta1": FRACTION,
        "beta2": FRACTION,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_inf")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, beta1, beta2, eps, decay, maximize = hyper
        step = lr / (1.0 - beta1 ** float(count + 1))
        return -scale if maximize else scale, decay, 1.0 - beta1, beta2, eps, step

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, decay, take, beta2, eps, step = coefficients
        c, wd, new, b2, e, rate = (
            kind(scale),
            kind(decay),
            kind(take),
            kind(beta2),
            kind(eps),
            kind(step),
        )
        near = new >= kind(0.5)
        way = new - kind(1.0) if near else new
        mean, most = state
        for i in range(value.size):
            d = c * gradient[i] + wd * value[i]
            mi = (d if near else mean[i]) + way * (d - mean[i])
            mean[i] = mi
            old, size = b2 * most[i], abs(d) + e
            large = old if old > size else size
            most[i] = large
            value[i] -= rate * (mi / large)

    def counted(self, hyper: Hyper) -> bool:
        """Each row is corrected for its own start."""
        return True

"""RMSprop, as `torch.optim.RMSprop` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State


@dataclass(frozen=True)
class RMSprop(BuiltIn):
    """value -= lr * gradient / root of a running mean of squared gradients, also with momentum.

    In this order: `maximize` negates the gradient g; g += weight_decay * value;
    square_avg = alpha * square_avg + (1 - alpha) * g * g; with `centered`,
    grad_avg += (1 - alpha) * (g - grad_avg) and the root is of square_avg - grad_avg^2, else of
    square_avg; g = g / (root + eps); with momentum, buffer = momentum * buffer + g and g = buffer;
    value -= lr * g.

    Whether a block has a momentum buffer and a mean of gradients is decided when it is defined, by
    `momentum` != 0 and `centered`.

    Example:
        >>> client.define("w", np.zeros(3), rule=RMSprop(lr=1e-3, momentum=0.9))

    Raises:
        ValueError: a number is out of its range; or a push has momentum or `centered`, and the
            block was defined without.
    Source: torch.optim.RMSprop; Hinton, lecture 6e of *Neural Networks for Machine Learning*, 2012;
        centered: Graves, 2013 (arXiv 1308.0850).
    """

    lr: float = 1e-2
    alpha: float = 0.99
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    centered: bool = False
    maximize: bool = False

    name: ClassVar[str] = "RMSprop"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "alpha": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "momentum": NOT_NEGATIVE,
        "centered": FLAG,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("square_avg", "momentum_buffer", "grad_avg")

    def __post_init__(self) -> None:
        super().__post_init__()
        own = self.states(self.hyper())
        object.__setattr__(self, "state_names", own)
        object.__setattr__(self, "_states", len(own))

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        _, _, _, _, momentum, centered, _ = hyper
        for option, number, defined in (
            ("momentum", momentum, self.momentum),
            ("centered", centered, self.centered),
        ):
            if number and not defined:
                raise ValueError(
                    f"RMSprop with {option} {number:g} needs a state that this block was defined "
                    f"without. Applied: no. To fix: define it with RMSprop({option}=...)"
                )

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        _, _, _, _, momentum, centered, _ = hyper
        square, buffer, mean = type(self).state_names
        return (square, *((buffer,) if momentum else ()), *((mean,) if centered else ()))

    def _numbers_of_states(self) -> set[int]:
        return {self._states}

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, alpha, eps, decay, momentum, centered, maximize = hyper
        signed = -scale if maximize else scale
        return signed, decay, alpha, 1.0 - alpha, eps, momentum, centered, lr

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        # The states are the mean of squares, then the buffer and the mean if there are any: with
        # fewer, two of these names are one array, of which a branch that is not taken speaks.
        kind = value.dtype.type
        scale, decay, keep, take, eps, momentum, center, step = coefficients
        c, wd, old, new = kind(scale), kind(decay), kind(keep), kind(take)
        e, mom, rate = kind(eps), kind(momentum), kind(step)
        near = new >= kind(0.5)
        way = new - kind(1.0) if near else new
        square, buffer, mean = state[0], state[min(1, len(state) - 1)], state[len(state) - 1]
        if momentum and center:  # five arrays that are written in one loop would be too many
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                square[i] = old * square[i] + new * d * d
                mean[i] = (d if near else mean[i]) + way * (d - mean[i])
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                root = np.sqrt(square[i] - mean[i] * mean[i])
                buffer[i] = mom * buffer[i] + d / (root + e)
            for i in range(value.size):
                value[i] -= rate * buffer[i]
        elif momentum:
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                si = old * square[i] + new * d * d
                b = mom * buffer[i] + d / (np.sqrt(si) + e)
                square[i] = si
                buffer[i] = b
                value[i] -= rate * b
        elif center:
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                si = old * square[i] + new * d * d
                mi = (d if near else mean[i]) + way * (d - mean[i])
                square[i] = si
                mean[i] = mi
                value[i] -= rate * (d / (np.sqrt(si - mi * mi) + e))
        else:
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                si = old * square[i] + new * d * d
                square[i] = si
                value[i] -= rate * (d / (np.sqrt(si) + e))

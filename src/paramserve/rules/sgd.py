"""Stochastic gradient descent, as `torch.optim.SGD` computes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FINITE, FLAG, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State


@dataclass(frozen=True)
class SGD(BuiltIn):
    """value -= lr * gradient, with weight decay, momentum and Nesterov's momentum.

    In this order: `maximize` negates the gradient g; g += weight_decay * value; with momentum,
    buffer = g in the first update and momentum * buffer + (1 - dampening) * g later, and
    g = g + momentum * buffer with `nesterov`, else buffer; value -= lr * g.

    Whether a block has a momentum buffer is decided when it is defined, by `momentum` != 0.

    Example:
        >>> client.define("w", np.zeros(3), rule=SGD(lr=0.1, momentum=0.9))

    Raises:
        ValueError: a number is out of its range, or `nesterov` without momentum or with dampening.
    Source: torch.optim.SGD, whose first update takes the whole gradient into the buffer, also with
        dampening; Sutskever et al., ICML 2013.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    maximize: bool = False

    name: ClassVar[str] = "SGD"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "momentum": NOT_NEGATIVE,
        "dampening": FINITE,
        "weight_decay": NOT_NEGATIVE,
        "nesterov": FLAG,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    state_if: ClassVar[str] = "momentum"

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        _, momentum, dampening, _, nesterov, _ = hyper
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise ValueError(
                "nesterov of SGD needs momentum above 0 and dampening 0, "
                f"not momentum {momentum} and dampening {dampening}"
            )

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, momentum, dampening, decay, nesterov, maximize = hyper
        keep, take = (momentum, 1.0 - dampening) if count else (0.0, 1.0)
        direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
        signed = -scale if maximize else scale
        return signed, decay, lr, keep, take, direct, through

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, decay, lr, keep, take, direct, through = coefficients
        c, wd, rate = kind(scale), kind(decay), kind(lr)
        old, new, near, far = kind(keep), kind(take), kind(direct), kind(through)
        if len(state) == 0:
            for i in range(value.size):
                value[i] -= rate * (c * gradient[i] + wd * value[i])
        else:
            buffer = state[0]
            for i in range(value.size):
                d = c * gradient[i] + wd * value[i]
                m = old * buffer[i] + new * d
                buffer[i] = m
                value[i] -= rate * (near * d + far * m)

    def counted(self, hyper: Hyper) -> bool:
        """True with dampening, whose first update is unlike all others."""
        return hyper[1] != 0.0 and hyper[2] != 0.0

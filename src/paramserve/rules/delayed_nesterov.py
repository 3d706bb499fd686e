"""Nesterov's momentum of gradients that come one by one from many workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FRACTION, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State


@dataclass(frozen=True)
class DelayedNesterov(BuiltIn):
    """Each gradient moves the values at once; the momentum is renewed after every `pushes` of them.

    Applied at each of the gradients that several workers send asynchronously, Nesterov's momentum
    amplifies those that are stale. Here a gradient g counts g / pushes when it comes, and the
    momentum takes the mean of `pushes` of them when the last one is there. In update t, counted
    from 1, with sum += g:

    - t is a multiple of `pushes`: buffer = momentum * buffer + sum / pushes;
      value -= lr * ((1 - activation * (pushes - 1)) * momentum * buffer + g / pushes); sum = 0.
    - else: value -= lr * (activation * momentum * buffer + g / pushes).

    Example:
        >>> outer = DelayedNesterov(lr=0.7, momentum=0.9, pushes=4)  # of four workers

    Attributes:
        pushes: gradients between two changes of the momentum: as many as there are workers.
        activation: the part of the momentum that each other gradient moves the values by, at most
            1 / pushes.
    Raises:
        ValueError: a number is out of its range.
    Source: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato, *Asynchronous Local-SGD
        Training for Language Modeling*, 2024 (arXiv 2401.09135), algorithm 3, with N = pushes and
        c = activation.
    """

    lr: float = 0.7
    momentum: float = 0.9
    pushes: int = 1
    activation: float = 0.0

    name: ClassVar[str] = "DelayedNesterov"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "momentum": FRACTION,
        "pushes": NOT_NEGATIVE,
        "activation": NOT_NEGATIVE,
    }
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer", "sum")

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        _, _, pushes, activation = hyper
        if pushes < 1.0 or pushes != int(pushes):
            raise ValueError(
                f"pushes of DelayedNesterov must be a whole number of at least 1, not {pushes:g}"
            )
        if activation > 1.0 / pushes:
            raise ValueError(
                f"activation of DelayedNesterov must be at most 1 / pushes = {1.0 / pushes:g}, not "
                f"{activation:g}"
            )

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, momentum, pushes, activation = hyper
        if (count + 1) % int(pushes) == 0:
            part = (1.0 - activation * (pushes - 1.0)) * momentum
            return scale, lr, 1.0 / pushes, momentum, 1.0 / pushes, 0.0, part
        return scale, lr, 1.0 / pushes, 1.0, 0.0, 1.0, activation * momentum

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, lr, share, keep, take, remain, through = coefficients
        c, rate, near = kind(scale), kind(lr), kind(share)
        old, new, rest, far = kind(keep), kind(take), kind(remain), kind(through)
        buffer, total = state
        for i in range(value.size):
            d = c * gradient[i]
            s = total[i] + d
            m = old * buffer[i] + new * s
            buffer[i] = m
            total[i] = rest * s
            value[i] -= rate * (far * m + near * d)

    def counted(self, hyper: Hyper) -> bool:
        """Each row's momentum is renewed after so many gradients of its own."""
        return True

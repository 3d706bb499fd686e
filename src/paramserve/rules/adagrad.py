"""Adagrad: steps that shrink with what a number, or a row, has been given so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import FLAG, NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State
from paramserve.rules.layout import LANES


@dataclass(frozen=True)
class Adagrad(BuiltIn):
    """value -= lr * gradient / root of the sum of all squared gradients so far.

    In this order: `maximize` negates the gradient g; g += weight_decay * value; sum += g * g; in
    update t, counted from 1, value -= lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps).
    The sum starts at `initial_accumulator_value`.

    Whether a table counts each row's updates is decided when it is defined, by `lr_decay` != 0.

    Example:
        >>> users = client.table("users", dim=64, rule=Adagrad(lr=0.05))

    Raises:
        ValueError: a number is out of its range.
    Source: torch.optim.Adagrad; Duchi et al., JMLR 2011.
    """

    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10
    maximize: bool = False

    name: ClassVar[str] = "Adagrad"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "lr_decay": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    state_start: ClassVar[str] = "initial_accumulator_value"

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, lr_decay, decay, eps, maximize = hyper
        step = lr / (1.0 + float(count) * lr_decay)
        return -scale if maximize else scale, decay, eps, step

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, decay, eps, step = coefficients
        c, wd, e, rate = kind(scale), kind(decay), kind(eps), kind(step)
        total = state[0]
        for i in range(value.size):
            d = c * gradient[i] + wd * value[i]
            ti = total[i] + d * d
            total[i] = ti
            value[i] -= rate * (d / (np.sqrt(ti) + e))

    def counted(self, hyper: Hyper) -> bool:
        """True with `lr_decay`."""
        return hyper[1] != 0.0


@dataclass(frozen=True)
class RowAdagrad(BuiltIn):
    """Adagrad with one sum for each row of a table: of the mean of its squared gradients.

    In this order: `maximize` negates the row's gradient g; g += weight_decay * value;
    sum += mean(g * g); value -= lr / (sqrt(sum) + eps) * g. The sum starts at
    `initial_accumulator_value`. Its state is one float for a row, where Adagrad's is as large as
    the row.

    Only for tables: a dense parameter has no rows.

    Example:
        >>> users = client.table("users", dim=64, rule=RowAdagrad(lr=0.05))

    Raises:
        ValueError: a number is out of its range; or a dense parameter is defined with it.
    Source: FBGEMM's EXACT_ROWWISE_ADAGRAD, with its weight decay in mode L2.
    """

    lr: float = 1e-2
    weight_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-8
    maximize: bool = False

    name: ClassVar[str] = "RowAdagrad"
    whole_rows: ClassVar[bool] = True
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    state_start: ClassVar[str] = "initial_accumulator_value"

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        lr, decay, eps, maximize = hyper
        return -scale if maximize else scale, decay, eps, lr

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        # The mean is summed in an order that is the same on every machine.
        kind = value.dtype.type
        scale, decay, eps, lr = coefficients
        c, wd, e, rate = kind(scale), kind(decay), kind(eps), kind(lr)
        total, sums = state
        size = value.size
        whole = size // LANES * LANES
        for lane in range(LANES):
            sums[lane] = 0.0
        for at in range(0, whole, LANES):
            v, g = value[at : at + LANES], gradient[at : at + LANES]
            for lane in range(LANES):
                d = c * g[lane] + wd * v[lane]
                sums[lane] += d * d
        for j in range(whole, size):
            d = c * gradient[j] + wd * value[j]
            sums[j - whole] += d * d
        for width in (8, 4, 2, 1):
            for lane in range(width):
                sums[lane] += sums[lane + width]
        total[0] += sums[0] / kind(size)
        step = rate / (np.sqrt(total[0]) + e)
        for j in range(size):
            value[j] -= step * (c * gradient[j] + wd * value[j])

    def row_states(self, dim: int) -> tuple[int, ...]:
        """One number for each row."""
        return (1,)

    def initial_row(self, dim: int) -> Array:
        """The initial accumulator value."""
        return np.full(1, self.initial_accumulator_value, np.float32)

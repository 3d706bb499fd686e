"""Adagrad: steps that shrink with what a number, or a row, has been given so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paramserve.rules.allowed import FLAG, NOT_NEGATIVE, Allowed, check_hyper
from paramserve.rules.base import NO_ROWS, Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

_STARTS: Mapping[str, Allowed] = {"initial_accumulator_value": NOT_NEGATIVE}
"""What is fixed when a parameter is defined, and does not travel with a push."""


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
    kernel: ClassVar[str] = "adagrad"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "lr_decay": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hyper(self.name, _STARTS, (float(self.initial_accumulator_value),))

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return (np.full(size, self.initial_accumulator_value, dtype),)

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        lr, lr_decay, decay, eps, maximize = hyper
        (total,) = state
        scale = -push.scale if maximize else push.scale
        target = out if out is not None else value[:0]
        adagrad = compiled().adagrad
        for start, stop, count, _ in runs:
            step = lr / (1.0 + count * lr_decay)
            adagrad(value, gradient, total, target, start, stop, scale, decay, eps, step)

    def counted(self, hyper: Hyper) -> bool:
        """With `lr_decay`."""
        return hyper[1] != 0.0

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        lr, lr_decay, decay, eps, maximize = hyper
        rows = compiled_rows()
        (at,) = view.layout.state_at
        scale = -push.scale if maximize else push.scale
        given = rows.rows_of(view, gradients)
        rows.adagrad(given, at, scale, decay, eps, lr, lr_decay)


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
    kernel: ClassVar[str] = "row_adagrad"
    whole_rows: ClassVar[bool] = True
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "eps": NOT_NEGATIVE,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("sum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_hyper(self.name, _STARTS, (float(self.initial_accumulator_value),))

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        raise ValueError(NO_ROWS.format(self.name))

    def block_kernels(self, dtype: np.dtype[Any]) -> Kernels:
        """It has no kernel for dense parameters."""
        return {}

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        raise ValueError(NO_ROWS.format(self.name))

    def row_states(self, dim: int) -> tuple[int, ...]:
        """One number for each row."""
        return (1,)

    def initial_row(self, dim: int) -> Array:
        """The initial accumulator value."""
        return np.full(1, self.initial_accumulator_value, np.float32)

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        lr, decay, eps, maximize = hyper
        rows = compiled_rows()
        (at,) = view.layout.state_at
        scale = -push.scale if maximize else push.scale
        rows.row_adagrad(rows.rows_of(view, gradients), at, scale, decay, eps, lr)

"""Adam and AdamW, as `torch.optim.Adam` computes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.allowed import FLAG, FRACTION, NOT_NEGATIVE, Allowed
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView


@dataclass(frozen=True)
class Adam(BuiltIn):
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
    kernel: ClassVar[str] = "adam"
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        super().__post_init__()

    def hyper(self) -> Hyper:
        return (
            float(self.lr),
            *(float(beta) for beta in self.betas),
            float(self.eps),
            float(self.weight_decay),
            float(self.decoupled),
            float(self.maximize),
        )

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
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize = hyper
        mean, square = state
        scale = -push.scale if maximize else push.scale
        decay, shrink = (0.0, 1.0 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
        target = out if out is not None else value[:0]
        adam = compiled().adam
        for start, stop, count, _ in runs:
            root = math.sqrt(1.0 - beta2 ** (count + 1))
            step = lr / (1.0 - beta1 ** (count + 1))
            adam(
                value, gradient, mean, square, target, start, stop,
                scale, decay, shrink, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, step,
            )  # fmt: skip

    def counted(self, hyper: Hyper) -> bool:
        """Each row is corrected for its own start: what is called lazy Adam."""
        return True

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        lr, beta1, beta2, eps, weight_decay, decoupled, maximize = hyper
        rows = compiled_rows()
        scale = -push.scale if maximize else push.scale
        decay, shrink = (0.0, 1.0 - lr * weight_decay) if decoupled else (weight_decay, 1.0)
        rows.adam(
            rows.rows_of(view, gradients), view.layout.state_at[0],
            scale, decay, shrink, beta1, beta2, eps, lr,
        )  # fmt: skip

"""Stochastic gradient descent, as `torch.optim.SGD` computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.allowed import FINITE, FLAG, NOT_NEGATIVE, Allowed
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView


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
    kernel: ClassVar[str] = "sgd"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "lr": NOT_NEGATIVE,
        "momentum": NOT_NEGATIVE,
        "dampening": FINITE,
        "weight_decay": NOT_NEGATIVE,
        "nesterov": FLAG,
        "maximize": FLAG,
    }
    state_names: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def check(self, hyper: Hyper) -> None:
        super().check(hyper)
        _, momentum, dampening, _, nesterov, _ = hyper
        if nesterov and (momentum == 0.0 or dampening != 0.0):
            raise ValueError(
                "nesterov of SGD needs momentum above 0 and dampening 0, "
                f"not momentum {momentum} and dampening {dampening}"
            )

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        return self.state_names if hyper[1] != 0.0 else ()

    def kernels(self) -> tuple[str, ...]:
        """With momentum, the one without as well: a push may turn it off."""
        return ("sgd", "sgd_momentum") if self.states(self.hyper()) else ("sgd",)

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
        """As `Rule.apply`.

        Raises:
            ValueError: `hyper` has momentum and the block was defined without. Nothing was applied.
        """
        lr, momentum, dampening, decay, nesterov, maximize = hyper
        scale = -push.scale if maximize else push.scale
        target = out if out is not None else value[:0]
        if momentum == 0.0:
            sgd = compiled().sgd
            for start, stop, *_ in runs:
                sgd(value, gradient, target, start, stop, scale, decay, lr)
            return
        if not state:
            raise ValueError(
                f"SGD with momentum {momentum} needs a momentum_buffer, and this block was "
                "defined without momentum. Applied: no. To fix: define it with "
                "SGD(momentum=...) above 0"
            )
        direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
        sgd_momentum = compiled().sgd_momentum
        for start, stop, count, _ in runs:
            keep, take = (momentum, 1.0 - dampening) if count else (0.0, 1.0)
            sgd_momentum(
                value, gradient, state[0], target, start, stop,
                scale, decay, keep, take, direct, through, lr,
            )  # fmt: skip

    def counted(self, hyper: Hyper) -> bool:
        """With dampening, whose first update is unlike all others."""
        return hyper[1] != 0.0 and hyper[2] != 0.0

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        lr, momentum, dampening, decay, nesterov, maximize = hyper
        rows = compiled_rows()
        given = rows.rows_of(view, gradients)
        scale = -push.scale if maximize else push.scale
        if momentum == 0.0:
            rows.sgd(given, scale, decay, lr)
            return
        direct, through = (1.0, momentum) if nesterov else (0.0, 1.0)
        (at,) = view.layout.state_at
        rows.sgd_momentum(given, at, scale, decay, momentum, dampening, direct, through, lr)

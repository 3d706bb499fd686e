"""FTRL-proximal: sparse linear models, learned online."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paramserve.rules.allowed import NOT_NEGATIVE, Allowed, check_hyper
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowLayout, RowView

_POSITIVE = Allowed("a finite number above 0", lambda x: 0.0 < x < math.inf)


@dataclass(frozen=True)
class FTRL:
    """Follow the regularised leader: Adagrad's steps, and values of exactly 0 with `l1`.

    For each element, with gradient g and n = 0, z = 0 at the start:
    sigma = (sqrt(n + g * g) - sqrt(n)) / alpha; z += g - sigma * value; n += g * g; then
    value = 0 if |z| <= l1, else (sign(z) * l1 - z) / ((beta + sqrt(n)) / alpha + l2).

    The method is made for values that start at 0. One that starts elsewhere is pulled to where
    (z, n) put it by its first update.

    Example:
        >>> weights = client.table("w", dim=1, rule=FTRL(alpha=0.1, l1=1.0), init=ps.Zeros())

    Raises:
        ValueError: a number is out of its range.
    Source: McMahan et al., KDD 2013, algorithm 1.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0

    name: ClassVar[str] = "FTRL"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "alpha": _POSITIVE,
        "beta": NOT_NEGATIVE,
        "l1": NOT_NEGATIVE,
        "l2": NOT_NEGATIVE,
    }
    hyper_names: ClassVar[tuple[str, ...]] = tuple(allowed)
    state_names: ClassVar[tuple[str, ...]] = ("z", "n")

    def __post_init__(self) -> None:
        self.check(self.hyper())

    def hyper(self) -> Hyper:
        return (float(self.alpha), float(self.beta), float(self.l1), float(self.l2))

    def check(self, hyper: Hyper) -> None:
        check_hyper(self.name, self.allowed, hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        return self.state_names

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return tuple(np.zeros(size, dtype) for _ in self.state_names)

    def prepare(self, dtype: np.dtype[Any]) -> None:
        compiled().load(dtype, compiled().ftrl)

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
        linear, square = state
        target = out if out is not None else value[:0]
        ftrl = compiled().ftrl
        for start, stop, *_ in runs:
            ftrl(value, gradient, linear, square, target, start, stop, push.scale, *hyper)

    def counted(self, hyper: Hyper) -> bool:
        return False

    def prepare_rows(self, layout: RowLayout) -> None:
        compiled_rows().load(compiled_rows().ftrl)

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        rows = compiled_rows()
        at = view.layout.state_at[0]
        rows.ftrl(rows.rows_of(view, gradients), at, push.scale, *hyper)

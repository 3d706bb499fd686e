"""FTRL-proximal: sparse linear models, learned online."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.allowed import NOT_NEGATIVE, Allowed
from paramserve.rules.base import Array, Hyper, PushInfo, Run
from paramserve.rules.built_in import BuiltIn
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView

_POSITIVE = Allowed("a finite number above 0", lambda x: 0.0 < x < math.inf)


@dataclass(frozen=True)
class FTRL(BuiltIn):
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
    kernel: ClassVar[str] = "ftrl"
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "alpha": _POSITIVE,
        "beta": NOT_NEGATIVE,
        "l1": NOT_NEGATIVE,
        "l2": NOT_NEGATIVE,
    }
    state_names: ClassVar[tuple[str, ...]] = ("z", "n")

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

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        rows = compiled_rows()
        at = view.layout.state_at[0]
        rows.ftrl(rows.rows_of(view, gradients), at, push.scale, *hyper)

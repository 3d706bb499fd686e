"""FTRL-proximal: sparse linear models, learned online."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import NOT_NEGATIVE, Allowed, BuiltIn, Numbers, State

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
    allowed: ClassVar[Mapping[str, Allowed]] = {
        "alpha": _POSITIVE,
        "beta": NOT_NEGATIVE,
        "l1": NOT_NEGATIVE,
        "l2": NOT_NEGATIVE,
    }
    state_names: ClassVar[tuple[str, ...]] = ("z", "n")

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        alpha, beta, l1, l2 = hyper
        return scale, alpha, beta, l1, l2

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        kind = value.dtype.type
        scale, alpha, beta, l1, l2 = coefficients
        c, rate, b = kind(scale), kind(alpha), kind(beta)
        most, ridge, zero = kind(l1), kind(l2), kind(0.0)
        linear, square = state
        for i in range(value.size):
            d = c * gradient[i]
            si = square[i] + d * d
            root = np.sqrt(si)
            zi = linear[i] + (d - (root - np.sqrt(square[i])) / rate * value[i])
            linear[i] = zi
            square[i] = si
            over = min(max(zi, -most), most) - zi
            # With beta and l2 of 0, an element whose gradients were all 0 would be 0 / 0.
            value[i] = over / ((b + root) / rate + ridge) if over != zero else zero

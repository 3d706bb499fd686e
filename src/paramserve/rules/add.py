"""Adding what was pushed: the rule of a plain key-value store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paramserve.rules.base import Array, Hyper
from paramserve.rules.built_in import BuiltIn, Numbers, State


@dataclass(frozen=True)
class Add(BuiltIn):
    """value += gradient

    Example:
        >>> client.define("w", np.zeros(3), rule=Add())
        >>> client.push("w", np.ones(3))
    """

    name: ClassVar[str] = "Add"

    @staticmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        return (scale,)

    @staticmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        c = value.dtype.type(coefficients[0])
        for i in range(value.size):
            value[i] += c * gradient[i]

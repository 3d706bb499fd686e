"""How much a gradient counts, by its staleness. Each is called with the staleness, an int >= 0."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from paramserve.consistency.base import number


@dataclass(frozen=True)
class Inverse:
    """1 / (1 + alpha * staleness).

    Source: Zhang, Gupta, Lian, Liu, *Staleness-aware async-SGD*, IJCAI 2016, divides the learning
    rate by the staleness; alpha = 1 does so.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        number("alpha of Inverse", self.alpha)

    def __call__(self, staleness: int) -> float:
        return 1.0 / (1.0 + self.alpha * staleness)


@dataclass(frozen=True)
class Exponential:
    """exp(-alpha * staleness)."""

    alpha: float = 0.1

    def __post_init__(self) -> None:
        number("alpha of Exponential", self.alpha)

    def __call__(self, staleness: int) -> float:
        return exp(-self.alpha * staleness)


@dataclass(frozen=True)
class Polynomial:
    """(1 + staleness) ** -exponent.

    Source: Nguyen et al., *Federated Learning with Buffered Asynchronous Aggregation*, AISTATS
    2022, use exponent = 1/2.
    """

    exponent: float = 0.5

    def __post_init__(self) -> None:
        number("exponent of Polynomial", self.exponent)

    def __call__(self, staleness: int) -> float:
        return float((1.0 + staleness) ** -self.exponent)


DAMPINGS = (Inverse, Exponential, Polynomial)

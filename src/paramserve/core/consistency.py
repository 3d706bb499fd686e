"""When a gradient is applied, and when a reader may read: policies decide, the shard acts.

A policy is a frozen, checked value object without state. Everything it may look at is an argument,
so that it can be tested without a cluster and sent to a server by name and options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from paramserve.config import PolicySpec
from paramserve.errors import UnknownRule

OnNonFinite = Literal["refuse", "skip"]


class Decision(Enum):
    """What a shard does with a gradient that has arrived."""

    APPLY = "apply"
    """Now, and alone."""
    COLLECT = "collect"
    """Keep it unapplied until the lead shard commits the clock."""


@runtime_checkable
class Consistency(Protocol):
    """A waiting rule. The shard asks at each push and each pull of a worker."""

    @property
    def on_nonfinite(self) -> OnNonFinite: ...

    def on_push(self, clock: int) -> Decision:
        """What to do with a gradient that ends or belongs to its worker's `clock`."""
        ...

    def on_pull(self, clock: int) -> int:
        """Clocks that every live worker must have finished before a worker at `clock` may read."""
        ...

    def scale(self, weight: float) -> float:
        """What the sum of a clock's gradients is multiplied by; `weight` is their total weight."""
        ...


def _check_nonfinite(value: str) -> None:
    if value not in ("refuse", "skip"):
        raise ValueError(f'on_nonfinite must be "refuse" or "skip", not {value!r}')


@dataclass(frozen=True)
class Sync:
    """All live workers' gradients of a clock are applied together, or none of them.

    A run is bit-for-bit repeatable: sums are taken in rank order. With "mean" the sum is divided
    by the sum of the weights (1 each unless the worker says otherwise).

    Args:
        reduce: "mean" or "sum" over the workers.
        on_nonfinite: "refuse" raises `NonFinite` in the worker that brings NaN or Inf; "skip"
            applies nothing at that clock, on all shards alike, and counts it.
    """

    reduce: Literal["mean", "sum"] = "mean"
    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f'reduce must be "mean" or "sum", not {self.reduce!r}')
        _check_nonfinite(self.on_nonfinite)

    def on_push(self, clock: int) -> Decision:
        return Decision.COLLECT

    def on_pull(self, clock: int) -> int:
        return clock

    def scale(self, weight: float) -> float:
        return 1.0 / weight if self.reduce == "mean" else 1.0


@dataclass(frozen=True)
class Async:
    """Each gradient is applied when it arrives; nobody waits for anybody.

    Args:
        on_nonfinite: "refuse" raises `NonFinite` in the worker that brings NaN or Inf; "skip"
            drops that gradient and counts it.
    """

    on_nonfinite: OnNonFinite = "refuse"

    def __post_init__(self) -> None:
        _check_nonfinite(self.on_nonfinite)

    def on_push(self, clock: int) -> Decision:
        return Decision.APPLY

    def on_pull(self, clock: int) -> int:
        return 0

    def scale(self, weight: float) -> float:
        return 1.0


BUILT_IN: Mapping[str, type[Sync] | type[Async]] = {"Sync": Sync, "Async": Async}


def spec(policy: Consistency) -> PolicySpec:
    """The policy as data: what travels to a server.

    Raises:
        TypeError: `policy` is not one of the built-in policies.
    """
    if not isinstance(policy, Sync | Async):
        raise TypeError(
            f"consistency must be one of {', '.join(BUILT_IN)} (an object, as in ps.Async()), "
            f"not {policy!r}"
        )
    return PolicySpec(type(policy).__name__, asdict(policy))


def build(policy: PolicySpec) -> Consistency:
    """The policy that a spec describes.

    Raises:
        UnknownRule: no built-in policy has this name. Nothing was applied.
    """
    kind = BUILT_IN.get(policy.name)
    if kind is None:
        raise UnknownRule(
            f"unknown consistency policy {policy.name!r}; known: {', '.join(BUILT_IN)}",
            fix="use one of the known policies",
        )
    return kind(**policy.options)  # type: ignore[arg-type]  # __post_init__ checks the values

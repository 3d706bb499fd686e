"""What the policies compute, once more: plain numpy, one gradient after the other.

A schedule says in which order one shard saw reads, gradients and changes of the membership. Each
function goes through it and gives the values after each entry. Nothing here is shared with the
servers' own code, so that the two can be compared. Whom a policy waits for is not decided here: the
schedule has happened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Read(NamedTuple):
    """A worker read the values."""

    worker: int


class Pushed(NamedTuple):
    """A worker's gradient came, computed from what it read last."""

    worker: int
    gradient: Array
    factor: float = 1.0
    """The worker's own (`Worker.factor`)."""
    weight: float = 1.0
    """Samples behind it."""
    clock: int = 0
    """Clock of the worker: for `synchronous` only."""


class Live(NamedTuple):
    """Event from which on so many workers are there."""

    workers: int


Entry = Read | Pushed | Live
Damping = Callable[[int], float]


class Plain(Protocol):
    """A rule with its state inside."""

    def step(
        self, value: Array, gradient: Array, momentum_reduction: float = 0.0, lr_scale: float = 1.0
    ) -> Array:
        """The new value.

        Args:
            momentum_reduction: is subtracted from the momentum, for this step.
            lr_scale: multiplies the learning rate, for this step.
        """
        ...


@dataclass
class PlainSGD:
    """torch.optim.SGD without weight decay."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    buffer: Array | None = None

    def step(
        self, value: Array, gradient: Array, momentum_reduction: float = 0.0, lr_scale: float = 1.0
    ) -> Array:
        lr = self.lr * lr_scale
        if self.momentum == 0.0:
            return value - lr * gradient
        momentum = max(0.0, self.momentum - momentum_reduction)
        if self.buffer is None:
            self.buffer = gradient.copy()
        else:
            self.buffer = momentum * self.buffer + (1.0 - self.dampening) * gradient
        if self.nesterov:
            return value - lr * (gradient + momentum * self.buffer)
        return value - lr * self.buffer


@dataclass
class PlainAdam:
    """torch.optim.Adam without weight decay."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    steps: int = 0
    mean: Array | None = None
    square: Array | None = None

    def step(
        self, value: Array, gradient: Array, momentum_reduction: float = 0.0, lr_scale: float = 1.0
    ) -> Array:
        beta1, beta2 = max(0.0, self.betas[0] - momentum_reduction), self.betas[1]
        mean = self.mean if self.mean is not None else np.zeros_like(value)
        square = self.square if self.square is not None else np.zeros_like(value)
        self.steps += 1
        self.mean = beta1 * mean + (1.0 - beta1) * gradient
        self.square = beta2 * square + (1.0 - beta2) * gradient * gradient
        right_mean = self.mean / (1.0 - beta1**self.steps)
        right_square = self.square / (1.0 - beta2**self.steps)
        return value - self.lr * lr_scale * right_mean / (np.sqrt(right_square) + self.eps)


def asynchronous(
    first: Array,
    schedule: Sequence[Entry],
    rule: Plain,
    *,
    damping: Damping | None = None,
    drop_after: int | None = None,
    corrected: bool = False,
    lam: float = 0.0,
) -> list[Array]:
    """`Async`, `BoundedStaleness` and, with `lam`, `DelayCompensated`.

    Args:
        first: values before the first entry; the results have its dtype.
        schedule: what happened, in order.
        rule: fresh.
        damping: of the learning rate, by the gradient's staleness: updates since its worker's read.
        drop_after: a gradient of more staleness does nothing.
        corrected: whether the rule's momentum is lowered by 1 - 1 / workers, not below 0.
        lam: of g + lam * g * g * (value now - value read).
    Returns:
        The values after each entry.
    """
    value, version, workers = first.copy(), 0, 1
    read: dict[int, tuple[int, Array]] = {}
    found = []
    for entry in schedule:
        match entry:
            case Live(workers):
                pass
            case Read(worker):
                read[worker] = version, value.copy()
            case Pushed(worker, gradient, factor):
                since, base = read.get(worker, (0, first))
                staleness = version - since
                if drop_after is None or staleness <= drop_after:
                    used = gradient + lam * gradient * gradient * (value - base)
                    less = 1.0 - 1.0 / max(workers, 1) if corrected else 0.0
                    rate = damping(staleness) if damping is not None else 1.0
                    value = rule.step(value, (factor * used).astype(first.dtype), less, rate)
                    version += 1
        found.append(value.astype(first.dtype))
    return found


def buffered(
    first: Array,
    schedule: Sequence[Entry],
    rule: Plain,
    *,
    size: int,
    damping: Damping | None = None,
) -> list[Array]:
    """`Buffered`: one update for each `size` gradients, and one when the last worker has left.

    Arguments and result: as for `asynchronous`.
    """
    value, version = first.copy(), 0
    read: dict[int, int] = {}
    buffer: list[Array] = []
    found = []
    for entry in schedule:
        full = False
        match entry:
            case Live(workers):
                full = workers == 0 and bool(buffer)
            case Read(worker):
                read[worker] = version
            case Pushed(worker, gradient, factor):
                staleness = version - read.get(worker, 0)
                counts = factor * (damping(staleness) if damping is not None else 1.0)
                buffer.append(gradient * counts)
                full = len(buffer) >= size
        if full:
            mean = np.sum(buffer, axis=0) / len(buffer)
            value = rule.step(value, mean.astype(first.dtype))
            version += 1
            buffer = []
        found.append(value.astype(first.dtype))
    return found


def synchronous(
    first: Array,
    schedule: Sequence[Entry],
    rule: Plain,
    *,
    reduce: str = "mean",
    backup: int = 0,
) -> list[Array]:
    """`Sync`: one update for each clock, with the gradients that all but `backup` workers pushed.

    A gradient of a clock that has been decided does nothing. One counts for weight * factor; the
    mean is the weighted sum divided by what all of them count for.

    Arguments and result: as for `asynchronous`.
    """
    value, clock, workers = first.copy(), 0, 1
    there: dict[int, Pushed] = {}
    found = []
    for entry in schedule:
        if isinstance(entry, Live):
            workers = entry.workers
        elif isinstance(entry, Pushed) and entry.clock == clock:
            there[entry.worker] = entry
        if there and len(there) >= workers - backup:
            parts = [there[rank] for rank in sorted(there)]
            counts = [each.factor * each.weight for each in parts]
            total = np.sum([c * p.gradient for c, p in zip(counts, parts, strict=True)], axis=0)
            if reduce == "mean":
                total = total / sum(counts)
            value = rule.step(value, total.astype(first.dtype))
            clock, there = clock + 1, {}
        found.append(value.astype(first.dtype))
    return found


def local_steps(
    first: Array, gradients: Sequence[Sequence[Sequence[Array]]], rule: Plain, *, lr: float
) -> list[Array]:
    """`LocalSteps` of workers that step with plain gradient descent.

    Args:
        first: values before the first round.
        gradients: of each round, worker and own step.
        rule: the outer one, fresh.
        lr: of the workers' own steps.
    Returns:
        The servers' values after each round.
    """
    value, found = first.copy(), []
    for of_workers in gradients:
        changes = []
        for own in of_workers:
            mine = value.copy()
            for gradient in own:
                mine = mine - lr * gradient
            changes.append(value - mine)
        value = rule.step(value, np.mean(changes, axis=0).astype(first.dtype))
        found.append(value.astype(first.dtype))
    return found


@dataclass
class Elastic:
    """`ElasticAverage`: the servers' values and those of each worker.

    Args:
        centre: the servers' first values, with which the workers start, too.
        alpha: lr * rho.
    """

    centre: Array
    alpha: float
    workers: dict[int, Array] = field(default_factory=dict)

    def exchange(self, worker: int, moved: Array) -> None:
        """A worker has moved by itself, and meets the servers.

        Args:
            worker: its rank.
            moved: what its own steps since its last exchange have added to its values.
        """
        mine = self.workers.get(worker, self._first) + moved
        pull = self.alpha * (mine - self.centre)
        self.centre = self.centre + pull
        self.workers[worker] = mine - pull

    def __post_init__(self) -> None:
        self._first = self.centre.copy()

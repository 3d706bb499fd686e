"""A table as a Python dictionary for each server, and the row rules once more in numpy.

Nothing here is shared with the servers' code: which server has a key, what a row begins with, how a
rule changes it and which rows go are said again, from what the docs promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from paramserve.core.table.options import Constant, Normal, Uniform, Zeros
from paramserve.rules import FTRL, SGD, Adagrad, Adam, Add, RowAdagrad, Rule

Floats = np.ndarray[Any, np.dtype[np.float32]]
F = np.float32


@dataclass
class Row:
    """What a key has: every field is replaced, and never written into."""

    value: Floats
    state: Floats
    count: int = 0
    used: int = 0
    """The clock of its last use."""


# --- where keys are, and what they begin with ----------------------------------------------------


def splitmix64(key: int) -> int:
    """The hash that tells the server, and that random streams are made of."""
    z = (key + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def server_of(key: int, servers: int) -> int:
    """Server of a key, by the low half of the hash."""
    return splitmix64(key) % 2**32 * servers >> 32


def initial(init: Any, seed: int, name: str, key: int, dim: int) -> Floats:
    """Initial row by (seed, table, key) only; near enough to tell keys and streams apart."""
    stream = int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    state = splitmix64(splitmix64(stream ^ splitmix64(key)) ^ 0x696E697469616C31)
    values = []
    for pair in range((dim + 1) // 2):
        z = splitmix64(state + pair * 0x9E3779B97F4A7C15)
        first, second = ((z >> 32) + 0.5) / 2**32, z % 2**32 / 2**32
        if isinstance(init, Normal):
            radius, angle = math.sqrt(-2.0 * math.log(first)), 2.0 * math.pi * second
            both = (radius * math.cos(angle), radius * math.sin(angle))
            values += [init.mean + init.std * each for each in both]
        elif isinstance(init, Uniform):
            values += [init.low + (init.high - init.low) * each for each in (first, second)]
        else:
            assert isinstance(init, Constant | Zeros), init
            values += [init.value if isinstance(init, Constant) else 0.0] * 2
    return np.array(values[:dim], F)


# --- rules ---------------------------------------------------------------------------------------


def _sgd(rule: SGD, row: Row, g: Floats) -> tuple[Floats, Floats]:
    g = (-g if rule.maximize else g) + F(rule.weight_decay) * row.value
    if rule.momentum == 0.0:
        return row.value - F(rule.lr) * g, row.state
    buffer = F(rule.momentum) * row.state + F(1.0 - rule.dampening) * g
    if rule.dampening and row.count == 0:
        buffer = g
    step = g + F(rule.momentum) * buffer if rule.nesterov else buffer
    return row.value - F(rule.lr) * step, buffer


def _adagrad(rule: Adagrad, row: Row, g: Floats) -> tuple[Floats, Floats]:
    g = (-g if rule.maximize else g) + F(rule.weight_decay) * row.value
    total = row.state + g * g
    lr = F(rule.lr / (1.0 + row.count * rule.lr_decay))
    return row.value - lr * (g / (np.sqrt(total) + F(rule.eps))), total


def _row_adagrad(rule: RowAdagrad, row: Row, g: Floats) -> tuple[Floats, Floats]:
    g = (-g if rule.maximize else g) + F(rule.weight_decay) * row.value
    total = row.state + (g * g).sum(dtype=F) / F(g.size)
    return row.value - F(rule.lr) / (np.sqrt(total) + F(rule.eps)) * g, total


def _adam(rule: Adam, row: Row, g: Floats) -> tuple[Floats, Floats]:
    g = -g if rule.maximize else g
    value, t, (beta1, beta2) = row.value, row.count + 1, rule.betas
    if rule.decoupled:
        value = F(1.0 - rule.lr * rule.weight_decay) * value
    else:
        g = g + F(rule.weight_decay) * value
    mean, square = np.split(row.state, 2)
    take = F(1.0 - beta1)
    mean = mean + take * (g - mean) if take < 0.5 else g + (take - F(1)) * (g - mean)
    square = F(beta2) * square + F(1.0 - beta2) * g * g
    root = np.sqrt(square) / F(math.sqrt(1.0 - beta2**t)) + F(rule.eps)
    return value - F(rule.lr / (1.0 - beta1**t)) * (mean / root), np.concatenate([mean, square])


def _ftrl(rule: FTRL, row: Row, g: Floats) -> tuple[Floats, Floats]:
    z, n = np.split(row.state, 2)
    after = n + g * g
    z = z + (g - (np.sqrt(after) - np.sqrt(n)) / F(rule.alpha) * row.value)
    below = (F(rule.beta) + np.sqrt(after)) / F(rule.alpha) + F(rule.l2)
    over = np.sign(z) * F(rule.l1) - z
    with np.errstate(invalid="ignore"):
        value = np.where(np.abs(z) <= F(rule.l1), F(0), over / below)
    return value.astype(F), np.concatenate([z, after])


_FORMULAS: dict[type[Any], Callable[[Any, Row, Floats], tuple[Floats, Floats]]] = {
    Add: lambda _, row, g: (row.value + g, row.state),
    SGD: _sgd,
    Adagrad: _adagrad,
    RowAdagrad: _row_adagrad,
    Adam: _adam,
    FTRL: _ftrl,
}


def updated(rule: Rule, row: Row, gradient: Floats) -> Row:
    """The row after one update, each operation rounded to float32."""
    value, state = _FORMULAS[type(rule)](rule, row, gradient)
    return Row(value, state, row.count + 1, row.used)


def counted(rule: Rule) -> bool:
    """Whether rows keep a count of their updates."""
    return (
        isinstance(rule, Adam)
        or (isinstance(rule, SGD) and bool(rule.momentum and rule.dampening))
        or (isinstance(rule, Adagrad) and rule.lr_decay != 0.0)
    )


def first_state(rule: Rule, dim: int) -> Floats:
    """The rule's state in a fresh row."""
    if isinstance(rule, Adagrad | RowAdagrad):
        width = dim if isinstance(rule, Adagrad) else 1
        return np.full(width, rule.initial_accumulator_value, F)
    width = {Add: 0, SGD: dim if getattr(rule, "momentum", 0.0) else 0}.get(type(rule), 2 * dim)
    return np.zeros(width, F)


# --- which rows are there ------------------------------------------------------------------------


class ModelServer:
    """Rows in the order of their last use, the oldest first.

    Args:
        rows_max: rows that it has, unless a request names more and `lru`.
        lru: whether the least recently used rows go for new ones; else these are refused.
        ttl: clocks that a row stays without use; 0: for ever.
        needed: the push at which a key gets its row.
        fresh: what a key begins with.
    """

    def __init__(
        self, rows_max: int, lru: bool, ttl: int, needed: int, fresh: Callable[[int], Row]
    ) -> None:
        self.rows: dict[int, Row] = {}
        self.dropped = self.created = self.evicted = self.deleted = 0
        self._pushes: dict[int, int] = {}
        self._rows_max, self._lru, self._ttl, self._needed = rows_max, lru, ttl, needed
        self._fresh = fresh
        self._clock = 0

    def use(self, keys: Sequence[int], clock: int, why: str) -> bool:
        """Find or make the rows of keys to "read", "push" or "put"; False: it is full.

        Args:
            keys: as they reach the server. Those of a push are distinct.
        """
        if not keys:
            return True
        self._clock = max(self._clock, clock)
        if self._ttl:
            old = [k for k, row in self.rows.items() if self._clock - row.used > self._ttl]
            self._drop(old)
        if why == "read":
            return True
        absent = [key for key in dict.fromkeys(keys) if key not in self.rows]
        new = absent
        if self._needed > 1 and why == "push":
            new = [key for key in absent if self._pushes.get(key, 0) + 1 >= self._needed]
        there = [key for key in keys if key in self.rows]
        over = len(self.rows) + len(new) - self._rows_max
        if new and over > 0 and not self._lru:
            return False
        if self._needed > 1 and why == "push":
            for key in absent:
                self._pushes[key] = 0 if key in new else self._pushes.get(key, 0) + 1
            self.dropped += len(absent) - len(new)
        for key in there:
            row = self.rows[key] = self.rows.pop(key)
            row.used = self._clock
        if new and over > 0:
            self._drop(list(self.rows)[: min(over, len(self.rows) - len(set(there)))])
        for key in new:
            self.rows[key] = self._fresh(key)
            self.rows[key].used = self._clock
        self.created += len(new)
        return True

    def delete(self, keys: Sequence[int], clock: int) -> int:
        """Forget all of some keys; how many rows there were."""
        self.use(keys, clock, "read")
        removed = {key for key in keys if key in self.rows}
        for key in keys:
            self.rows.pop(key, None)
            self._pushes.pop(key, None)
        self.deleted += len(removed)
        return len(removed)

    def _drop(self, keys: list[int]) -> None:
        for key in keys:
            del self.rows[key]
        self.evicted += len(keys)

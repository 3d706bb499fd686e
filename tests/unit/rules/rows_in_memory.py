"""A few rows of a table, as a server has them."""

from __future__ import annotations

from typing import Any

import numpy as np

from paramserve.rules import Array, PushInfo, Rule
from paramserve.rules.rows import RowView, apply_rows, initial_state, prepare_rows, row_layout

PUSH = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)
ROWS, DIM = 6, 7


class Rows:
    """A few rows in memory."""

    def __init__(self, rule: Rule, dtype: str = "float32", dim: int = DIM) -> None:
        self.rule = rule
        self.layout = row_layout(rule, dim, dtype)
        prepare_rows(rule)
        self.floats = np.zeros((ROWS, self.layout.words), np.float32)
        at = self.layout.value_words
        self.floats[:, at : at + self.layout.state_words] = initial_state(rule, self.layout)

    def push(self, slots: list[int], gradients: Array, push: PushInfo = PUSH, **hyper: Any) -> None:
        at = np.array(slots, np.int64)
        view = RowView(self.floats, self.floats.view(np.uint32), self.layout, at, at + 100, 7)
        rule = type(self.rule)(**hyper) if hyper else self.rule
        apply_rows(self.rule, view, gradients, rule.hyper(), push)

    @property
    def values(self) -> Array:
        return self.floats[:, : self.layout.dim]


def numbers(*shape: int, seed: int = 0) -> Array:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

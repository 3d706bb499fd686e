"""One line for any value: arrays by their shape, the rest up to a length."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tests.suites import each_case

from paramserve.launch.abbreviation import abbreviated


class Raises:
    def __repr__(self) -> str:
        raise LookupError


@each_case(
    ("value", "text"),
    [
        ({0: 0.25, 1: None}, "{0: 0.25, 1: None}"),
        ({0: torch.ones(3, 4)}, "{0: Tensor(shape=(3, 4))}"),
        ({0: {"w": np.ones(3)}}, "{0: {'w': ndarray(shape=(3,))}}"),
        (torch.tensor(0.25), "tensor(0.2500)"),
        ([*range(100)], "[0, 1, 2, 3, 4, 5, 6, 7, ...]"),
        ("two\nlines", r"'two\nlines'"),
        (torch.nn.Linear(1, 1), "Linear(in_features=1, out_features=1, bias=True)"),
    ],
)
def test_value_is_one_short_line(value: object, text: str) -> None:
    assert abbreviated(value) == text


@each_case(
    "value", [{rank: ["x" * 1000] * 1000 for rank in range(1000)}, "x" * 10**6, Raises(), 10**2000]
)
def test_value_of_any_size_is_short(value: Any) -> None:
    assert len(abbreviated(value)) < 8 * 8 * 100

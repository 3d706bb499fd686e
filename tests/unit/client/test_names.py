"""Names of tensors, and what may be written to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.suites import each_case
from tests.unit.client.fakes import block_of

from paramserve.client.names import NamedPiece, Names, as_rows, as_tensors
from paramserve.compiling import load_kernels


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    load_kernels(np.dtype(np.float32))
    load_kernels(np.dtype(np.float64))


@pytest.fixture
def names() -> Names:
    names = Names()
    names.add(block_of({"a": (2, 3), "b": (4,)}))
    return names


def test_names_find_blocks_once_in_the_order_of_the_names(names: Names) -> None:
    names.add(block_of({"c": (1,)}, number=1))
    assert [block.id for block in names.blocks(["c", "b", "a"])] == [1, 0]
    assert "a" in names
    assert "x" not in names


@each_case("bad", [np.nan, np.inf, -np.inf])
@each_case("dtype", [np.float64, np.float32])
def test_fill_tells_what_is_not_finite(names: Names, bad: float, dtype: type) -> None:
    gradient = np.ones((2, 3), dtype)
    gradient[1, 2] = bad
    piece, flat = names.piece("a"), np.zeros(10)
    assert piece.fill(flat, gradient, False) == np.inf
    flat[:6] = gradient.reshape(-1)
    assert piece.fill(flat, piece.view(flat), True) == np.inf


def test_fill_of_what_overflows_the_parameters_dtype_is_not_finite() -> None:
    piece = NamedPiece(block_of({"w": (2,)}, dtype="float32"), 0)
    assert piece.fill(np.zeros(2, np.float32), np.full(2, 1e200), False) == np.inf


def test_trained_parameters_are_taken_with_their_present_values(names: Names) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
    for array in (
        names.piece("b").checked(parameter),
        as_tensors("b", parameter)[0].array,
        as_rows([3], parameter.reshape(1, 4), 4, "users")[1],
    ):
        assert array.reshape(-1).tolist() == [1.0] * 4

"""Names of tensors, and what may be written to them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.client.fakes import block_of

from paramserve.client.names import NamedPiece, Names, as_tensors
from paramserve.compiling import load_kernels
from paramserve.errors import DtypeMismatch, ShapeMismatch, UnknownName


@pytest.fixture
def names() -> Names:
    names = Names()
    names.add(block_of({"a": (2, 3), "b": (4,)}))
    return names


def test_as_tensors_takes_one_name_or_a_mapping() -> None:
    assert [t.name for t in as_tensors("w", [1.0])] == ["w"]
    assert [t.name for t in as_tensors({"b": 1.0, "a": 2.0}, None)] == ["b", "a"]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("w", None, TypeError),
        ({"w": 1.0}, 1.0, TypeError),
        ({}, None, ValueError),
        (3, 1.0, TypeError),
        ("", 1.0, TypeError),
        ({3: 1.0}, None, TypeError),
        ({"a": np.ones(1), "b": np.ones(1, np.float32)}, None, TypeError),
        ("w", np.ones(1, np.float16), TypeError),
        ("w", True, TypeError),
    ],
)
def test_as_tensors_refuses_anything_else(
    name: object, value: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        as_tensors(name, value)


def test_names_find_blocks_once_in_the_order_of_the_names(names: Names) -> None:
    names.add(block_of({"c": (1,)}, number=1))
    assert [block.id for block in names.blocks(["c", "b", "a"])] == [1, 0]
    assert "a" in names
    assert "x" not in names


def test_name_of_two_groups_is_ambiguous(names: Names) -> None:
    names.remember(("a",), names.blocks(["a"]))
    names.add(block_of({"a": (1,)}, number=1, group="other"))
    assert names.known(("a",)) is None
    with pytest.raises(UnknownName, match="several groups: default, other"):
        names.blocks(["a"])
    with pytest.raises(UnknownName, match="no parameter is named 'x'"):
        names.piece("x")


@pytest.mark.parametrize("value", [np.ones((2, 3), np.float32), np.ones((2, 3)).tolist()])
def test_value_of_the_shape_and_kind_is_taken(names: Names, value: object) -> None:
    assert names.checked("a", value).shape == (2, 3)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (np.ones((3, 2)), ShapeMismatch),
        (np.ones(6), ShapeMismatch),
        (np.ones((2, 3), int), DtypeMismatch),
        (np.ones((2, 3), bool), DtypeMismatch),
        (np.ones((2, 3), complex), DtypeMismatch),
    ],
)
def test_value_of_another_shape_or_kind_is_refused(
    names: Names, value: np.ndarray, error: type[Exception]
) -> None:
    with pytest.raises(error):
        names.checked("a", value)


@pytest.mark.parametrize(
    "gradient",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6.0, dtype=np.float32).reshape(2, 3),
        np.arange(6.0).reshape(3, 2).T.copy(order="F"),
        np.arange(12.0).reshape(4, 3)[::2],
        np.broadcast_to(2.0, (2, 3)),
    ],
    ids=["plain", "float32", "fortran", "strided", "read-only"],
)
def test_fill_writes_only_its_place(names: Names, gradient: np.ndarray) -> None:
    piece = names.piece("a")
    flat = np.full(10, -1.0)
    assert piece.fill(flat, gradient, False)
    assert np.array_equal(flat[:6].reshape(2, 3), gradient)
    assert (flat[6:] == -1.0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_fill_tells_what_is_not_finite(names: Names, bad: float, dtype: type) -> None:
    gradient = np.ones((2, 3), dtype)
    gradient[1, 2] = bad
    piece, flat = names.piece("a"), np.zeros(10)
    assert not piece.fill(flat, gradient, False)
    flat[:6] = gradient.reshape(-1)
    assert not piece.fill(flat, piece.view(flat), True)


def test_fill_of_a_transposed_view_of_the_same_place_is_copied() -> None:
    piece = NamedPiece(block_of({"s": (2, 2)}), 0)
    flat = np.arange(4.0)
    assert piece.fill(flat, piece.view(flat).T, True)
    assert flat.tolist() == [0.0, 2.0, 1.0, 3.0]


def test_read_copies_unless_told_otherwise(names: Names) -> None:
    piece, flat = names.piece("b"), np.arange(10.0)
    copy = piece.read(flat, None, True)
    view = piece.read(flat, None, False)
    target = np.zeros(4)
    assert piece.read(flat, target, False) is target
    flat[:] = -1.0
    assert copy.tolist() == target.tolist() == [6.0, 7.0, 8.0, 9.0]
    assert view.tolist() == [-1.0] * 4
    assert (view.flags.writeable, flat.flags.writeable) == (False, True)


def test_fill_of_what_overflows_the_parameters_dtype_is_not_finite() -> None:
    load_kernels(np.dtype(np.float32))
    piece = NamedPiece(block_of({"w": (2,)}, dtype="float32"), 0)
    assert not piece.fill(np.zeros(2, np.float32), np.full(2, 1e200), False)

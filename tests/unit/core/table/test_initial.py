"""What rows begin with."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contract.table_model import splitmix64
from tests.suites import each_case
from tests.unit.core.table.rig import STREAM, keys_of, read, store_of

from paramserve.core.table.options import Constant, Init, Normal, TableOptions, Uniform, Zeros
from paramserve.core.table.store import Purpose, RowStore
from paramserve.rules.layout import RowLayout

NONE = np.empty(0, np.float32)

MANY = 4000


def drawn(
    init: Init, dim: int, keys: int = MANY, dtype: str = "float32"
) -> npt.NDArray[np.float32]:
    return read(store_of(TableOptions(init), dim=dim, dtype=dtype), range(keys))


def normal(key: int, element: int) -> float:
    """Box and Muller's method, with the system's logarithm and cosine."""
    state = splitmix64(splitmix64(STREAM ^ splitmix64(key)) ^ 0x696E697469616C31)
    z = splitmix64(state + element // 2 * 0x9E3779B97F4A7C15)
    radius = math.sqrt(-2.0 * math.log(((z >> 32) + 0.5) / 2**32))
    turn = math.sin if element % 2 else math.cos
    return radius * turn(2.0 * math.pi * (z % 2**32) / 2**32)


@each_case("dim", [1, 2, 7, 128, 129])
def test_normal_is_box_mullers(dim: int) -> None:
    got = drawn(Normal(2.0, 3.0), dim, keys=40)
    expected = [[2.0 + 3.0 * normal(key, j) for j in range(dim)] for key in range(40)]
    np.testing.assert_allclose(got, expected, rtol=2e-7, atol=2e-7)


def test_normal_has_its_moments() -> None:
    x = drawn(Normal(1.0, 2.0), 50).astype(np.float64)
    z = (x - 1.0) / 2.0
    error = 5.0 / math.sqrt(z.size)
    assert abs(z.mean()) < error
    assert abs((z**2).mean() - 1.0) < error * math.sqrt(2)
    assert abs((z**3).mean()) < error * math.sqrt(15)
    assert abs((z**4).mean() - 3.0) < error * math.sqrt(96)
    assert abs(np.corrcoef(z.T) - np.eye(50)).max() < 6.0 / math.sqrt(MANY)
    neighbours = np.corrcoef(z[:-1, 0], z[1:, 0])[0, 1]
    assert abs(neighbours) < 5.0 / math.sqrt(MANY)


def test_uniform_has_its_moments_and_bounds() -> None:
    x = drawn(Uniform(-1.0, 3.0), 50).astype(np.float64)
    assert -1.0 <= x.min() < -0.999
    assert 2.999 < x.max() <= 3.0
    u = (x + 1.0) / 4.0
    error = 5.0 / math.sqrt(u.size)
    for power in range(1, 5):
        assert abs((u**power).mean() - 1.0 / (power + 1)) < error
    assert abs(np.corrcoef(u.T) - np.eye(50)).max() < 6.0 / math.sqrt(MANY)


@each_case("dtype", ["float32", "bfloat16", "float16"])
def test_constant_is_one_value_the_nearest_of_its_dtype(dtype: str) -> None:
    nearest = {"float32": np.float32(0.1), "bfloat16": 0.10009765625, "float16": np.float16(0.1)}
    assert (drawn(Constant(0.1), 3, 9, dtype) == nearest[dtype]).all()
    assert not drawn(Zeros(), 3, 9, dtype).any()


@each_case("dtype", ["bfloat16", "float16"])
@each_case("dim", [1, 4, 5])
def test_16_bit_rows_begin_with_the_nearest_value(dtype: str, dim: int) -> None:
    exact = drawn(Normal(std=3.0), dim, 500)
    got = drawn(Normal(std=3.0), dim, 500, dtype)
    if dtype == "float16":
        assert (got == exact.astype(np.float16)).all()
    else:
        half = np.uint32(0x8000)
        bits = ((exact.view(np.uint32) + half) & np.uint32(0xFFFF0000)).view(np.float32)
        assert (got == bits).all()


@settings(max_examples=15)
@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20),
    st.sampled_from(["float32", "bfloat16", "float16"]),
)
def test_initial_value_depends_on_the_key_only(keys: list[int], dtype: str) -> None:
    """Not on who else is asked for, nor when, nor on whether it has a row."""
    options = TableOptions(Normal(std=1.0))
    alone = {key: read(store_of(options, dtype=dtype), [key])[0].tobytes() for key in keys}
    store = store_of(options, dtype=dtype)
    order = sorted(keys, key=lambda key: splitmix64(key ^ len(keys)))
    for purpose in (Purpose.READ, Purpose.PUSH, Purpose.PUT, Purpose.READ):
        got = read(store, order, purpose)
        assert [row.tobytes() for row in got] == [alone[key] for key in order]


def test_initial_value_of_another_table_is_another() -> None:
    layout = RowLayout(8, "float32")
    stores = [
        RowStore(layout, NONE, TableOptions(Normal()), stream) for stream in (1, 2, 2**64 - 1)
    ]
    got = [read(store, [5]).tobytes() for store in stores]
    assert len(set(got)) == 3


def test_wider_rows_begin_as_narrow_ones() -> None:
    wide, narrow = drawn(Normal(), 300, 20), drawn(Normal(), 7, 20)
    assert (wide[:, :7] == narrow).all()


def test_initial_values_go_where_positions_say() -> None:
    store, keys = store_of(), keys_of([4, 5, 4])
    rows = store.take(keys, 0, Purpose.READ).rows
    out = np.full((5, 3), 9.0, np.float32)
    store.read(rows, keys, out, np.array([3, 0, 2], np.int32))
    assert (out[[3, 0, 2]] == read(store, keys.tolist())).all()
    assert (out[[1, 4]] == 9.0).all()


@each_case("dtype", ["float32", "bfloat16"])
@each_case("purpose", [Purpose.PUT, Purpose.READ])
def test_nothing_is_written_at_positions_that_are_not_there(dtype: str, purpose: Purpose) -> None:
    """Clients can change them after they were checked."""
    store, keys = RowStore(RowLayout(3, dtype), NONE, TableOptions(Normal()), 1), keys_of(range(4))
    rows = store.take(keys, 0, purpose).rows
    memory = np.full((4, 3), 9.0, np.float32)
    store.read(rows, keys, memory[1:3], np.array([-1, 2, 2**31 - 1, -(2**31)], np.int32))
    assert (memory == 9.0).all()

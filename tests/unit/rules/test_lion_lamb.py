"""Lion and LAMB against their papers' programs, written once more in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.rules.rows_in_memory import PUSH

from paramserve.errors import NonFinite
from paramserve.rules import LAMB, Array, Lion, Run
from paramserve.rules.rows import row_layout

SIZES = (3001, 1, 40)
"""More than one tile of a kernel, one element, and a tensor that starts within a tile."""
UPDATES = 20
KINDS = [np.float32, np.float64]


def runs_of(count: int) -> list[Run]:
    ends = np.cumsum(SIZES).tolist()
    return [Run(end - size, end, count, (size,)) for end, size in zip(ends, SIZES, strict=True)]


def pushed(rule: Any, value: Array, gradients: list[Array]) -> list[Array]:
    """The values after each update."""
    rule.prepare(value.dtype)
    state, found = rule.init_state(value.size, value.dtype), []
    for count, gradient in enumerate(gradients):
        rule.apply(value, gradient, state, rule.hyper(), runs_of(count), PUSH)
        found.append(value.copy())
    return found


def drawn(dtype: Any) -> tuple[Array, list[Array]]:
    rng = np.random.default_rng(3)
    size = sum(SIZES)
    return (
        rng.standard_normal(size).astype(dtype),
        [rng.standard_normal(size).astype(dtype) for _ in range(UPDATES)],
    )


@each_case("dtype", KINDS)
@each_case("maximize", [False, True])
@each_case("decay", [0.0, 0.1])
def test_lion_is_program_1_of_its_paper(dtype: Any, maximize: bool, decay: float) -> None:
    start, gradients = drawn(dtype)
    lr, beta1, beta2 = 0.01, 0.9, 0.99
    rule = Lion(lr=lr, betas=(beta1, beta2), weight_decay=decay, maximize=maximize)
    weight, momentum = start.astype(np.float64), np.zeros(start.size)
    for found, g in zip(pushed(rule, start.copy(), gradients), gradients, strict=True):
        gradient = -g.astype(np.float64) if maximize else g.astype(np.float64)
        update = gradient * (1 - beta1) + momentum * beta1
        momentum = gradient * (1 - beta2) + momentum * beta2
        weight -= (np.sign(update) + weight * decay) * lr
        # A direction of almost 0 may have the other sign in float32.
        near = np.abs(found - weight) <= (1e-5 if dtype is np.float32 else 1e-12)
        assert near.mean() >= (0.998 if dtype is np.float32 else 1.0)


def test_lion_stands_still_where_all_is_zero() -> None:
    rule, value = Lion(lr=1.0), np.array([2.0, -3.0])
    rule.prepare(value.dtype)
    state = rule.init_state(2, value.dtype)
    rule.apply(value, np.zeros(2), state, rule.hyper(), [Run(0, 2, 0)], PUSH)
    np.testing.assert_array_equal(value, [2.0, -3.0])


def by_the_paper(start: Array, gradients: list[Array], decay: float, sign: float) -> list[Array]:
    """Algorithm 2, with phi the identity, tensor by tensor."""
    lr, beta1, beta2, eps = 0.01, 0.9, 0.999, 1e-6
    cuts = np.cumsum(SIZES)[:-1]
    values = np.split(start.astype(np.float64), cuts)
    m, v = [np.zeros(n) for n in SIZES], [np.zeros(n) for n in SIZES]
    found = []
    for t, pushed in enumerate(gradients, start=1):
        for i, g in enumerate(np.split(sign * pushed.astype(np.float64), cuts)):
            m[i] = beta1 * m[i] + (1 - beta1) * g
            v[i] = beta2 * v[i] + (1 - beta2) * g**2
            r = m[i] / (1 - beta1**t) / (np.sqrt(v[i] / (1 - beta2**t)) + eps)
            r = r + decay * values[i]
            x, length = np.linalg.norm(values[i]), np.linalg.norm(r)
            ratio = x / length if x and length else 1.0
            values[i] = values[i] - lr * ratio * r
        found.append(np.concatenate(values))
    return found


@each_case("dtype", KINDS)
@each_case("maximize", [False, True])
@each_case("decay", [0.0, 0.1])
def test_lamb_is_algorithm_2_of_its_paper(dtype: Any, maximize: bool, decay: float) -> None:
    start, gradients = drawn(dtype)
    start[SIZES[0]] = 0.0  # a tensor whose norm is 0: its ratio is 1
    rule = LAMB(lr=0.01, weight_decay=decay, maximize=maximize)
    expected = by_the_paper(start, gradients, decay, -1.0 if maximize else 1.0)
    atol = 2e-6 if dtype is np.float32 else 1e-12
    for found, wanted in zip(pushed(rule, start.copy(), gradients), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=atol)


def test_lamb_changes_no_value_of_a_tensor_with_nan() -> None:
    rule = LAMB(lr=0.1)
    rule.prepare(np.dtype(np.float32))
    value, gradient = np.ones(5000, np.float32), np.ones(5000, np.float32)
    gradient[4500] = np.nan
    state = rule.init_state(5000, value.dtype)
    with pytest.raises(NonFinite):
        rule.apply(value, gradient, state, rule.hyper(), [Run(0, 5000, 0, (5000,))], PUSH)
    np.testing.assert_array_equal(value, 1.0)


def test_lamb_is_refused_for_tables() -> None:
    with pytest.raises(ValueError, match="whole tensors, and a table has none"):
        row_layout(LAMB(), 8, "float32")


@each_case("rule", [Lion, LAMB])
@each_case("wrong", [{"betas": (0.9,)}, {"betas": (1.0, 0.9)}, {"lr": -1.0}])
def test_numbers_out_of_range_are_refused(rule: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rule.name):
        rule(**wrong)

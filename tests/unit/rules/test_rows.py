"""Rules on rows: against plain numpy and torch, and what is refused before anything is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case
from tests.unit.rules.rows_in_memory import DIM, PUSH, ROWS, Rows, numbers

from paramserve.rules import (
    FTRL,
    LAMB,
    SGD,
    Adagrad,
    Adam,
    Add,
    Array,
    DelayedNesterov,
    Lion,
    NAdam,
    RMSprop,
    RowAdagrad,
    RowRule,
    Rule,
    Run,
)
from paramserve.rules.registry import BUILT_IN, TORCH
from paramserve.rules.rows import (
    RowLayout,
    initial_state,
    prepare_rows,
    row_layout,
)
from paramserve.rules.torch_rule import TorchRule

RULES: list[Any] = [
    *(
        kind(**({"lr": 0.1} if kind is SGD else {}))
        for kind in BUILT_IN.values()
        if kind is not LAMB
    ),
    SGD(lr=0.1, momentum=0.9),
    RMSprop(momentum=0.9, centered=True),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for rule in RULES:
        prepare_rows(rule)


# --- layout ------------------------------------------------------------------------------------


@each_case(
    ("layout", "value_words", "state_at", "count_at", "words"),
    [
        (RowLayout(4, "float32"), 4, (), -1, 4),
        (RowLayout(64, "float32", (64,)), 64, (64,), -1, 128),
        (RowLayout(64, "float32", (1,)), 64, (64,), -1, 65),
        (RowLayout(5, "bfloat16", (5, 1), True), 3, (3, 8), 9, 10),
        (RowLayout(64, "float16", (), True), 32, (), 32, 33),
    ],
    ids=str,
)
def test_layout_places_values_states_and_count(
    layout: RowLayout, value_words: int, state_at: tuple[int, ...], count_at: int, words: int
) -> None:
    assert layout.value_words == value_words
    assert layout.state_at == state_at
    assert layout.count_at == count_at
    assert layout.words == words


@each_case("wrong", [(0, "float32", ()), (4, "float32", (0,)), (3, "float64", ()), (4, "int8", ())])
def test_layout_wrong_width_or_dtype_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        RowLayout(*wrong)


def test_rows_are_counted_only_where_the_rule_looks() -> None:
    plain = (Add(), SGD(lr=0.1, momentum=0.9), Adagrad(), RowAdagrad(), FTRL(), RMSprop(), Lion())
    looks = (SGD(lr=0.1, momentum=0.9, dampening=0.1), Adam(), Adagrad(lr_decay=0.1))
    looks += (DelayedNesterov(pushes=3), NAdam(), TorchRule.of("RMSprop"))
    for rule in (*plain, *looks):
        assert row_layout(rule, DIM, "float32").counted is (rule in looks), rule
        assert row_layout(rule, DIM, "bfloat16").counted, rule


def test_every_built_in_rule_runs_on_rows() -> None:
    assert all(isinstance(rule, RowRule) for rule in RULES)


def test_fresh_states_are_the_rules_own() -> None:
    for rule, expected in (
        (Adagrad(initial_accumulator_value=0.25), [0.25] * 3),
        (RowAdagrad(initial_accumulator_value=0.25), [0.25]),
        (Adam(), [0.0] * 6),
        (Add(), []),
    ):
        state = initial_state(rule, row_layout(rule, 3, "float32"))
        np.testing.assert_array_equal(state, np.array(expected, np.float32))


# --- refused -------------------------------------------------------------------------------------


@each_case(
    ("rule", "hyper", "text"),
    [
        (SGD(lr=0.1), {"lr": 0.1, "momentum": 0.9}, "needs the state momentum_buffer"),
        (
            SGD(lr=0.1, momentum=0.9),
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
            "needs a count of updates",
        ),
        (Adagrad(), {"lr_decay": 0.1}, "needs a count of updates"),
        (RMSprop(), {"momentum": 0.9}, "needs the state square_avg, momentum_buffer"),
    ],
    ids=str,
)
def test_hyper_that_needs_more_than_rows_hold_is_refused_before_writing(
    rule: Rule, hyper: dict[str, Any], text: str
) -> None:
    rows = Rows(rule)
    with pytest.raises(ValueError, match=rf"{text}.*Applied: no\. To fix:"):
        rows.push([1, 2], numbers(2, DIM), **hyper)
    assert not rows.values.any()


# --- what rules compute --------------------------------------------------------------------------


def test_row_adagrad_keeps_the_sum_of_mean_squares() -> None:
    rule = RowAdagrad(lr=0.3, weight_decay=0.1, initial_accumulator_value=0.2, eps=1e-3)
    for dim in (1, 7, 16, 33, 100):
        rows = Rows(rule, dim=dim)
        rows.values[:] = start = numbers(ROWS, dim, seed=1)
        value, total = start[4].astype(np.float64), 0.2
        for i in range(20):
            gradient = numbers(1, dim, seed=i)
            rows.push([4], gradient)
            g = gradient[0] + 0.1 * value
            total += float(np.mean(g * g))
            value -= 0.3 / (math.sqrt(total) + 1e-3) * g
        np.testing.assert_allclose(rows.values[4], value, rtol=1e-5, atol=1e-6)
        assert rows.floats[4, dim] == pytest.approx(total, rel=1e-6)
        np.testing.assert_array_equal(np.delete(rows.values, 4, 0), np.delete(start, 4, 0))


def test_row_adagrad_maximize_goes_the_other_way() -> None:
    up, down = Rows(RowAdagrad(maximize=True)), Rows(RowAdagrad())
    for rows in (up, down):
        rows.push([0, 5], numbers(2, DIM))
    np.testing.assert_array_equal(up.values, -down.values)
    assert up.values.any()


@each_case("dtype", [np.float32, np.float64])
@each_case("options", [{}, {"l1": 0.8, "l2": 0.3}, {"beta": 0.0, "l1": 0.1}], ids=str)
def test_ftrl_is_algorithm_1_of_the_paper(options: dict[str, float], dtype: Any) -> None:
    """McMahan et al. write a value when it is needed, from z and n alone."""
    rule = FTRL(alpha=0.4, **options)
    rule.prepare(np.dtype(dtype))
    alpha, beta, l1, l2 = rule.hyper()
    size = 9
    value, state = np.zeros(size, dtype), rule.init_state(size, np.dtype(dtype))
    z, n, w = [0.0] * size, [0.0] * size, [0.0] * size
    zeros = 0
    for step in range(30):
        gradient = numbers(size, seed=step).astype(dtype)
        gradient[8] = 0.0  # an element that never hears anything
        rule.apply(value, gradient, state, rule.hyper(), [Run(0, size, step)], PUSH)
        for i, g in enumerate(gradient.tolist()):
            sigma = (math.sqrt(n[i] + g * g) - math.sqrt(n[i])) / alpha
            z[i] += g - sigma * w[i]
            n[i] += g * g
            if abs(z[i]) <= l1:
                w[i] = 0.0
            else:
                sign = math.copysign(1.0, z[i])
                w[i] = -(z[i] - sign * l1) / ((beta + math.sqrt(n[i])) / alpha + l2)
        zeros += sum(each == 0.0 for each in w[:8])
        tolerance = 1e-4 if dtype == np.float32 else 1e-10
        np.testing.assert_allclose(value, w, rtol=tolerance, atol=tolerance)
    assert value[8] == 0.0
    assert (zeros > 0) == (l1 > 0), "l1 is there to make zeros"


@each_case("decoupled", [False, True], ids=["Adam", "AdamW"])
def test_adam_on_rows_equals_torch_with_one_parameter_for_each_row(decoupled: bool) -> None:
    """Lazy: a row that is not named neither moves nor counts."""
    rows = Rows(Adam(lr=0.05, weight_decay=0.1, decoupled=decoupled))
    rows.values[:] = start = numbers(ROWS, DIM, seed=3)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    parameters = [torch.nn.Parameter(torch.tensor(row)) for row in start]
    optimizer = kind(parameters, lr=0.05, weight_decay=0.1, foreach=False)
    for i in range(30):
        slots = [slot for slot in range(ROWS) if i % (slot + 1) == 0]
        gradients = numbers(len(slots), DIM, seed=i)
        rows.push(slots, gradients)
        optimizer.zero_grad(set_to_none=True)
        for slot, gradient in zip(slots, gradients, strict=True):
            parameters[slot].grad = torch.tensor(gradient)
        optimizer.step()
    expected = torch.stack([p.detach() for p in parameters]).numpy()
    np.testing.assert_allclose(rows.values, expected, rtol=1e-4, atol=1e-5)


@each_case("kind", ["RMSprop", "Adamax", "NAdam"])
def test_torch_rule_on_rows_equals_torch_with_one_parameter_for_each_row(kind: str) -> None:
    """NAdam keeps a number for each tensor besides its elements: here, for each row."""
    rows = Rows(TorchRule.of(kind, lr=0.05))
    rows.values[:] = start = numbers(ROWS, DIM, seed=3)
    parameters = [torch.nn.Parameter(torch.tensor(row)) for row in start]
    optimizer = getattr(torch.optim, kind)(parameters, lr=0.05, foreach=False)
    for i in range(6):
        slots = [slot for slot in reversed(range(ROWS)) if i % (slot + 1) == 0]
        gradients = numbers(len(slots), DIM, seed=i)
        rows.push(slots, gradients)
        optimizer.zero_grad(set_to_none=True)
        for slot, gradient in zip(slots, gradients, strict=True):
            parameters[slot].grad = torch.tensor(gradient)
        optimizer.step()
    expected = torch.stack([p.detach() for p in parameters]).numpy()
    np.testing.assert_allclose(rows.values, expected, rtol=1e-5, atol=1e-6)


def test_momentum_zero_on_rows_with_a_buffer_leaves_it_alone() -> None:
    rows = Rows(SGD(lr=1.0, momentum=0.9))
    rows.floats[:, DIM:] = 7.0
    rows.push([2], np.ones((1, DIM), np.float32), lr=1.0)
    np.testing.assert_array_equal(rows.values[2], -1.0)
    np.testing.assert_array_equal(rows.floats[:, DIM:], 7.0)


def test_count_of_a_row_stays_at_the_largest() -> None:
    rows = Rows(Adam())
    words = rows.floats.view(np.uint32)
    words[:, rows.layout.count_at] = 2**32 - 2
    for _ in range(3):
        rows.push([0], numbers(1, DIM))
    assert words[0, rows.layout.count_at] == 2**32 - 1
    assert np.isfinite(rows.values).all()


def test_half_rows_drift_as_float32_does_where_the_nearest_would_stand_still() -> None:
    """A hundred steps of 1/20 of what bfloat16 tells apart at 1."""
    rows = Rows(SGD(lr=1.0), "bfloat16", dim=1000)
    halves = rows.floats.view(np.uint16)
    halves[:, :1000] = 0x3F80  # 1.0
    small = np.full((1, 1000), -(2.0**-7) / 20, np.float32)
    for _ in range(100):
        rows.push([3], small)
    values = (halves[3, :1000].astype(np.uint32) << 16).view(np.float32)
    assert values.mean() == pytest.approx(1.0 + 100 * 2.0**-7 / 20, abs=0.002)
    np.testing.assert_array_equal(np.delete(halves[:, :1000], 3, 0), 0x3F80)


# --- kernels -------------------------------------------------------------------------------------


def test_apply_rows_never_compiles() -> None:
    dispatchers: list[Any] = [each for rule in RULES for each in rule.row_kernels()]

    def signatures() -> list[int]:
        return [len(each.signatures) for each in dispatchers]

    tables = [Rows(rule, dtype) for rule in RULES for dtype in ("float32", "bfloat16", "float16")]
    before = signatures()
    locked = numbers(2, DIM)
    locked.flags.writeable = False
    whole = PUSH._replace(scale=1)  # an int where a float is meant
    for rows in tables:
        for gradients in (numbers(2, DIM), locked, numbers(2, 2 * DIM)[:, ::2]):
            rows.push([0, 3], gradients, whole)
    assert signatures() == before


def test_torch_has_its_name() -> None:
    """`rules.rows` knows a torch rule by it, without importing torch."""
    assert TorchRule.name == TORCH


# --- Adam with a small beta1 ----------------------------------------------------------------------


GRADIENTS = [1e4, 1e-4, -3.0, 1e-4]
"""float32 has no 1e4 + 1e-4."""


def by_torch(beta1: float, gradients: list[Array]) -> Array:
    parameter = torch.zeros(gradients[0].size, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], lr=0.1, betas=(beta1, 0.999), foreach=False)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    mean: Array = optimizer.state[parameter]["exp_avg"].numpy()
    return mean


def by_lerp(beta1: float, gradients: list[Array]) -> Array:
    """torch's formula, each operation rounded."""
    mean, weight = np.zeros_like(gradients[0]), np.float32(1.0 - beta1)
    for gradient in gradients:
        if weight < 0.5:
            mean = mean + weight * (gradient - mean)
        else:
            mean = gradient - (gradient - mean) * (np.float32(1) - weight)
    return mean


@each_case("beta1", [0.0, 0.3, 0.5, 0.51, 0.9])
def test_mean_of_gradients_is_the_one_that_torchs_lerp_gives(beta1: float) -> None:
    factors = np.random.default_rng(0).uniform(0.5, 1.5, 19)
    gradients = [(each * factors).astype(np.float32) for each in GRADIENTS]
    rule = Adam(lr=0.1, betas=(beta1, 0.999))
    rule.prepare(np.dtype(np.float32))
    value = np.zeros(19, np.float32)
    mean, square = rule.init_state(19, value.dtype)
    rows = Rows(rule, dim=19)
    for count, gradient in enumerate(gradients):
        rule.apply(value, gradient, (mean, square), rule.hyper(), [Run(0, 19, count)], PUSH)
        rows.push([2], gradient[None])
    expected = by_lerp(beta1, gradients)
    assert mean.tolist() == expected.tolist()
    assert rows.floats[2, 19:38].tolist() == expected.tolist()
    np.testing.assert_allclose(mean, by_torch(beta1, gradients), rtol=5e-7)
    if beta1 == 0.0:
        assert mean.tolist() == gradients[-1].tolist()

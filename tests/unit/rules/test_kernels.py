"""The kernels that belong to no rule, against plain numpy; and that no call ever compiles."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.kernel_cache import Kernels
from paramserve.rules import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Add,
    Array,
    DelayedNesterov,
    Lion,
    NAdam,
    PushInfo,
    RMSprop,
    Run,
    kernels,
)
from paramserve.rules.built_in import BuiltIn

DTYPES = [np.float32, np.float64]
SIZES = [0, 1, 7, 256, 1023, 1024, 1025, 5000]
BAD = [math.nan, -math.nan, math.inf, -math.inf]
RULES: list[BuiltIn] = [Add(), SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), Adam(), Adagrad(), FTRL()]
RULES += [DelayedNesterov(pushes=2), RMSprop(), RMSprop(momentum=0.9, centered=True)]
RULES += [Adadelta(), Adamax(), NAdam(), Lion(), LAMB()]
PUSH = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for dtype in DTYPES:
        kernels.prepare(np.dtype(dtype))
        for rule in RULES:
            rule.prepare(np.dtype(dtype))


def numbers(size: int, dtype: Any, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


@each_case("dtype", DTYPES)
def test_largest_is_numpys(dtype: Any) -> None:
    for size in SIZES:
        source, target = numbers(size, dtype), np.full(size, 9, dtype)
        expected = np.abs(source).max(initial=0.0)
        assert kernels.largest(source) == expected
        assert kernels.copy_largest(target, source) == expected
        np.testing.assert_array_equal(target, source)


@each_case("dtype", DTYPES)
def test_largest_of_extremes(dtype: Any) -> None:
    info = np.finfo(dtype)
    small = [info.tiny, -info.smallest_subnormal, 0.0, -0.0]
    assert kernels.largest(np.array(small, dtype)) == info.tiny
    assert kernels.largest(np.array([info.max, *small], dtype)) == info.max
    assert kernels.largest(np.array([*small, info.min], dtype)) == info.max


@each_case("dtype", DTYPES)
def test_largest_is_inf_with_one_bad_element_anywhere(dtype: Any) -> None:
    for bad, size in itertools.product(BAD, SIZES[1:]):
        for at in {0, size // 2, size - 1}:
            a = numbers(size, dtype)
            a[at] = bad
            assert kernels.largest(a) == math.inf, (bad, size, at)
            assert kernels.copy_largest(np.empty_like(a), a) == math.inf, (bad, size, at)


@each_case("dtype", DTYPES)
def test_add_into_adds_as_numpy_to_the_bit(dtype: Any) -> None:
    for size in SIZES:
        total, other = numbers(size, dtype), numbers(size, dtype, seed=1)
        plain, scaled = total + other, total + other + dtype(0.3) * other
        kernels.add_into(total, other)
        np.testing.assert_array_equal(total, plain)
        kernels.add_scaled_into(total, 0.3, other)
        np.testing.assert_array_equal(total, scaled)


@each_case("dtype", DTYPES)
def test_squared_norm_is_exact_to_float64(dtype: Any) -> None:
    for size in SIZES:
        a = numbers(size, dtype)
        expected = math.fsum(float(x) ** 2 for x in a)
        assert kernels.squared_norm(a) == pytest.approx(expected, rel=1e-14)


def test_squared_norm_order_of_addition_is_as_written() -> None:
    """256 sums side by side, then folded in halves: replicas on other machines must agree."""
    a = numbers(5000, np.float64)
    padded = np.zeros(5120)
    padded[:5000] = a
    sums = np.zeros(256)
    for row in padded.reshape(-1, 256):
        sums += row * row
    while sums.size > 1:
        half = sums.size // 2
        sums = sums[:half] + sums[half:]
    assert kernels.squared_norm(a) == sums[0]


def test_squared_norm_of_large_float32_does_not_overflow() -> None:
    assert kernels.squared_norm(np.full(4, 1e30, np.float32)) == pytest.approx(4e60, rel=1e-6)


@each_case("dtype", [np.int32, np.float16, np.dtype(">f8")])
def test_prepare_other_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(TypeError, match="float32 or float64"):
        kernels.prepare(np.dtype(dtype))
    for rule in RULES:
        with pytest.raises(TypeError, match="float32 or float64"):
            rule.prepare(np.dtype(dtype))


def compiled_signatures(wanted: Kernels) -> list[int]:
    dispatchers: list[Any] = list(wanted)
    return [len(each.signatures) for each in dispatchers]


@each_case("dtype", DTYPES)
def test_apply_never_compiles(dtype: Any) -> None:
    for rule in RULES:
        wanted = rule.block_kernels(np.dtype(dtype))
        before = compiled_signatures(wanted)
        for size, with_out, runs in itertools.product((1, 4096), (False, True), (0, 1, 2)):
            memory = np.zeros(64 + 8 * size, np.uint8)
            value = memory[64 : 64 + size * np.dtype(dtype).itemsize].view(dtype)  # as in an arena
            out = np.zeros(2 * size, dtype)[size:] if with_out else None
            state = rule.init_state(size, value.dtype)
            some = [Run(0, size, 0), Run(0, size, 10**9)][:runs]
            rule.apply(value, numbers(size, dtype), state, rule.hyper(), some, PUSH, out)
            whole = PUSH._replace(scale=1)  # an int where a float is meant
            rule.apply(value, numbers(size, dtype), state, rule.hyper(), some, whole, out)
        assert compiled_signatures(wanted) == before, rule


@each_case("dtype", DTYPES)
def test_shared_kernels_never_compile(dtype: Any) -> None:
    shared = kernels.shared(np.dtype(dtype))
    before = compiled_signatures(shared)
    a, b = numbers(100, dtype), numbers(200, dtype)[100:]
    kernels.largest(a)
    kernels.copy_largest(a, b)
    kernels.add_into(a, b)
    kernels.add_scaled_into(a, 1, b)
    kernels.squared_norm(a)
    assert compiled_signatures(shared) == before


def test_call_with_other_types_raises_and_does_not_compile() -> None:
    shared = kernels.shared(np.dtype(np.float32))
    before = compiled_signatures(shared)
    for wrong in (np.zeros(4, np.int32), np.zeros(8)[::2], np.zeros((2, 2))):
        with pytest.raises(TypeError):
            kernels.largest(wrong)
    with pytest.raises(TypeError):
        kernels.add_into(np.zeros(4, np.float32), np.zeros(4))
    assert compiled_signatures(shared) == before


def test_float32_is_computed_in_float32() -> None:
    """1 + 2^-24 is 1 in float32; a float64 inside would leave a trace in the difference."""
    value = np.ones(4, np.float32)
    gradient = np.full(4, 2.0**-24, np.float32)
    rule = SGD(lr=1.0, weight_decay=1.0)
    rule.apply(value, gradient, (), rule.hyper(), [Run(0, 4, 0)], PUSH)
    np.testing.assert_array_equal(value, 0.0)  # in float64: -2^-24


def test_import_of_the_rules_does_not_import_numba_or_torch() -> None:
    code = (
        "import sys, paramserve.rules.registry as r; r.build(r.spec(r.rules.SGD(lr=0.1)));"
        "print(*{'numba', 'torch'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""

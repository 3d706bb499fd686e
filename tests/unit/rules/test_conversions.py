"""Gradients of 16 bits in kernels: every number of theirs, and every kind of float32 rounded."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from paramserve import kernel_cache
from paramserve.errors import NonFinite
from paramserve.rules import SGD, Adam, kernels
from paramserve.rules.base import PushInfo, Run
from paramserve.rules.conversions import TILE

Array = Any
FLOAT = np.dtype(np.float32)
HALVES = dict(zip(("bfloat16", "float16"), kernels.HALVES, strict=True))
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LARGEST = {"bfloat16": 0x7F7F, "float16": 0x7BFF}
ALL_BITS = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
RULES = (SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.01))
SIZES = (0, 1, 15, TILE, TILE + 1, 3 * TILE + 7)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    kernels.prepare(FLOAT)
    for dtype in HALVES.values():
        kernels.prepare(dtype)
        for rule in RULES:
            rule.prepare(FLOAT)
            kernel_cache.load(rule.block_kernels(FLOAT, dtype))


@pytest.fixture(params=HALVES)
def half(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def floats_of(bits: Array, half: str) -> Array:
    """What 16 bits stand for, as torch has it."""
    found = torch.from_numpy(bits.view(np.int16)).view(TORCH[half]).float()
    return found.numpy()


def bits_of(values: Array, half: str) -> Array:
    """As torch rounds them."""
    return torch.from_numpy(values).to(TORCH[half]).view(torch.int16).numpy().view(np.uint16)


def rounded(values: Array, half: str) -> Array:
    out = np.empty(values.size, HALVES[half])
    kernels.round_into(out, values)
    return out.view(np.uint16)


def normal(seed: int, size: int) -> Array:
    return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_every_number_of_16_bits_is_widened_exactly(half: str) -> None:
    found = np.empty(ALL_BITS.size, np.float32)
    kernels.scaled_into(found, 1.0, ALL_BITS.view(HALVES[half]))
    wanted = floats_of(ALL_BITS, half)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found[~nan].view(np.uint32), wanted[~nan].view(np.uint32))


def test_every_number_of_16_bits_is_rounded_to_itself(half: str) -> None:
    values = floats_of(ALL_BITS, half)
    nan = np.isnan(values)
    np.testing.assert_array_equal(rounded(values, half)[~nan], ALL_BITS[~nan])


def test_float32_is_rounded_to_the_nearest_and_never_to_infinity(half: str) -> None:
    chosen = np.random.default_rng(1)
    exact = floats_of(ALL_BITS, half)
    exact = np.sort(exact[np.isfinite(exact)])
    with np.errstate(over="ignore"):
        between = (exact[1:] / 2 + exact[:-1] / 2).astype(np.float32)  # ties
    beside = np.concatenate([np.nextafter(between, s * np.float32(np.inf)) for s in (-1, 1)])
    any_bits = chosen.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32)
    sizes = 10.0 ** chosen.integers(-9, 6, 200_000)
    usual = (chosen.normal(size=200_000) * sizes).astype(np.float32)
    values = np.concatenate([between, beside, any_bits, usual])
    values = values[~np.isnan(values)]
    found, wanted = rounded(values, half), bits_of(values, half)
    over = np.isfinite(values) & ~np.isfinite(floats_of(wanted, half))
    assert over.any()
    np.testing.assert_array_equal(found[~over], wanted[~over])
    np.testing.assert_array_equal(found[over] & 0x7FFF, LARGEST[half])
    np.testing.assert_array_equal(found[over] >> 15, np.signbit(values[over]))


def test_nan_stays_nan(half: str) -> None:
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    assert np.isnan(floats_of(rounded(bits.view(np.float32), half), half)).all()


def test_kernels_do_with_16_bits_what_they_do_with_float32(half: str) -> None:
    for size in SIZES:
        bits = bits_of(normal(size, size), half).view(HALVES[half])
        floats = floats_of(bits.view(np.uint16), half)
        assert kernels.largest(bits) == (abs(floats).max() if size else 0.0)
        copied = np.empty_like(bits)
        assert kernels.copy_largest(copied, bits) == kernels.largest(floats)
        np.testing.assert_array_equal(copied, bits)
        assert kernels.squared_norm(bits) == kernels.squared_norm(floats)
        total, wanted = normal(1, size), normal(1, size)
        kernels.add_scaled_into(total, 0.3, bits)
        kernels.add_scaled_into(wanted, 0.3, floats)
        np.testing.assert_array_equal(total, wanted)
        kernels.scaled_into(total, 0.3, bits)
        np.testing.assert_array_equal(total, np.float32(0.3) * floats)
        kernels.multiply(bits, 0.3)
        np.testing.assert_array_equal(bits.view(np.uint16), bits_of(np.float32(0.3) * floats, half))


def test_nan_and_infinity_are_found(half: str) -> None:
    bads = (math.nan, math.inf, -math.inf)
    for bad, at in itertools.product(bads, (0, TILE - 1, TILE, 3 * TILE)):
        values = normal(1, 3 * TILE + 1)
        values[at] = bad
        bits = bits_of(values, half).view(HALVES[half])
        assert kernels.largest(bits) == math.inf
        assert kernels.copy_largest(np.empty_like(bits), bits) == math.inf


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rule_updates_as_with_float32_and_leaves_rounded_values(half: str, rule: Any) -> None:
    for size in SIZES:
        info, runs = PushInfo(0, 0, 0, 0, 1.0, 0.7), [Run(0, size, 1)]
        value, state = normal(2, size), rule.init_state(size, FLOAT)
        plain, plain_state = value.copy(), rule.init_state(size, FLOAT)
        for seed in range(3):
            bits = bits_of(normal(10 + seed, size), half).view(HALVES[half])
            floats = floats_of(bits.view(np.uint16), half)
            out = np.empty_like(bits) if seed else None
            rule.apply(value, bits, state, rule.hyper(), runs, info, out)
            rule.apply(plain, floats, plain_state, rule.hyper(), runs, info)
        np.testing.assert_array_equal(value, plain)
        np.testing.assert_array_equal(np.array(state), np.array(plain_state))
        assert out is not None
        np.testing.assert_array_equal(out.view(np.uint16), bits_of(value, half))


def test_rule_stops_at_infinity(half: str) -> None:
    values = normal(1, 2 * TILE)
    values[TILE + 3] = math.inf
    value, before = normal(2, 2 * TILE), normal(2, 2 * TILE)
    bits = bits_of(values, half).view(HALVES[half])
    info = PushInfo(0, 0, 0, 0, 1.0, 1.0)
    with pytest.raises(NonFinite, match=f"from element {TILE} on"):
        SGD(0.1).apply(value, bits, (), SGD(0.1).hyper(), [Run(0, 2 * TILE, 1)], info)
    np.testing.assert_array_equal(value[TILE:], before[TILE:])
    assert (value[:TILE] != before[:TILE]).all()

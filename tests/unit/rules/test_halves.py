"""16-bit values: every one is widened exactly, and rounding is right on average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.rules import Array
from paramserve.rules.halves import decode, encode, mix, noise_of

BFLOAT16, FLOAT16 = 1, 2
CODES = np.arange(2**16, dtype=np.uint16)
KINDS = pytest.mark.parametrize("half", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])


def plain(codes: Array, half: int) -> Array:
    """What 16-bit codes mean, by numpy."""
    if half == FLOAT16:
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


def widened(words: Array, half: int, size: int) -> Array:
    out = np.empty(size, np.float32)
    decode(words, half, out)
    return out


def rounded(values: Array, half: int, noise: Any) -> Array:
    words = np.zeros((values.size + 1) // 2, np.uint32)
    encode(values, half, words, np.uint64(noise))
    return words


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for half in (BFLOAT16, FLOAT16):
        widened(rounded(np.zeros(1, np.float32), half, 0), half, 1)
    noise_of(np.uint64(0), 0, 0)


@KINDS
def test_every_code_is_widened_exactly(half: int) -> None:
    values, expected = widened(CODES.view(np.uint32), half, CODES.size), plain(CODES, half)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), nan)
    np.testing.assert_array_equal(values[~nan].view(np.uint32), expected[~nan].view(np.uint32))


@KINDS
def test_what_16_bits_hold_is_not_changed_by_rounding(half: int) -> None:
    exact = plain(CODES, half)
    nan = np.isnan(exact)
    for noise in (0, 2**64 - 1, 12345):
        codes = rounded(exact, half, noise).view(np.uint16)
        np.testing.assert_array_equal(codes[~nan], CODES[~nan])
        assert np.isnan(plain(codes[nan], half)).all()


@KINDS
def test_rounding_gives_neighbours_and_the_value_on_average(half: int) -> None:
    ordered = np.sort(plain(CODES[: 2**15], half)[: 0x7C00 if half == FLOAT16 else 0x7F80])
    for value in (1.0001, -3.3, 1e-5, 3e-7, -2e-8, 60000.5):
        many = np.full(100_001, value, np.float32)
        got = widened(rounded(many, half, noise_of(np.uint64(5), 3, 7)), half, many.size)
        codes = np.unique(got)
        exact = float(many[0])
        at = int(np.searchsorted(ordered, abs(exact)))
        np.testing.assert_array_equal(np.sort(np.abs(codes)), ordered[at - 1 : at + 1])
        spread = float(got.std(dtype=np.float64)) / np.sqrt(many.size)
        assert abs(float(got.mean(dtype=np.float64)) - exact) < 5 * spread, value


@each_case(
    ("half", "largest", "beyond"),
    [
        (FLOAT16, 65504.0, [65504.1, 65519.0, 65520.0, 1e6, 3.4e38]),
        (BFLOAT16, 3.3895313892515355e38, [3.39e38, 3.3961775292304957e38, 3.4028234663852886e38]),
    ],
    ids=["float16", "bfloat16"],
)
def test_finite_value_beyond_the_largest_becomes_the_largest_and_inf_stays(
    half: int, largest: float, beyond: list[float]
) -> None:
    values = np.array([*beyond, *(-each for each in beyond), np.inf, -np.inf], np.float32)
    n = len(beyond)
    expected = np.array([largest] * n + [-largest] * n + [np.inf, -np.inf], np.float32)
    for noise in (0, 2**64 - 1, *range(1, 30)):
        got = widened(rounded(values, half, noise), half, values.size)
        np.testing.assert_array_equal(got, expected)


@KINDS
def test_odd_number_of_values_leaves_the_last_half_word_zero(half: int) -> None:
    words = rounded(np.array([1.0, -2.0, 3.0], np.float32), half, 99)
    assert words[1] >> 16 == 0
    np.testing.assert_array_equal(widened(words, half, 3), [1.0, -2.0, 3.0])


def test_mix_is_splitmix64() -> None:
    """The first numbers of the published generator with seed 0."""
    golden = 0x9E3779B97F4A7C15
    expected = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    for i, number in enumerate(expected):
        assert int(mix(np.uint64(i * golden % 2**64))) == number


def test_noise_differs_by_stream_key_and_count() -> None:
    drawn = {
        int(noise_of(np.uint64(stream), key, count))
        for stream in (0, 1, 2**64 - 1)
        for key in (-1, 0, 2**63 - 1)
        for count in (0, 1, 2**32 - 1)
    }
    assert len(drawn) == 27

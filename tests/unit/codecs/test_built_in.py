"""The built-in codecs against a second implementation, their bounds, and bytes that are none."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case
from tests.unit.codecs import reference

from paramserve.codecs import (
    BFloat16,
    Codec,
    Delta,
    Feedback,
    Float16,
    Int2,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from paramserve.codecs.registry import BUILT_IN, as_codec, build, spec
from paramserve.compiling import load_codecs
from paramserve.config import CodecSpec
from paramserve.errors import UnknownCodec

Floats = npt.NDArray[np.float32]

CODECS = [
    BFloat16(),
    Float16(),
    Float16(100.0),
    Int8(),
    Int8(8),
    Int4(),
    Int4(32),
    Int2(),
    Int2(8),
    Sign(),
    Sign(16),
    TopK(0.01),
    TopK(0.3, "plain"),
    TopK(1.0),
    RandomK(0.1),
    RandomK(1.0, feedback=False),
    TopK(0.1) | Int4(),
    TopK(0.3) | Int2(16),
    TopK(0.2, "plain") | BFloat16(),
    RandomK(0.3) | Int8(16),
    RandomK(0.5) | Sign(8),
]
DRAWN = [kind(rounding="stochastic") for kind in (Int8, Int4, Int2)]
SIZES = [0, 9, 64, 257, 5003]
"""No value, rests of bytes and blocks, whole blocks, and many; `test_any_finite_values` has all
sizes up to 90."""
MAX = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).smallest_subnormal)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def aligned(size: int) -> Any:
    return np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]


def encode(codec: Codec, values: Floats, seed: int = 0) -> Any:
    out = aligned(codec.size(values.size))
    out[...] = 0xAA
    written = codec.encode(values, out, seed)
    assert written == out.size if codec.fixed else written <= out.size
    return out[:written]


def decode(codec: Codec, data: Any, count: int) -> Floats:
    found = np.full(count, np.nan, np.float32)
    codec.decode(data, found)
    assert np.isfinite(found).all()
    return found


def there_and_back(codec: Codec, values: Floats, seed: int = 0) -> Floats:
    return decode(codec, encode(codec, values, seed), values.size)


def normal(size: int, scale: float = 1.0) -> Floats:
    drawn = np.random.default_rng(size).normal(size=size) * scale
    return np.asarray(drawn, np.float32)


@each_case("codec", CODECS, ids=repr)
def test_bytes_are_those_of_the_reference(codec: Codec) -> None:
    for size, seed in itertools.product(SIZES, (0, 0xFFFFFFFF)):
        for values in (normal(size), normal(size, 1e-3), np.zeros(size, np.float32)):
            expected = reference.encoded(codec, values, seed)
            assert encode(codec, values, seed).tobytes() == expected, (size, seed)


EXTREMES = [0.0, -0.0, TINY, -TINY, 1e-38, 6e-8, 65504.0, 65520.0, 1.0, MAX, -MAX]
EXTREMES += [float(np.uint32(0x3F808000).view(np.float32)), 1e-45, 3.3e38]


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.one_of(st.sampled_from(EXTREMES), FINITE), max_size=90))
def test_any_finite_values(values: list[float]) -> None:
    array = np.array(values, np.float32)
    for codec in CODECS:
        data = encode(codec, array)
        if "Sign" not in repr(codec):  # a mean of doubles, in another order
            assert data.tobytes() == reference.encoded(codec, array), codec
        decode(codec, data, array.size)
    for codec in DRAWN:
        there_and_back(codec, array, 7)


def test_draws_of_other_seeds_are_others() -> None:
    """That each has the value as its mean, and equal seeds equal bytes, is in the suite."""
    for codec in DRAWN:
        assert (encode(codec, normal(64), 1) != encode(codec, normal(64), 2)).any(), codec


@each_case("codec", DRAWN, ids=repr)
def test_largest_value_never_changes_its_sign(codec: Codec) -> None:
    """Its level, and noise of almost a half, are the next level to within a rounding error: of as
    many draws some were, before they were limited."""
    below = {Int8: 1.001 / 127, Int4: 1.001 / 7, Int2: 1 / 128}[type(codec)]
    above = 1 / 128 if isinstance(codec, Int2) else 0.001  # levels in bfloat16
    for value, seed in itertools.product((1.0, -0.1, MAX), range(20)):
        values = np.full(1 << 20, value, np.float32)
        found = there_and_back(codec, values, seed * 12345).astype(np.float64) / value
        assert 1 - below < found.min() <= found.max() < 1 + above


def levels_of(codec: Int2, data: Any) -> Any:
    """The levels of the first block that are not below 0."""
    return (data[:4].view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def test_two_bits_are_the_nearest_of_four_levels() -> None:
    """Near those of the optimal quantizer of a normal distribution, and its error."""
    values = normal(64 * 400, 3.0)
    data = encode(Int2(1 << 16), values)
    low, high = levels_of(Int2(1 << 16), data)
    assert (low / 3.0, high / 3.0) == pytest.approx((0.4528, 1.510), rel=0.02)
    found = decode(Int2(1 << 16), data, values.size)
    levels = np.array([-high, -low, low, high])
    nearest = np.abs(values[:, None] - levels).min(axis=1)
    np.testing.assert_allclose(np.abs(values - found), nearest, rtol=1e-5, atol=1e-6)
    assert np.square(values - found).mean() / 9.0 == pytest.approx(0.1175, rel=0.02)


def test_two_bits_of_blocks_that_have_few_sizes() -> None:
    zeros, one = np.zeros(64, np.float32), np.zeros(64, np.float32)
    one[17] = -3.0
    equal = np.where(normal(64) > 0, np.float32(0.25), np.float32(-0.25))
    two = np.where(np.arange(64) % 5 == 0, np.float32(-2.0), np.float32(0.5))
    for values in (zeros, one, equal, two):
        np.testing.assert_array_equal(there_and_back(Int2(), values), values)
    assert not np.signbit(there_and_back(Int2(), -zeros)).any()


@given(st.lists(FINITE, min_size=1, max_size=64))
def test_error_of_two_bits_is_below_the_squares(values: list[float]) -> None:
    """What error feedback needs (Karimireddy et al., 2019), whatever the values; to within a
    rounding of levels to bfloat16."""
    given_values = np.array(values, np.float32)
    left = given_values.astype(np.float64) - there_and_back(Int2(), given_values)
    squares = np.square(given_values.astype(np.float64)).sum()
    smallest = len(values) * 1e-34**2  # the levels of so small values may be 0
    assert np.square(left).sum() <= squares * (1 - 1 / 80) + smallest  # of 64 equal sizes a 64th


def test_signs_and_the_largest() -> None:
    values = np.array([3.0, -1.0, 0.0, -4.0, 2.0], np.float32)
    assert there_and_back(Sign(8), values).tolist() == [2.0, -2.0, 2.0, -2.0, 2.0]
    assert there_and_back(TopK(0.4), values).tolist() == [3.0, 0.0, 0.0, -4.0, 0.0]
    assert there_and_back(TopK(0.01), values).tolist() == [0.0, 0.0, 0.0, -4.0, 0.0]
    equal = np.array([1.0, -1.0, 1.0, 1.0], np.float32)
    assert there_and_back(TopK(0.5), equal).tolist() == [1.0, -1.0, 0.0, 0.0]


def test_sixteen_bits_keep_what_is_not_finite() -> None:
    values = np.array([np.inf, -np.inf, np.nan], np.float32)
    found = np.empty(3, np.float32)
    BFloat16().decode(encode(BFloat16(), values), found)
    np.testing.assert_array_equal(found, values)


def test_bytes_of_another_length_are_refused() -> None:
    for codec in [*CODECS, *DRAWN]:
        data = encode(codec, normal(700))
        longer = aligned(data.size + 8)
        longer[: data.size] = data
        for wrong in (data[: data.size // 2 & ~7], data[:0], longer):
            with pytest.raises(ValueError, match=r"bytes came|places of ps.TopK|scale of ps"):
                decode(codec, wrong, 700)


@each_case("codec", [Int8(), Int4(), Int2(), Sign()], ids=repr)
def test_scale_that_is_none_is_refused(codec: Codec) -> None:
    good = encode(codec, normal(700))
    scales = np.array([math.nan, math.inf, -1.0], "<f4").view(np.uint8).reshape(-1, 4)
    cases = [(slice(4, 8), scale) for scale in scales]
    if isinstance(codec, Int2):  # an inner level, and an outer one
        halves = np.array([0x7F80, 0x7FC0, 0x8000, 0xFFFF], "<u2").view(np.uint8).reshape(-1, 2)
        cases += [(slice(at, at + 2), half) for at in (4, 6) for half in halves]
    for place, wrong in cases:
        data = good.copy()
        data[place] = wrong
        with pytest.raises(ValueError, match=f"a scale of ps.{codec.name} is negative, NaN or Inf"):
            decode(codec, data, 700)


def test_places_that_are_none_are_refused() -> None:
    plain, delta = TopK(0.01, "plain"), TopK(0.01)
    for places in ([5, 5], [6, 5], [5, 200], [5, 1 << 31]):
        data = encode(plain, normal(200))
        data[8:].view(np.uint32)[...] = places
        with pytest.raises(ValueError, match="are not 2 rising ones below 200"):
            decode(plain, data, 200)
    data = encode(delta, normal(200))
    for gaps in ([0x80, 0x80], [0x7F, 0x7F], [0xFF, 0xFF]):
        wrong = aligned(10)
        wrong[:8], wrong[8:] = data[:8], gaps
        with pytest.raises(ValueError, match="are not 2 rising ones below 200"):
            decode(delta, wrong, 200)
    wrong = aligned(14)
    wrong[:8], wrong[8:] = data[:8], [0xFF] * 6
    with pytest.raises(ValueError, match="are not 2 rising"):
        decode(delta, wrong, 200)
    data[:4].view(np.float32)[0] = np.nan
    with pytest.raises(ValueError, match=r"a value of ps.TopK is NaN or Inf"):
        decode(delta, data, 200)


@given(st.binary(max_size=80), st.integers(0, 40))
def test_any_bytes_are_decoded_or_refused(data: bytes, count: int) -> None:
    given_bytes = aligned(len(data))
    given_bytes[...] = np.frombuffer(data, np.uint8)
    for codec in [*CODECS[3:], *DRAWN]:
        for size in {codec.size(count), len(data)}:
            if size <= len(data):
                found = np.empty(count, np.float32)
                try:
                    codec.decode(given_bytes[:size], found)
                except ValueError:
                    continue
                assert not np.isnan(found).any()


@each_case(
    ("make", "told"),
    [
        (lambda: TopK(0), "ratio of ps.TopK must be above 0"),
        (lambda: TopK(1.5), "ratio of ps.TopK"),
        (lambda: TopK(True), "ratio of ps.TopK"),
        (lambda: TopK(index="x"), 'index of ps.TopK is "delta" or "plain"'),
        (lambda: RandomK(0), "ratio of ps.RandomK must be above 0"),
        (lambda: Int8(100), "block of ps.Int8 is a power of two from 8 to 65536, not 100"),
        (lambda: Int8(4), "block of ps.Int8"),
        (lambda: Int4(True), "block of ps.Int4"),
        (lambda: Sign(1 << 17), "block of ps.Sign"),
        (lambda: Int4(rounding="up"), 'rounding of ps.Int4 is "nearest" or "stochastic"'),
        (lambda: Float16(0.0), "scale of ps.Float16 must be > 0"),
        (lambda: Float16(math.inf), "scale of ps.Float16"),
        (
            lambda: Int8(feedback=1),
            r"feedback of ps.Int8 is True, False or ps.Feedback\(...\), not 1",
        ),
        (lambda: Feedback(decay=0.0), "decay of ps.Feedback must be above 0 and at most 1, not 0"),
        (lambda: Feedback(decay=math.nan), "decay of ps.Feedback"),
        (lambda: Feedback(decay=True), "decay of ps.Feedback"),
        (lambda: Feedback(clip_norm=0), "clip_norm of ps.Feedback must be > 0 and finite, or None"),
        (lambda: Feedback(clip_norm=math.inf), "clip_norm of ps.Feedback"),
        (lambda: BFloat16(even_local=None), "even_local of ps.BFloat16"),
    ],
)
def test_options_are_checked(make: Any, told: str) -> None:
    with pytest.raises((ValueError, TypeError), match=told):
        make()


def test_codecs_travel_by_name() -> None:
    """As in the suite, which has none of these."""
    for codec in (
        *CODECS,
        Int8(feedback=False),
        PowerSGD(2, 3),
        TopK(0.1, feedback=Feedback(decay=0.5)) | Int4(),
        Sign(feedback=Feedback(decay=0.5)),
        BFloat16(feedback=Feedback(clip_norm=2)),
    ):
        described = msgspec.msgpack.encode(spec(codec))
        assert build(msgspec.msgpack.decode(described, type=CodecSpec)) == codec


def test_what_is_no_codec_is_refused() -> None:
    with pytest.raises(UnknownCodec, match="no codec is called 'Huffman' here, known are BFloat16"):
        build(CodecSpec("Huffman"))
    with pytest.raises(ValueError, match=r"Int8 does not take \{'blocks': 3\}"):
        build(CodecSpec("Int8", {"blocks": 3}))
    with pytest.raises(ValueError, match=r"does not take .*decay of ps.Feedback must be above 0"):
        build(CodecSpec("Int8", {"feedback": True, "feedback_decay": 2.0}))
    with pytest.raises(ValueError, match=r"does not take .*unexpected keyword argument 'rate'"):
        build(CodecSpec("Int8", {"feedback_rate": 2.0}))
    with pytest.raises(TypeError, match=r"push takes an object: write push=ps.Int8\(\)"):
        as_codec(Int8, "push")
    with pytest.raises(TypeError, match=r"push takes a codec, one of ps.BFloat16\(\), .*'int8'"):
        as_codec("int8", "push")
    named = {"BFloat16", "Float16", "Int8", "Int4", "Int2", "Sign", "TopK", "RandomK", "PowerSGD"}
    assert set(BUILT_IN) == {*named, "Delta"}
    with pytest.raises(TypeError, match=r"write pull=ps.Delta\(ps.Int4\(\)\)"):
        as_codec(Delta, "pull")


@each_case("codec", [Int4(32), TopK(0.1) | Int8(8), Int8(even_local=True)], ids=lambda c: c.called)
def test_delta_travels_with_the_codec_of_its_deltas(codec: Codec) -> None:
    delta = Delta(codec)
    assert build(spec(delta)) == delta
    assert (delta.size(1000), delta.fixed) == (codec.size(1000), codec.fixed)
    assert delta.even_local == codec.even_local


@each_case(
    ("options", "told"),
    [
        ({}, "a delta's codec is the name of a codec, and not None"),
        ({"codec": "Delta", "codec.codec": "Int4"}, "a delta's codec is .* and not 'Delta'"),
        ({"codec": "PowerSGD"}, "equal bit by bit"),
        ({"codec": "Int4", "codec.block": 7}, "block of ps.Int4 is a power of two"),
        ({"codec": "Chain", "codec.first": "TopK", "codec.second": "Delta"}, "not 'Delta'"),
        ({"codec": "RandomK", "codec.feedback": False}, "leave feedback out"),
        ({"codec": "Int4", "other": 3}, "Delta does not take"),
    ],
)
def test_delta_of_a_peer_is_checked(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(CodecSpec("Delta", options))

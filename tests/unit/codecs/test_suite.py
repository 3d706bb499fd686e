"""All built-in codecs pass the public suite, and what breaks its rules does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case, passes
from tests.unit.codecs import reference

from paramserve.codecs import (
    BFloat16,
    Codec,
    CustomCodec,
    Delta,
    Float16,
    Int2,
    Int4,
    Int8,
    PowerSGD,
    RandomK,
    Sign,
    TopK,
)
from paramserve.codecs.registry import BUILT_IN
from paramserve.compiling import load_codecs
from paramserve_testing.codec_suite import CodecSuite


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def by_block(values: Any, block: int, share: float) -> Any:
    """A share of the largest size in each block, and what halves of denormals round to."""
    size = np.abs(values).astype(np.float64)
    largest = [part.max() for part in reference.blocks(size, block)]  # type: ignore[arg-type]
    return np.repeat(largest, block)[: size.size] * share * (1 + 1e-4) + 2.0**-119


class BFloat16Suite(CodecSuite):
    codec: Codec = BFloat16()

    def bound(self, values: Any) -> Any:
        return np.abs(values).astype(np.float64) / 256 + 2.0**-134


class Float16Suite(CodecSuite):
    codec: Codec = Float16()

    def bound(self, values: Any) -> Any:
        size = np.abs(values).astype(np.float64)
        return np.maximum(np.maximum(size / 2048, 2.0**-25), size - 65504.0)


class ScaledFloat16Suite(CodecSuite):
    codec: Codec = Float16(100.0)

    def bound(self, values: Any) -> Any:
        size = np.abs(values).astype(np.float64)
        rounding = np.maximum(size / 2048 * (1 + 1e-6), 2.0**-25 / 100)
        return np.maximum(rounding, size - 655.0)


class Int8Suite(CodecSuite):
    codec: Codec = Int8()
    share = 1 / 254

    def bound(self, values: Any) -> Any:
        return by_block(values, self.codec.block, self.share)  # type: ignore[attr-defined]


class StochasticInt8Suite(Int8Suite):
    codec = Int8(64, rounding="stochastic")
    unbiased = True
    share = 1 / 127


class Int4Suite(Int8Suite):
    codec = Int4()
    share = 1 / 14


class StochasticInt4Suite(Int8Suite):
    codec = Int4(rounding="stochastic")
    unbiased = True
    share = 1 / 7


class Int2Suite(Int8Suite):
    codec = Int2()
    share = 1.0


class StochasticInt2Suite(Int8Suite):
    codec = Int2(rounding="stochastic")
    unbiased = True
    share = 2.0


class SignSuite(Int8Suite):
    codec = Sign(8)
    share = 1.0


class TopKSuite(CodecSuite):
    codec: Codec = TopK(0.01)

    def bound(self, values: Any) -> Any:
        return np.abs(values)


class PlainTopKSuite(TopKSuite):
    codec = TopK(0.3, "plain")


class RandomKSuite(TopKSuite):
    codec = RandomK(0.01)


class UnbiasedRandomKSuite(CodecSuite):
    codec = RandomK(0.25, feedback=False)
    unbiased = True


class TopKOfInt4Suite(CodecSuite):
    codec: Codec = TopK(0.01) | Int4()

    def bound(self, values: Any) -> Any:
        return np.abs(values) + by_block(values, max(values.size, 1), 1 / 14)


class RandomKOfInt8Suite(TopKOfInt4Suite):
    codec = RandomK(0.1) | Int8(8)


class TopKOfInt2Suite(CodecSuite):
    codec = TopK(0.01) | Int2()


class PowerSGDSuite(CodecSuite):
    """Without shapes; with them see `test_low_rank`."""

    codec = PowerSGD(1)


class RandomKOfSignSuite(CodecSuite):
    codec = RandomK(0.5) | Sign(8)


class DeltaOfInt4Suite(CodecSuite):
    codec: Codec = Delta(Int4())

    def bound(self, values: Any) -> Any:
        return by_block(values, 64, 1 / 14)


class DeltaOfAChainSuite(TopKSuite):
    codec = Delta(TopK(0.3) | Int8(8))

    def bound(self, values: Any) -> Any:
        return np.abs(values) + by_block(values, max(values.size, 1), 1 / 254)


@dataclass(frozen=True)
class Steps(CustomCodec):
    """Whole multiples of a step, in a byte each."""

    step: float = 0.05
    feedback: bool = field(default=False, kw_only=True)

    def size(self, count: int) -> int:
        return count

    def encode(self, values: Any, out: Any, seed: int) -> int:
        within = np.clip(values, -127 * self.step, 127 * self.step)
        out[:] = np.rint(within / self.step).astype(np.int8).view(np.uint8)
        return int(values.size)

    def decode(self, data: Any, out: Any) -> None:
        if data.size != out.size:
            raise ValueError("another length")
        out[:] = data.view(np.int8) * np.float32(self.step)


class StepsSuite(CodecSuite):
    codec = Steps()

    def bound(self, values: Any) -> Any:
        size = np.abs(values).astype(np.float64)
        return np.maximum(0.025 * (1 + 1e-5), size - 127 * 0.05 * (1 - 1e-5))


class ChainOfStepsSuite(CodecSuite):
    codec = TopK(0.1, feedback=False) | Steps()


SUITES = [
    each
    for each in list(globals().values())
    if isinstance(each, type) and issubclass(each, CodecSuite) and each is not CodecSuite
]


@each_case("kind", SUITES, ids=lambda kind: kind.__name__)
def test_codec_passes_the_suite(kind: type[CodecSuite]) -> None:
    passes(kind())


def test_all_built_in_codecs_are_here() -> None:
    assert set(BUILT_IN.values()) <= {type(each.codec) for each in SUITES}


class WritesPast(Steps):
    def encode(self, values: Any, out: Any, seed: int) -> int:
        super().encode(values, out, seed)
        if out.size:
            np.lib.stride_tricks.as_strided(out, (out.size + 1,), (1,))[-1] = 0
        return int(out.size)


class LeavesBytes(Steps):
    def encode(self, values: Any, out: Any, seed: int) -> int:
        super().encode(values[1:], out[1:], seed)
        return int(values.size)


class AddsToWhatWasThere(Steps):
    def decode(self, data: Any, out: Any) -> None:
        with np.errstate(invalid="ignore"):
            out += data.view(np.int8)


class RaisesAnything(Steps):
    def decode(self, data: Any, out: Any) -> None:
        assert data.size == out.size
        super().decode(data, out)


class TakesAnyLength(Steps):
    def decode(self, data: Any, out: Any) -> None:
        out[:] = 0
        count = min(data.size, out.size)
        super().decode(data[:count], out[:count])


class Doubles(Steps):
    def decode(self, data: Any, out: Any) -> None:
        super().decode(data, out)
        out *= 2


class Returns(Steps):
    def decode(self, data: Any, out: Any) -> Any:
        super().decode(data, out)
        return out


class Draws(Steps):
    def encode(self, values: Any, out: Any, seed: int) -> int:
        out[:] = np.random.default_rng().integers(0, 9, out.size)
        return int(values.size)


class LeavesNaN(Steps):
    def decode(self, data: Any, out: Any) -> None:
        super().decode(data, out)
        out[:1] = np.nan


class SizeOfFloat(Steps):
    def size(self, count: int) -> Any:
        return count * 1.0


@dataclass(frozen=True)
class Diverges(CustomCodec):
    """A tenth of the values, ten times as large, with feedback."""

    def size(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Any, out: Any, seed: int) -> int:
        kept = np.random.default_rng(seed).random(values.size) < 0.1
        with np.errstate(over="ignore"):
            out.view(np.float32)[:] = np.nan_to_num(np.where(kept, 10 * values, 0))
        return int(out.size)

    def decode(self, data: Any, out: Any) -> None:
        out[:] = data.view(np.float32)


@each_case(
    ("kind", "test", "told"),
    [
        (WritesPast, "bytes_are_within_size", "written past"),
        (LeavesBytes, "equal_values_and_seeds_give_equal_bytes", "1 values, seed 0"),
        (AddsToWhatWasThere, "decoded_values_do_not_depend_on_what_was_there", "not equal"),
        (RaisesAnything, "any_bytes_are_decoded_or_raise_value_error", "raised AssertionError"),
        (TakesAnyLength, "bytes_of_another_length_are_refused", "bytes were decoded"),
        (Doubles, "values_move_within_the_bound", "the bound is 0.025"),
        (Doubles, "mean_over_the_seeds_is_the_value", "off by"),
        (Returns, "decoded_values_are_finite", "decode returned"),
        (Draws, "equal_values_and_seeds_give_equal_bytes", "values, seed"),
        (LeavesNaN, "decoded_values_are_finite", "NaN or Inf"),
        (SizeOfFloat, "sizes_are_numbers_of_bytes", r"size\(0\) is 0.0"),
        (Diverges, "what_feedback_keeps_does_not_grow", "of 1000 gradients were left out"),
        (Steps, "codec_can_travel", None),
    ],
    ids=lambda each: each.__name__ if isinstance(each, type) else None,
)
def test_suite_finds_what_breaks_its_rules(kind: Any, test: str, told: str | None) -> None:
    class Suite(StepsSuite):
        codec = kind()
        unbiased = True

    def run() -> None:
        suite = Suite()
        suite.setup_method()
        with np.errstate(all="ignore"):
            getattr(suite, f"test_{test}")()

    if told is None:
        run()
        return
    with pytest.raises(AssertionError, match=told):
        run()

"""The conformance suite of codecs: what clients and servers rely on, for built-in ones and yours.

    class TestThirds(CodecSuite):
        codec = Thirds(0.01)

        def bound(self, values):
            return np.full(values.size, 0.005)

pytest then runs every test below on that codec. Whether models learn well with it is not tested
here.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Bytes, Codec, Floats
from paramserve.codecs.registry import as_codec, build, own_classes, spec
from paramserve.compiling import load_codecs
from paramserve.config import CodecSpec

SEEDS = (0, 1, 0xFFFFFFFF)
DRAWS = 10_000
"""Draws from which an unbiased codec's mean is taken."""
ROUNDS = 1000
"""Rounds of error feedback."""
GARBAGE = 200
"""Payloads of random bytes for each number of values."""
GUARD = 64
"""Bytes behind what a codec may write."""


class CodecSuite:
    """Tests that every codec passes. Set `codec` in a subclass, and override `bound`.

    Attributes:
        codec: to be tested.
        unbiased: whether the mean of what is decoded, over the seeds, is the value.
        sizes: numbers of values that are encoded.
    """

    codec: Codec
    unbiased: bool = False
    sizes: Sequence[int] = (0, 1, 2, 7, 8, 9, 63, 64, 65, 255, 257, 1000, 5003)

    def bound(self, values: Floats) -> npt.NDArray[Any] | None:
        """How far each of these values may move, [count]; None: that is not known. To be
        overridden."""
        return None

    def setup_method(self) -> None:
        load_codecs()

    # What it is.

    def test_codec_can_travel(self) -> None:
        assert as_codec(self.codec, "codec") is self.codec
        described = spec(self.codec)
        arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(described), type=CodecSpec)
        again = build(arrived, own_classes(self.codec, "codec"))
        assert again == self.codec, f"{again} was built from the spec of {self.codec}"
        assert spec(again) == described

    def test_instance_is_a_frozen_value(self) -> None:
        assert hash(self.codec) == hash(replace(self.codec))
        assert pickle.loads(pickle.dumps(self.codec)) == self.codec

    def test_sizes_are_numbers_of_bytes(self) -> None:
        for count in self.sizes:
            size = self.codec.size(count)
            assert type(size) is int, f"size({count}) is {size!r}"
            assert size >= min(count, 1), f"{count} values cannot lie in {size} bytes"

    # What is encoded.

    def test_bytes_are_within_size(self) -> None:
        for values in self.given():
            for seed in SEEDS:
                self.encode(values, seed)

    def test_equal_values_and_seeds_give_equal_bytes(self) -> None:
        """Whatever the memory held before."""
        for values in self.given():
            for seed in SEEDS:
                first = self.encode(values, seed, held=0x55)
                second = self.encode(values.copy(), seed, held=0xAA)
                assert first.tobytes() == second.tobytes(), f"{values.size} values, seed {seed}"

    def test_decoded_values_do_not_depend_on_what_was_there(self) -> None:
        for values in self.given():
            data = self.encode(values, 1)
            first, second = (self.decode(data, values.size, held) for held in (math.nan, 7.0))
            np.testing.assert_array_equal(first, second)

    def test_decoded_values_are_finite(self) -> None:
        for values in self.given():
            for seed in SEEDS:
                found = self.there_and_back(values, seed)
                assert np.isfinite(found).all(), f"{values} became NaN or Inf: {found}"

    def test_values_move_within_the_bound(self) -> None:
        for values in self.given():
            wanted = self.bound(values)
            if wanted is None:
                continue
            for seed in SEEDS:
                found = self.there_and_back(values, seed).astype(np.float64)
                moved = np.abs(found - values)
                worst = int((moved - wanted).argmax()) if values.size else 0
                assert (moved <= wanted).all(), (
                    f"of {values.size} values {values[worst]} became {found[worst]}, which is "
                    f"{moved[worst]} away, the bound is {wanted[worst]}"
                )

    def test_mean_over_the_seeds_is_the_value(self) -> None:
        """Test the mean to 4 standard errors, where the codec is declared unbiased."""
        if not self.unbiased:
            return
        values = normal(50, 1.0)
        seeds = np.random.default_rng(1).integers(0, 1 << 32, DRAWS).tolist()
        found = np.array([self.there_and_back(values, seed) for seed in seeds], np.float64)
        error = found.std(axis=0) / math.sqrt(DRAWS)
        missed = np.abs(found.mean(axis=0) - values)
        assert (missed <= 4 * error + 1e-7).all(), f"off by {(missed / error).max()} errors"

    def test_what_feedback_keeps_does_not_grow(self) -> None:
        """Test that a codec with `feedback` leaves out at most half of all gradients."""
        if not self.codec.feedback:
            return
        gradient, left = normal(500, 1.0), np.zeros(500, np.float32)
        for seed in range(ROUNDS):
            given = gradient + left
            left = given - self.there_and_back(given, seed)
        share = float(np.linalg.norm(left) / np.linalg.norm(gradient)) / ROUNDS
        assert share < 0.5, f"{share:.0%} of {ROUNDS} gradients were left out"

    # What peers send.

    def test_bytes_of_another_length_are_refused(self) -> None:
        if not self.codec.fixed:
            return
        for count in self.sizes:
            size = self.codec.size(count)
            for wrong in {0, size // 2 & ~7, size - 1, size + 1, size + 8} - {size, -1}:
                data = aligned(wrong, 1)
                try:
                    self.codec.decode(data, np.empty(count, np.float32))
                except ValueError:
                    continue
                raise AssertionError(f"{wrong} bytes were decoded, {count} values have {size}")

    def test_any_bytes_are_decoded_or_raise_value_error(self) -> None:
        rng = np.random.default_rng(3)
        for count in (0, 1, 7, 64, 257):
            good = [self.encode(normal(count, 1.0), 1), self.encode(np.zeros(count, "f4"), 1)]
            for number in range(GARBAGE):
                data = aligned(int(rng.integers(0, self.codec.size(count) + 9)), 0)
                data[:] = rng.integers(0, 256, data.size)
                if number % 2:  # in part right
                    data = good[number % 4 // 2].copy()
                    at = rng.integers(0, max(data.size, 1), 3)
                    data[at[at < data.size]] = rng.integers(0, 256, int((at < data.size).sum()))
                before = data.tobytes()
                data.flags.writeable = False
                try:
                    self.codec.decode(data, np.zeros(count, np.float32))
                except ValueError:
                    pass
                except Exception as error:
                    kind = type(error).__name__
                    raise AssertionError(f"{before!r} raised {kind}, not ValueError") from error

    # What the tests are made of.

    def given(self) -> Iterator[Floats]:
        """What is encoded: of all sizes, and extremes."""
        for size in self.sizes:
            yield normal(size, 1.0)
            yield np.zeros(size, np.float32)
        limits = np.finfo(np.float32)
        for extreme in (limits.smallest_subnormal, limits.tiny, 1e-3, limits.max):
            for size in (1, 9, 300):
                values = normal(size, 1.0)
                with np.errstate(under="ignore", over="ignore"):
                    scaled = values / np.abs(values).max() * np.float32(extreme)
                yield scaled
                yield np.full(size, -extreme, np.float32)
        mixed = normal(300, 1.0)
        mixed[::3], mixed[1::7], mixed[2::11] = 0.0, limits.smallest_subnormal, -0.0
        yield mixed

    def encode(self, values: Floats, seed: int, held: int = 0x33) -> Bytes:
        """The bytes of values, after a look that nothing else was written."""
        values.flags.writeable = False
        size = self.codec.size(values.size)
        memory = aligned(size + GUARD, held)
        written = self.codec.encode(values, memory[:size], seed)
        assert (memory[size:] == held).all(), f"{values.size} values were written past {size} bytes"
        if self.codec.fixed:
            assert written == size, f"{written} bytes were written, size({values.size}) is {size}"
        assert 0 <= written <= size, f"{written} bytes were written, size({values.size}) is {size}"
        assert written or not values.size, f"{values.size} values became no byte"
        return memory[:written]

    def decode(self, data: Bytes, count: int, held: float = math.nan) -> Floats:
        """What bytes stand for."""
        found = np.full(count, held, np.float32)
        given = data[:]
        given.flags.writeable = False
        decode: Any = self.codec.decode  # what users write need not be typed
        returned = decode(given, found)
        assert returned is None, f"decode returned {type(returned).__name__}"
        return found

    def there_and_back(self, values: Floats, seed: int) -> Floats:
        """What is decoded of values."""
        return self.decode(self.encode(values, seed), values.size)


def normal(size: int, scale: float) -> Floats:
    """Values of a normal distribution, [size]; of equal sizes equal ones."""
    drawn = np.random.default_rng(size).normal(size=size) * scale
    return np.asarray(drawn, np.float32)


def aligned(size: int, held: int) -> Bytes:
    """Memory [size] at an address that is a multiple of 8, full of one byte."""
    memory = np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]
    memory.fill(held)
    return memory

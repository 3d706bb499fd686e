"""The codecs of every value: 16 bits; 8, 4, 2 and 1 bit with a scale for each block."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np

from paramserve.codecs.base import Bytes, Codec, Feedback, Floats, check_length
from paramserve.codecs.compiled import codec_kernels

SCALE_BYTES = 4
BLOCK_MIN, BLOCK_MAX = 8, 1 << 16
"""Values that share a scale."""
FLOAT16_MAX = 65504.0
TILE = 1 << 14
"""Values that are converted at a time, by way of memory that stays in the cache."""


@dataclass(frozen=True)
class BFloat16(Codec):
    """Half the bytes: float32 without its lower 16 bits, rounded to the nearest.

    A value keeps its range, and 8 bits of its mantissa: it moves by at most 1/256 of its size.
    """

    feedback: bool | Feedback = field(default=False, kw_only=True)

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        codec_kernels().to_bfloat16(values.view(np.uint32), out.view(np.uint16)[: values.size])
        return 2 * values.size

    def decode(self, data: Bytes, out: Floats) -> None:
        check_length(data, 2 * out.size)
        codec_kernels().from_bfloat16(data.view(np.uint16), out.view(np.uint32))


@dataclass(frozen=True)
class Float16(Codec):
    """Half the bytes: IEEE half precision of `scale` times the values, rounded to the nearest.

    It keeps 11 bits of a mantissa for sizes of 6e-5 to 65,504, after scaling; below, less, and what
    is larger becomes 65,504.

    Attributes:
        scale: above 0; gradients below 1e-4 need one of 100 or 1,000.
    """

    scale: float = 1.0
    feedback: bool | Feedback = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not (good and 0.0 < self.scale < math.inf):
            raise ValueError(f"scale of ps.Float16 must be > 0 and finite, not {self.scale!r}")

    def size(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        halves, scaled = out.view(np.float16), np.empty(min(TILE, values.size), np.float32)
        for start in range(0, values.size, TILE):
            part = values[start : start + TILE]
            tile = scaled[: part.size]
            with np.errstate(over="ignore"):
                np.multiply(part, np.float32(self.scale), out=tile)
            np.clip(tile, -FLOAT16_MAX, FLOAT16_MAX, out=tile)
            halves[start : start + part.size] = tile
        return 2 * values.size

    def decode(self, data: Bytes, out: Floats) -> None:
        check_length(data, 2 * out.size)
        halves = data.view(np.float16)
        for start in range(0, out.size, TILE):
            tile = out[start : start + TILE]
            with np.errstate(invalid="ignore", over="ignore"):  # a peer's bytes may be anything
                tile[...] = halves[start : start + TILE]
                tile /= np.float32(self.scale)


@dataclass(frozen=True)
class Blockwise(Codec):
    """Values in blocks, each with a float32 scale. The scales come first.

    Attributes:
        block: values with one scale: a power of two from 8 to 65,536.
    """

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        block = self.block
        good = isinstance(block, int) and not isinstance(block, bool)
        if not (good and BLOCK_MIN <= block <= BLOCK_MAX and block & (block - 1) == 0):
            raise ValueError(
                f"block of ps.{self.name} is a power of two from {BLOCK_MIN} to {BLOCK_MAX}, not "
                f"{block!r}"
            )

    def _scales(self, count: int) -> int:
        return -(-count // self.block)

    def _parts(self, data: Bytes, count: int) -> tuple[Floats, Bytes]:
        """The scales and the rest."""
        end = SCALE_BYTES * self._scales(count)
        return data[:end].view(np.float32), data[end : self.size(count)]

    def _read(self, data: Bytes, count: int) -> tuple[Floats, Bytes]:
        """The scales, looked at, and the rest.

        Raises:
            ValueError: they are none.
        """
        check_length(data, self.size(count))
        scales, rest = self._parts(data, count)
        self.check_scales(scales)
        return scales, rest

    def check_scales(self, scales: Floats) -> None:
        """Raise `ValueError` if one is negative, NaN or Inf."""
        if scales.size and not (scales.min() >= 0.0 and scales.max() < math.inf):
            self._refuse_scale()

    def _refuse_scale(self) -> NoReturn:
        raise ValueError(f"a scale of ps.{self.name} is negative, NaN or Inf")


Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True)
class Integers(Blockwise):
    """One of a few levels for each value, which the block's scale tells.

    Attributes:
        rounding: "nearest"; or "stochastic": up or down at random, so that the mean is right.
    """

    rounding: Rounding = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'rounding of ps.{self.name} is "nearest" or "stochastic", not {self.rounding!r}'
            )

    def _encode(self, kernel: Any, values: Floats, out: Bytes, seed: int) -> int:
        scales, rest = self._parts(out, values.size)
        random = int(self.rounding == "stochastic")
        kernel(values, scales, rest, self.block, random, seed & 0xFFFFFFFF)
        return self.size(values.size)


@dataclass(frozen=True)
class Int8(Integers):
    """A quarter of the bytes: 255 levels in each block of 256 values, with a float32 scale.

    A value moves by at most 1/254 of the largest of its block; 1/127 if rounding is stochastic.
    """

    def size(self, count: int) -> int:
        return SCALE_BYTES * self._scales(count) + count

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        return self._encode(codec_kernels().to_int8, values, out, seed)

    def decode(self, data: Bytes, out: Floats) -> None:
        scales, rest = self._read(data, out.size)
        codec_kernels().from_int8(rest, scales, out, self.block)


@dataclass(frozen=True)
class Int4(Integers):
    """An eighth of the bytes: 15 levels in each block of 64 values, with a float32 scale.

    A value moves by at most 1/14 of the largest of its block; 1/7 if rounding is stochastic.
    """

    block: int = 64

    def size(self, count: int) -> int:
        return SCALE_BYTES * self._scales(count) + -(-count // 2)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        return self._encode(codec_kernels().to_int4, values, out, seed)

    def decode(self, data: Bytes, out: Floats) -> None:
        scales, rest = self._read(data, out.size)
        codec_kernels().from_int4(rest, scales, out, self.block)


BFLOAT16_INF = 0x7F80
"""Bits of infinity; those of negative numbers, of Inf and of NaN are no less."""


@dataclass(frozen=True)
class Int2(Integers):
    """A thirteenth of the bytes: 4 levels in each block of 64 values, with two scales in bfloat16.

    The levels are -b, -a, a and b. a is the mean size of the values that are small, b that of the
    others, which begin where those of the optimal quantizer of a normal distribution do: at 1.2303
    times the mean size. Each value becomes the nearest level, and moves by at most the largest size
    of its block, whose squared error is below the squares' sum: so error feedback makes up for it.
    A block of zeros stays so, and a few values among zeros stay as they are.

    With stochastic rounding a is the mean size of all, b the largest; a value moves by at most
    twice the largest of its block.

    Source: Max, *Quantizing for Minimum Distortion*, 1960; Lloyd, 1982, of whose iteration this is
    the first step.
    """

    block: int = 64

    def size(self, count: int) -> int:
        return SCALE_BYTES * self._scales(count) + -(-count // 4)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        return self._encode(codec_kernels().to_int2, values, out, seed)

    def decode(self, data: Bytes, out: Floats) -> None:
        scales, rest = self._read(data, out.size)
        codec_kernels().from_int2(rest, scales, out, self.block)

    def check_scales(self, scales: Floats) -> None:
        """Check both scales in each four bytes; see `Blockwise.check_scales`."""
        halves = scales.view(np.uint16)
        if halves.size and halves.max() >= BFLOAT16_INF:
            self._refuse_scale()


@dataclass(frozen=True)
class Sign(Blockwise):
    """One bit for a value: its sign, times the mean size in its block of 256.

    Source: Bernstein et al., signSGD, 2018; with the scale of Karimireddy et al., 2019.
    """

    def size(self, count: int) -> int:
        return SCALE_BYTES * self._scales(count) + -(-count // 8)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        scales, rest = self._parts(out, values.size)
        codec_kernels().to_signs(values, scales, rest, self.block)
        return self.size(values.size)

    def decode(self, data: Bytes, out: Floats) -> None:
        scales, rest = self._read(data, out.size)
        codec_kernels().from_signs(rest, scales, out, self.block)

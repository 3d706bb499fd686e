"""Values of 16 bits, two in a 32-bit word: widened to float32, and rounded back at random.

Stochastic rounding takes the upper neighbour with the chance that the exact value lies that far
towards it, so that many small updates add up to what they should: rounding to the nearest loses
every update below half a step. What is drawn depends on (stream, key, count, element) only.

A finite value beyond the largest of 16 bits becomes the largest, with its sign: Inf would stay for
ever, and make NaN of all that it meets. NaN and Inf stay what they are.

Imports Numba: import this lazily. Kernels take any row; none checks sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paramserve.rules.base import Array
from paramserve.rules.kernels import kernel

U = np.uint64
GOLDEN = U(0x9E3779B97F4A7C15)
MIX1, MIX2 = U(0xBF58476D1CE4E5B9), U(0x94D049BB133111EB)
"""Constants of splitmix64: Steele, Lea and Flood, OOPSLA 2014."""
U1, U13, U16, U23, U27, U30, U31, U32 = (U(n) for n in (1, 13, 16, 23, 27, 30, 31, 32))
LOW16, LOW32 = U(0xFFFF), U(0xFFFFFFFF)
SIGN, HALF_SIGN = U(0x80000000), U(0x8000)
INF = U(0x7F800000)
BFLOAT16 = 1
"""Number of bfloat16 in `RowLayout.half`; 2 is float16."""

BFLOAT_INF, BFLOAT_MAX, BFLOAT_QUIET = U(0x7F80), U(0x7F7F), U(0x0040)
FLOAT_INF, FLOAT_MAX, FLOAT_QUIET = U(0x7C00), U(0x7BFF), U(0x0200)
FLOAT_NORMAL = U(0x38800000)
"""2**-14: below it, float16 has steps of 2**-24."""
FLOAT_BIAS = U(112 << 23)
FLOAT_MANTISSA, FLOAT_DROPPED = U(0x3FF), U(0x1FFF)
MANTISSA, HIDDEN = U(0x7FFFFF), U(0x800000)
FLOAT_SHIFT = U(126)
WIDEN = np.float32(2.0**112)


@kernel
def mix(x: Any) -> Any:
    """A hash of 64 bits, as uint64: the step of splitmix64."""
    z = U(x) + GOLDEN
    z = (z ^ (z >> U30)) * MIX1
    z = (z ^ (z >> U27)) * MIX2
    return z ^ (z >> U31)


@kernel
def noise_of(stream: Any, key: int, count: int) -> Any:
    """What all noise of one row at one count is drawn from."""
    return mix(mix(U(stream) ^ mix(U(key))) + U(count))


@kernel
def round_bfloat16(bits: Any, noise: Any) -> Any:
    """The bfloat16 of a float32's bits. NaN and Inf stay; what is finite stays finite."""
    size = U(bits) & ~SIGN
    sign = (U(bits) >> U16) & HALF_SIGN
    if size > INF:
        return sign | (size >> U16) | BFLOAT_QUIET
    if size == INF:
        return sign | BFLOAT_INF
    return sign | min((size + (U(noise) & LOW16)) >> U16, BFLOAT_MAX)


@kernel
def round_float16(bits: Any, noise: Any) -> Any:
    """The float16 of a float32's bits; otherwise as `round_bfloat16`."""
    size = U(bits) & ~SIGN
    sign = (U(bits) >> U16) & HALF_SIGN
    if size > INF:
        payload = (size >> U13) & FLOAT_MANTISSA
        return sign | FLOAT_INF | FLOAT_QUIET | payload
    if size == INF:
        return sign | FLOAT_INF
    if size >= FLOAT_NORMAL:
        near = (size - FLOAT_BIAS + (U(noise) & FLOAT_DROPPED)) >> U13
        return sign | min(near, FLOAT_MAX)
    exponent = max(size >> U23, U1)
    mantissa = (size & MANTISSA) | (HIDDEN if size >= HIDDEN else U(0))
    # In steps of 2**-24 the value is mantissa / 2**shift. 32 bits of noise tell 2**-56 apart.
    shift = FLOAT_SHIFT - exponent
    if shift > U32:
        mantissa >>= min(shift - U32, U31)
        shift = U32
    return sign | ((mantissa + (U(noise) >> (U32 - shift))) >> shift)


@kernel
def decode(words: Array, half: int, out: Array) -> None:
    """Widen a row's 16-bit values to float32 [dim]; `words` is uint32 [at least (dim + 1) / 2]."""
    bits = out.view(np.uint32)
    if half == BFLOAT16:
        for j in range(out.size // 2):
            bits[2 * j] = U(words[j]) << U16
            bits[2 * j + 1] = U(words[j]) & (LOW16 << U16)
        if out.size % 2:
            bits[out.size - 1] = U(words[out.size // 2]) << U16
        return
    for i in range(out.size):
        stored = (U(words[i // 2]) >> (U16 * U(i % 2))) & LOW16
        bits[i] = ((stored & HALF_SIGN) << U16) | ((stored & ~HALF_SIGN) << U13)
    for i in range(out.size):
        out[i] *= WIDEN  # exact, also for the smallest numbers
        if abs(out[i]) >= np.float32(65536.0):
            bits[i] = U(bits[i]) | INF


@kernel
def encode(values: Array, half: int, words: Array, noise: Any) -> None:
    """Round float32 [dim] into a row's words, two values in each.

    Args:
        noise: from `noise_of`; each word draws its own 64 bits from it.
    """
    bits = values.view(np.uint32)
    stream = U(noise)
    for j in range((values.size + 1) // 2):
        stream += GOLDEN
        z = mix(stream)
        low = U(bits[2 * j])
        high = U(bits[2 * j + 1]) if 2 * j + 1 < values.size else U(0)
        if half == BFLOAT16:
            word = U(round_bfloat16(low, z & LOW32))
            word |= U(round_bfloat16(high, z >> U32)) << U16
        else:
            word = U(round_float16(low, z & LOW32))
            word |= U(round_float16(high, z >> U32)) << U16
        words[j] = word

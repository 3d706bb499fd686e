"""The loops of the codecs, compiled by Numba: imported through `compiled` only.

Every kernel takes contiguous, aligned arrays, and does not check their sizes. Values come as
float32, or as the bits of it where only these matter. Nothing is said of NaN and Inf: what holds
one is not encoded, but by the 16-bit kinds, which keep it.

Rounding to the nearest integer adds 1.5 * 2**23, whose sum has no place for a fraction: an addition
rounds to the nearest, ties to even, and vectorises where a call of `rint` does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import borrowed, inlined, reinterpreted
from paramserve.rules.kernels import INT, kernel

U = np.uint32
MAGIC = np.float32(12582912.0)
"""1.5 * 2**23."""
HALF, ZERO = np.float32(0.5), np.float32(0.0)
UNIT = np.float32(2.0**-24)
LARGEST = U(0x7FFFFFFF)
"""All bits but the sign."""
INF, BFLOAT_INF, BFLOAT_MAX = U(0x7F800000), U(0x7F80), U(0x7F7F)
BINS = 1 << 16

READ_FLOATS = types.Array(types.float32, 1, "C", readonly=True)
READ_BITS = types.Array(types.uint32, 1, "C", readonly=True)
READ_HALVES = types.Array(types.uint16, 1, "C", readonly=True)
READ_BYTES = types.Array(types.uint8, 1, "C", readonly=True)
FLOATS = types.Array(types.float32, 1, "C")
BITS = types.Array(types.uint32, 1, "C")
HALVES = types.Array(types.uint16, 1, "C")
BYTES = types.Array(types.uint8, 1, "C")


# --- 16 bits ---------------------------------------------------------------------------------


@kernel
def to_bfloat16(bits: Array, out: Array) -> None:
    """Round to the nearest, ties to even; a finite value never becomes Inf."""
    for i in range(bits.size):
        b = bits[i]
        size = b & LARGEST
        r = (b + U(0x7FFF) + ((b >> U(16)) & U(1))) >> U(16)
        over = ((r & U(0x7FFF)) == BFLOAT_INF) & (size < INF)
        r = (r & U(0x8000)) | BFLOAT_MAX if over else r
        r = (b >> U(16)) | U(0x40) if size > INF else r
        out[i] = np.uint16(r)


@kernel
def from_bfloat16(data: Array, out: Array) -> None:
    for i in range(data.size):
        out[i] = U(data[i]) << U(16)


# --- blocks with a scale each ------------------------------------------------------------------
#
# Loops go over slices, from 0: an index that begins elsewhere may be below 0 for all that the
# compiler knows, and then it does not vectorise. Sums of uint32 become uint64, so each is cast.


@inlined
def hashed(seed: Any, i: Any) -> Any:
    """32 bits: murmur3's finalizer (A. Appleby, public domain)."""
    x = U(U(U(i) * U(0x9E3779B1)) + seed)
    x = U(U(x ^ U(x >> U(16))) * U(0x85EBCA6B))
    x = U(U(x ^ U(x >> U(13))) * U(0xC2B2AE35))
    return U(x ^ U(x >> U(16)))


@inlined
def noise(seed: Any, i: Any) -> Any:
    """Noise in [-0.5, 0.5)."""
    return np.float32(np.int32(U(hashed(seed, i) >> U(8)))) * UNIT - HALF


@inlined
def draw_level(value: Any, factor: Any, levels: Any, seed: Any, i: Any) -> Any:
    """A level, rounded up or down at random. The largest value has `levels` to within a rounding
    error, which noise of almost 0.5 would make the next one: that has another sign."""
    y = value * factor + noise(seed, i)
    y = levels if y > levels else y
    y = -levels if y < -levels else y
    return np.int32(reinterpreted(y + MAGIC))


@inlined
def largest_of(values: Array) -> Any:
    """The largest size of an element."""
    most = ZERO
    for i in range(values.size):
        size = abs(values[i])
        most = size if size > most else most
    return most


@inlined
def steps_of(largest: Any, levels: Any) -> Any:
    """Factor by which `largest` becomes so many levels; 0 where that would overflow: then all are
    0, as they are to within 2**-120."""
    factor = levels / largest if largest > ZERO else ZERO
    return factor if factor < np.float32(np.inf) else ZERO


@inlined
def scale_of(largest: Any, levels: Any, factor: Any) -> Any:
    """What a level stands for: the largest value stays finite."""
    scale = largest / levels if factor > ZERO else ZERO
    if scale * levels == np.float32(np.inf):
        scale = reinterpreted(np.int32(reinterpreted(scale) - 1))
    return scale


@kernel
def to_int8(values: Array, scales: Array, out: Array, block: int, random: int, seed: int) -> None:
    """One scale for each block, and one byte for each value; with `random` rounded at random."""
    levels = np.float32(127.0)
    for number in range(scales.size):
        start = number * block
        span, bytes_of = values[start : start + block], out[start : start + block]
        largest = largest_of(span)
        factor = steps_of(largest, levels)
        scales[number] = scale_of(largest, levels, factor)
        if random:
            own = U(seed + start)
            for i in range(span.size):
                bytes_of[i] = np.uint8(draw_level(span[i], factor, levels, own, i))
        else:
            for i in range(span.size):
                bytes_of[i] = np.uint8(np.int32(reinterpreted(span[i] * factor + MAGIC)))


@kernel
def from_int8(data: Array, scales: Array, out: Array, block: int) -> None:
    for number in range(scales.size):
        start = number * block
        bytes_of, span = data[start : start + block], out[start : start + block]
        scale = scales[number]
        for i in range(span.size):
            span[i] = np.float32(np.int8(bytes_of[i])) * scale


@inlined
def nibble(value: Any, factor: Any) -> Any:
    return np.int32(np.int32(reinterpreted(value * factor + MAGIC)) & np.int32(15))


@inlined
def drawn_nibble(value: Any, factor: Any, seed: Any, i: Any) -> Any:
    return np.int32(draw_level(value, factor, np.float32(7.0), seed, i) & np.int32(15))


@kernel
def to_int4(values: Array, scales: Array, out: Array, block: int, random: int, seed: int) -> None:
    """One scale for each block, and one byte for two values, the first one's in the low bits."""
    levels = np.float32(7.0)
    for number in range(scales.size):
        start = number * block
        span, bytes_of = values[start : start + block], out[start // 2 :]
        largest, own, pairs = largest_of(span), U(seed + start), span.size // 2
        factor = steps_of(largest, levels)
        scales[number] = scale_of(largest, levels, factor)
        if random:
            for i in range(pairs):
                low = drawn_nibble(span[2 * i], factor, own, 2 * i)
                high = drawn_nibble(span[2 * i + 1], factor, own, 2 * i + 1)
                bytes_of[i] = np.uint8(low | np.int32(high << 4))
        else:
            for i in range(pairs):
                low, high = nibble(span[2 * i], factor), nibble(span[2 * i + 1], factor)
                bytes_of[i] = np.uint8(low | np.int32(high << 4))
        if span.size % 2:
            last, alone = span.size - 1, nibble(span[-1], factor)
            if random:
                alone = drawn_nibble(span[-1], factor, own, last)
            bytes_of[pairs] = np.uint8(alone)


@inlined
def signed(four: Any) -> Any:
    """A number of four bits, of which the highest is the sign."""
    return np.float32(np.int32(np.int32(np.int32(four) ^ np.int32(8)) - np.int32(8)))


@kernel
def from_int4(data: Array, scales: Array, out: Array, block: int) -> None:
    for number in range(scales.size):
        start = number * block
        bytes_of, span = data[start // 2 :], out[start : start + block]
        scale, pairs = scales[number], span.size // 2
        for i in range(pairs):
            both = bytes_of[i]
            span[2 * i] = signed(both & np.uint8(15)) * scale
            span[2 * i + 1] = signed(both >> np.uint8(4)) * scale
        if span.size % 2:
            span[2 * pairs] = signed(bytes_of[pairs] & np.uint8(15)) * scale


OUTER = 1.2303
"""Times the mean size: where the outer of four levels begins, for values of a normal distribution
0.9816 times the standard deviation (Max, *Quantizing for Minimum Distortion*, 1960), which is
sqrt(pi / 2) times the mean size."""
PARTS = np.float32(65535.0)
"""Parts of a block's largest size, in which sizes are added up: whole numbers, so that their sum
depends on no order, and is below 2**32 for the largest block."""
MAGIC_BITS = U(0x4B400000)
TOP = np.int32(1 << 24)


@inlined
def parts_of(value: Any, factor: Any) -> Any:
    """A size as a whole number of parts of the largest."""
    return U(U(np.int32(reinterpreted(abs(value) * factor + MAGIC))) - MAGIC_BITS)


@inlined
def nearest_half(value: Any) -> Any:
    """The bits of a finite float32, not below 0, rounded to bfloat16: see `to_bfloat16`."""
    b = U(np.int32(reinterpreted(value)))
    r = U(U(b + U(0x7FFF) + U(U(b >> U(16)) & U(1))) >> U(16))
    return r if r < BFLOAT_INF else BFLOAT_MAX


@inlined
def lower_half(value: Any) -> Any:
    """The same, rounded down."""
    return U(U(np.int32(reinterpreted(value))) >> U(16))


@inlined
def upper_half(value: Any) -> Any:
    """The same, rounded up."""
    b = U(np.int32(reinterpreted(value)))
    r = U(U(b + U(0xFFFF)) >> U(16))
    return r if r < BFLOAT_INF else BFLOAT_MAX


@inlined
def of_half(bits: Any) -> Any:
    """The float32 that 16 bits of bfloat16 are."""
    return reinterpreted(np.int32(U(U(bits) << U(16))))


@inlined
def total_of(values: Array, factor: Any) -> Any:
    """All sizes, in parts."""
    total = U(0)
    for i in range(values.size):
        total = U(total + parts_of(values[i], factor))
    return total


@inlined
def int2_levels(values: Array, factor: Any, largest: Any) -> Any:
    """The inner and the outer level of a block, as the bits of a bfloat16 each: the mean of the
    small sizes, and that of the others. Where there are no others, both are the same."""
    total = total_of(values, factor)
    limit = U(np.int64(np.float64(total) * OUTER / values.size))
    above, others = U(0), U(0)
    for i in range(values.size):
        parts = parts_of(values[i], factor)
        above = U(above + (parts if parts > limit else U(0)))
        others = U(others + (U(1) if parts > limit else U(0)))
    part = np.float64(largest) / np.float64(PARTS)
    few = np.float64(U(total - above)) / np.float64(U(U(values.size) - others))
    inner = outer = nearest_half(np.float32(few * part))
    if others > U(0):
        outer = nearest_half(np.float32(np.float64(above) / np.float64(others) * part))
    return inner, outer


@inlined
def pair(value: Any, limit: Any) -> Any:
    """Two bits: whether the level is the outer one, and whether it is below 0."""
    return U(U(2) if value < ZERO else U(0)) | U(U(1) if abs(value) > limit else U(0))


@inlined
def drawn_pair(value: Any, inner: Any, outer: Any, seed: Any, i: Any) -> Any:
    """The same, of one of the two levels around the value; drawn so that the mean is the value.
    One beyond the outer level has that, with its sign."""
    draw = np.int32(U(hashed(seed, i) >> U(8)))
    centred = np.float32(np.int32(np.int32(draw + draw) + np.int32(1)) - TOP) * UNIT  # in (-1, 1)
    size = abs(value)
    between = size > inner
    above = np.float32(draw) * UNIT * (outer - inner) < size - inner
    below = value < (ZERO if between else centred * inner)
    return U(U(2) if below else U(0)) | U(U(1) if between & above else U(0))


@inlined
def byte_of(a: Any, b: Any, c: Any, d: Any) -> Any:
    """Four pairs, the first one in the low bits."""
    return np.uint8(U(a | U(b << U(2))) | U(U(c << U(4)) | U(d << U(6))))


@inlined
def to_pairs(span: Array, bytes_of: Array, limit: Any) -> None:
    for at in range(span.size // 4):
        a, b = pair(span[4 * at], limit), pair(span[4 * at + 1], limit)
        c, d = pair(span[4 * at + 2], limit), pair(span[4 * at + 3], limit)
        bytes_of[at] = byte_of(a, b, c, d)
    first, bits = span.size & ~3, U(0)
    for i in range(span.size & 3):
        bits = U(bits | U(pair(span[first + i], limit) << U(2 * i)))
    if span.size & 3:
        bytes_of[first // 4] = np.uint8(bits)


@inlined
def to_drawn_pairs(span: Array, bytes_of: Array, inner: Any, outer: Any, seed: Any) -> None:
    for at in range(span.size // 4):
        a = drawn_pair(span[4 * at], inner, outer, seed, 4 * at)
        b = drawn_pair(span[4 * at + 1], inner, outer, seed, 4 * at + 1)
        c = drawn_pair(span[4 * at + 2], inner, outer, seed, 4 * at + 2)
        d = drawn_pair(span[4 * at + 3], inner, outer, seed, 4 * at + 3)
        bytes_of[at] = byte_of(a, b, c, d)
    first, bits = span.size & ~3, U(0)
    for i in range(span.size & 3):
        code = drawn_pair(span[first + i], inner, outer, seed, first + i)
        bits = U(bits | U(code << U(2 * i)))
    if span.size & 3:
        bytes_of[first // 4] = np.uint8(bits)


@kernel
def to_int2(values: Array, scales: Array, out: Array, block: int, random: int, seed: int) -> None:
    """Two levels for each block, the bits of two bfloat16 as one float32, the inner one's low; and
    one byte for four values, the first one's in the low bits. A block is a multiple of 4."""
    for number in range(scales.size):
        start = number * block
        span, bytes_of = values[start : start + block], out[start // 4 :]
        largest = largest_of(span)
        factor = steps_of(largest, PARTS)
        if random:
            part = np.float64(largest) / np.float64(PARTS)
            mean = np.float64(total_of(span, factor)) / span.size * part
            low, high = lower_half(np.float32(mean)), upper_half(largest)
            high = high if factor > ZERO else U(0)
        else:
            low, high = int2_levels(span, factor, largest)
        scales[number] = reinterpreted(np.int32(U(low | U(high << U(16)))))
        inner, outer = of_half(low), of_half(high)
        if random:
            to_drawn_pairs(span, bytes_of, inner, outer, U(seed + start))
        else:
            to_pairs(span, bytes_of, HALF * inner + HALF * outer)


@inlined
def level(code: Any, inner: Any, outer: Any) -> Any:
    """What two bits stand for; the levels are given as bits."""
    size = outer if U(code) & U(1) else inner
    return reinterpreted(np.int32(U(size | U(U(U(code) & U(2)) << U(30)))))


@kernel
def from_int2(data: Array, scales: Array, out: Array, block: int) -> None:
    """out[i] = level, or -level if bit s of byte i // 4 is set, with s = 2 * (i % 4) + 1. Bit s - 1
    chooses the level: 0 the inner one, 1 the outer one. These are the bfloat16 in the low and in
    the high 16 bits of the scale of i's block."""
    for number in range(scales.size):
        start = number * block
        bytes_of, span = data[start // 4 :], out[start : start + block]
        both = U(np.int32(reinterpreted(scales[number])))
        inner, outer = U(both << U(16)), U(both & U(0xFFFF0000))
        for at in range(span.size // 4):
            four = bytes_of[at]
            span[4 * at] = level(four, inner, outer)
            span[4 * at + 1] = level(four >> np.uint8(2), inner, outer)
            span[4 * at + 2] = level(four >> np.uint8(4), inner, outer)
            span[4 * at + 3] = level(four >> np.uint8(6), inner, outer)
        first = span.size & ~3
        for i in range(span.size & 3):
            span[first + i] = level(bytes_of[first // 4] >> np.uint8(2 * i), inner, outer)


@kernel
def to_signs(values: Array, scales: Array, out: Array, block: int) -> None:
    """The mean size of each block, and one bit for each value, set where it is below 0. A block is
    a multiple of 8."""
    lanes = np.empty(8, np.float64)
    for number in range(scales.size):
        start = number * block
        span, bytes_of = values[start : start + block], out[start // 8 :]
        whole = span.size // 8
        lanes[:] = 0.0
        for byte in range(whole):
            eight, bits = span[8 * byte : 8 * byte + 8], U(0)
            for i in range(8):
                lanes[i] += np.float64(abs(eight[i]))
                sign = U(U(np.int32(reinterpreted(eight[i]))) >> U(31))
                bits = U(bits | U(sign << U(i)))
            bytes_of[byte] = np.uint8(bits)
        total = lanes.sum()
        tail = span[8 * whole :]
        if tail.size:
            bits = U(0)
            for i in range(tail.size):
                total += np.float64(abs(tail[i]))
                sign = U(U(np.int32(reinterpreted(tail[i]))) >> U(31))
                bits = U(bits | U(sign << U(i)))
            bytes_of[whole] = np.uint8(bits)
        scales[number] = np.float32(total / span.size)


@kernel
def from_signs(data: Array, scales: Array, out: Array, block: int) -> None:
    for number in range(scales.size):
        start = number * block
        span, scale = out[start : start + block], scales[number]
        bytes_of = data[start // 8 :]
        for i in range(span.size):
            below = U(U(bytes_of[i // 8]) >> U(i % 8)) & U(1)
            span[i] = -scale if below else scale


# --- the largest of all ----------------------------------------------------------------------


@kernel
def choose_largest(bits: Array, k: int, counts: Array, places: Array) -> None:
    """The places, rising, of the `k` values of the largest size; of equal ones the first.

    Args:
        counts: uint32 [BINS] of any content.
        places: uint32 [k], gets them.
    """
    counts[:] = U(0)
    for i in range(bits.size):
        counts[(bits[i] & LARGEST) >> U(16)] += U(1)
    top, remaining = BINS - 1, k
    while counts[top] < remaining:
        remaining -= counts[top]
        top -= 1
    counts[:] = U(0)
    high = U(top)
    for i in range(bits.size):
        size = bits[i] & LARGEST
        if size >> U(16) == high:
            counts[size & U(0xFFFF)] += U(1)
    low = BINS - 1
    while counts[low] < remaining:
        remaining -= counts[low]
        low -= 1
    least, at = (high << U(16)) | U(low), 0
    for i in range(bits.size):
        size = bits[i] & LARGEST
        if size > least:
            places[at] = U(i)
            at += 1
        elif size == least and remaining > 0:
            places[at] = U(i)
            at += 1
            remaining -= 1


@kernel
def to_gaps(places: Array, out: Array) -> int:
    """Rising places as the distances between them less 1, seven bits to a byte, the low ones first;
    the highest bit says that another byte follows. The bytes that were written."""
    before, at = np.int64(-1), 0
    for i in range(places.size):
        gap = np.int64(places[i]) - before - 1
        before = np.int64(places[i])
        while gap >= 128:
            out[at] = np.uint8(gap & 127) | np.uint8(128)
            gap >>= 7
            at += 1
        out[at] = np.uint8(gap)
        at += 1
    return at


@kernel
def from_gaps(data: Array, out: Array, size: int) -> int:
    """The places below `size` that bytes stand for; how many bytes that took, or -1 if they stand
    for no such places."""
    before, at = np.int64(-1), 0
    for i in range(out.size):
        gap, shift = np.int64(0), 0
        while True:
            if at >= data.size or shift > 28:
                return -1
            byte = data[at]
            at += 1
            gap |= np.int64(byte & np.uint8(127)) << np.int64(shift)
            shift += 7
            if byte < 128:
                break
        before += gap + 1
        if before >= size:
            return -1
        out[i] = U(before)
    return at


# --- some of all -------------------------------------------------------------------------------


@kernel
def draw_places(count: int, seed: int, places: Array) -> None:
    """`chosen.size` of `count` places, rising; every choice of as many is equally likely.

    Source: Fan, Muller and Rezucha, 1962; Knuth, The Art of Computer Programming, volume 2, 3.4.2,
    Algorithm S.

    Args:
        seed: 32 bits.
        places: uint32 [at most count], gets them.
    """
    own, at, i = U(seed), 0, 0
    while at < places.size:
        product = np.uint64(hashed(own, i)) * np.uint64(count - i)
        places[at] = U(i)
        at += 1 if np.int64(product >> np.uint64(32)) < places.size - at else 0
        i += 1


KERNELS: Kernels = {
    to_bfloat16: (READ_BITS, HALVES),
    from_bfloat16: (READ_HALVES, BITS),
    to_int8: (READ_FLOATS, FLOATS, BYTES, INT, INT, INT),
    from_int8: (READ_BYTES, READ_FLOATS, FLOATS, INT),
    to_int4: (READ_FLOATS, FLOATS, BYTES, INT, INT, INT),
    from_int4: (READ_BYTES, READ_FLOATS, FLOATS, INT),
    to_int2: (READ_FLOATS, FLOATS, BYTES, INT, INT, INT),
    from_int2: (READ_BYTES, READ_FLOATS, FLOATS, INT),
    to_signs: (READ_FLOATS, FLOATS, BYTES, INT),
    from_signs: (READ_BYTES, READ_FLOATS, FLOATS, INT),
    choose_largest: (READ_BITS, INT, BITS, BITS),
    to_gaps: (READ_BITS, BYTES),
    from_gaps: (READ_BYTES, BITS, INT),
    draw_places: (INT, INT, BITS),
}
"""All of them, compiled for these arguments: arrays that are only read come as read-only ones."""


# --- rows of tables and their keys -----------------------------------------------------------
#
# Each row is encoded by itself, as a tensor of `dim` values would be: its blocks begin with it, and
# so do its bytes. The scales of all rows come first.

_to_int8, _from_int8 = inlined(to_int8), inlined(from_int8)
_to_int4, _from_int4 = inlined(to_int4), inlined(from_int4)
_to_int2, _from_int2 = inlined(to_int2), inlined(from_int2)
_to_signs, _from_signs = inlined(to_signs), inlined(from_signs)


@kernel
def rows_to_int8(
    values: Array, scales: Array, out: Array, dim: int, block: int, random: int, seed: int
) -> None:
    values, scales, out = borrowed(values), borrowed(scales), borrowed(out)
    blocks = -(-dim // block)
    for row in range(values.size // dim):
        at, first = row * dim, row * blocks
        span, own = values[at : at + dim], scales[first : first + blocks]
        _to_int8(span, own, out[at : at + dim], block, random, seed + at)


@kernel
def rows_from_int8(data: Array, scales: Array, out: Array, dim: int, block: int) -> None:
    data, scales, out = borrowed(data), borrowed(scales), borrowed(out)
    blocks = -(-dim // block)
    for row in range(out.size // dim):
        at, first = row * dim, row * blocks
        own = scales[first : first + blocks]
        _from_int8(data[at : at + dim], own, out[at : at + dim], block)


@kernel
def rows_to_int4(
    values: Array, scales: Array, out: Array, dim: int, block: int, random: int, seed: int
) -> None:
    values, scales, out = borrowed(values), borrowed(scales), borrowed(out)
    blocks, width = -(-dim // block), -(-dim // 2)
    for row in range(values.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        span, own = values[at : at + dim], scales[first : first + blocks]
        _to_int4(span, own, out[byte : byte + width], block, random, seed + at)


@kernel
def rows_from_int4(data: Array, scales: Array, out: Array, dim: int, block: int) -> None:
    data, scales, out = borrowed(data), borrowed(scales), borrowed(out)
    blocks, width = -(-dim // block), -(-dim // 2)
    for row in range(out.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        own = scales[first : first + blocks]
        _from_int4(data[byte : byte + width], own, out[at : at + dim], block)


@kernel
def rows_to_int2(
    values: Array, scales: Array, out: Array, dim: int, block: int, random: int, seed: int
) -> None:
    values, scales, out = borrowed(values), borrowed(scales), borrowed(out)
    blocks, width = -(-dim // block), -(-dim // 4)
    for row in range(values.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        span, own = values[at : at + dim], scales[first : first + blocks]
        _to_int2(span, own, out[byte : byte + width], block, random, seed + at)


@kernel
def rows_from_int2(data: Array, scales: Array, out: Array, dim: int, block: int) -> None:
    data, scales, out = borrowed(data), borrowed(scales), borrowed(out)
    blocks, width = -(-dim // block), -(-dim // 4)
    for row in range(out.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        own = scales[first : first + blocks]
        _from_int2(data[byte : byte + width], own, out[at : at + dim], block)


@kernel
def rows_to_signs(values: Array, scales: Array, out: Array, dim: int, block: int) -> None:
    blocks, width = -(-dim // block), -(-dim // 8)
    for row in range(values.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        span, own = values[at : at + dim], scales[first : first + blocks]
        _to_signs(span, own, out[byte : byte + width], block)


@kernel
def rows_from_signs(data: Array, scales: Array, out: Array, dim: int, block: int) -> None:
    data, scales, out = borrowed(data), borrowed(scales), borrowed(out)
    blocks, width = -(-dim // block), -(-dim // 8)
    for row in range(out.size // dim):
        at, first, byte = row * dim, row * blocks, row * width
        own = scales[first : first + blocks]
        _from_signs(data[byte : byte + width], own, out[at : at + dim], block)


Q = np.uint64
SEVEN, LOW_SEVEN, MORE = Q(7), Q(127), Q(128)
LAST_SHIFT = Q(63)
"""Shift of the tenth byte of a gap, which has one bit left."""
KEY_MAX = Q(0xFFFFFFFFFFFFFFFF)


@kernel
def key_gaps_bytes(keys: Array, least: int) -> int:
    """What `to_key_gaps` writes."""
    before, nbytes, next_to = Q(0), 0, Q(least)
    for i in range(keys.size):
        gap = keys[i] if i == 0 else keys[i] - before - next_to
        before = keys[i]
        nbytes += 1
        while gap >= MORE:
            gap >>= SEVEN
            nbytes += 1
    return nbytes


@kernel
def to_key_gaps(keys: Array, out: Array, least: int) -> int:
    """Rising keys as the first one, and the distances between them less the least that there may
    be, coded as by `to_gaps`; up to ten bytes each. The bytes that were written."""
    before, at, next_to = Q(0), 0, Q(least)
    for i in range(keys.size):
        gap = keys[i] if i == 0 else keys[i] - before - next_to
        before = keys[i]
        while gap >= MORE:
            out[at] = np.uint8((gap & LOW_SEVEN) | MORE)
            gap >>= SEVEN
            at += 1
        out[at] = np.uint8(gap)
        at += 1
    return at


@kernel
def from_key_gaps(data: Array, out: Array, least: int) -> int:
    """The keys that bytes stand for; how many bytes that took, or -1 if they stand for no such
    keys: they end within one, a number is not written in the shortest way, or passes 64 bits."""
    before, at, next_to = Q(0), 0, Q(least)
    for i in range(out.size):
        gap, shift = Q(0), Q(0)
        while True:
            if at >= data.size:
                return -1
            byte = Q(data[at])
            at += 1
            if (shift == LAST_SHIFT and byte > Q(1)) or (shift > Q(0) and byte == Q(0)):
                return -1
            gap |= (byte & LOW_SEVEN) << shift
            if byte < MORE:
                break
            shift += SEVEN
        if i > 0:
            room = KEY_MAX - before
            if room < next_to or gap > room - next_to:
                return -1
            gap += before + next_to
        before = gap
        out[i] = gap
    return at


READ_KEYS = types.Array(types.uint64, 1, "C", readonly=True)
ENCODES_ROWS = (READ_FLOATS, FLOATS, BYTES, INT, INT)
DECODES_ROWS = (READ_BYTES, READ_FLOATS, FLOATS, INT, INT)
KERNELS = {
    **KERNELS,
    rows_to_int8: (*ENCODES_ROWS, INT, INT),
    rows_from_int8: DECODES_ROWS,
    rows_to_int4: (*ENCODES_ROWS, INT, INT),
    rows_from_int4: DECODES_ROWS,
    rows_to_int2: (*ENCODES_ROWS, INT, INT),
    rows_from_int2: DECODES_ROWS,
    rows_to_signs: ENCODES_ROWS,
    rows_from_signs: DECODES_ROWS,
    key_gaps_bytes: (READ_KEYS, INT),
    to_key_gaps: (READ_KEYS, BYTES, INT),
    from_key_gaps: (READ_BYTES, types.Array(types.uint64, 1, "C"), INT),
}

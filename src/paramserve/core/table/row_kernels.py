"""Loops over the rows of a keyed table, compiled by Numba: import this lazily.

Initial values are drawn from (stream, key, element) and nothing else, with additions,
multiplications, divisions and roots only, each rounded as IEEE 754 says. So a row begins with the
same bits whatever else is asked for with it, on whichever shard and machine; the mathematics
library of the system, which may differ in the last bit, is not asked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from paramserve.core.table.kernels import KEYS, mix
from paramserve.kernel_cache import Kernels
from paramserve.rules import halves
from paramserve.rules.base import Array
from paramserve.rules.halves import BFLOAT16, GOLDEN, round_bfloat16, round_float16
from paramserve.rules.intrinsics import (
    LINE,
    borrowed,
    fence,
    inlined,
    prefetch,
    stream_row,
    streaming_pays,
)
from paramserve.rules.kernels import kernel

CONSTANT, UNIFORM, NORMAL = 0, 1, 2
"""What `draw` draws."""
TILE = 64
"""Pairs of elements that are drawn together: they stay in the first-level cache."""
AHEAD_BYTES = 2048
"""Bytes of rows that are prefetched ahead of their use."""

FLOATS = types.Array(types.float32, 2, "C")
WORDS = types.Array(types.uint32, 2, "C")
LINE_OF_FLOATS = types.Array(types.float32, 1, "C")
POSITIONS = types.Array(types.int32, 1, "C")
INT = types.intp
DRAW = (
    *(types.uint64, INT, types.float64, types.float64),
    *(types.Array(types.float64, 2, "C"), LINE_OF_FLOATS),
)

INITIAL = np.uint64(0x696E697469616C31)
"""Keeps initial values apart from the noise of rounding, which has the same stream."""
U16, U20, U32, U52 = (np.uint64(n) for n in (16, 20, 32, 52))
LOW32 = np.uint64(0xFFFFFFFF)
MANTISSA, ONE, TWO_TO_52 = (np.uint64(n) for n in ((1 << 52) - 1, 1023 << 52, 1075 << 52))
"""Lower bits of a float64, 1.0, and 2**52, to which the lower bits add a whole number."""
LESS_THAN_ONE = 1.0 - 2.0**-33
EXPONENT_OF_ONE = float((1 << 52) + 1023)
A3, A5, A7, A9, A11, A13, A15, A17 = (1.0 / n for n in range(3, 18, 2))
"""Coefficients of the series of artanh s, to s**17."""
S3, S5, S7, S9, S11, S13 = ((-1.0) ** (n // 2) / math.factorial(n) for n in range(3, 14, 2))
C2, C4, C6, C8, C10, C12, C14 = ((-1.0) ** (n // 2) / math.factorial(n) for n in range(2, 15, 2))
NEAREST_BFLOAT16, NEAREST_FLOAT16 = np.uint64(0x8000), np.uint64(0x80001000)
"""Noise of half a step, with which rounding at random goes to the nearest."""
LN2, ROOT2, ROOT_HALF, QUARTER_TURN = math.log(2.0), math.sqrt(2.0), math.sqrt(0.5), math.pi / 2.0

decode = inlined(halves.decode)


@inlined
def uniform_pairs(state: Any, first: Array, second: Array, n: int) -> None:
    """Draw n numbers of (0, 1) and of [0, 1), 32 bits each. As bits, so that it is vectorised."""
    bits, more = first.view(np.uint64), second.view(np.uint64)
    for i in range(n):
        z = mix(state + np.uint64(i) * GOLDEN)
        bits[i] = ((z >> U32) << U20) | ONE
        more[i] = ((z & LOW32) << U20) | ONE
    for i in range(n):
        first[i] = first[i] - LESS_THAN_ONE
        second[i] = second[i] - 1.0


@inlined
def normal_pairs(radius: Array, angle: Array, exponent: Array, n: int) -> None:
    """Two uniform numbers each become two normal ones (Box, Muller 1958).

    Without branches, and with the series written as products, so that it is vectorised.
    """
    bits, high = radius.view(np.uint64), exponent.view(np.uint64)
    for i in range(n):
        high[i] = (bits[i] >> U52) | TWO_TO_52
        bits[i] = (bits[i] & MANTISSA) | ONE
    for i in range(n):
        # ln x = (e + 0.5) ln 2 + 2 artanh s, with x = m * 2**e and 1 <= m < 2: s is at most 0.172,
        # where the series ends at 1e-15.
        s = (radius[i] - ROOT2) / (radius[i] + ROOT2)
        q = s * s
        log = A9 + q * (A11 + q * (A13 + q * (A15 + q * A17)))
        log = 2.0 * s * (1.0 + q * (A3 + q * (A5 + q * (A7 + q * log))))
        length = np.sqrt(-2.0 * (log + (exponent[i] - EXPONENT_OF_ONE + 0.5) * LN2)) * ROOT_HALF
        # The angle is a quarter of the circle, and an eighth to either side of its middle.
        turns = 4.0 * angle[i]
        quarter = np.floor(turns)
        t = (turns - quarter - 0.5) * QUARTER_TURN
        q = t * t
        sine = t * (1.0 + q * (S3 + q * (S5 + q * (S7 + q * (S9 + q * (S11 + q * S13))))))
        cosine = 1.0 + q * (C2 + q * (C4 + q * (C6 + q * (C8 + q * (C10 + q * (C12 + q * C14))))))
        right = 1.0 if abs(quarter - 1.5) > 1.0 else -1.0
        up = 1.0 if quarter < 1.5 else -1.0
        radius[i] = length * (right * cosine - up * sine)
        angle[i] = length * (up * cosine + right * sine)


@inlined
def draw(stream: Any, kind: int, a: float, b: float, key: int, out: Array, work: Array) -> None:
    """Write a key's initial values [dim] to `out`.

    Args:
        kind: CONSTANT (a), UNIFORM (from a to b) or NORMAL (mean a, deviation b).
        work: float64 [3, TILE].
    """
    if kind == CONSTANT:
        for j in range(out.size):
            out[j] = a
        return
    scale = b if kind == NORMAL else b - a
    state = mix(mix(stream ^ mix(key)) ^ INITIAL)
    first, second = work[0], work[1]
    for at in range(0, out.size, 2 * TILE):
        part = out[at : at + 2 * TILE]
        n = (part.size + 1) // 2
        uniform_pairs(state + np.uint64(at // 2) * GOLDEN, first, second, n)
        if kind == NORMAL:
            normal_pairs(first, second, work[2], n)
        for i in range(part.size // 2):
            part[2 * i] = a + scale * first[i]
            part[2 * i + 1] = a + scale * second[i]
        if part.size % 2:
            part[part.size - 1] = a + scale * first[n - 1]


@inlined
def pack(values: Array, half: int, words: Array) -> None:
    """Round float32 [dim] to the nearest 16-bit values, two in each word of a row."""
    bits = values.view(np.uint32)
    for j in range((values.size + 1) // 2):
        word = np.uint64(0)
        for i in range(min(2 * j + 1, values.size - 1), 2 * j - 1, -1):
            if half == BFLOAT16:
                word = (word << U16) | np.uint64(round_bfloat16(bits[i], NEAREST_BFLOAT16))
            else:
                word = (word << U16) | np.uint64(round_float16(bits[i], NEAREST_FLOAT16))
        words[j] = word


@inlined
def ask(base: Any, row: int, row_bytes: int, nbytes: int) -> None:
    """Prefetch the first `nbytes` bytes of a row, if it is one."""
    if row >= 0:
        for at in range(0, nbytes, LINE):
            prefetch(np.uint64(base + row * row_bytes + at))


@kernel
def gather(floats: Array, rows: Array, dim: int, positions: Array, out: Array) -> int:
    """out[positions[i]] = values of rows[i], of float32; without positions, out[i].

    Where the row is -1 nothing is written; says how often. Nor at a position that `out` does not
    have: clients can write to the memory that positions lie in, also after they were checked.
    """
    floats, out = borrowed(floats), borrowed(out)
    base, row_bytes, nbytes, n = floats.ctypes.data, floats.shape[1] * 4, dim * 4, rows.size
    there = out.ctypes.data
    ahead = max(2, AHEAD_BYTES // nbytes)
    placed = positions.size > 0
    streamed = placed and streaming_pays(there, nbytes, n)  # else it is read here, and at once
    absent = 0
    for i in range(min(ahead, n)):
        ask(base, rows[i], row_bytes, nbytes)
    for i in range(n):
        if i + ahead < n:
            ask(base, rows[i + ahead], row_bytes, nbytes)
        row = rows[i]
        at = positions[i] if placed else i
        if row < 0:
            absent += 1
        elif not 0 <= at < out.shape[0]:
            continue
        elif streamed:
            stream_row(base + row * row_bytes, there + at * nbytes, nbytes)
        else:
            source, to = floats[row], out[at]
            for j in range(dim):
                to[j] = source[j]
    if streamed:
        fence()
    return absent


@kernel
def gather_half(words: Array, half: int, rows: Array, positions: Array, out: Array) -> int:
    """Gather rows of 16-bit values, as `gather`."""
    words, out = borrowed(words), borrowed(out)
    base, row_bytes, n = words.ctypes.data, words.shape[1] * 4, rows.size
    bytes_of_values = out.shape[1] * 2
    ahead = max(2, AHEAD_BYTES // bytes_of_values)
    placed = positions.size > 0
    absent = 0
    for i in range(n):
        if i + ahead < n:
            ask(base, rows[i + ahead], row_bytes, bytes_of_values)
        at = positions[i] if placed else i
        if rows[i] < 0:
            absent += 1
        elif 0 <= at < out.shape[0]:
            decode(words[rows[i]], half, out[at])
    return absent


@kernel
def gather_initial(
    stream: Any,
    kind: int,
    a: float,
    b: float,
    work: Array,
    line: Array,
    keys: Array,
    rows: Array,
    half: int,
    positions: Array,
    out: Array,
) -> None:
    """out[positions[i]] = initial values of keys[i] where rows[i] is -1, as its row would hold.

    Args:
        work: float64 [3, TILE], and line: float32 [dim]. Overwritten: a kernel that made them would
            have to hold them.
    """
    work, line, out = borrowed(work), borrowed(line), borrowed(out)
    packed = line.view(np.uint32)
    placed = positions.size > 0
    for i in range(rows.size):
        at = positions[i] if placed else i
        if rows[i] < 0 and 0 <= at < out.shape[0]:
            to = out[at]
            draw(stream, kind, a, b, keys[i], to, work)
            if half:
                pack(to, half, packed)
                decode(packed, half, to)


@kernel
def fill(
    stream: Any,
    kind: int,
    a: float,
    b: float,
    work: Array,
    line: Array,
    floats: Array,
    words: Array,
    half: int,
    state: Array,
    keys: Array,
    rows: Array,
    key_of: Array,
) -> None:
    """Make rows new: initial values, the rule's initial state and no update so far.

    `work` and `line` as for `gather_initial`.
    """
    work, line, floats, words = borrowed(work), borrowed(line), borrowed(floats), borrowed(words)
    dim = line.size
    value_words = (dim + 1) // 2 if half else dim
    for i in range(rows.size):
        row = rows[i]
        key_of[row] = keys[i]
        if half:
            draw(stream, kind, a, b, keys[i], line, work)
            pack(line, half, words[row])
        else:
            draw(stream, kind, a, b, keys[i], floats[row, :dim], work)
        for j in range(state.size):
            floats[row, value_words + j] = state[j]
        for j in range(value_words + state.size, words.shape[1]):
            words[row, j] = 0


@kernel
def scatter(
    floats: Array, words: Array, half: int, begin: int, rows: Array, values: Array, packed: bool
) -> None:
    """Write values [n, width] to rows, from word `begin` on, rounded to 16 bits if `packed`."""
    words, values = borrowed(words), borrowed(values)
    for i in range(rows.size):
        if packed:
            pack(values[i], half, words[rows[i]])
        else:
            for j in range(values.shape[1]):
                floats[rows[i], begin + j] = values[i, j]


KERNELS: Kernels = {
    gather: (FLOATS, KEYS, INT, POSITIONS, FLOATS),
    gather_half: (WORDS, INT, KEYS, POSITIONS, FLOATS),
    gather_initial: (*DRAW, KEYS, KEYS, INT, POSITIONS, FLOATS),
    fill: (*DRAW, FLOATS, WORDS, INT, LINE_OF_FLOATS, KEYS, KEYS, KEYS),
    scatter: (FLOATS, WORDS, INT, INT, KEYS, FLOATS, types.boolean),
}
"""All of them, compiled for these arguments."""

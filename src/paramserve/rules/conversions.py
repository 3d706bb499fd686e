"""Bfloat16 and float16 in kernels: widened to float32, and rounded to the nearest, ties to even.

Numba has neither. A kernel is given their bits: of bfloat16 as uint16, of float16 as int16. So the
dtype of an array says what it holds, and one kernel is compiled for each kind that it may be given.

A finite value beyond the largest of 16 bits becomes the largest, with its sign: no model has Inf
where the servers have none. NaN and Inf stay what they are.

Imports Numba: import this lazily. The functions are called in kernels only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from paramserve.rules.base import Array
from paramserve.rules.intrinsics import inlined, reinterpreted

TILE = 2048
"""Elements that a kernel goes through at a time, in memory that stays in the first-level cache.
16384 made SGD over 100 MB with `out` 15% slower. Looking for NaN and Inf costs 5% with these, and
17% with 1024."""

U = np.uint32
U1, U13, U16 = (U(n) for n in (1, 13, 16))
SIGN, SIZE = U(0x8000), U(0x7FFFFFFF)
"""The sign of 16 bits, and all but the sign of 32."""
INF = U(0x7F800000)
BFLOAT_INF, BFLOAT_MAX, BFLOAT_QUIET = U(0x7F80), U(0x7F7F), U(0x0040)
BFLOAT_BELOW_HALF = U(0x7FFF)
BFLOAT_OVER, FLOAT_OVER = np.int32(0x7F7F8000), np.int32(0x477FF000)
"""Smallest numbers, as float32 bits, that would be rounded to Inf."""
FLOAT_SIZE, FLOAT_INF, FLOAT_MAX, FLOAT_NAN = U(0x7FFF), U(0x7C00), U(0x7BFF), U(0x7E00)
FLOAT_NORMAL = U(0x0400)
"""The bits of 2**-14: below it, float16 has steps of 2**-24."""
NORMAL = U(0x38800000)
"""Smallest normal float16, as float32 bits."""
TINY, TINY_BITS = np.float32(2.0**-14), U(113 << 23)
HALF, HALF_BITS = np.float32(0.5), U(0x3F000000)
"""The step of float32 from 0.5 on is 2**-24, too: adding it rounds to multiples of that."""
BIAS, BIAS_OF_INF = U(112 << 23), U(224 << 23)
REBIAS_BELOW_HALF = U(0xC8000FFF)
"""-112 << 23, and a bit less than half of what is dropped."""

HALF_SIZE = np.uint16(0x7FFF)
"""All but the sign of 16 bits."""

Body = Callable[..., Any]
_OPTIONS = {"nogil": True, "error_model": "numpy", "forceinline": True}


# Four names that kernels call, for which the compiler puts in what an array's dtype needs: Python
# never runs these bodies.


def publish(out: Array, value: Array) -> None:
    """out[:] = value, in the dtype of `out`; an empty `out` is left alone."""
    raise NotImplementedError


def tile_memory(array: Array) -> Any:
    """What `floats_of` needs for tiles of this array."""
    raise NotImplementedError


def floats_of(tile: Array, memory: Array) -> Any:
    """A tile of at most `TILE` elements as floating point: itself, or widened into `memory`."""
    raise NotImplementedError


def spoiled(tile: Array) -> Any:
    """Whether a tile holds NaN or Inf."""
    raise NotImplementedError


@inlined
def greatest(x: Array, most: Any) -> Any:
    """The greater of `most` and the largest size in a tile, both as integers: the bits of numbers
    without a sign have their order, with Inf and then NaN above all, and the greatest of integers
    is found with vectors without fastmath."""
    for i in range(x.size):
        most = max(most, reinterpreted(abs(x[i])))
    return most


def _copy(out: Any, value: Any) -> None:
    for i in range(out.size):
        out[i] = value[i]


# What is rounded is mostly finite and below the largest of 16 bits: a first loop takes all for
# such, and looks whether that was right. A second one, which is rare, takes longer.


def _to_bfloat16(out: Any, value: Any) -> None:
    bits, most = value.view(np.uint32), np.int32(0)
    for i in range(out.size):
        b = bits[i]
        most = max(most, np.int32(b & SIZE))
        out[i] = np.uint16(U(b + BFLOAT_BELOW_HALF + U(U(b >> U16) & U1)) >> U16)
    if most < BFLOAT_OVER:
        return
    for i in range(out.size):
        b = bits[i]
        size = U(b & SIZE)
        r = U(U(b + BFLOAT_BELOW_HALF + U(U(b >> U16) & U1)) >> U16)
        over = (U(r & ~SIGN) == BFLOAT_INF) & (size < INF)
        r = U(U(r & SIGN) | BFLOAT_MAX) if over else r
        r = U(U(b >> U16) | BFLOAT_QUIET) if size > INF else r
        out[i] = np.uint16(r)


def _from_bfloat16(out: Any, value: Any) -> None:
    bits = out.view(np.uint32)
    for i in range(out.size):
        bits[i] = U(U(value[i]) << U16)


def _to_float16(out: Any, value: Any) -> None:
    bits, halves, most = value.view(np.uint32), out.view(np.uint16), np.int32(0)
    for i in range(halves.size):
        b = bits[i]
        size = U(b & SIZE)
        most = max(most, np.int32(size))
        shifted = np.float32(reinterpreted(np.int32(size)) + HALF)
        small = U(U(reinterpreted(shifted)) - HALF_BITS)
        near = U(U(size + REBIAS_BELOW_HALF + U(U(size >> U13) & U1)) >> U13)
        r = near if size >= NORMAL else small
        halves[i] = np.uint16(U(U(b >> U16) & SIGN) | r)
    if most < FLOAT_OVER:
        return
    for i in range(halves.size):
        b = bits[i]
        size = U(b & SIZE)
        shifted = np.float32(reinterpreted(np.int32(size)) + HALF)
        small = U(U(reinterpreted(shifted)) - HALF_BITS)
        near = U(U(size + REBIAS_BELOW_HALF + U(U(size >> U13) & U1)) >> U13)
        r = near if size >= NORMAL else small
        r = FLOAT_MAX if r > FLOAT_MAX else r
        r = FLOAT_INF if size == INF else r
        r = FLOAT_NAN if size > INF else r
        halves[i] = np.uint16(U(U(b >> U16) & SIGN) | r)


def _from_float16(out: Any, value: Any) -> None:
    bits, halves = out.view(np.uint32), value.view(np.uint16)
    for i in range(halves.size):
        h = U(halves[i])
        size = U(h & FLOAT_SIZE)
        mantissa = U(size << U13)
        small = np.float32(reinterpreted(np.int32(U(mantissa + TINY_BITS))) - TINY)
        r = U(mantissa + (BIAS_OF_INF if size >= FLOAT_INF else BIAS))
        r = U(reinterpreted(small)) if size < FLOAT_NORMAL else r
        bits[i] = U(r | U(U(h & SIGN) << U16))


_NARROWS: dict[Any, Body] = {types.uint16: _to_bfloat16, types.int16: _to_float16}
_WIDENS: dict[Any, Body] = {types.uint16: _from_bfloat16, types.int16: _from_float16}


def _publish(out: Any, value: Any) -> Body:
    if out.dtype == value.dtype:
        return _copy
    return _NARROWS[out.dtype] if out.dtype in _NARROWS else _WIDENS[value.dtype]


def _empty(array: Any) -> Any:
    return array[:0]


def _memory(array: Any) -> Any:
    return np.empty(TILE, np.float32)


def _tile_memory(array: Any) -> Body:
    return _memory if array.dtype in _WIDENS else _empty


def _itself(tile: Any, memory: Any) -> Any:
    return tile


def _widened(tile: Any, memory: Any) -> Any:
    part = memory[: tile.size]
    publish(part, tile)
    return part


def _floats_of(tile: Any, memory: Any) -> Body:
    return _widened if tile.dtype in _WIDENS else _itself


def _spoiled_floats(tile: Any) -> Any:
    none = reinterpreted(tile.dtype.type(0.0))
    return greatest(tile, none) >= reinterpreted(tile.dtype.type(np.inf))


def _most_bits(tile: Any) -> Any:
    bits, most = tile.view(np.uint16), np.uint16(0)
    for i in range(bits.size):
        size = np.uint16(bits[i] & HALF_SIZE)
        most = size if size > most else most
    return most


_greatest_bits: Any = inlined(_most_bits)


def _spoiled_bfloats(tile: Any) -> Any:
    return _greatest_bits(tile) >= BFLOAT_INF


def _spoiled_halves(tile: Any) -> Any:
    return _greatest_bits(tile) >= FLOAT_INF


_SPOILED: dict[Any, Body] = {types.uint16: _spoiled_bfloats, types.int16: _spoiled_halves}


def _spoiled(tile: Any) -> Body:
    return _SPOILED.get(tile.dtype, _spoiled_floats)


_decorator: Any = overload
"""Numba goes by the names and annotations of the arguments: those of a choice are its bodies'."""
for _function, _choice in (
    (publish, _publish),
    (tile_memory, _tile_memory),
    (floats_of, _floats_of),
    (spoiled, _spoiled),
):
    _decorator(_function, jit_options=_OPTIONS)(_choice)

"""XXH64 of many strings at once, compiled by Numba: imported through `compiled` only.

The digest of a string is that of its UTF-8 bytes, whatever it is kept as.

Source: xxHash fast digest algorithm, Y. Collet, doc/xxhash_spec.md of the xxHash repository.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from paramserve.core.table.kernels import INT, KEYS
from paramserve.kernel_cache import Kernels
from paramserve.rules.base import Array
from paramserve.rules.intrinsics import inlined
from paramserve.rules.kernels import kernel

PRIME1 = np.uint64(0x9E3779B185EBCA87)
PRIME2 = np.uint64(0xC2B2AE3D27D4EB4F)
PRIME3 = np.uint64(0x165667B19E3779F9)
PRIME4 = np.uint64(0x85EBCA77C2B2AE63)
PRIME5 = np.uint64(0x27D4EB2F165667C5)
"""Fifth prime of the XXH64 specification."""
WORD = np.uint64(64)
STRIPE = 32
"""Bytes that the four accumulators take in one round."""
SURROGATES, BEHIND, UNICODE_END = 0xD800, 0xE000, 0x110000
"""Code points in [SURROGATES, BEHIND) are no characters; those from UNICODE_END on are none."""


@inlined
def rotated(x: Any, bits: Any) -> Any:
    count = np.uint64(bits)
    return (x << count) | (x >> (WORD - count))


@inlined
def word_at(data: Array, at: Any, size: Any) -> Any:
    """`size` bytes as a little-endian number, on every machine."""
    word = np.uint64(0)
    for i in range(size):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@inlined
def in_round(accumulator: Any, lane: Any) -> Any:
    return rotated(accumulator + lane * PRIME2, 31) * PRIME1


@inlined
def merged(accumulator: Any, lane: Any) -> Any:
    return (accumulator ^ in_round(np.uint64(0), lane)) * PRIME1 + PRIME4


@inlined
def digest(data: Array, at: Any, stop: Any, seed: Any) -> Any:
    """XXH64 of data[at:stop]."""
    size = np.uint64(stop - at)
    if stop - at >= STRIPE:
        first, second = seed + PRIME1 + PRIME2, seed + PRIME2
        third, fourth = seed, seed - PRIME1
        while at + STRIPE <= stop:
            first = in_round(first, word_at(data, at, 8))
            second = in_round(second, word_at(data, at + 8, 8))
            third = in_round(third, word_at(data, at + 16, 8))
            fourth = in_round(fourth, word_at(data, at + 24, 8))
            at += STRIPE
        h = rotated(first, 1) + rotated(second, 7) + rotated(third, 12) + rotated(fourth, 18)
        h = merged(merged(merged(merged(h, first), second), third), fourth)
    else:
        h = seed + PRIME5
    h += size
    while at + 8 <= stop:
        h = rotated(h ^ in_round(np.uint64(0), word_at(data, at, 8)), 27) * PRIME1 + PRIME4
        at += 8
    if at + 4 <= stop:
        h = rotated(h ^ (word_at(data, at, 4) * PRIME1), 23) * PRIME2 + PRIME3
        at += 4
    while at < stop:
        h = rotated(h ^ (np.uint64(data[at]) * PRIME5), 11) * PRIME1
        at += 1
    h = (h ^ (h >> np.uint64(33))) * PRIME2
    h = (h ^ (h >> np.uint64(29))) * PRIME3
    return h ^ (h >> np.uint64(32))


@kernel
def hash_bytes(data: Array, bounds: Array, seed: int, keys: Array) -> None:
    """keys[i] = the digest of data[bounds[i]:bounds[i + 1]].

    Args:
        data: uint8.
        bounds: int64 [n + 1].
        keys: int64 [n].
    """
    for i in range(keys.size):
        keys[i] = np.int64(digest(data, bounds[i], bounds[i + 1], np.uint64(seed)))


@kernel
def hash_padded(data: Array, width: int, seed: int, keys: Array) -> None:
    """keys[i] = the digest of data[i * width:(i + 1) * width] without the zeros at its end.

    Args:
        data: uint8 [n * width].
    """
    for i in range(keys.size):
        start, stop = i * width, (i + 1) * width
        while stop > start and data[stop - 1] == 0:
            stop -= 1
        keys[i] = np.int64(digest(data, start, stop, np.uint64(seed)))


@kernel
def hash_code_points(codes: Array, width: int, room: Array, seed: int, keys: Array) -> int:
    """keys[i] = the digest, in UTF-8, of codes[i * width:(i + 1) * width] without the zeros at its
    end.

    Args:
        codes: uint32 [n * width].
        room: uint8 [4 * width], written over.
    Returns:
        The number of the first string that cannot be encoded, where this stopped; or -1.
    """
    for i in range(keys.size):
        start, stop = i * width, (i + 1) * width
        while stop > start and codes[stop - 1] == 0:
            stop -= 1
        size = 0
        for j in range(start, stop):
            code = np.int64(codes[j])
            if code < 0x80:
                room[size] = code
                size += 1
                continue
            if code < 0x800:
                room[size] = 0xC0 | (code >> 6)
                size += 1
            elif SURROGATES <= code < BEHIND or code >= UNICODE_END:
                return i
            elif code < 0x10000:
                room[size] = 0xE0 | (code >> 12)
                room[size + 1] = 0x80 | ((code >> 6) & 0x3F)
                size += 2
            else:
                room[size] = 0xF0 | (code >> 18)
                room[size + 1] = 0x80 | ((code >> 12) & 0x3F)
                room[size + 2] = 0x80 | ((code >> 6) & 0x3F)
                size += 3
            room[size] = 0x80 | (code & 0x3F)
            size += 1
        keys[i] = np.int64(digest(room, 0, size, np.uint64(seed)))
    return -1


_READ = types.Array(types.uint8, 1, "C", readonly=True)
_BOUNDS = types.Array(types.int64, 1, "C", readonly=True)
_CODES = types.Array(types.uint32, 1, "C", readonly=True)
_BYTES = types.Array(types.uint8, 1, "C")
KERNELS: Kernels = {
    hash_bytes: (_READ, _BOUNDS, INT, KEYS),
    hash_padded: (_READ, INT, INT, KEYS),
    hash_code_points: (_CODES, INT, _BYTES, INT, KEYS),
}
"""All of them, compiled for these arguments: arrays that are only read come as read-only ones."""

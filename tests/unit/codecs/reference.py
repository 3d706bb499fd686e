"""What each codec is, written a second time with numpy, one block or value at a time."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


def bfloat16(values: Floats) -> bytes:
    """Round by whole numbers: the nearest multiple of 2**16, the even one of two."""
    found = []
    for value in values:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        low, high = bits & 0xFFFF, bits >> 16
        if low > 0x8000 or (low == 0x8000 and high % 2):
            high += 1
        if high & 0x7FFF == 0x7F80 and np.isfinite(value):
            high -= 1
        found.append(high)
    return np.array(found, "<u2").tobytes()


def float16(values: Floats, scale: float) -> bytes:
    with np.errstate(over="ignore"):
        scaled = values * np.float32(scale)
    return np.clip(scaled, -65504, 65504).astype("<f2").tobytes()


def blocks(values: Floats, block: int) -> list[Floats]:
    return [values[at : at + block] for at in range(0, values.size, block)]


def levels(part: Floats, most: int) -> tuple[float, list[int]]:
    """The scale of a block, and its values as multiples of that."""
    largest = np.abs(part).max()
    with np.errstate(over="ignore", divide="ignore"):
        factor = np.float32(most) / largest
    if not np.isfinite(factor):
        return 0.0, [0] * part.size
    scale = np.float32(largest / np.float32(most))
    with np.errstate(over="ignore"):
        if np.isinf(scale * np.float32(most)):
            scale = np.nextafter(scale, np.float32(0))
    return float(scale), [int(n) for n in np.rint(part * factor)]


def int8(values: Floats, block: int) -> bytes:
    found = [levels(part, 127) for part in blocks(values, block)]
    scales = np.array([scale for scale, _ in found], "<f4")
    numbers = np.array([n for _, each in found for n in each], "i1")
    return scales.tobytes() + numbers.tobytes()


def int4(values: Floats, block: int) -> bytes:
    found = [levels(part, 7) for part in blocks(values, block)]
    scales = np.array([scale for scale, _ in found], "<f4")
    numbers = [n % 16 for _, each in found for n in each]
    numbers += [0] * (len(numbers) % 2)
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return scales.tobytes() + bytes(low + 16 * high for low, high in pairs)


def int2(values: Floats, block: int) -> bytes:
    levels, pairs = b"", []
    for part in blocks(values, block):
        sizes, low, high = np.abs(part), 0.0, 0.0
        with np.errstate(over="ignore", divide="ignore"):
            factor = np.float32(65535) / sizes.max()
        if np.isfinite(factor):
            numbers = [int(n) for n in np.rint(sizes * factor)]
            first = 1.2303 * sum(numbers) / len(numbers)
            small, large = [n for n in numbers if n <= first], [n for n in numbers if n > first]
            low = sum(small) / len(small) * float(sizes.max()) / 65535
            high = sum(large) / len(large) * float(sizes.max()) / 65535 if large else low
        both = bfloat16(np.array([low, high], np.float32))
        widened = np.frombuffer(both, "<u2").astype("<u4") * 65536
        low, high = (float(level) for level in widened.view("<f4"))
        levels += both
        pairs += [2 * (x < 0) + (abs(float(x)) - low > high - abs(float(x))) for x in part]
    pairs += [0] * (-len(pairs) % 4)
    fours = zip(*(pairs[place::4] for place in range(4)), strict=True)
    return levels + bytes(sum(int(two) * 4**place for place, two in enumerate(f)) for f in fours)


def signs(values: Floats, block: int) -> bytes:
    scales = [float(np.abs(part.astype(np.float64)).mean()) for part in blocks(values, block)]
    bits = np.packbits(np.signbit(values), bitorder="little")
    return np.array(scales, "<f4").tobytes() + bits.tobytes()


def top(values: Floats, kept: int, index: str) -> bytes:
    order = sorted(range(values.size), key=lambda i: (-abs(float(values[i])), i))
    places = sorted(order[:kept])
    taken = np.array([values[i] for i in places], "<f4").tobytes()
    if index == "plain":
        return taken + np.array(places, "<u4").tobytes()
    gaps, before = bytearray(), -1
    for place in places:
        gap, before = place - before - 1, place
        while gap >= 128:
            gaps.append(gap % 128 + 128)
            gap //= 128
        gaps.append(gap)
    return taken + bytes(gaps)


def murmur(seed: int, number: int) -> int:
    """The finalizer of murmur3, 32 bits, by Python's whole numbers."""
    x = (number * 0x9E3779B1 + seed) % 2**32
    x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
    x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def drawn(count: int, kept: int, seed: int) -> list[int]:
    """Knuth's Algorithm S: each place is taken with the chance (still wanted) / (still left)."""
    places: list[int] = []
    for place in range(count):
        wanted, left = kept - len(places), count - place
        if murmur(seed, place) * left // 2**32 < wanted:
            places.append(place)
    return places


def random(values: Floats, kept: int, seed: int) -> bytes:
    if not values.size:
        return b""
    taken = np.array([values[i] for i in drawn(values.size, kept, seed)], "<f4")
    return taken.tobytes() + struct.pack("<I", seed)


def chain(codec: Any, values: Floats, seed: int) -> bytes:
    """What the second codec makes of the chosen values, then the places as the first has them."""
    whole = encoded(codec.first, values, seed)
    end = 4 * int(np.ceil(codec.first.ratio * values.size))
    return encoded(codec.second, np.frombuffer(whole[:end], np.float32), seed) + whole[end:]


def encoded(codec: Any, values: Floats, seed: int = 0) -> bytes:
    """What a codec's bytes have to be."""
    match codec.name:
        case "Chain":
            return chain(codec, values, seed)
        case "BFloat16":
            return bfloat16(values)
        case "Float16":
            return float16(values, codec.scale)
        case "Int8":
            return int8(values, codec.block)
        case "Int4":
            return int4(values, codec.block)
        case "Int2":
            return int2(values, codec.block)
        case "Sign":
            return signs(values, codec.block)
    kept = int(np.ceil(codec.ratio * values.size)) if values.size else 0
    if codec.name == "RandomK":
        return random(values, kept, seed)
    return top(values, kept, codec.index)

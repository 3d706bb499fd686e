"""Codecs on rows and the keys that go with them, against a second implementation; and bytes that
are none."""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.suites import each_case
from tests.unit.codecs import reference

from paramserve.codecs import BFloat16, Codec, Float16, Int2, Int4, Int8, Sign, TopK
from paramserve.codecs.keys import ONCE, REPEATED, keys_bytes, order_of, read_keys, write_keys
from paramserve.codecs.rows import RowCodec, why_not_rows
from paramserve.compiling import load_codecs

Floats = npt.NDArray[np.float32]

CODECS = [
    None,
    BFloat16(),
    Float16(100.0),
    Int8(),
    Int8(8),
    Int4(),
    Int4(8),
    Int2(),
    Int2(8),
    Sign(),
    Sign(8),
]
DIMS = [1, 3, 8, 17, 64, 65, 300]
U64_MAX = 2**64 - 1


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def aligned(size: int) -> Any:
    return np.empty(-(-size // 8), np.uint64).view(np.uint8)[:size]


def normal(rows: int, dim: int, seed: int = 0) -> Floats:
    """Rows of very different sizes."""
    draw = np.random.default_rng(seed)
    sizes = 10.0 ** draw.uniform(-4, 4, (rows, 1))
    return np.asarray(draw.normal(size=(rows, dim)) * sizes, np.float32)


def encode(codec: RowCodec, values: Floats, seed: int = 0) -> Any:
    out = aligned(codec.size(len(values)))
    out[...] = 0xAA
    codec.encode(values.reshape(-1), out, seed)
    return out


def decode(codec: RowCodec, data: Any, shape: tuple[int, ...]) -> Floats:
    found = np.full(shape, np.nan, np.float32)
    codec.decode(data, found.reshape(-1))
    return found


def of_rows(codec: Codec | None, values: Floats) -> bytes:
    """What the bytes have to be: each row by itself, the scales of all rows first."""
    if codec is None:
        return values.tobytes()
    each = [reference.encoded(codec, row) for row in values]
    block = getattr(codec, "block", 0)
    scales = 4 * math.ceil(values.shape[1] / block) if block else 0
    return b"".join(row[:scales] for row in each) + b"".join(row[scales:] for row in each)


@each_case("codec", CODECS, ids=repr)
def test_bytes_are_those_of_each_row_by_itself(codec: Codec | None) -> None:
    for dim, count in itertools.product(DIMS, (0, 1, 5)):
        rows, values = RowCodec(codec, dim, random=False), normal(count, dim, dim)
        data = encode(rows, values)
        assert data.tobytes() == of_rows(codec, values), (dim, count)
        found = decode(rows, data, values.shape)
        for number, row in enumerate(values):  # no row depends on those beside it
            alone = decode(rows, encode(rows, row[None]), (1, dim))
            np.testing.assert_array_equal(found[number], alone[0])


@each_case("dim", [1, 63, 100])
@each_case("codec", [Int8(32), Int4(), Int4(rounding="nearest"), Int2()], ids=repr)
def test_gradients_are_rounded_at_random_without_bias(codec: Int8 | Int4 | Int2, dim: int) -> None:
    """The mean of 10,000 draws, within 4 standard errors; a value moves by less than a level."""
    rows, values = RowCodec(codec, dim, random=True), normal(3, dim, 1)
    drawn = np.empty((10_000, 3, dim), np.float64)
    for seed in range(len(drawn)):
        drawn[seed] = decode(rows, encode(rows, values, seed), values.shape)
    most = {Int8: 127, Int4: 7, Int2: 0.5}[type(codec)]
    for row in range(3):
        for at in range(0, dim, codec.block):
            part = np.s_[row, at : at + codec.block]
            level = float(np.abs(values[part]).max()) / most
            moved = np.abs(drawn[:, part[0], part[1]] - values[part])
            assert moved.max() <= level * (1 + 1e-5)
    error = drawn.std(axis=0) / math.sqrt(len(drawn))
    small = np.abs(values).max(axis=1, keepdims=True) * 1e-6
    assert (np.abs(drawn.mean(axis=0) - values) <= 4 * error + small).all()
    assert (encode(rows, values, 5) == encode(rows, values, 5)).all()


def test_rows_of_one_push_are_rounded_each_in_its_own_way() -> None:
    values, codec = np.tile(normal(1, 64), (50, 1)), RowCodec(Int4(), 64, random=True)
    found = decode(codec, encode(codec, values, 3), values.shape)
    assert len({row.tobytes() for row in found}) == 50


def test_scale_that_is_none_is_refused() -> None:
    scales = (math.nan, math.inf, -math.inf, -1.0)
    for codec, scale in itertools.product(CODECS[3:], scales):
        assert codec is not None
        rows = RowCodec(codec, 9, random=True)
        data = encode(rows, normal(4, 9))
        data[8:12].view(np.float32)[...] = scale
        with pytest.raises(ValueError, match=f"a scale of ps.{codec.name} is negative, NaN or Inf"):
            decode(rows, data, (4, 9))


def test_bytes_of_another_length_are_refused() -> None:
    for codec in CODECS:
        rows = RowCodec(codec, 9, random=True)
        size = rows.size(4)
        for wrong in (0, size - 1, size + 1):
            with pytest.raises(ValueError, match=f"{wrong} bytes came where {size} are needed"):
                decode(rows, aligned(wrong), (4, 9))


@given(st.binary(max_size=150), st.sampled_from(CODECS), st.sampled_from([1, 3, 9, 20]))
def test_any_bytes_are_rows_or_refused(data: bytes, codec: Codec | None, dim: int) -> None:
    rows = RowCodec(codec, dim, random=True)
    given_bytes = aligned(len(data))
    given_bytes[...] = np.frombuffer(data, np.uint8)
    for count in (len(data) // rows.row_bytes, 3):
        try:
            found = decode(rows, given_bytes, (count, dim))
        except ValueError:
            continue
        assert count * rows.row_bytes == len(data)
        if count and isinstance(codec, Int8 | Int4 | Int2 | Sign):
            assert not np.isnan(found).any()


def test_codecs_that_leave_values_out_are_not_for_rows() -> None:
    for codec in (TopK(0.1), OfMine()):
        wrong = why_not_rows(codec)
        assert wrong == (
            f"{codec!r} is not for rows of a table: ps.BFloat16, ps.Float16, ps.Int8, ps.Int4, "
            "ps.Int2 and ps.Sign are"
        )
        with pytest.raises(ValueError, match="is not for rows of a table"):
            RowCodec(codec, 8, random=True)


class OfMine(Int8):
    """A codec whose bytes are not those of the one that it is made of."""


# --- keys -------------------------------------------------------------------------------------


def coded(keys: Any, least: int) -> bytes:
    out = np.full(keys_bytes(keys, least), 0xAA, np.uint8)
    write_keys(keys, out, least)
    return out.tobytes()


def back(data: bytes, count: int, least: int) -> Any:
    return read_keys(np.frombuffer(data, np.uint8), count, least)


def by_hand(keys: list[int], least: int) -> bytes:
    """By whole numbers of Python."""
    found, before = bytearray(), 0
    for number, key in enumerate(keys):
        gap, before = key - before - (least if number else 0), key
        while gap >= 128:
            found.append(gap % 128 + 128)
            gap //= 128
        found.append(gap)
    if len(found) < 8 * len(keys):
        return bytes(found)
    return b"".join(key.to_bytes(8, "little") for key in keys)


KEYS = st.integers(0, U64_MAX) | st.integers(0, 300) | st.sampled_from([2**63, U64_MAX, 127, 128])


@given(st.lists(KEYS, max_size=60), st.booleans())
def test_keys_are_their_distances(given_keys: list[int], repeated: bool) -> None:
    least = REPEATED if repeated else ONCE
    wanted = sorted(given_keys) if repeated else sorted(set(given_keys))
    keys = np.array(given_keys if repeated else sorted(set(given_keys)), np.uint64).view(np.int64)
    keys = keys[order_of(keys)]
    data = coded(keys, least)
    assert data == by_hand(wanted, least)
    assert len(data) <= 8 * len(wanted)
    assert back(data, len(wanted), least).view(np.uint64).tolist() == wanted


@each_case(
    ("keys", "nbytes"),
    [
        (np.arange(1000), 1000),
        (np.arange(1000) * 129, 1 + 999 * 2),
        (np.arange(3) + 2**62, 9 + 2),
        (np.array([-1]), 8),  # ten bytes as a distance
        (np.array([2**63 - 1, -1]), 16),
    ],
)
def test_bytes_of_keys(keys: Any, nbytes: int) -> None:
    assert len(coded(keys, ONCE)) == nbytes


@each_case(("count", "shortest"), [(1, 8), (16, 7.8), (65_536, 7.1)])
def test_hashes_take_about_as_much_as_they_did(count: int, shortest: float) -> None:
    """Of 65,536 the distances are 2**48 in the mean, and above 2**49 with a chance of e**-2."""
    draw = np.random.default_rng(0)
    keys = np.sort(draw.integers(0, U64_MAX, count, np.uint64, endpoint=True)).view(np.int64)
    assert shortest <= len(coded(keys, ONCE)) / count <= min(8.0, shortest + 0.1 + 4 / count)


BAD = {
    "repeated in eight bytes": (np.array([2**63, 2**63, 2**63 + 1], "<u8").tobytes(), 3, ONCE),
    "falling in eight bytes": (np.array([2, 1], "<u8").tobytes(), 2, REPEATED),
    "past 64 bits": (b"\xff" * 9 + b"\x01" + b"\x00" * 5, 6, ONCE),
    "past 64 bits by one": (b"\xff" * 9 + b"\x01" + b"\x00", 2, ONCE),
    "a tenth byte with more": (b"\xff" * 9 + b"\x02" + b"\x00" * 5, 6, ONCE),
    "an eleventh byte": (b"\xff" * 10 + b"\x01", 2, ONCE),
    "not the shortest": (b"\x80\x00", 1, ONCE),
    "within a number": (b"\x01\x80", 2, ONCE),
    "too short": (b"\x01", 2, ONCE),
    "too long": (b"\x01\x01", 1, ONCE),
    "longer than eight bytes each": (b"\x01" * 17, 2, ONCE),
    "none": (b"", 1, ONCE),
    "some for none": (b"\x01", 0, ONCE),
    "fewer than none": (b"\x01", -1, ONCE),
}


def test_bytes_that_are_no_keys_are_refused() -> None:
    for data, count, least in BAD.values():
        with pytest.raises(ValueError, match=f"{len(data)} bytes"):
            back(data, count, least)


@given(st.binary(max_size=100), st.integers(0, 30), st.sampled_from([ONCE, REPEATED]))
def test_any_bytes_are_rising_keys_or_refused(data: bytes, count: int, least: int) -> None:
    try:
        found = back(data, count, least).view(np.uint64).tolist()
    except ValueError:
        return
    assert len(found) == count
    assert all(b - a >= least for a, b in pairwise(found))
    if len(data) < 8 * count or not count:
        assert by_hand(found, least) == data, "one form for each"

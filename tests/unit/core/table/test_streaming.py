"""Rows that are written past the caches are the same rows, wherever they lie."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from tests.suites import each_case

from paramserve.compiling import load_routing
from paramserve.core.table import routing
from paramserve.core.table.compiled import prepare, row_kernels
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.parts import padded
from paramserve.rules.intrinsics import LINE, STREAMED_BYTES, streaming_pays

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
CASES = each_case(
    ("dim", "beside", "share", "streamed"),
    [
        (64, 0, 1.0, True),
        (16, 0, 1.5, True),
        (1024, 0, 1.1, True),
        (64, 0, 0.9, False),
        (64, 8, 1.1, False),
        (60, 0, 1.1, False),
    ],
    ids=["just enough", "lines", "long rows", "too few", "beside lines", "no whole lines"],
)
"""Dim; bytes from a line to where memory begins; rows, in what is enough; whether it streams."""

prepare()
load_routing()
streaming_pays(0, LINE, 1)  # here, so that no test is the one that waits for it


def memory(nbytes: int, beside: int) -> Bytes:
    """Ones, from so many bytes past the begin of a line on."""
    raw = np.ones(nbytes + 2 * LINE, np.uint8)
    start = -int(raw.ctypes.data) % LINE + beside
    return raw[start : start + nbytes]


def count_of(dim: int, share: float) -> int:
    return int(STREAMED_BYTES * share) // (4 * dim)


@CASES
@each_case("placed", [True, False])
def test_gathered_rows_are_where_they_were_to_go(
    dim: int, beside: int, share: float, streamed: bool, placed: bool
) -> None:
    count, draws = count_of(dim, share), np.random.default_rng(0)
    floats = draws.random((500, dim + 3), dtype=np.float32)
    rows = draws.integers(-1, 500, count)
    out = memory(2 * count * dim * 4, beside).view(np.float32).reshape(2 * count, dim)
    assert streaming_pays(out.ctypes.data, dim * 4, count) == streamed
    expected = out.copy()
    positions = draws.permutation(2 * count)[:count].astype(np.int32)
    positions[:3] = -1, 2 * count, -(2**31)  # what `out` does not have
    at = positions if placed else np.arange(count, dtype=np.int32)
    there = (rows >= 0) & (at >= 0) & (at < 2 * count)
    expected[at[there]] = floats[rows[there], :dim]
    given = positions if placed else positions[:0]
    absent = row_kernels().gather(floats, rows, dim, given, out)
    assert absent == (rows < 0).sum()
    assert np.array_equal(out, expected)


@CASES
@each_case("bad", [None, 40, 1000])
def test_laid_gradients_are_the_sums_in_order(
    dim: int, beside: int, share: float, streamed: bool, bad: int | None
) -> None:
    count, draws = count_of(dim, share), np.random.default_rng(1)
    keys = np.concatenate([np.arange(count), draws.integers(0, count, 50)])
    keys = keys[draws.permutation(keys.size)]
    values = draws.standard_normal((keys.size, dim), dtype=np.float32)
    if bad is not None:
        values[bad, dim - 1] = np.nan
    found, numbers = routing.distinct(keys)
    laid = memory(routing.gradient_bytes_max(found.size, dim, 2) + LINE, beside)
    assert streaming_pays(laid.ctypes.data, dim * 4, found.size) == streamed
    words = laid[: laid.size // 8 * 8].view(np.int64)
    first, parts = routing.lay_gradient(found, numbers, values, 2, words)
    assert first == (-1 if bad is None else bad)
    sums = np.zeros((found.size, dim), np.float32)
    np.add.at(sums, numbers, values)
    for shard, (many, offset) in enumerate(parts):
        of_shard = shard_of(found, 2) == shard
        part = laid[offset:]
        assert np.array_equal(part[: 8 * many].view(np.int64), found[of_shard])
        rows = part[padded(8 * many) :][: 4 * many * dim].view(np.float32)
        assert np.array_equal(rows.reshape(many, dim), sums[of_shard], equal_nan=True)


@each_case("elsewhere", [True, False])
@each_case("twice", [0, 100, 10_000])
def test_rows_that_begin_between_lines_are_summed_as_well(elsewhere: bool, twice: int) -> None:
    dim, count = 64, count_of(64, 1.1)
    draws = np.random.default_rng(2)
    values = draws.standard_normal((count + twice, dim), dtype=np.float32)
    numbers = np.concatenate([np.arange(count), draws.integers(0, count, twice)])
    apart = dim + LINE // 4
    out = memory(4 * count * apart, 0).view(np.float32)
    assert streaming_pays(out.ctypes.data, dim * 4, count)
    targets = np.arange(count) * apart + np.arange(count) % 2  # every second one at a line's begin
    add_rows = routing.routing_kernels().add_rows
    assert add_rows(values, numbers.astype(np.int32), targets, out, elsewhere) == -1
    sums = np.zeros((count, dim), np.float32)
    np.add.at(sums, numbers, values)
    found = out[targets[:, None] + np.arange(dim)]
    assert np.array_equal(found, sums)

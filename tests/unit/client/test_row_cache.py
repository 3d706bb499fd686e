"""Copies of rows against a dict: never too old, never wrong, never too many."""

from __future__ import annotations

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.client import row_cache
from paramserve.client.row_cache import RowCache

DIM = 2


def rows_of(keys: np.ndarray, clock: int) -> np.ndarray:
    """What a key's row is at a clock: tells both."""
    return np.stack([keys, np.full(keys.size, clock)], 1).astype(np.float32)


def array(*keys: int) -> np.ndarray:
    return np.array(keys, np.int64)


def keep(cache: RowCache, keys: np.ndarray, clock: int, versions: tuple[int, ...] = (0,)) -> None:
    cache.keep(keys, rows_of(keys, clock), clock, versions)


def here(cache: RowCache, keys: np.ndarray, clock: int) -> list[int]:
    """The keys of these that are found; their rows are right."""
    found = cache.find(keys, clock)
    there = np.setdiff1d(np.arange(keys.size), found.missing)
    assert np.array_equal(found.rows[there, 0], keys[there].astype(np.float32))
    assert (found.rows[there, 1] >= clock - cache.clocks).all()
    return keys[there].tolist()


def made(rows: int, clocks: int = 3) -> RowCache:
    return RowCache(rows, clocks, DIM, keep_pushed=False)


@each_case("rows", [1, 7, 60, 1000])
@each_case("looked_at", [4, 1024])
def test_cache_that_does_anything_agrees_with_a_dict(
    monkeypatch: pytest.MonkeyPatch, rows: int, looked_at: int
) -> None:
    monkeypatch.setattr(row_cache, "LOOKED_AT_MIN", looked_at)
    draw = np.random.default_rng(rows)
    cache, clock = made(rows), 0
    known: dict[int, int] = {}
    for _ in range(150):
        keys = draw.integers(-40, 40, int(draw.integers(1, 50)))
        found = cache.find(keys, clock)
        there = np.setdiff1d(np.arange(keys.size), found.missing)
        for number in there.tolist():
            key = int(keys[number])
            assert found.rows[number].tolist() == [key, known[key]]
            assert known[key] >= clock - 3
        if rows >= 80:
            fresh = [known.get(int(key), -9) >= clock - 3 for key in keys]
            assert there.tolist() == np.flatnonzero(fresh).tolist()
        asked = np.unique(keys[found.missing])
        keep(cache, asked, clock)
        known |= dict.fromkeys(asked.tolist(), clock)
        gone = draw.integers(-40, 40, 5)
        cache.drop(gone)
        for key in gone.tolist():
            known.pop(key, None)
        assert cache.report.rows <= rows
        clock += int(draw.integers(0, 2))


def test_older_rows_that_come_later_do_not_replace_newer_ones() -> None:
    cache = made(10)
    keep(cache, array(1), 5)
    keep(cache, array(2, 1), 3)
    assert cache.find(array(1, 2), 5).rows.tolist() == [[1.0, 5.0], [2.0, 3.0]]


def test_keys_that_come_again_stay_when_others_come_once() -> None:
    cache = made(100, clocks=1000)
    hot = np.arange(40)
    keep(cache, hot, 0)
    for n in range(50):
        assert here(cache, hot, n) == hot.tolist()
        keep(cache, np.arange(1000 + 30 * n, 1030 + 30 * n), n)
    assert cache.report.rows == 100


def test_copies_that_are_too_old_go_before_those_that_are_used() -> None:
    cache = made(4, clocks=1)
    keep(cache, array(1, 2), 0)
    here(cache, array(1, 2), 0)
    keep(cache, array(3, 4), 5)
    here(cache, array(3, 4), 5)
    keep(cache, array(5, 6), 5)
    assert here(cache, array(1, 2, 3, 4, 5, 6), 5) == [3, 4, 5, 6]


def test_more_rows_than_there_is_room_for_fill_it() -> None:
    cache = made(10)
    keep(cache, np.arange(25), 0)
    assert len(here(cache, np.arange(25), 0)) == cache.report.rows == 10
    keep(cache, np.arange(100, 125), 0)
    assert len(here(cache, np.arange(100, 125), 0)) == cache.report.rows == 10


def test_versions_are_those_of_the_oldest_copy_found() -> None:
    cache = made(10)
    keep(cache, array(1), 0, (5, 9))
    keep(cache, array(2), 0, (6, 4))
    keep(cache, array(3), 1, (8, 8))
    assert cache.find(array(3), 1).versions == [8, 8]
    assert cache.find(array(3, 2), 1).versions == [5, 4]
    assert cache.find(array(7), 1).versions is None
    keep(cache, array(4), 4, (20, 20))
    assert cache.find(array(3, 4), 4).versions == [8, 8]
    assert cache.find(array(1, 4), 4).versions == [20, 20]

"""The index is a dict, while it grows and while keys go."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.table.rig import Keys, keys_of

from paramserve.core.table import index as index_module
from paramserve.core.table.hashing import hashes
from paramserve.core.table.index import KEY_BYTES_MAX, Index

EXTREMES = [0, -1, 1, 2**63 - 1, -(2**63), 2**62, -(2**62)]
KEYS = st.integers(-40, 40) | st.sampled_from(EXTREMES)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "move"]), st.lists(KEYS, max_size=30)), max_size=30
)


def rows_of(index: Index, keys: Keys) -> list[int]:
    rows = np.empty(keys.size, np.int64)
    absent = index.find(keys, rows)
    assert absent == int((rows == -1).sum())
    return rows.tolist()


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    """Few places, of which few move at a time: so both arrays are there most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PLACES", 16)
        patch.setattr(index_module, "MOVED_MIN", 1)
        yield


@settings(max_examples=15)
@given(STEPS)
def test_index_is_a_dict_for_any_steps(steps: list[tuple[str, list[int]]]) -> None:
    index, model = Index(), dict[int, int]()
    for kind, keys in steps:
        if kind == "add":
            new = [key for key in dict.fromkeys(keys) if key not in model]
            rows = range(len(model), len(model) + len(new))
            index.insert(keys_of(new), keys_of(rows))
            model |= dict(zip(new, rows, strict=True))
        elif kind == "remove":
            index.remove(keys_of(keys))
            for key in keys:
                model.pop(key, None)
        else:
            index.move(len(keys))
        asked = [*keys, *EXTREMES]
        assert rows_of(index, keys_of(asked)) == [model.get(key, -1) for key in asked]
        assert len(index) == len(model)


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 20]))
def test_index_that_grows_while_keys_come_and_go_is_a_dict(seed: int, few: int) -> None:
    """Keys go from both arrays and both sides of the mark."""
    draw = np.random.default_rng(seed)
    many = 48 * few
    index, model = Index(), {key: key for key in range(many)}
    index.insert(np.arange(many), np.arange(many))
    moving = 0
    for step in range(60):
        moving += index._mark > 0
        new = [-1 - few * step - i for i in range(few)]
        rows = range(many + few * step, many + few * (step + 1))
        index.insert(keys_of(new), keys_of(rows))
        model |= dict(zip(new, rows, strict=True))
        gone = draw.choice(keys_of(model), few // 2, replace=False)
        index.remove(gone)
        for key in gone.tolist():
            del model[key]
        assert rows_of(index, gone) == [-1] * gone.size
    assert moving
    assert rows_of(index, keys_of(model)) == list(model.values())
    assert rows_of(index, keys_of(range(many, many + 100))) == [-1] * 100
    index.move(100_000)
    assert rows_of(index, keys_of(model)) == list(model.values())
    assert len(index) == len(model)


def test_index_grows_by_no_more_than_it_says() -> None:
    index = Index()
    for start in range(0, 30_000, 300):
        index.insert(np.arange(start, start + 300) * 7, np.arange(start, start + 300))
        assert index.nbytes <= 16 * 16 + KEY_BYTES_MAX * len(index)
    assert rows_of(index, np.arange(30_000) * 7) == list(range(30_000))


def test_growth_moves_a_bounded_number_of_entries_for_a_request() -> None:
    index, moved = Index(), list[int]()
    for start in range(0, 20_000, 10):
        old, mark = index._old, index._mark
        index.insert(np.arange(start, start + 10), np.arange(start, start + 10))
        if start > 1000 and old.size:
            moved.append((index._mark if index._old is old else len(old)) - mark)
    chain = 500  # at most, to the next empty place
    assert index_module.MOVED_PER_KEY * 10 <= max(moved) < index_module.MOVED_PER_KEY * 10 + chain


@settings(max_examples=15)
@given(st.lists(st.integers(1, 400), min_size=10, max_size=60))
def test_request_that_begins_or_ends_a_growth_moves_no_more_than_its_share(
    sizes: list[int],
) -> None:
    index, begun, passed = Index(), 0, 0
    move = index_module.index_kernels().move

    def counted(old: Keys, new: Keys, mark: int, least: int, secret: int) -> int:
        nonlocal passed
        after = int(move(old, new, mark, least, secret))
        passed += after - mark
        return after

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module.index_kernels(), "move", counted)
        for size in sizes:
            passed = 0
            index.insert(np.arange(begun, begun + size), np.arange(begun, begun + size))
            begun += size
            chains = 500
            assert passed <= index_module.MOVED_PER_KEY * size + chains
    assert rows_of(index, np.arange(begun)) == list(range(begun))


@settings(max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 200), st.integers(200, 3000))
def test_memory_is_bounded_while_as_many_keys_go_as_come(seed: int, few: int, size: int) -> None:
    draw = np.random.default_rng(seed)
    index, there = Index(), np.arange(size)
    index.insert(there, there)
    for step in range(1, 60):
        gone = draw.permutation(size)[:few]
        index.remove(there[gone].copy())
        there[gone] = np.arange(gone.size) + 10_000 * step
        index.insert(there[gone].copy(), gone)
        assert index.nbytes <= 16 * 16 + KEY_BYTES_MAX * size
    assert rows_of(index, there) == list(range(size))


def test_many_keys_at_once_are_all_there() -> None:
    index = Index()
    index.insert(keys_of(range(10)), keys_of(range(10)))
    index.insert(keys_of(range(10, 20_000)), keys_of(range(10, 20_000)))
    assert rows_of(index, keys_of(range(20_000))) == list(range(20_000))


def test_keys_with_one_home_are_told_apart() -> None:
    """Hashes that begin alike make one chain, over the end of the array to its beginning."""
    keys, index = np.arange(200_000), Index()
    secret = np.uint64(index.secret % 2**64)
    mixed = (keys.view(np.uint64) ^ secret) * (secret | np.uint64(1))
    last = keys[np.argsort(hashes((mixed ^ (mixed >> np.uint64(32))).view(np.int64)))[-300:]]
    index.insert(last, np.arange(last.size))
    assert (index._new[:200, 1] != 0).all(), "over the end"
    assert rows_of(index, last) == list(range(last.size))
    index.remove(last[::2].copy())
    assert rows_of(index, last[1::2].copy()) == list(range(1, last.size, 2))
    assert rows_of(index, last[::2].copy()) == [-1] * (last.size // 2)


def test_index_without_memory_to_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(rows: int, columns: int) -> Keys:
        raise MemoryError

    index = Index()
    index.insert(keys_of(range(12)), keys_of(range(12)))
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "zeros", refuse)
        with pytest.raises(MemoryError):
            index.insert(keys_of([12]), keys_of([12]))
    assert rows_of(index, keys_of(range(13))) == [*range(12), -1]
    index.insert(keys_of([12]), keys_of([12]))
    assert rows_of(index, keys_of(range(13))) == list(range(13))


def test_index_with_room_reserved_enters_keys_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    index, model = Index(), dict[int, int]()
    for more in (3, 12, 13, 50, 7, 2000, 1):
        new = range(len(model), len(model) + more)
        with monkeypatch.context() as patch:
            index.reserve(more)
            places = index_module.zeros

            def refuse(rows: int, columns: int, places: Any = places) -> Keys:
                assert rows == 0, "this was to be reserved"
                return places(rows, columns)

            patch.setattr(index_module, "zeros", refuse)
            index.insert(keys_of(new), keys_of(new))
        model |= dict(zip(new, new, strict=True))
        assert rows_of(index, keys_of(range(len(model) + 9))) == [*model, *[-1] * 9]

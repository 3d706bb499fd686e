"""Which rows are there, after any requests, and what is in them."""

from __future__ import annotations

import mmap
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.suites import each_case
from tests.unit.core.table.rig import STATE, STREAM, Model, contents, keys_of, read, store_of

from paramserve.core.table import index as index_module
from paramserve.core.table import memory
from paramserve.core.table import store as store_module
from paramserve.core.table.options import LRU, TTL, MinCount, Normal, TableOptions, Zeros
from paramserve.core.table.store import TO_COME, Purpose, RowStore
from paramserve.errors import TableFull
from paramserve.rules.layout import RowLayout

READ, PUSH, PUT = Purpose.READ, Purpose.PUSH, Purpose.PUT
DRAFT = Purpose.DRAFT
EXTREMES = [0, -1, 2**63 - 1, -(2**63)]
REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(-6, 6) | st.sampled_from(EXTREMES), max_size=8),
        st.integers(0, 3),
        st.sampled_from([*Purpose, None]),  # None: the keys are deleted
    ),
    max_size=40,
)
INIT = Normal(std=1.0)


def limits(count: int, ttl: int | None, lru: int | None, max_bytes: int = 0) -> TableOptions:
    admit = MinCount(count) if count > 1 else None
    both = [each for each in (ttl and TTL(ttl), lru and LRU(lru)) if each]
    evict = both[0] | both[1] if len(both) == 2 else (both or [None])[0]
    return TableOptions(INIT, admit, evict, max_bytes)


@settings(max_examples=15, deadline=None)
@example([([0], 0, PUSH), ([0], 0, PUT), ([], 2, READ), ([0], 0, PUSH)], 2, 1, None, False)
@example([([0], 0, PUSH), ([0], 0, None), ([0], 0, PUSH), ([0], 0, PUSH)], 2, None, None, False)
@given(
    REQUESTS,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([None, 1, 4]),
    st.sampled_from([None, 1, 4, 8]),
    st.booleans(),
)
def test_rows_are_those_of_a_dict(
    requests: list[tuple[list[int], int, Purpose | None]],
    count: int,
    ttl: int | None,
    lru: int | None,
    swept_late: bool,
) -> None:
    store, model = store_of(limits(count, ttl, lru)), Model(count=count, ttl=ttl, lru=lru)
    clock = dropped = 0
    with pytest.MonkeyPatch.context() as patch:
        if swept_late:
            patch.setattr(store_module, "SWEPT_MIN", 1)
            patch.setattr(store_module, "SWEPT_PER_KEY", 0)
        for keys, later, purpose in requests:
            clock += later
            if purpose is None:
                assert store.delete(keys_of(keys), clock) == model.delete(keys, clock)
                continue
            expected = model.take(keys, clock, purpose)
            taken = store.take(keys_of(keys), clock, purpose)
            dropped += taken.dropped
            assert [row != -1 for row in taken.rows.tolist()] == expected
            rows = {k: r for k, r in zip(keys, taken.rows.tolist(), strict=True) if r >= 0}
            assert len(set(rows.values())) == len(rows)
            assert all(
                rows[k] == r for k, r in zip(keys, taken.rows.tolist(), strict=True) if r >= 0
            )
        store.take(keys_of(range(100, 108)), clock, READ)  # sweeps what is past its TTL
        for _ in range(20):
            store.take(keys_of([]), clock, READ)
        assert contents(store).keys() == model.used.keys()
        assert len(store) == len(model.used)
        counters = (store.created, store.evicted, store.deleted, dropped)
        assert counters == (model.created, model.evicted, model.deleted, model.dropped)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, 250]), st.sampled_from([None, 40]))
def test_rows_of_a_table_whose_index_has_moved_in_part_are_those_of_a_dict(
    seed: int, lru: int | None, ttl: int | None
) -> None:
    """They are found, evicted, put, deleted and scanned at every stage of a growth."""
    draw = np.random.default_rng(seed)
    model, moving = Model(ttl=ttl, lru=lru), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "PLACES", 16)
        patch.setattr(index_module, "MOVED_MIN", 1)
        store = store_of(limits(1, ttl, lru))
        for clock in range(60):
            purpose = (PUT, PUSH, READ)[draw.integers(3) if clock else 0]
            keys = draw.integers(0, 1000, 150 if clock == 0 else draw.integers(1, 15)).tolist()
            model.take(keys, clock, purpose)
            taken = store.take(keys_of(keys), clock, purpose)
            if purpose is READ:
                assert store.delete(keys_of(keys), clock) == model.delete(keys, clock)
            if purpose is PUT:
                values = np.repeat(np.array(keys, np.float32), 3).reshape(-1, 3)
                store.write(taken.rows, values)
                assert (read(store, keys) == values).all()
            moving += store._index._mark > 0
            store.take(keys_of([-1]), clock, READ)
            assert contents(store).keys() == model.used.keys()
    assert moving


def change(store: RowStore, keys: list[int], by: float) -> None:
    """As an update would: values and state up by a number, counts by one."""
    asked = keys_of(keys)
    rows = store.take(asked, 0, PUSH).rows
    there = rows >= 0
    view = store.view(rows[there], asked[there])
    at = store.layout.count_at
    view.floats[view.slots, :at] += by
    view.words[view.slots, at] += 1


def filled(store: RowStore, pushes: int = 1) -> int:
    """Push new keys, a few at a time, until there is no room."""
    for start in range(0, 100_000, 50):
        try:
            for _ in range(pushes):
                store.take(np.arange(start, start + 50), 0, PUSH)
        except TableFull:
            break
    return len(store)


def test_deleted_row_begins_again_with_its_initial_values_and_state() -> None:
    store = store_of()
    store.take(keys_of([1, 2, 3]), 0, PUT)
    fresh = contents(store)
    change(store, [1, 2, 3], 2.0)
    kept = contents(store)[2]
    initial = read(store, [1, 9])
    assert store.delete(keys_of([3, 1, 1, 9]), 0) == 2
    assert contents(store) == {2: kept}
    assert read(store, [9]).tolist() == initial[1:].tolist()
    store.take(keys_of([1, 3]), 0, PUT)
    assert contents(store) == {**fresh, 2: kept}


def test_delete_without_memory_for_free_rows_changes_nothing() -> None:
    store = store_of(limits(2, None, None))
    for _ in range(2):
        store.take(keys_of([1, 2]), 0, PUSH)
    store.take(keys_of([3]), 0, PUSH)
    before = contents(store)

    def none(rows: int) -> None:
        raise MemoryError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._free, "reserve", none)
        with pytest.raises(MemoryError):
            store.delete(keys_of([1, 2, 3]), 0)
    assert (contents(store), store.deleted) == (before, 0)
    assert store.take(keys_of([3]), 0, PUSH).created == 1


def test_memory_of_a_table_whose_rows_are_deleted_stays_below_its_limit() -> None:
    store = store_of(limits(1, None, None, 1 << 20))
    for _ in range(3):
        filled(store)
        assert store.delete(np.arange(100_000), 0) == store.room // 50 * 50
        assert store.memory_bytes <= 1 << 20


@each_case("limit", ["ttl", "lru", "both"])
def test_rows_go_in_the_order_of_the_last_use_that_they_were_given(limit: str) -> None:
    """As a dict of last uses. Requests come at even clocks, the uses given are at odd ones."""
    for seed in range(8):
        check_order(limit, seed)


def check_order(limit: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    ttl, lru = None if limit == "lru" else 12, None if limit == "ttl" else 9
    store, used, clock, order = store_of(limits(1, ttl, lru)), dict[int, tuple[int, int]](), 0, 0
    for _ in range(60):
        clock += 2 * int(draw.integers(2))
        keys = draw.choice(20, draw.integers(1, 5), replace=False)
        dated = draw.random() < 0.5
        idle = 2 * draw.integers(0, 8, keys.size) + 1 if dated else np.zeros(keys.size, np.int64)
        if dated:
            keys, idle = keys[~store.is_past(idle)], idle[~store.is_past(idle)]
        if not keys.size:
            continue
        used = {k: at for k, at in used.items() if ttl is None or at[0] >= clock - ttl}
        for key in keys.tolist():
            if key in used:
                used[key] = clock, (order := order + 1)
        new = [key for key in keys.tolist() if key not in used]
        over = len(used) + len(new) - (lru or 99) if new else 0
        for key in sorted(used, key=used.__getitem__)[: max(over, 0)]:
            del used[key]
        for key, ago in zip(keys.tolist(), idle.tolist(), strict=True):
            if dated or key in new:
                used[key] = clock - ago, (order := order + 1)
        store.set_idle(store.take(keys, clock, PUT).rows, idle)
        assert contents(store).keys() == used.keys(), seed
        mine = np.array(list(used))
        ages = store.idle(store.take(mine, clock, READ).rows, clock)
        assert ages.tolist() == [clock - used[key][0] for key in mine.tolist()], seed


def test_rows_past_their_ttl_make_room_before_the_table_is_full() -> None:
    store = store_of(limits(1, 2, None, 40_000))
    many = filled(store)
    with pytest.raises(TableFull):
        store.take(np.arange(-many, 0), 2, PUT)
    assert store.take(np.arange(-many, 0), 3, PUT).created == many
    assert len(store) == many


@each_case("purpose", [PUSH, PUT])
def test_full_table_refuses_and_stays_as_it_was(purpose: Purpose) -> None:
    store = store_of(limits(1, None, None, 60_000))
    many = filled(store)
    assert 300 < many < 10_000
    change(store, [0, 7], 1.0)
    before = (contents(store), store.memory_bytes, store.created)
    with pytest.raises(TableFull, match="max_bytes=60000"):
        store.take(keys_of([1, *range(-50, 0)]), 0, purpose)
    assert (contents(store), store.memory_bytes, store.created) == before
    assert store.take(keys_of([1, 2]), 0, purpose).created == 0
    assert store.take(keys_of([1, -1]), 0, READ).rows.tolist()[1] == -1


def test_full_table_counts_no_push_that_it_refuses() -> None:
    store = store_of(limits(3, None, None, 64_000))
    filled(store, 3)
    new = np.arange(-50, 0)
    for pushes in range(4):
        if pushes < 2:
            assert store.take(new, 0, PUSH).dropped == 50
        else:
            with pytest.raises(TableFull):
                store.take(new, 0, PUSH)
    assert store.take(new, 0, READ).rows.tolist() == [-1] * 50


class Refusing:
    """A system that gives memory a few times, and then none."""

    def __init__(self, patch: pytest.MonkeyPatch, times: int) -> None:
        self.times = times
        reserve, zeros = memory.Growing.reserve, index_module.zeros

        def growth(growing: memory.Growing, rows: int) -> None:
            self._ask(rows > growing.capacity)
            reserve(growing, rows)

        def places(rows: int, columns: int) -> Any:
            self._ask(rows > 0)
            return zeros(rows, columns)

        patch.setattr(memory.Growing, "reserve", growth)
        patch.setattr(index_module, "zeros", places)

    def _ask(self, more: bool) -> None:
        self.times -= more
        if self.times < 0:
            raise MemoryError


@each_case(
    ("purpose", "count", "least"),
    [(PUSH, 1, 5), (PUT, 1, 5), (PUSH, 2, 2), (PUT, 2, 5)],
)
def test_request_without_memory_for_its_rows_is_refused_and_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, purpose: Purpose, count: int, least: int
) -> None:
    """Wherever memory ends: rows, keys, order of use, free rows, index, keys that wait."""
    monkeypatch.setattr(memory, "SMALL_BYTES", mmap.PAGESIZE)
    new = np.array([5, *range(2000, 3100)])  # some were pushed once, and many have to go

    def used() -> RowStore:
        store = store_of(limits(count, None, 1300))
        store.take(np.arange(500), 0, PUT)
        store.take(np.arange(2000, 2100), 0, PUSH)
        return store

    def seen(store: RowStore) -> Any:
        return contents(store), store.created, store.evicted, store.memory_bytes

    before, good = seen(used()), used()
    expected = good.take(new, 1, purpose).rows.tolist()
    for refused in range(20):
        store = used()
        with pytest.MonkeyPatch.context() as patch:
            Refusing(patch, refused)
            try:
                rows = store.take(new, 1, purpose).rows
            except TableFull as full:
                text = str(full)
            else:
                break
        assert re.search(r"no memory for 1\d+ more rows of this table, which has [56]00\.", text)
        assert "Applied: no." in text
        assert seen(store)[:4] == before[:4]
        assert store.take(new, 1, purpose).rows.tolist() == expected
    assert refused >= least
    assert rows.tolist() == expected
    assert seen(store) == seen(good)


def test_request_of_more_keys_than_max_bytes_has_room_for_is_refused() -> None:
    store = store_of(TableOptions(INIT, evict=LRU(3), max_bytes=20_000))
    most = store.room
    store.take(keys_of([1, 2]), 0, PUT)
    with pytest.raises(TableFull, match=f"{most + 1} rows at once, this table has room for {most}"):
        store.take(np.arange(2, most + 3), 0, PUT)
    assert contents(store).keys() == {1, 2}
    store.take(np.arange(2, most + 2), 0, PUT)
    assert len(store) == most


@each_case("admit", [1, 2])
@each_case("dim", [1, 16])
def test_memory_never_exceeds_max_bytes(admit: int, dim: int) -> None:
    most = 300_000
    options = TableOptions(INIT, MinCount(admit), LRU(), most)
    store = store_of(options, dim=dim)
    peak = 0
    for start in range(0, 12_000, 100):
        for _ in range(admit):
            store.take(np.arange(start, start + 100), 0, PUSH)
            peak = max(peak, store.memory_bytes)
    assert 0.5 * most < peak <= most
    assert store.evicted > 0
    assert len(store) == store.rows_max


def test_limit_below_a_row_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        store_of(TableOptions(INIT, max_bytes=100))


def test_memory_is_rows_and_a_small_part_more() -> None:
    store = store_of(TableOptions(Zeros()), dim=61)
    values = 4 * store.layout.words
    for start in range(0, 40_000, 400):
        store.take(np.arange(start, start + 400), 0, PUT)
        assert values * len(store) < store.memory_bytes < 1.25 * values * len(store) + 16_384


@each_case("dtype", ["float32", "bfloat16", "float16"])
def test_written_rows_are_read_again(dtype: str) -> None:
    for dim in (1, 4, 5):
        check_rows_written(dtype, dim)


def check_rows_written(dtype: str, dim: int) -> None:
    store, keys = store_of(dim=dim, dtype=dtype), keys_of([5, -6, 7])
    before = read(store, [5, -6, 7, 8], PUT)
    rows = store.take(keys, 0, PUT).rows
    values = np.arange(3 * dim, dtype=np.float32).reshape(3, dim) - 2.5
    state = np.arange(9, dtype=np.float32).reshape(3, 3)
    counts = np.array([1, 2**32 - 1, 3], np.uint32)
    store.write(rows, values, state, counts)
    assert (read(store, [5, -6, 7]) == values).all()
    got = store.read_state(rows)
    assert (got[0] == state).all()
    assert (got[1] == counts).all()
    store.write(rows[:1].copy(), before[:1])
    assert (read(store, [5]) == before[:1]).all()
    assert (store.read_state(rows)[0] == state).all()
    assert (read(store, [8]) == before[3]).all()


def test_rows_without_state_and_count_have_none() -> None:
    layout = RowLayout(2, "float32")
    store = RowStore(layout, np.empty(0, np.float32), TableOptions(Zeros()), 1)
    rows = store.take(keys_of([1, 2]), 0, PUT).rows
    store.write(rows, np.ones((2, 2), np.float32), None, np.ones(2, np.uint32))
    state, counts = store.read_state(rows)
    assert state.shape == (2, 0)
    assert counts is None
    assert (read(store, [2, 1]) == 1.0).all()


def test_scan_meets_each_row_once_while_others_come_and_go() -> None:
    store = store_of(limits(1, None, 400))
    store.take(np.arange(400), 0, PUT)
    met: list[int] = []
    cursor, step = 0, 0
    while cursor >= 0:
        keys, rows, cursor = store.scan(cursor, 13)
        assert (store.take(keys, 0, READ).rows == rows).all()
        met += keys.tolist()
        store.take(np.arange(300), 0, PUT)
        store.take(np.arange(1000 + step, 1005 + step), 0, PUT)
        step += 5
    assert len(met) == len(set(met))
    assert set(range(300)) <= set(met)


def test_same_requests_give_the_same_bytes() -> None:
    def run() -> tuple[bytes, list[int]]:
        store, draw, rows = store_of(limits(2, 3, 50)), np.random.default_rng(5), list[int]()
        for clock in range(60):
            keys = draw.integers(-60, 60, 20)
            change(store, keys.tolist(), float(clock))
            rows += store.take(keys, clock, PUT).rows.tolist()
        return store.view(keys_of([0]), keys_of([0])).floats.tobytes(), rows

    assert run() == run()


def test_view_is_the_memory_of_the_rows() -> None:
    store, keys = store_of(), keys_of([8, 9])
    view = store.view(store.take(keys, 0, PUT).rows, keys)
    assert view.stream == STREAM
    assert view.layout is store.layout
    assert (view.words.view(np.float32)[view.slots, :3] == read(store, [8, 9])).all()
    view.floats[view.slots[1], 0] = 5.0
    assert read(store, [9])[0, 0] == 5.0


def test_growth_of_the_memory_keeps_all_rows() -> None:
    store = store_of(TableOptions(INIT), dim=40)
    keys = np.arange(20_000) * 977
    expected = read(store, keys.tolist())
    for start in range(0, keys.size, 1000):
        store.take(keys[start : start + 1000], 0, PUT)
    assert len(store) == keys.size
    assert (read(store, keys.tolist()) == expected).all()


def test_state_of_another_width_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="state"):
        RowStore(RowLayout(2, "float32", (2,)), STATE, TableOptions(Zeros()), 1)


def test_draft_shows_what_a_push_would_do_and_leaves_rows_use_and_counts() -> None:
    def used() -> RowStore:
        store = store_of(limits(2, 5, 4))
        store.take(keys_of([1, 2, 3, 4]), 0, PUT)
        store.take(keys_of([7, 8]), 1, PUSH)  # once: one more admits them
        return store

    store, other = used(), used()
    before = (contents(store), store.created, store.evicted)
    for _ in range(3):
        drafted = store.take(keys_of([1, 7, 9, 8]), 1, DRAFT)
    assert (drafted.rows.tolist()[1:], drafted.created) == ([TO_COME, -1, TO_COME], 0)
    assert (drafted.dropped, store.drafted) == (1, 2)
    assert (contents(store), store.created, store.evicted) == before
    for each in (store, other):
        pushed = each.take(keys_of([1, 7, 9, 8]), 1, PUSH)
        assert (pushed.created, pushed.dropped, each.evicted) == (2, 1, 2)
        assert each.take(keys_of([9]), 1, PUSH).created == 1, "counted once"
    assert contents(store) == contents(other)


def test_room_that_is_held_is_for_the_push_that_it_is_held_for() -> None:
    store = store_of(limits(1, None, None, 60_000))
    most = filled(store)
    room = store.rows_max - most
    new = np.arange(-room, 0)
    store.take(new, 0, DRAFT)
    store.reserved_rows = store.drafted
    with pytest.raises(TableFull):
        store.take(keys_of([1 << 40]), 0, PUT)
    assert store.take(new, 0, PUSH).created == room


def test_drafts_are_copies_of_rows_and_of_rows_as_they_begin() -> None:
    store = store_of()
    store.take(keys_of([5]), 0, PUT)
    change(store, [5], 2.0)
    keys = keys_of([6, 5])
    view = store.drafts(store.take(keys, 0, DRAFT).rows, keys)
    before = contents(store)
    rows = store.take(keys, 0, PUT).rows
    lying = np.empty_like(view.floats)
    store.raw(rows, lying)
    assert view.floats.tobytes() == lying.tobytes()
    view.floats[:] = 1.0
    assert contents(store)[5] == before[5]

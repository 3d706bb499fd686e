"""A table goes on while its cut is read: the cut stays as it was taken."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
from tests.suites import each_case
from tests.unit.core.table.rig import keys_of, store_of

from paramserve.core.table.admission import Waiting
from paramserve.core.table.changes import RowChanges
from paramserve.core.table.cut import RowsCopy
from paramserve.core.table.options import LRU, TTL, MinCount, Normal, TableOptions
from paramserve.core.table.store import CLOCK_MAX, Purpose, RowStore, clocks_of

OPTIONS: dict[str, TableOptions] = {
    "plain": TableOptions(Normal(std=1.0)),
    "lru": TableOptions(Normal(std=1.0), evict=LRU(rows=40)),
    "ttl": TableOptions(Normal(std=1.0), evict=TTL(clocks=3)),
    "both": TableOptions(Normal(std=1.0), evict=LRU(rows=60) | TTL(clocks=5)),
    "admit": TableOptions(Normal(std=1.0), admit=MinCount(2), evict=LRU(rows=40)),
}
KEYS = 150
SEEDS = 12


class State(NamedTuple):
    """What a cut has, as plain values."""

    rows: dict[int, bytes]
    oldest_first: list[tuple[int, int]]
    """Keys with the clocks of their last use."""
    waiting: list[dict[int, int]]


def state_of(store: RowStore) -> State:
    keys, rows, _ = store.scan(0, 1 << 20)
    raw = np.empty((rows.size, store.layout.words), np.float32)
    store.raw(rows, raw)
    uses = store.uses(rows) if store.orders_use else np.zeros(0, np.int64)
    oldest = np.argsort(uses)
    clocks = clocks_of(uses[oldest])
    counted = store.candidates()
    return State(
        {int(key): row.tobytes() for key, row in zip(keys, raw, strict=True)},
        [*zip(keys[oldest].tolist(), clocks.tolist(), strict=True)] if uses.size else [],
        as_dicts(counted.entries() if counted is not None else None),
    )


def as_dicts(waiting: Waiting | None) -> list[dict[int, int]]:
    return [dict(zip(k.tolist(), n.tolist(), strict=True)) for k, n in waiting or ()]


class Training:
    """Requests that a table is sent, drawn from a seed."""

    def __init__(self, seed: int, options: TableOptions) -> None:
        self.dice = Random(seed)
        self.store = store_of(options)
        self.clock = 0

    def request(self) -> None:
        self.clock += self.dice.random() < 0.3
        keys = keys_of(self.dice.sample(range(KEYS), self.dice.randint(1, 12)))
        purpose = self.dice.choice((Purpose.PUSH, Purpose.PUSH, Purpose.PUT, Purpose.READ))
        if self.dice.random() < 0.1:
            self.store.delete(keys, self.clock)
            return
        if self.dice.random() < 0.1:  # loaded from a file
            rows = self.store.take(keys, self.clock, Purpose.PUT).rows
            self.store.write(rows, np.full((rows.size, 3), self.dice.random(), np.float32))
            idle = [self.dice.randint(0, 9) for _ in rows]
            self.store.set_idle(rows, np.array(idle))
            return
        rows = self.store.take(keys, self.clock, purpose).rows
        if purpose is Purpose.PUSH:
            there = rows >= 0
            values = np.full((int(there.sum()), 3), self.dice.random(), np.float32)
            self.store.write(rows[there], values)

    def requests(self, number: int) -> None:
        for _ in range(number):
            self.request()


def read(copy: RowsCopy, training: Training) -> State:
    """A cut as it is written, with requests in between."""

    def some() -> None:
        training.requests(training.dice.randint(0, 4))

    some()
    while copy.find_free(3):
        some()
    some()
    wanted = copy.rows_to_copy()
    rows, uses = dict[int, bytes](), list[tuple[int, int]]()
    for at in range(0, wanted.size, 7):
        some()
        numbers = wanted[at : at + 7]
        found = copy.of(numbers)
        rows |= {int(key): raw.tobytes() for key, raw in zip(*found, strict=True)}
        assert copy.keys_of(numbers).tolist() == found.keys.tolist()
        if copy.orders_use:
            uses += zip(copy.uses_of(numbers).tolist(), found.keys.tolist(), strict=True)
        copy.written(numbers)
    oldest = [(key, use) for use, key in sorted(uses)]
    clocks = clocks_of(np.array([use for _, use in oldest], np.int64)).tolist()
    return State(
        rows,
        [(key, clock) for (key, _), clock in zip(oldest, clocks, strict=True)],
        as_dicts(copy.candidates),
    )


@each_case("name", OPTIONS)
def test_cut_stays_as_it_was(name: str) -> None:
    for seed in range(SEEDS):
        training = Training(seed, OPTIONS[name])
        training.requests(training.dice.randint(0, 60))
        for _ in range(2):
            before = state_of(training.store)
            copy = RowsCopy(training.store)
            assert read(copy, training) == before, seed
            copy.close()
        assert not training.store.watchers


@each_case("name", OPTIONS)
def test_increments_come_to_what_was_at_the_last_cut(name: str) -> None:
    """Each is read while the table goes on; one in three is given up."""
    for seed in range(SEEDS):
        check_increments(Training(seed, OPTIONS[name]), seed)


def check_increments(training: Training, seed: int) -> None:
    changes = RowChanges()
    training.store.watchers.append(changes)
    rows, clocks = dict[int, bytes](), dict[int, int]()
    for number in range(1, 12):
        training.requests(training.dice.randint(0, 8))
        before = state_of(training.store)
        changed = changes.cut(number)
        copy = RowsCopy(training.store, changed)
        found = read(copy, training)
        copy.close()
        committed = training.dice.random() < 0.7
        changes.end_checkpoint(number, committed=committed)
        if not committed:
            continue
        if changed.whole:
            rows, clocks = {}, {}
        for key in changed.removed().tolist():
            rows.pop(key, None)
            clocks.pop(key, None)
        rows |= found.rows
        clocks |= dict(found.oldest_first)
        assert rows == before.rows, seed
        assert clocks == dict(before.oldest_first), seed
        assert found.waiting == before.waiting, seed


def test_what_a_cut_takes_does_not_grow_with_the_table() -> None:
    """Nothing of the table is read when the cut is taken, except how often keys were pushed."""
    training = Training(0, OPTIONS["both"])
    training.requests(50)
    store: Any = training.store
    hidden = store._rows, store._keys, store._free, store._use._links
    store._rows = store._keys = store._free = store._use._links = None
    copy = RowsCopy(store)
    store._rows, store._keys, store._free, store._use._links = hidden
    assert not copy.find_free(1 << 10)
    assert copy.rows_to_copy().size == len(store)
    copy.close()


def test_uses_keep_their_order_past_the_last_clock() -> None:
    training = Training(0, OPTIONS["lru"])
    keys = keys_of([1, 2, 3])
    for clock in (CLOCK_MAX - 1, 1 << 62, 1 << 62):
        rows = training.store.take(keys, clock, Purpose.PUSH).rows
        uses = training.store.uses(rows)
        assert (np.diff(uses) > 0).all()
        assert clocks_of(uses).tolist() == [min(clock, CLOCK_MAX)] * 3

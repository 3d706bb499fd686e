"""A table on 1 to 3 servers against a plain dict of rows for each shard, in any order of calls."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster

from paramserve.client import Client
from paramserve.core.keyed.hashing import shard_of
from paramserve.core.keyed.options import LRU, TTL, MinCount, Uniform
from paramserve.errors import TableFull
from paramserve.rules import Add

pytestmark = pytest.mark.usefixtures("tables_ready")

DIM = 2
SETTINGS = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to make a failure smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
KEYS = [0, -1, 2**63 - 1, -(2**63), *range(1, 13)]
key = st.sampled_from(KEYS)
batches = st.lists(key, max_size=9)
sets = st.lists(key, max_size=9, unique=True)
Row = tuple[float, ...]


class ModelShard:
    """Rows in the order of their last use, the oldest first, with the clock of that use."""

    def __init__(self, rows_max: int, ttl: int, lru: bool, needed: int) -> None:
        self.rows: dict[int, tuple[np.ndarray, int]] = {}
        self.pushes: dict[int, int] = {}
        self.dropped = 0
        self._rows_max, self._ttl, self._lru, self._needed = rows_max, ttl, lru, needed
        self._clock = 0

    def use(self, keys: list[int], clock: int, initial: dict[int, np.ndarray], why: str) -> bool:
        """Find or make rows, as for a pull, push or put of these keys; False: it is full."""
        if not keys:
            return True
        self._clock = max(self._clock, clock)
        if self._ttl:
            self.rows = {k: r for k, r in self.rows.items() if self._clock - r[1] <= self._ttl}
        if why == "read":
            return True
        absent = [key for key in dict.fromkeys(keys) if key not in self.rows]
        fresh = absent
        if self._needed > 1 and why == "pull":
            fresh = []
        elif self._needed > 1 and why == "push":
            fresh = [key for key in absent if self.pushes.get(key, 0) + 1 >= self._needed]
        there = [key for key in keys if key in self.rows]
        over = len(self.rows) + len(fresh) - self._rows_max
        if fresh and over > 0 and not self._lru:
            return False
        over = min(over, len(self.rows) - len(set(there)))
        if self._needed > 1 and why == "push":
            for key in absent:
                self.pushes[key] = 0 if key in fresh else self.pushes.get(key, 0) + 1
            self.dropped += len(absent) - len(fresh)
        for key in there:
            self.rows[key] = (self.rows.pop(key)[0], self._clock)
        for _ in range(over if fresh else 0):
            del self.rows[next(iter(self.rows))]
        for key in fresh:
            self.rows[key] = (initial[key].copy(), self._clock)
        return True


class Towns:
    """A cluster with a worker for each number of servers, for one table after the other."""

    def __init__(self, make_cluster: MakeCluster) -> None:
        self._make = make_cluster
        self._made: dict[int, tuple[RoleCluster, Client]] = {}
        self._names = 0

    def of(self, servers: int) -> tuple[RoleCluster, Client]:
        if servers not in self._made:
            cluster = self._make("inprocess", servers=servers, workers=1)
            self._made[servers] = (cluster, cluster.client(0))
        return self._made[servers]

    def new_name(self) -> str:
        self._names += 1
        return f"users {self._names}"


class TableMachine(RuleBasedStateMachine):
    """Does to a table and to the model what hypothesis draws."""

    def __init__(self, towns: Towns) -> None:
        super().__init__()
        self.towns = towns
        self.clock = 0

    @initialize(
        servers=st.integers(1, 3),
        ttl=st.sampled_from([0, 0, 1, 2]),
        lru=st.sampled_from([0, 2, 3, 5]),
        full=st.sampled_from([0, 0, 4]),
        needed=st.sampled_from([1, 1, 2, 3]),
    )
    def start(self, servers: int, ttl: int, lru: int, full: int, needed: int) -> None:
        """Rows of Uniform values, in a table that may be full, evict or admit late."""
        cluster, self.client = self.towns.of(servers)
        evict: Any = LRU(rows=lru * servers) if lru else None
        if ttl:
            evict = TTL(clocks=ttl) if evict is None else TTL(clocks=ttl) | evict
        self.table = self.client.table(
            self.towns.new_name(),
            dim=DIM,
            rule=Add(),
            init=Uniform(-1.0, 1.0),
            evict=evict,
            admit=MinCount(needed) if needed > 1 else None,
        )
        limit = lru if lru else full if full else 1 << 30
        for server in cluster.servers:
            store = server.role.shard.blocks[self.table.block.id].store
            assert not lru or store.rows_max == lru
            store.rows_max = limit
            store.room = 1 << 30 if lru else limit
        self.initial = dict(zip(KEYS, self.table.pull(KEYS, create=False), strict=True))
        self.shards = [ModelShard(limit, ttl, bool(lru), needed) for _ in range(servers)]
        self.owner = dict(zip(KEYS, shard_of(np.array(KEYS), servers).tolist(), strict=True))

    def by_shard(self, keys: list[int]) -> list[list[int]]:
        return [[k for k in keys if self.owner[k] == n] for n in range(len(self.shards))]

    def use(self, keys: list[int], why: str) -> list[bool]:
        return [
            shard.use(own, self.clock, self.initial, why)
            for shard, own in zip(self.shards, self.by_shard(keys), strict=True)
        ]

    def value(self, key: int) -> np.ndarray:
        found = self.shards[self.owner[key]].rows.get(key)
        return self.initial[key] if found is None else found[0]

    def fails(self, fitted: list[bool]) -> AbstractContextManager[object]:
        return nullcontext() if all(fitted) else pytest.raises(TableFull)

    def expect(self, keys: list[int], rows: np.ndarray) -> None:
        expected = np.array([self.value(k) for k in keys], np.float32).reshape(-1, DIM)
        assert np.array_equal(rows, expected)

    @rule(keys=sets, create=st.booleans(), twice=st.booleans())
    def pull(self, keys: list[int], create: bool, twice: bool) -> None:
        keys = keys + keys if twice else keys
        rows = self.table.pull(keys, create=create)
        self.use(keys, "pull" if create else "read")
        self.expect(keys, rows)

    @rule(keys=sets, pushed=batches)
    def prefetch_and_push_and_pull(self, keys: list[int], pushed: list[int]) -> None:
        self.table.prefetch(keys)
        self.use(keys, "pull")
        expected = [self.value(k).copy() for k in keys]
        self.push(pushed, 1)
        rows = self.table.pull(keys[::-1])
        assert np.array_equal(rows, np.array(expected[::-1]).reshape(-1, DIM))

    @rule(keys=batches, value=st.integers(-9, 9))
    def push(self, keys: list[int], value: int) -> None:
        gradients = np.arange(value, value + len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
        fitted = self.use(list(dict.fromkeys(keys)), "push")
        with self.fails(fitted):
            self.table.push(keys, gradients).result()
        sums: dict[int, np.ndarray] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        for key, total in sums.items():
            shard = self.shards[self.owner[key]]
            if fitted[self.owner[key]] and key in shard.rows:
                row, used = shard.rows[key]
                shard.rows[key] = (row + total, used)

    @rule(keys=sets, value=st.integers(-9, 9))
    def put(self, keys: list[int], value: int) -> None:
        values = np.arange(value, value + len(keys) * DIM, dtype=np.float32).reshape(-1, DIM)
        fitted = self.use(keys, "put")
        with self.fails(fitted):
            self.table.put(keys, values)
        for key, row in zip(keys, values, strict=True):
            if fitted[self.owner[key]]:
                shard = self.shards[self.owner[key]]
                shard.rows[key] = (row, shard.rows[key][1])

    @rule(clocks=st.integers(1, 2))
    def tick(self, clocks: int) -> None:
        for _ in range(clocks):
            self.client.tick(self.table.name).result()
            self.clock += 1

    @rule(rows=st.integers(1, 6))
    def scan(self, rows: int) -> None:
        met: dict[int, Row] = {}
        for part in self.table.scan(rows):
            assert not met.keys() & set(part.keys.tolist())
            met |= dict(zip(part.keys.tolist(), map(tuple, part.values.tolist()), strict=True))
        model = [shard.rows for shard in self.shards]
        assert met == {k: tuple(r.tolist()) for rows in model for k, (r, _) in rows.items()}

    @invariant()
    def tells_how_many_rows_there_are(self) -> None:
        reports = self.table.reports()
        assert [each.rows for each in reports] == [len(shard.rows) for shard in self.shards]
        assert [each.unadmitted for each in reports] == [shard.dropped for shard in self.shards]


def test_table_does_what_a_dict_of_rows_does(make_cluster: MakeCluster) -> None:
    towns = Towns(make_cluster)
    run_state_machine_as_test(lambda: TableMachine(towns), settings=SETTINGS)


def test_machine_finds_rows_that_are_not_in_the_order_of_their_use(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is worth nothing if it finds nothing."""
    monkeypatch.setattr(ModelShard, "use", _forgets_to_touch(ModelShard.use))
    towns = Towns(make_cluster)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(lambda: TableMachine(towns), settings=SETTINGS)


def _forgets_to_touch(use: Any) -> Any:
    def wrong(shard: ModelShard, keys: list[int], clock: int, initial: Any, why: str) -> bool:
        order = list(shard.rows)
        fitted = bool(use(shard, keys, clock, initial, why))
        if why == "pull":
            known = {k: shard.rows[k] for k in order if k in shard.rows}
            shard.rows = known | {k: r for k, r in shard.rows.items() if k not in known}
        return fitted

    return wrong

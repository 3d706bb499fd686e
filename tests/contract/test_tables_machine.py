"""A table on 1 to 3 servers does what a dictionary of rows does, in any order of calls.

`TableMachine` draws a table and what is done to it, and compares all that can be read, to the bit,
with `table_model`. A failure is made smaller, and printed as the calls that lead to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from tests.contract import table_model
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from tests.contract.table_model import ModelServer, Row, counted, first_state, updated
from tests.contract.test_tables_links import PATIENT

from paramserve.client import Client
from paramserve.client.table import Table
from paramserve.compiling import load_table
from paramserve.core.table.options import LRU, TTL, Constant, MinCount, Normal, Uniform, Zeros
from paramserve.core.table.store import Purpose, RowStore
from paramserve.errors import NonFinite, TableFull
from paramserve.rules import FTRL, SGD, Adagrad, Adam, Add, RowAdagrad, Rule
from paramserve.rules.rows import row_layout

pytestmark = [pytest.mark.usefixtures("tables_ready"), pytest.mark.timeout(900)]

DIM = 2
TABLES_MAX = 60
"""Of one cluster: what is asked of all its tables takes longer with each."""
SEED = 1
QUICK = settings(  # for each rule
    max_examples=4,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    report_multiple_bugs=False,  # to make several smaller takes minutes
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
LONG = settings(QUICK, max_examples=50, stateful_step_count=50, derandomize=False, print_blob=True)
KEYS = [0, -1, 2**63 - 1, -(2**63), *range(1, 9)]
RULES: dict[str, Rule] = {
    "Add": Add(),
    "SGD": SGD(0.5),
    "SGD maximize": SGD(0.25, weight_decay=0.1, maximize=True),
    "SGD momentum": SGD(0.1, momentum=0.9, weight_decay=0.01),
    "SGD nesterov": SGD(0.1, momentum=0.9, nesterov=True),
    "SGD dampening": SGD(0.1, momentum=0.5, dampening=0.25),
    "Adagrad": Adagrad(lr=0.5),
    "Adagrad with all": Adagrad(
        lr=0.5, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True
    ),
    "RowAdagrad": RowAdagrad(lr=0.5),
    "RowAdagrad with all": RowAdagrad(
        lr=0.5, weight_decay=0.1, initial_accumulator_value=0.5, maximize=True
    ),
    "Adam": Adam(lr=0.1),
    "Adam beta1=0": Adam(lr=0.1, betas=(0.0, 0.9), weight_decay=0.1),
    "AdamW maximize": Adam(
        lr=0.1, betas=(0.3, 0.5), weight_decay=0.1, decoupled=True, maximize=True
    ),
    "FTRL": FTRL(),
    "FTRL l1 l2": FTRL(alpha=0.5, beta=0.0, l1=2.0, l2=0.1),
}
INITS = [Uniform(-1.0, 1.0), Normal(0.5, 2.0), Constant(0.75), Zeros()]

key = st.sampled_from(KEYS)
batches = st.lists(key, max_size=9)
who = st.sampled_from([0, 0, 1])
"""The worker, which ends clocks, or a client without a rank."""
shards = st.integers(0, 2)


class Harness:
    """A cluster with a worker and a client without a rank, for one table after the other."""

    def __init__(self, cluster: RoleCluster) -> None:
        self.cluster = cluster
        self.tables = 0
        self.clients = [self._client(0), self._client(-1)]

    def _client(self, rank: int) -> Client:
        return self.cluster.client(rank, deadlines=PATIENT)

    def restart_worker(self) -> None:
        """The worker's process has died, and comes again."""
        self.cluster.mark_dead(0)
        self.clients[0].close()
        self.clients[0] = self._client(0)


class Harnesses:
    """A harness for each transport and number of servers, a new one when it has many tables."""

    def __init__(self, make: MakeCluster) -> None:
        self._make = make
        self._made: dict[tuple[str, int], Harness] = {}

    def of(self, kind: str, servers: int) -> Harness:
        harness = self._made.get((kind, servers))
        if harness is None or harness.tables == TABLES_MAX:
            cluster = self._make(kind, servers=servers, workers=1, restarts=True)
            harness = self._made[kind, servers] = Harness(cluster)
        harness.tables += 1
        return harness


class TableMachine(RuleBasedStateMachine):
    """Does to a table and to the model what hypothesis draws."""

    def __init__(self, harnesses: Harnesses, name_of_rule: str) -> None:
        super().__init__()
        self.harnesses = harnesses
        self.name_of_rule, self.rule = name_of_rule, RULES[name_of_rule]
        self.clock = 0
        self.tables: list[Table] = []

    @initialize(
        kind=st.sampled_from(["tcp", "unix"]),
        servers=st.integers(1, 3),
        init=st.sampled_from(INITS),
        seed=st.sampled_from([0, 1, 2**63 - 1]),
        ttl=st.sampled_from([0, 0, 1, 2]),
        lru=st.sampled_from([0, 0, 2, 5]),
        full=st.sampled_from([0, 0, 0, 4]),
        needed=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def start(
        self,
        kind: str,
        servers: int,
        init: Any,
        seed: int,
        ttl: int,
        lru: int,
        full: int,
        needed: int,
    ) -> None:
        """A table that may be full, evict or admit late."""
        note(f"the rule is {self.name_of_rule}: {self.rule}")
        self.harness = self.harnesses.of(kind, servers)
        self.servers = servers
        evict: Any = LRU(rows=lru * servers) if lru else None
        if ttl:
            evict = TTL(clocks=ttl) if evict is None else TTL(clocks=ttl) | evict
        self.options = {
            "dim": DIM,
            "rule": self.rule,
            "init": init,
            "evict": evict,
            "admit": MinCount(needed) if needed > 1 else None,
            "seed": seed,
        }
        self.name = f"users {self.harness.tables}"
        self.find_table()
        if full and not lru:  # as max_bytes does, of which few hundred bytes have room for no row
            for server in self.harness.cluster.servers:
                store = server.role.shard.blocks[self.tables[0].block.id].store
                store.room = store.rows_max = full
        limit = lru or full or 1 << 30
        first = self.tables[0].pull(KEYS)
        self.initial = dict(zip(KEYS, first, strict=True))
        for each, row in self.initial.items():
            expected = table_model.initial(init, seed, self.name, each, DIM)
            np.testing.assert_allclose(row, expected, rtol=1e-6, atol=1e-6)
        self.model = [
            ModelServer(limit, bool(lru), ttl, needed, self.fresh) for _ in range(servers)
        ]

    def find_table(self) -> None:
        self.tables = [client.table(self.name, **self.options) for client in self.harness.clients]

    # --- the model -------------------------------------------------------------------------------

    def fresh(self, key: int) -> Row:
        return Row(self.initial[key], first_state(self.rule, DIM))

    def owner(self, key: int) -> ModelServer:
        return self.model[table_model.server_of(key, self.servers)]

    def use(self, keys: list[int], why: str) -> list[ModelServer]:
        """The servers that had no room."""
        return [
            server
            for server in self.model
            if not server.use([k for k in keys if self.owner(k) is server], self.clock, why)
        ]

    def values(self, keys: list[int]) -> np.ndarray:
        rows = [self.owner(key).rows.get(key) for key in keys]
        found = [
            self.initial[key] if row is None else row.value
            for key, row in zip(keys, rows, strict=True)
        ]
        return np.array(found, np.float32).reshape(-1, DIM)

    def fails(self, full: list[ModelServer]) -> AbstractContextManager[object]:
        return pytest.raises(TableFull) if full else nullcontext()

    # --- what is done ----------------------------------------------------------------------------

    @rule(keys=batches, who=who)
    def pull(self, keys: list[int], who: int) -> None:
        rows = self.tables[who].pull(keys)
        self.use(keys, "read")
        assert np.array_equal(rows, self.values(keys))

    @rule(keys=batches, pushed=batches)
    def prefetch_and_push_and_pull(self, keys: list[int], pushed: list[int]) -> None:
        self.tables[0].prefetch(keys)
        self.use(keys, "read")
        expected = self.values(keys[::-1])
        self.push(pushed, 1, 0, 1.0, None)
        assert np.array_equal(self.tables[0].pull(keys[::-1]), expected)

    @rule(
        keys=batches,
        value=st.integers(-9, 9),
        who=who,
        slower=st.sampled_from([1.0, 1.0, 0.5]),
        cut=st.none() | st.tuples(shards, st.booleans()),
    )
    def push(
        self, keys: list[int], value: int, who: int, slower: float, cut: tuple[int, bool] | None
    ) -> None:
        """Maybe with hyper-parameters of its own, and with a connection that is cut before the
        push or behind it."""
        rate = "alpha" if isinstance(self.rule, FTRL) else "lr"
        changed: Any = self.rule
        if slower != 1.0 and not isinstance(self.rule, Add):
            changed = replace(changed, **{rate: getattr(changed, rate) * slower})
        gradients = np.arange(value, value + len(keys) * DIM).reshape(-1, DIM).astype(np.float32)
        gradients /= 4
        full = self.use(list(dict.fromkeys(keys)), "push")
        with self.fails(full):
            if cut is not None and not cut[1]:
                self.cut(cut[0], who)
            hyper = None if changed is self.rule else changed.hyper()
            ticket = self.tables[who].push(keys, gradients, hyper=hyper)
            if cut is not None and cut[1]:
                self.cut(cut[0], who)
            ticket.result()
        sums: dict[int, np.ndarray] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            sums[key] = sums[key] + gradient if key in sums else gradient
        for key, total in sums.items():
            rows = self.owner(key).rows
            if key in rows and self.owner(key) not in full:
                rows[key] = updated(changed, rows[key], total)

    @rule(shard=shards, who=who)
    def cut(self, shard: int, who: int) -> None:
        self.harness.cluster.cut(self.harness.clients[who], shard % self.servers)

    @rule(keys=st.lists(key, min_size=1, max_size=9), at=st.integers(0, 8), who=who)
    def push_not_finite(self, keys: list[int], at: int, who: int) -> None:
        gradients = np.ones((len(keys), DIM), np.float32)
        gradients[at % len(keys), 1] = np.nan if at % 2 else np.inf
        with pytest.raises(NonFinite, match=f"key {keys[at % len(keys)]} "):
            self.tables[who].push(keys, gradients)

    @rule(keys=batches, value=st.integers(-9, 9), state=st.none() | st.integers(0, 9), who=who)
    def put(self, keys: list[int], value: int, state: int | None, who: int) -> None:
        """Of a key that is named twice, the last one counts."""
        values = np.arange(value, value + len(keys) * DIM).reshape(-1, DIM).astype(np.float32)
        width = first_state(self.rule, DIM).size
        whole: tuple[Any, ...] = ()
        if state is not None:
            states = np.arange(state, state + len(keys) * width, dtype=np.float32)
            whole = (states.reshape(len(keys), width), np.arange(state, state + len(keys)))
        full = self.use(keys, "put")
        with self.fails(full):
            self.tables[who].put(keys, values, *whole)
        for i, key in enumerate(keys):
            owner = self.owner(key)
            if owner not in full:
                old = owner.rows[key]
                new = (old.state, old.count) if state is None else (whole[0][i], int(whole[1][i]))
                owner.rows[key] = Row(values[i], *new, old.used)

    @rule(keys=st.lists(key, max_size=3), pushed=batches, who=who, cut=st.none() | shards)
    def delete(self, keys: list[int], pushed: list[int], who: int, cut: int | None) -> None:
        """Behind a push that is under way, maybe over a connection that is cut."""
        full = self.use(list(dict.fromkeys(pushed)), "push")
        ticket = self.tables[who].push(pushed, np.ones((len(pushed), DIM), np.float32))
        if full:
            with self.fails(full):
                ticket.result()
        for key in dict.fromkeys(pushed):
            rows = self.owner(key).rows
            if key in rows and self.owner(key) not in full:
                total = np.full(DIM, pushed.count(key), np.float32)
                rows[key] = updated(self.rule, rows[key], total)
        if cut is not None:
            self.cut(cut, who)
        removed = 0
        for server in self.model:
            removed += server.delete([k for k in keys if self.owner(k) is server], self.clock)
        assert self.tables[who].delete(keys) == removed
        if not full:
            ticket.result()
        found = self.tables[who].contains(KEYS)
        self.use(KEYS, "read")
        assert found.tolist() == [key in self.owner(key).rows for key in KEYS]

    @rule(clocks=st.integers(1, 2))
    def tick(self, clocks: int) -> None:
        for _ in range(clocks):
            self.harness.clients[0].tick(self.name).result()
            self.clock += 1

    @rule()
    def restart_worker(self) -> None:
        self.harness.restart_worker()
        self.find_table()
        assert self.harness.clients[0].clock(self.name) == self.clock

    # --- what is there ---------------------------------------------------------------------------

    @rule(rows=st.integers(1, 6), who=who)
    def scan(self, rows: int, who: int) -> None:
        met: dict[int, tuple[Any, ...]] = {}
        for part in self.tables[who].scan(rows, state=True):
            assert part.state is not None
            assert part.counts is not None
            for key, *row in zip(
                part.keys.tolist(), part.values, part.state, part.counts.tolist(), strict=True
            ):
                assert key not in met
                met[key] = tuple(row)
        model = {key: row for server in self.model for key, row in server.rows.items()}
        assert met.keys() == model.keys()
        for key, (value, state, count) in met.items():
            expected = model[key]
            assert np.array_equal(value, expected.value), (key, value, expected)
            assert np.array_equal(state, expected.state), (key, state, expected)
            assert count == (expected.count if counted(self.rule) else 0), (key, count, expected)
        for report, server in zip(self.tables[who].reports(), self.model, strict=True):
            assert report.rows == len(server.rows)
            went = (report.evicted, report.deleted)
            assert (report.created, *went) == (server.created, server.evicted, server.deleted)
            assert report.unadmitted == server.dropped

    def teardown(self) -> None:
        """Both clients look, so that none is left with a connection that was cut: a server forgets
        a client without a rank after a minute."""
        for who in range(len(self.tables)):
            self.scan(100, who)
        super().teardown()


@pytest.fixture(scope="module")
def _rules_ready() -> None:
    for each in RULES.values():
        load_table(each, row_layout(each, DIM, "float32"))


def check(
    make: MakeCluster, chosen: settings, rules: Iterable[str] = RULES, first: int = SEED
) -> None:
    """Run the machine for each of these rules: with seeds of their own, unless others are drawn."""
    harnesses = Harnesses(make)
    for number, name in enumerate(rules):
        machine = partial(TableMachine, harnesses, name)
        if chosen.derandomize:
            seed(first + number)(machine)
        run_state_machine_as_test(machine, settings=chosen)


@pytest.mark.usefixtures("_rules_ready")
def test_table_does_what_a_dictionary_does(make_cluster: MakeCluster) -> None:
    check(make_cluster, QUICK)


@pytest.mark.slow
@pytest.mark.usefixtures("_rules_ready")
def test_table_does_what_a_dictionary_does_in_long_runs(make_cluster: MakeCluster) -> None:
    """Other calls each time; a failure prints how to repeat it."""
    check(make_cluster, LONG)


@pytest.mark.usefixtures("_rules_ready")
@pytest.mark.parametrize(
    ("wrong", "first"),
    [
        ("order of use", 51),  # in a quarter of the time that seed 1 takes
        ("count of updates", SEED),
        ("state of a deleted row", SEED),
    ],
)
def test_machine_finds_what_is_wrong(
    make_cluster: MakeCluster, wrong: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that forgets something differs from the table, as does a table that does not: the
    machine is worth something."""
    use, update = ModelServer.use, table_model.updated
    delete, make, kept = RowStore.delete, RowStore._new_rows, dict[tuple[int, int], Any]()

    def keeps_state(store: RowStore, keys: Any, clock: int) -> int:
        rows = store.take(keys, clock, Purpose.READ).rows
        state = store.read_state(rows[rows >= 0])[0]
        for key, each in zip(keys[rows >= 0].tolist(), state, strict=True):
            kept[id(store), key] = each.copy()
        return delete(store, keys, clock)

    def finds_state(store: RowStore, keys: Any) -> Any:
        rows, layout = make(store, keys), store.layout
        for row, key in zip(rows.tolist(), keys.tolist(), strict=True):
            if (id(store), key) in kept:
                end = layout.value_words + layout.state_words
                store._rows.array[row, layout.value_words : end] = kept.pop((id(store), key))
        return rows

    def forgets_order(server: ModelServer, keys: list[int], clock: int, why: str) -> bool:
        order = list(server.rows)
        fitted = use(server, keys, clock, why)
        if why in ("push", "put"):
            known = {k: server.rows[k] for k in order if k in server.rows}
            server.rows = known | {k: r for k, r in server.rows.items() if k not in known}
        return fitted

    def forgets_count(rule: Rule, row: Row, gradient: Any) -> Row:
        return replace(update(rule, row, gradient), count=row.count)

    if wrong == "order of use":
        monkeypatch.setattr(ModelServer, "use", forgets_order)
    elif wrong == "count of updates":
        monkeypatch.setitem(globals(), "updated", forgets_count)
    else:
        monkeypatch.setattr(RowStore, "delete", keeps_state)
        monkeypatch.setattr(RowStore, "_new_rows", finds_state)
    chosen = settings(QUICK, max_examples=250, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        check(make_cluster, chosen, ["Adam"], first)

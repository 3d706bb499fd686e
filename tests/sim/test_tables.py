"""Simulated clusters whose clients train a keyed table: every invariant holds, key by key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.sim import planted_sessions
from tests.sim.policies import TABLE_POLICIES
from tests.sim.workloads import tables
from tests.sim.workloads.tables import KEYS, CountingRows, Rows, table

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.core import replies
from paramserve.core.block import ShardBlock
from paramserve.core.events import Requested
from paramserve.core.group_state import GroupState
from paramserve.core.replies import delete
from paramserve.core.shard import Shard
from paramserve.core.table import routing
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.hashing import shard_of
from paramserve.core.table.options import LRU, TableOptions, Zeros
from paramserve.core.table.parts import RowGradient
from paramserve.core.table.store import Purpose, RowsTaken, RowStore
from paramserve.messages import Delete
from paramserve.rules.compiled import compiled
from paramserve.rules.custom import CustomRule
from paramserve_testing import (
    Faults,
    Scenario,
    Setting,
    SimulatedCluster,
    Violation,
    Workload,
    replay,
)
from paramserve_testing.history import Row

SEEDS = 6
FOUND_WITHIN = 200
"""Seeds after which a planted bug has been found."""
LATE = {"slot_freed_on_timeout": 77, "resent_delete_removes_again": 21}
"""Where the search for a rare bug begins: a few seeds before the first that shows it."""
STEPS = 20
"""Of each client there."""
Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("policy", TABLE_POLICIES)
def test_seeds_of_a_table_keep_every_invariant(policy: str, servers: int) -> None:
    for seed in range(SEEDS):
        replay(seed, workload=table, servers=servers, consistency=TABLE_POLICIES[policy])


@pytest.mark.parametrize("policy", TABLE_POLICIES)
def test_seeds_of_a_table_whose_rows_are_deleted_keep_every_invariant(policy: str) -> None:
    deleted = 0
    for seed in range(SEEDS):
        policy_of = TABLE_POLICIES[policy]
        scenario = Scenario(consistency=policy_of, deletes=True, workload=table)
        cluster = SimulatedCluster(seed, scenario)
        history = cluster.run()
        cluster.check()
        for part, row in history.final.items():
            for each in history.deleted(part):
                assert not any(row.pushes[w] & gone for w, gone in each.pushes.items())
                deleted += sum(gone.bit_count() for gone in each.pushes.values())
    assert deleted > 100, "else this tests nothing"


@pytest.mark.parametrize("links", ["shared", "tcp"])
def test_seeds_of_a_table_over_one_kind_of_link_keep_every_invariant(links: Any) -> None:
    for seed in range(4):
        for policy in (Sync(reduce="sum"), Async()):
            options = {"links": links, "outstanding": 3, "restarts": True}
            replay(seed, workload=table, consistency=policy, **options)


def test_seed_of_a_table_runs_the_same_again() -> None:
    traces = []
    for _ in range(2):
        cluster = SimulatedCluster(3, Scenario(consistency=Async(), workload=table))
        cluster.run()
        traces.append(cluster.trace())
    assert traces[0] == traces[1]


def test_seeds_of_a_table_meet_faults_and_all_keys_on_all_shards() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        scenario = Scenario(servers=3, consistency=Async(), workload=table)
        cluster = SimulatedCluster(seed, scenario)
        history = cluster.run()
        seen["killed"] += sum(client.dead for client in cluster.clients)
        seen["unanswered"] += sum(call.answered is None for call in history.calls)
        seen["joined"] += sum(each.joins for each in history.entered)
        seen["changed"] += len(history.policies) > 1
        seen["some keys"] += sum(0 < len(call.blocks) < KEYS.size for call in history.calls)
        seen["spoiled"] += sum(call.spoiled for call in history.calls)
        owners = {part.block: part.shard for part in history.final}
        assert owners == dict(enumerate(shard_of(KEYS, 3).tolist()))
        assert set(owners.values()) == {0, 1, 2}
        assert len({part for call in history.calls for part in call.reads}) == KEYS.size
        assert sum(sum(row.counts) for row in history.final.values()) > 0
    expected = {"killed", "unanswered", "joined", "changed", "some keys", "spoiled"}
    assert set(+seen) == expected, seen


def test_without_faults_every_push_of_rows_is_acknowledged() -> None:
    scenario = Scenario(consistency=Async(), faults=Faults(), workload=table)
    cluster = SimulatedCluster(0, scenario)
    history = cluster.run()
    cluster.check()
    pushes = [call for call in history.calls if call.push is not None and not call.spoiled]
    assert len(pushes) > 20
    assert all(call.acknowledged for call in pushes)


# --- bugs that a table could have ---------------------------------------------------------------


def sent_twice_is_applied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_sessions.no_duplicate_filter(monkeypatch)


def slot_freed_on_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    planted_sessions.slot_freed_on_timeout(monkeypatch)


def resent_delete_removes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what has come to its keys since."""
    requested = Shard._requested

    def again(shard: Shard, event: Requested) -> None:
        session, message = shard.sessions.by_client.get(event.client), event.message
        if isinstance(message, Delete) and session and message.seq in session._outcomes:
            delete(shard._group_of(message.block), message, event.memory)
        requested(shard, event)

    monkeypatch.setattr(Shard, "_requested", again)


def delete_overtakes_what_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is executed at once, and not behind the held requests of its client."""
    requested = Shard._requested

    def at_once(shard: Shard, event: Requested) -> None:
        session = shard.sessions.by_client[event.client]
        held, applied = session.held, session.applied
        if isinstance(event.message, Delete) and held is not None:
            session.held = None
            requested(shard, event)
            session.held, session.applied = held, applied
        else:
            requested(shard, event)

    monkeypatch.setattr(Shard, "_requested", at_once)


def delete_leaves_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of its keys."""
    remove = RowStore.delete

    def all_but_one(store: RowStore, keys: np.ndarray, clock: int) -> int:
        return remove(store, keys[:-1], clock)

    monkeypatch.setattr(RowStore, "delete", all_but_one)


def clock_forgets_keys_that_only_later_workers_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sum_of = KeyedBlock.total

    def total(block: KeyedBlock, weighted: Sequence[Any]) -> RowGradient:
        keys, values = sum_of(block, weighted)
        first = np.isin(keys, weighted[0][2].keys)
        return RowGradient(keys[first], values[first])

    monkeypatch.setattr(KeyedBlock, "total", total)


def equal_keys_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of several workers' gradients of one key counts."""

    def summed(keys: np.ndarray, values: np.ndarray) -> RowGradient:
        found, numbers = routing.distinct(keys)
        out = np.empty((found.size, values.shape[1]), np.float32)
        out[numbers] = values
        return RowGradient(found, out)

    monkeypatch.setattr(routing, "summed", summed)


def rows_are_read_to_the_places_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = KeyedBlock._keys

    def turned(block: KeyedBlock, *args: Any) -> tuple[np.ndarray, np.ndarray | None]:
        keys, places = read(block, *args)
        return keys[::-1].copy(), places

    monkeypatch.setattr(KeyedBlock, "_keys", turned)


class BoundedRows(Rows):
    """Of a table whose rows come with gradients only: there a row holds pushes, or there is none.
    It never has more rows than it may."""

    def rows(
        self, block: ShardBlock | KeyedBlock, shard: int, shards: int
    ) -> list[tuple[int, Row]]:
        assert isinstance(block, KeyedBlock)
        found = []
        for n, row in super().rows(block, shard, shards):
            taken = block.store.take(KEYS[n : n + 1], block.clock, Purpose.READ)
            there = int(taken.rows[0]) >= 0
            found.append((n, row._replace(sound=row.sound and there == (sum(row.counts) > 0))))
        return found


def bounded_table(setting: Setting) -> Workload:
    options = TableOptions(Zeros(), evict=LRU(64))
    return Workload(BoundedRows(CountingRows(setting.writers), options))


BOUNDED: dict[str, Any] = {
    "servers": 3,
    "workers": 2,
    "others": (),
    "steps": 2,
    "workload": bounded_table,
}


def calls_take_some_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, each to some of the keys: a key may be in a refused clock only."""
    monkeypatch.setattr(tables, "SOME", 1.0)


def test_seeds_of_a_bounded_table_keep_every_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_take_some_keys(monkeypatch)
    for seed in range(10):
        replay(seed, consistency=Sync(reduce="sum"), **BOUNDED)


@dataclass(frozen=True)
class Picky(CustomRule):
    """A user's rule that adds, and fails at a row without pushes in every second clock."""

    whole_rows: ClassVar[bool] = True

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        if push.clock % 2 and not (value != 0.0).any(axis=1).all():
            raise ArithmeticError("a row without pushes")
        value += gradient


class PickyRows(Rows):
    rule = Picky()


def picky_table(setting: Setting) -> Workload:
    return Workload(PickyRows(CountingRows(setting.writers)))


PICKY: dict[str, Any] = {
    "servers": 3,
    "workers": 2,
    "others": (),
    "steps": STEPS,
    "deletes": True,
    "workload": picky_table,
}


def test_seeds_of_a_rule_that_fails_at_rows_deleted_meanwhile_keep_every_invariant() -> None:
    refused = 0
    for seed in range(10):
        history = replay(seed, consistency=Sync(reduce="sum"), **PICKY).history
        failed = [call for call in history.calls if call.error == "RuleFailed"]
        assert all(call.applied == "no" for call in failed)
        refused += len(failed)
    assert refused > 10, "else this tests nothing"


def rule_runs_again_where_rows_were_deleted_under_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed for the clock is dropped."""

    def dropped(state: GroupState, block: Any) -> None:
        state.collect.prepared = None

    monkeypatch.setattr(replies, "_under_vote", dropped)


def draft_makes_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared for a clock has its rows from then on, whether it is decided or refused."""
    take = RowStore.take

    def taken(store: RowStore, keys: np.ndarray, clock: int, purpose: Purpose) -> RowsTaken:
        drafted = take(store, keys, clock, purpose)
        if purpose is Purpose.DRAFT:
            take(store, keys, clock, Purpose.PUT)
        return drafted

    monkeypatch.setattr(RowStore, "take", taken)
    calls_take_some_keys(monkeypatch)


def nan_is_looked_for_in_the_first_row_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def largest(block: KeyedBlock, gradient: RowGradient, *args: object) -> float:
        return float(compiled().largest(gradient.values[:1].reshape(-1)))

    monkeypatch.setattr(KeyedBlock, "largest", largest)


@pytest.mark.parametrize(
    ("plant", "policy", "checkers"),
    [
        (draft_makes_rows, Sync(reduce="sum"), {"counters_agree"}),
        (sent_twice_is_applied_twice, Async(), {"counters_agree"}),
        (slot_freed_on_timeout, Async(), {"counters_agree", "processes_raise_nothing"}),
        (clock_forgets_keys_that_only_later_workers_have, Sync(reduce="sum"), {"exactly_once"}),
        (equal_keys_are_not_summed, Sync(reduce="sum"), {"exactly_once"}),
        (rows_are_read_to_the_places_of_others, Async(), {"counters_agree"}),
        (
            nan_is_looked_for_in_the_first_row_only,
            Sync(reduce="sum", on_nonfinite="skip"),
            {"spoiled_gradients_change_nothing"},
        ),
        (resent_delete_removes_again, Async(), {"exactly_once", "sessions_in_order"}),
        (delete_overtakes_what_came_before, Sync(reduce="sum"), {"exactly_once"}),
        (delete_leaves_a_row, Async(), {"exactly_once"}),
        (rule_runs_again_where_rows_were_deleted_under_vote, Sync(reduce="sum"), {"exactly_once"}),
    ],
)
def test_bug_of_a_table_is_found(
    plant: Plant, policy: Policy, checkers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    own = {draft_makes_rows: BOUNDED, rule_runs_again_where_rows_were_deleted_under_vote: PICKY}
    plain = {"steps": STEPS, "deletes": "delete" in plant.__name__, "workload": table}
    options = own.get(plant, plain)
    first_seed = LATE.get(plant.__name__, 0)
    for seed in range(first_seed, first_seed + FOUND_WITHIN):
        cluster = SimulatedCluster(seed, Scenario(consistency=policy, **options))
        try:
            cluster.run()
            cluster.check()
        except Violation as violation:
            first, *lines = str(violation).splitlines()
            found = {line.split(":")[0].strip() for line in lines}
            if checkers & found and f"replay(seed={seed}," in first and "table" in first:
                return
    pytest.fail(f"{plant.__name__} was not found in {FOUND_WITHIN} seeds")

"""Shards that are restored from a cut go on as the original: dense, in Sync, tables that let rows
go, and whatever of the cut's content is left out shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.sim.twins import Differs, SimulatedTwins
from tests.sim.workloads.tables import CountingRows, Rows

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Buffered, Sync
from paramserve.core.group import GroupMachine
from paramserve.core.group_state import GroupRecord
from paramserve.core.shard_sessions import SessionRecord, ShardSession
from paramserve.core.table.cut import RowsCopy
from paramserve.core.table.options import LRU, TTL, MinCount, TableOptions, Zeros
from paramserve.core.table.store import RowStore
from paramserve_testing import Faults, Scenario, Setting, Workload

SEEDS = 3
FOUND_WITHIN = 60
"""Seeds after which a planted bug has been found."""
FAULTS = Faults(slow=0.1, cut=0.03, lose=0.02, duplicate=0.05)
TABLES = {
    "plain": TableOptions(Zeros()),
    "lru": TableOptions(Zeros(), evict=LRU(rows=4)),
    "ttl": TableOptions(Zeros(), evict=TTL(2)),
    "admit": TableOptions(Zeros(), admit=MinCount(2)),
}


def table(name: str) -> Callable[[Setting], Workload]:
    """A table with these options."""
    return lambda setting: Workload(Rows(CountingRows(setting.writers), TABLES[name]))


def compared(policy: Policy, seed: int, **options: Any) -> int:
    """Events that twins were compared at."""
    options.setdefault("others", ())
    cluster = SimulatedTwins(seed, Scenario(consistency=policy, **options))
    cluster.run()
    return sum(getattr(server.shard, "compared", 0) for server in cluster.servers)


@pytest.mark.parametrize(
    "policy",
    [Async(), Sync(reduce="sum"), BoundedStaleness(1), Buffered(3, damping=None)],
    ids=["async", "sync", "bounded", "buffered"],
)
def test_restored_shard_goes_on_as_the_original(policy: Policy) -> None:
    assert sum(compared(policy, seed) for seed in range(SEEDS)) > 100


@pytest.mark.parametrize("options", TABLES)
@pytest.mark.parametrize("policy", [Async(), Sync(reduce="sum")], ids=["async", "sync"])
def test_restored_table_goes_on_as_the_original(options: str, policy: Policy) -> None:
    workload = table(options)
    assert sum(compared(policy, seed, workload=workload) for seed in range(SEEDS)) > 100


def test_restored_shard_knows_the_changes_of_policy_and_the_leases() -> None:
    others = (Sync(reduce="sum"), Async())
    changes = Faults(slow=0.1, change=0.05)
    found = [compared(Async(), s, faults=changes, others=others) for s in range(6)]
    found += [compared(Async(), seed, samples=60) for seed in range(3)]
    assert min(sum(found[:6]), sum(found[6:])) > 100


# --- what a cut may lack -------------------------------------------------------------------------


def outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ShardSession.record

    def without(session: ShardSession, last: int) -> SessionRecord:
        return structs.replace(whole(session, last), outcomes=())

    monkeypatch.setattr(ShardSession, "record", without)


def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GroupMachine.record

    def without(machine: GroupMachine, unfinished: Any) -> GroupRecord:
        return structs.replace(whole(machine, unfinished), marks=())

    monkeypatch.setattr(GroupMachine, "record", without)


def order_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RowsCopy.uses

    def by_key(copy: RowsCopy) -> Any:
        keys, clocks = whole(copy) or (np.empty(0, np.int64), np.empty(0, np.int64))
        return keys[np.argsort(keys)], clocks[np.argsort(keys)]

    monkeypatch.setattr(RowsCopy, "uses", by_key)


def last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RowsCopy.uses

    def without(copy: RowsCopy) -> Any:
        uses = whole(copy)
        return uses and (uses[0], np.zeros_like(uses[1]))

    monkeypatch.setattr(RowsCopy, "uses", without)


def deletions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowStore, "free", lambda store, begin, end: np.zeros(0, np.int64))


def admission_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowStore, "candidates", lambda store: None)


@pytest.mark.parametrize(
    ("left_out", "options"),
    [
        (outcomes, {"faults": FAULTS}),
        (marks, {"samples": 60}),
        (order_of_use, {"workload": table("lru")}),
        (last_use, {"workload": table("ttl")}),
        (deletions, {"workload": table("ttl")}),
        (admission_counts, {"workload": table("admit")}),
    ],
)
def test_what_a_cut_lacks_shows(
    left_out: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out(monkeypatch)
    for seed in range(FOUND_WITHIN):
        try:
            compared(Async(), seed, **options)
        except Differs:
            return
    pytest.fail(f"a cut without {left_out.__name__} was not found in {FOUND_WITHIN} seeds")

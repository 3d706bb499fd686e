"""Servers are lost in simulated clusters, and all shards go on from the last cut."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs
from tests.sim.crashes import SimulatedCrashes

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.core.cut_parts import BlockCopy
from paramserve.core.group import GroupMachine
from paramserve.core.group_state import GroupRecord
from paramserve_testing import Faults, Scenario, Violation

SEEDS = 3
FOUND_WITHIN = 20
FAULTS = Faults(slow=0.1, cut=0.02, lose=0.02, duplicate=0.05, kill=0.02)


def crashed(seed: int, policy: Policy) -> bool:
    """Run one seed and check it; whether the servers were lost."""
    scenario = Scenario(
        consistency=policy, others=(), workers=2, steps=14, restarts=True, faults=FAULTS
    )
    cluster = SimulatedCrashes(seed, scenario)
    cluster.run()
    cluster.check()
    return cluster.fell_to is not None


@pytest.mark.parametrize(
    "policy",
    [Async(), Sync(reduce="sum"), BoundedStaleness(1)],
    ids=["async", "sync", "bounded"],
)
def test_shards_that_go_on_from_a_cut_have_what_is_in_it_and_what_came_since(
    policy: Policy,
) -> None:
    assert sum(crashed(seed, policy) for seed in range(SEEDS)) >= 1


def values_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not copied before it changes."""
    monkeypatch.setattr(BlockCopy, "finish", lambda copy: None)


def clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards of a synchronous group do not know which clock is committed."""
    whole = GroupMachine.record

    def without(machine: GroupMachine, unfinished: Any) -> GroupRecord:
        record = whole(machine, unfinished)
        return structs.replace(record, committed=record.committed + machine.shard)

    monkeypatch.setattr(GroupMachine, "record", without)


@pytest.mark.parametrize(("left_out", "policy"), [(values_of_now, Async()), (clocks, Sync("sum"))])
def test_what_a_cut_lacks_shows_after_a_crash(
    left_out: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out(monkeypatch)
    for seed in range(FOUND_WITHIN):
        try:
            crashed(seed, policy)
        except (Violation, AssertionError):
            return
    pytest.fail(f"a cut without {left_out.__name__} was not found in {FOUND_WITHIN} seeds")

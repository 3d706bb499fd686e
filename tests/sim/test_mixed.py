"""Simulated clusters whose clients train tensors and a table: one call pushes to both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from tests.sim.policies import POLICIES, TABLE_POLICIES
from tests.sim.workloads.tables import table_beside_tensors

from paramserve.client.links import Framed, Links, ReachedShard
from paramserve.client.step_parts import StepParts
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve.messages import ShardRequest
from paramserve_testing import Scenario, SimulatedCluster, Violation, replay

SEEDS = 4
FOUND_WITHIN = 60
"""Seeds after which a planted bug has been found."""


@pytest.mark.parametrize(
    ("tensors", "table"),
    [
        ("sync", "sync"),
        ("sync", "async"),
        ("sync-backup", "async"),
        ("async", "sync"),
        ("async", "async"),
        ("bounded-0", "bounded-0"),
        ("bounded-1", "bounded-1"),
    ],
)
def test_seeds_of_a_table_beside_tensors_keep_every_invariant(tensors: str, table: str) -> None:
    together = POLICIES[tensors].collects and TABLE_POLICIES[table].collects
    for seed in range(SEEDS):
        replay(
            seed,
            workload=table_beside_tensors,
            consistency=POLICIES[tensors],
            second=TABLE_POLICIES[table],
            others=(),
            restarts=False if together else None,  # see `test_seeds_of_two_groups_that_collect`
        )


@pytest.mark.parametrize("seed", [4, 20, 105, 141])
def test_seeds_where_two_groups_with_a_bound_waited_for_each_others_members(seed: int) -> None:
    # Ranks that had rested or come back were further on in one group than in the other.
    bounded = BoundedStaleness(1)
    replay(seed, workload=table_beside_tensors, consistency=bounded, second=bounded, others=())


@pytest.mark.parametrize("seed", [6, 27])
def test_seeds_where_a_clock_of_the_second_group_was_decided_without_one_who_joins(
    seed: int,
) -> None:
    # On one shard its step was left out of that clock, on the other it was taken for the next one.
    replay(
        seed,
        workload=table_beside_tensors,
        consistency=POLICIES["sync-backup"],
        second=POLICIES["sync"],
        others=(),
        restarts=False,
    )


def test_seeds_of_a_table_beside_tensors_send_both_in_one_frame() -> None:
    seen: Counter[str] = Counter()
    for seed in range(2):
        lines: list[str] = []
        scenario = Scenario(second=Async(), others=(), links="tcp", workload=table_beside_tensors)
        cluster = SimulatedCluster(seed, scenario, lines.append)
        cluster.run()
        cluster.check()
        seen["together"] += sum("-> ['batch'" in line for line in lines)
        for group, history in cluster.histories.items():
            seen[group] += sum(call.acknowledged for call in history.calls)
            seen[f"reads of {group}"] += sum(len(call.reads) for call in history.calls)
    assert len(seen) == 5, seen
    assert min(seen.values()) > 20, seen


# --- bugs that a call of both could have ---------------------------------------------------------


def parts_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients send the parts of a call as their programs name them."""
    monkeypatch.setattr(StepParts, "order", lambda parts: (False, 0))


def bytes_of_a_second_request_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the requests of a frame only the first one's bytes go along."""
    whole = Links._frame

    def frame(links: Links, shard: ReachedShard, messages: Sequence[ShardRequest]) -> Framed:
        first, header = whole(links, shard, messages[:1]), whole(links, shard, messages)[0]
        return header, first[1]

    monkeypatch.setattr(Links, "_frame", frame)


@pytest.mark.parametrize(
    ("plant", "policy"),
    [
        (parts_in_the_order_given, Sync(reduce="sum")),
        (bytes_of_a_second_request_are_left_out, Async()),
    ],
)
def test_bug_of_a_table_beside_tensors_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(FOUND_WITHIN):
        scenario = Scenario(
            consistency=policy,
            second=policy,
            others=(),
            restarts=False,
            workload=table_beside_tensors,
        )
        cluster = SimulatedCluster(seed, scenario)
        try:
            cluster.run()
            cluster.check()
        except Violation:
            return
    pytest.fail(f"{plant.__name__} was not found in {FOUND_WITHIN} seeds")

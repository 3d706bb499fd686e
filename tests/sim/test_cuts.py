"""Cuts of simulated clusters: whole under every policy, while workers die, join and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.sim.policies import POLICIES

from paramserve.consistency.built_in import Async
from paramserve.core import cut as cut_module
from paramserve.core.cut import CutAgreement
from paramserve.core.cut_parts import BlockCopy, ShardCut
from paramserve.core.cut_state import group_record
from paramserve.core.table.cut import RowsCopy
from paramserve.messages import Commit, CutAt, CutTo
from paramserve.testing import Scenario, Violation
from paramserve.testing.cuts import (
    SimulatedCuts,
    SimulatedMixedCuts,
    SimulatedTableCuts,
    replay,
)
from paramserve.testing.simulated import rerun

SEEDS = 8
MANY = 200
FOUND_WITHIN = 40
"""Seeds after which a planted bug has been found."""


@pytest.mark.parametrize("policy", ["async", "bounded-1", "sync", "sync-backup"])
def test_seeds_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS):
        replay(seed, consistency=POLICIES[policy])


@pytest.mark.parametrize("policy", ["async", "sync"])
def test_seeds_of_tables_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS // 2):
        together = POLICIES[policy].collects
        for kind in (SimulatedTableCuts, SimulatedMixedCuts):
            second = Async() if kind is SimulatedMixedCuts else None
            options = {"second": second, "others": (), "restarts": False if together else None}
            rerun(kind, seed, None, consistency=POLICIES[policy], **options)


def test_seeds_of_leases_with_cuts_have_the_marks_of_the_same_steps() -> None:
    for seed in range(SEEDS // 2):
        replay(seed, consistency=Async(), others=(), samples=60)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "bounded-1", "sync"])
def test_many_seeds_with_cuts_keep_every_invariant(policy: str) -> None:
    for seed in range(SEEDS, MANY):
        replay(seed, consistency=POLICIES[policy])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["async", "sync"])
def test_many_seeds_of_tables_beside_tensors_keep_every_invariant(policy: str) -> None:
    together = POLICIES[policy].collects
    for seed in range(SEEDS, MANY):
        options = {"second": POLICIES[policy], "others": ()}
        options["restarts"] = False if together else None
        rerun(SimulatedMixedCuts, seed, None, consistency=POLICIES[policy], **options)


def test_cuts_are_taken_while_clients_push() -> None:
    cluster = SimulatedCuts(1, Scenario(consistency=Async(), others=(), servers=3))
    cluster.run()
    cluster.check()
    assert len(cluster.cuts) > 10
    assert len({tuple(cut.parts[0].pushes.items()) for cut in cluster.cuts}) > 5


# --- bugs that a cut could have ------------------------------------------------------------------


def the_lowest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard 0 answers with the lowest number of each client."""

    def lowest(number: int, told: list[CutAt]) -> CutTo:
        highest = whole(number, told)
        least = {
            client: min({c: n for c, n, _ in each.clients}.get(client, 0) for each in told)
            for client, _ in highest.clients
        }
        return CutTo(number, tuple(least.items()), highest.groups)

    whole = cut_module._highest
    monkeypatch.setattr(cut_module, "_highest", lowest)


def a_commit_between_report_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that has stopped commits what the lead decides."""

    def every(cuts: CutAgreement, commit: Commit) -> bool:
        return True

    monkeypatch.setattr(CutAgreement, "allows_commit", every)


def a_push_between_report_and_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that has told how far its clients have come executes what they send."""
    monkeypatch.setattr(CutAgreement, "allows", lambda cuts, session, seq: True)


def a_copy_after_the_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is not copied before it changes."""
    monkeypatch.setattr(BlockCopy, "finish", lambda copy: None)


def a_row_copied_after_its_first_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of a table is not copied before it changes."""
    monkeypatch.setattr(RowsCopy, "before", lambda copy, rows: None)


def marks_of_after_the_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is used of the leases is read when the cut is."""
    whole = ShardCut.__init__

    def init(part: Any, shard: int, ask: Any, clients: Any, groups: Any, *others: Any) -> None:
        part.live = groups
        whole(part, shard, ask, clients, groups, *others)

    now = property(
        lambda part: tuple(group_record(each, {}) for each in part.live.values()),
        lambda part, value: None,
    )
    monkeypatch.setattr(ShardCut, "__init__", init)
    monkeypatch.setattr(ShardCut, "groups", now, raising=False)


@pytest.mark.parametrize(
    ("plant", "kind", "options"),
    [
        (the_lowest_number, SimulatedCuts, {"consistency": Async()}),
        (a_commit_between_report_and_cut, SimulatedCuts, {}),
        (a_push_between_report_and_cut, SimulatedCuts, {"consistency": Async()}),
        (a_copy_after_the_first_write, SimulatedCuts, {"consistency": Async()}),
        (a_copy_after_the_first_write, SimulatedCuts, {}),
        (a_row_copied_after_its_first_write, SimulatedTableCuts, {"consistency": Async()}),
        (marks_of_after_the_cut, SimulatedCuts, {"consistency": Async(), "samples": 60}),
    ],
)
def test_bug_of_a_cut_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: type[SimulatedCuts],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    for seed in range(FOUND_WITHIN):
        cluster = kind(seed, Scenario(others=(), **options))
        cluster.run()
        try:
            cluster.check()
        except Violation:
            return
    pytest.fail(f"{plant.__name__} was not found in {FOUND_WITHIN} seeds")

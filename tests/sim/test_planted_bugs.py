"""The checkers find bugs that were put in on purpose, and find nothing without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.sim import planted, planted_client, planted_drivers, planted_sessions

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, BoundedStaleness, Sync
from paramserve_testing import Faults, Scenario, SimulatedCluster, Violation

SEEDS = 90
"""Of the 184 planted bugs of `tests/sim` half show at the first seed, three in four within 2 seeds,
nine in ten within 9 and 19 in 20 within 18: a quick `test_seeds` has 16 of each policy, 256."""
SEEDS_WITH_RESTARTS = 120
SEEDS_OF_DRIVERS = 400
"""The rarest bug of all shows at one of 88 seeds."""
SEEDS_OF_GROUPS = 200
LATE = {
    "control_not_read_after_it_was_restored": 196,
    "clock_follows_a_repeated_step": 108,
    "call_that_broke_between_its_frames_goes_on": 22,
    "coordinator_ticks_once": 44,
    "place_of_the_first_optimizer": 47,
    "first_step_passes_nothing_by": 2025,
    "slot_freed_at_the_first_answer": 10,
    "refused_step_ends_no_clock": 9,
    "rest_of_a_call_is_refused": 16,
    "own_step_of_a_restarted_worker_refused": 16,
    "decision_about_members_is_sent_once": 10,
    "only_the_first_of_several_notices": 9,
    "failed_attempt_stays_the_last": 9,
    "last_rank_is_left_alone": 13,
    "frames_before_the_pause_forgotten": 16,
}
"""Where the search for a rare bug begins: a few seeds before the first that shows it. One seed is
as good as another, and as many are tried from there on."""
CASES = [
    *(
        pytest.param(plant, Sync(reduce="sum"), id=f"{plant.__name__}-sync")
        for plant in planted_sessions.SYNC
    ),
    *(
        pytest.param(plant, Async(), id=f"{plant.__name__}-async")
        for plant in planted_sessions.ASYNC
    ),
]
RESTARTS = [
    *(
        pytest.param(plant, Sync(reduce="sum"), id=f"{plant.__name__}-sync")
        for plant in planted_sessions.RESTARTS_SYNC
    ),
    *(
        pytest.param(plant, Async(), id=f"{plant.__name__}-async")
        for plant in planted_sessions.RESTARTS_ASYNC
    ),
]


OFF_BY_ONE = [
    pytest.param(plant, policy, options, id=f"{plant.__name__}-{type(policy).__name__}")
    for plant, policy, options in (*planted.OFF_BY_ONE, *planted_sessions.DEATHS_BY_CLOCK)
]
SCENARIOS = {repr(case.values[1:]): case.values[1:] for case in OFF_BY_ONE}
"""What they run, each once."""
DRIVERS = [
    pytest.param(plant, policy, options, id=plant.__name__)
    for plant, policy, options in planted_drivers.CASES
]


def first_violation(
    kind: type[SimulatedCluster],
    policy: Policy,
    seeds: int = SEEDS,
    *,
    plant: planted.Plant | None = None,
    **options: Any,
) -> int | None:
    """The first of so many seeds that breaks an invariant."""
    first = LATE.get(plant.__name__, 0) if plant is not None else 0
    for seed in range(first, first + seeds):
        cluster = kind(seed, Scenario(consistency=policy, **options))
        try:
            cluster.run()
            cluster.check()
        except AssertionError:  # a violation, or one of a shard that finds itself in no good state
            return seed
    return None


@pytest.mark.parametrize(("plant", "policy"), CASES)
def test_planted_bug_is_found(
    plant: planted.Plant, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = first_violation(plant(monkeypatch), policy, plant=plant)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS} seeds"


@pytest.mark.parametrize("plant", planted_client.ALL, ids=lambda plant: plant.__name__)
def test_planted_bug_of_the_client_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    faults = Faults(slow=0.1, cut=0.02, lose=0.01, duplicate=0.05, interrupt=0.03, partition=0.05)
    found = first_violation(SimulatedCluster, Async(), faults=faults)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS} seeds"


@pytest.mark.parametrize("plant", planted.GROUPS, ids=lambda plant: plant.__name__)
def test_planted_bug_of_two_groups_is_found(
    plant: planted.Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = plant(monkeypatch)
    second = Sync(reduce="sum")
    options: dict[str, Any] = {"others": (), "second": second, "restarts": False}
    assert first_violation(kind, second, SEEDS_OF_GROUPS, plant=plant, **options) is not None


def test_planted_bug_of_a_call_whose_rank_ends_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant, second = planted_sessions.rest_of_a_call_is_refused, Sync(reduce="sum")
    options: dict[str, Any] = {"others": (), "second": second, "restarts": True, "plant": plant}
    assert first_violation(plant(monkeypatch), second, SEEDS_OF_GROUPS, **options) is not None


@pytest.mark.parametrize(("plant", "policy"), planted.GROUPS_WITH_A_BOUND)
def test_planted_bug_of_two_groups_with_a_bound_is_found(
    plant: planted.Plant, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, second = plant(monkeypatch), BoundedStaleness(0)
    assert first_violation(kind, policy, others=(), second=second) is not None


@pytest.mark.parametrize(("plant", "policy"), RESTARTS)
def test_planted_bug_of_restarts_is_found(
    plant: planted.Plant, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = plant(monkeypatch)
    found = first_violation(kind, policy, SEEDS_WITH_RESTARTS, plant=plant, restarts=True)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS_WITH_RESTARTS} seeds"


@pytest.mark.parametrize(("plant", "policy", "options"), OFF_BY_ONE)
def test_planted_bug_of_a_policy_is_found(
    plant: planted.Plant,
    policy: Policy,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = first_violation(plant(monkeypatch), policy, plant=plant, **options)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS} seeds"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "options"), SCENARIOS.values(), ids=SCENARIOS)
def test_without_the_planted_bug_of_a_policy_its_scenario_passes(
    policy: Policy, options: dict[str, Any]
) -> None:
    assert first_violation(SimulatedCluster, policy, 10, **options) is None


@pytest.mark.parametrize(("plant", "policy", "options"), DRIVERS)
def test_planted_bug_of_a_driver_is_found(
    plant: planted.Plant,
    policy: Policy,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = plant(monkeypatch)
    found = first_violation(kind, policy, SEEDS_OF_DRIVERS, plant=plant, **options)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS_OF_DRIVERS} seeds"


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "policy", "options"), DRIVERS)
def test_without_the_planted_bug_of_a_driver_its_scenario_passes(
    plant: planted.Plant, policy: Policy, options: dict[str, Any]
) -> None:
    assert first_violation(SimulatedCluster, policy, 10, **options) is None


@pytest.mark.parametrize("plant", planted_drivers.SLOW_READERS, ids=lambda plant: plant.__name__)
def test_planted_bug_with_slow_readers_is_found(
    plant: planted.Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"slow_readers": True, "outstanding": 4, "links": "tcp"}
    found = first_violation(plant(monkeypatch), Async(), plant=plant, **options)
    assert found is not None, f"{plant.__name__} was not found in {SEEDS} seeds"


def test_policy_that_never_admits_is_found_in_the_liveness_phase() -> None:
    cluster = SimulatedCluster(0, Scenario(consistency=planted.NoReads(), faults=Faults()))
    cluster.run()
    with pytest.raises(Violation, match=r"everyone_finishes: writer \d+ .* has not finished"):
        cluster.check()


@pytest.mark.slow  # of `test_seeds`, more seeds
@pytest.mark.parametrize("policy", [Sync(reduce="sum"), Async()], ids=["sync", "async"])
def test_without_a_planted_bug_the_same_seeds_pass(policy: Policy) -> None:
    assert first_violation(SimulatedCluster, policy) is None

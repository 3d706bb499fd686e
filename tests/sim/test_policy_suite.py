"""What the conformance suite of policies says of a seed that failed."""

from __future__ import annotations

import pytest

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve_testing import History, Violation, checkers
from paramserve_testing.policy_suite import PolicySuite, counted


class OfMine(PolicySuite):
    seeds = (7,)


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (Async(drop_after=9), "set `seeds = (7,)` in OfMine"),
        (Sync(), "paramserve_testing.replay(seed=7, workers=3, consistency=Sync("),
    ],
)
def test_suite_violation_says_how_to_run_only_that_seed_again(
    policy: Policy, again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[History] = []

    def wrong(history: History) -> list[str]:
        judged.append(history)
        return [f"under {history.policies[0][1]!r}"]

    monkeypatch.setattr(checkers, "ALL", (wrong,))
    suite = OfMine()
    suite.policy = policy
    with pytest.raises(Violation) as raised:
        suite.test_simulated_cluster_keeps_its_invariants()
    first, finding = str(raised.value).splitlines()
    assert again in first
    assert f"under {policy!r}" in finding
    assert len(judged) == 1


def test_counted_policy_is_called_by_its_own_name() -> None:
    assert repr(counted(Async(drop_after=2))) == repr(Async(drop_after=2))

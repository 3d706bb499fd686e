"""The arithmetic of a calibration, without a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.suites import each_case

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, LocalSteps, Sync
from paramserve_plan import calibrate as module
from paramserve_plan.calibrate import (
    SMALL_BYTES,
    Calibration,
    Compared,
    Fitted,
    Measured,
    calibrate,
    fit,
    rounds_of,
    show_calibration,
    solve,
)

MACHINE = Fitted(cores=2, latency_s=40e-6, message_s=15e-6, byte_s=2e-10, contention=1.3)
BYTES = 8e6


@each_case(("goal", "expected"), [(9.0, 3.0), (0.0, 1.0), (1e6, 100.0)])
def test_solve_finds_the_goal_or_the_nearer_bound(goal: float, expected: float) -> None:
    assert solve(lambda x: x * x, goal, (1.0, 100.0)) == pytest.approx(expected, rel=1e-4)


def measured(policy: Policy) -> Measured:
    return Measured(
        MACHINE.step_s(policy, 1, 1, SMALL_BYTES),
        MACHINE.step_s(policy, 4, 1, SMALL_BYTES),
        1.5 * MACHINE.step_s(policy, 1, 1, BYTES),  # contention is a ratio of these two
        MACHINE.step_s(policy, 4, 1, BYTES),
        1.5 * MACHINE.step_s(policy, 1, 2, BYTES),
    )


@each_case("policy", [Sync(), Async()], ids=["sync", "async"])
def test_fit_of_a_modelled_machine_predicts_it(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOCKS", 6)
    monkeypatch.setattr(module, "HALVINGS", 14)
    found = fit(policy, BYTES, measured(policy), cores=2)
    for sleep_s in (0.0, 0.02):
        expected = MACHINE.step_s(policy, 4, 2, BYTES, sleep_s)
        assert found.step_s(policy, 4, 2, BYTES, sleep_s) == pytest.approx(expected, rel=0.1)


def test_contention_slows_passes_of_two_servers_only() -> None:
    calm = MACHINE._replace(contention=1.0)
    assert MACHINE.step_s(Sync(), 1, 1, BYTES) == calm.step_s(Sync(), 1, 1, BYTES)
    assert MACHINE.step_s(Sync(), 1, 2, BYTES) > 1.1 * calm.step_s(Sync(), 1, 2, BYTES)


def test_calibrate_refuses_a_policy_with_own_steps() -> None:
    with pytest.raises(ValueError, match="own steps"):
        calibrate(LocalSteps(every=4), BYTES, 0.02)


def test_rounds_fill_about_two_seconds_within_bounds() -> None:
    assert rounds_of(2048, 1, 0.0) == 1000
    assert rounds_of(25_000_000, 4, 0.0) == 30
    assert rounds_of(2_000_000, 4, 0.02) == pytest.approx(2.0 / 0.0524, abs=1)


@each_case(("modelled_s", "said"), [(0.025, "+25%, within"), (0.03, "+50%, NOT")])
def test_verdict_is_about_the_last_line(modelled_s: float, said: str) -> None:
    line = Compared(1, 1, BYTES, 0.0, 0.01, 0.01, "byte")
    last = Compared(4, 2, BYTES, 0.02, 0.02, modelled_s, "")
    text = io.StringIO()
    found = Calibration(MACHINE, [line, last])
    show_calibration("sync", found, Console(file=text, width=200))
    assert said in text.getvalue()
    assert found.as_dict()["off"] == pytest.approx(modelled_s / 0.02 - 1)

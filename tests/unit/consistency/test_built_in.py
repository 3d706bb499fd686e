from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from msgspec import structs
from tests.suites import each_case

from paramserve.config import check_count, check_number
from paramserve.consistency.base import (
    ADMIT,
    APPLY,
    DROP,
    Admit,
    Apply,
    Buffer,
    Policy,
    Pull,
    Push,
    Wait,
)
from paramserve.consistency.built_in import (
    Adaptive,
    Async,
    AsyncLocalSteps,
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    ElasticAverage,
    Exponential,
    Inverse,
    LocalSteps,
    Polynomial,
    Sync,
)
from paramserve.consistency.registry import BUILT_IN, build, spec, terms
from paramserve.errors import UnknownRule
from paramserve.rules import SGD, DelayedNesterov
from paramserve_testing.policy_suite import PlainGroupView

PUSH = Push(worker=0, clock=3, staleness=0)


def standing(*clocks: int, **fields: Any) -> PlainGroupView:
    """Ranks 0, 1, ... at these clocks."""
    return PlainGroupView(dict(enumerate(clocks)), **fields)


def stale(staleness: int, factor: float = 1.0) -> Push:
    return PUSH._replace(staleness=staleness, factor=factor)


def halves(staleness: int) -> float:
    return 0.5**staleness


# --- Sync ---------------------------------------------------------------------------------------


def test_sync_reads_when_the_slowest_has_finished_the_clock() -> None:
    assert Sync().on_pull(Pull(0, 3), standing(3, 3, 3)) == ADMIT
    assert Sync().on_pull(Pull(0, 3), standing(3, 2, 3)) == Wait((1,))
    assert Sync().on_pull(Pull(0, 3), standing(2, 2, 3)) == Wait((0, 1))
    assert Sync().on_pull(Pull(0, 0), standing()) == ADMIT


@each_case(
    ("backup", "arrived", "answer"),
    [
        (0, (0, 1), Wait((2,))),
        (0, (0, 1, 2), ADMIT),
        (1, (0,), Wait((1, 2))),
        (1, (0, 2), ADMIT),
        (1, (0, 1, 2), ADMIT),
        (2, (1,), ADMIT),
        (2, (), Wait((0, 1, 2))),
        (1, (0, 7), Wait((1, 2))),  # 7 has left, and is no member
        (0, (0, 1, 7), Wait((2,))),
        (0, (0, 1, 2, 7), ADMIT),
    ],
)
def test_sync_clock_is_decided_without_its_backup(
    backup: int, arrived: tuple[int, ...], answer: Any
) -> None:
    assert Sync(backup=backup).on_clock(standing(3, 3, 3, arrived=arrived)) == answer


@each_case(("waited_s", "answer"), [(0.0, Wait((1,), 0.5)), (0.49, Wait((1,), 0.5)), (0.5, ADMIT)])
def test_sync_timeout_decides_with_those_that_are_there(waited_s: float, answer: Any) -> None:
    group = standing(3, 3, arrived=(0,), waited_s=waited_s)
    assert Sync(timeout_s=0.5).on_clock(group) == answer


@each_case("arrived", [(0, 7), (7, 8), (0, 7, 8)])
def test_sync_timeout_holds_when_one_that_left_has_pushed(arrived: Any) -> None:
    group = standing(3, 3, arrived=arrived, waited_s=0.6)
    assert Sync(timeout_s=0.5).on_clock(group) == ADMIT


def test_sync_timeout_without_gradients_decides_nothing() -> None:
    assert Sync(timeout_s=0.5).on_clock(standing(3, 3)) == Wait((0, 1), 0.5)


@each_case(("step_s", "until_s"), [(0.01, 0.05), (0.1, 0.3)])
def test_sync_adaptive_deadline_follows_the_median(step_s: float, until_s: float) -> None:
    policy = Sync(timeout_s=Adaptive(factor=3.0, least_s=0.05))
    group = standing(3, 3, arrived=(0,), step_s=step_s)
    until: Any = pytest.approx(until_s)
    assert policy.on_clock(group) == Wait((1,), until)
    assert policy.on_clock(replace(group, waited_s=until_s + 1e-9)) == ADMIT


def test_sync_adaptive_deadline_without_a_median_is_none() -> None:
    group = standing(3, 3, arrived=(0,), waited_s=60.0)
    assert Sync(timeout_s=Adaptive()).on_clock(group) == Wait((1,))


@each_case(("workers", "fine"), [(0, True), (1, False), (2, False), (3, True)])
def test_sync_backup_needs_more_workers(workers: int, fine: bool) -> None:
    policy = Sync(backup=2)
    if fine:
        policy.check(workers)
        return
    with pytest.raises(ValueError, match=f"below the number of workers, {workers}, not 2"):
        policy.check(workers)


def test_sync_scale_is_the_mean_or_one() -> None:
    assert Sync().scale(4.0) == 0.25
    assert Sync(reduce="sum").scale(4.0) == 1.0


# --- policies that apply what comes -------------------------------------------------------------


def test_async_applies_and_never_waits() -> None:
    assert Async().on_push(stale(1000), standing(0, 50)) == APPLY
    assert Async().on_pull(Pull(1, 50), standing(0, 50)) == ADMIT
    assert not Async().collects


@each_case(("staleness", "answer"), [(0, APPLY), (3, APPLY), (4, DROP), (1000, DROP)])
def test_async_drop_after_keeps_the_last_one_allowed(staleness: int, answer: Any) -> None:
    assert Async(drop_after=3).on_push(stale(staleness), standing(3, 3)) == answer


def test_async_drop_after_zero_takes_fresh_gradients_only() -> None:
    assert Async(drop_after=0).on_push(stale(0), standing(3)) == APPLY
    assert Async(drop_after=0).on_push(stale(1), standing(3)) == DROP


@each_case("damping", [Inverse(0.5), Exponential(), Polynomial(), halves])
def test_async_damping_is_of_the_learning_rate_and_factor_of_the_gradient(
    damping: Callable[[int], float],
) -> None:
    answer = Async(damping=damping).on_push(stale(3, factor=0.8), standing(3))
    assert answer == Apply(0.8, lr_scale=damping(3))


def test_async_dropped_gradient_is_not_damped() -> None:
    def fails(staleness: int) -> float:
        raise AssertionError(staleness)

    assert Async(damping=fails, drop_after=0).on_push(stale(1), standing(3)) == DROP


@each_case(("workers", "less"), [(0, 0.0), (1, 0.0), (2, 0.5), (4, 0.75)])
def test_async_corrected_momentum_follows_the_live_workers(workers: int, less: float) -> None:
    group = standing(*[3] * workers)
    assert Async(momentum="corrected").on_push(stale(2), group) == Apply(1.0, less)


@each_case(
    ("clock", "answer"),
    [(0, ADMIT), (6, ADMIT), (7, Wait((1,))), (8, Wait((1, 2)))],
)
def test_bound_read_waits_for_those_behind_it(clock: int, answer: Any) -> None:
    assert BoundedStaleness(4).on_pull(Pull(0, clock), standing(clock, 2, 3)) == answer


@each_case("bound", [0, 1, 4])
def test_bound_slowest_worker_is_never_held(bound: int) -> None:
    for clocks in ((5, 5), (5, 9), (5, 500)):
        assert BoundedStaleness(bound).on_pull(Pull(0, 5), standing(*clocks)) == ADMIT


@each_case("policy", [BoundedStaleness(4), DelayCompensated(), Buffered(2), Async()])
def test_push_is_multiplied_by_the_workers_factor(policy: Policy) -> None:
    answer = policy.on_push(stale(0, factor=0.3), standing(3))
    assert isinstance(answer, Apply | Buffer)
    assert (answer.weight if isinstance(answer, Buffer) else answer.scale) == 0.3


def test_compensated_push_carries_lambda_and_needs_reads() -> None:
    assert DelayCompensated().on_push(stale(3), standing(3)) == Apply(1.0, 0.0, 0.04)
    assert DelayCompensated(lam=0.0).on_push(stale(3), standing(3)) == APPLY
    assert DelayCompensated.keeps_reads
    assert not Async.keeps_reads


def test_buffered_push_counts_by_its_staleness() -> None:
    assert Buffered(4).on_push(stale(3, factor=0.8), standing(3)) == Buffer(4, 0.4)
    assert Buffered(4, damping=None).on_push(stale(3), standing(3)) == Buffer(4, 1.0)


def test_buffered_without_workers_applies_at_once() -> None:
    assert Buffered(4).on_push(stale(0), standing()) == Buffer(1, 1.0)


def test_buffered_remainder_is_applied_when_the_last_worker_leaves() -> None:
    assert Buffered(4).on_membership(standing(buffered=3))
    assert not Buffered(4).on_membership(standing(7, buffered=3))


# --- a user's own -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain(Policy):
    """Nothing but the defaults."""


@dataclass(frozen=True)
class Gathers(Policy):
    collects = True


def test_policy_defaults_apply_and_admit() -> None:
    assert Plain().on_push(PUSH, standing(3, 9)) == APPLY
    assert Plain().on_pull(Pull(1, 9), standing(3, 9)) == ADMIT
    assert (Plain().collects, Plain().keeps_reads, Plain().on_nonfinite) == (False, False, "refuse")
    Plain().check(0)


def test_policy_that_collects_waits_for_all_by_default() -> None:
    assert Gathers().on_clock(standing(3, 3, 3, arrived=(1,))) == Wait((0, 2))
    assert Gathers().on_clock(standing(3, 3, arrived=(1, 0))) == Admit()
    assert Gathers().on_clock(standing(3, 3, arrived=(0, 7))) == Wait((1,))
    assert Gathers().scale(8.0) == 0.125


def test_standing_slowest_is_the_smallest_clock() -> None:
    assert standing(5, 3, 9).slowest == 3
    assert standing().slowest == 0


# --- wrong arguments ----------------------------------------------------------------------------

WRONG: list[tuple[Callable[..., Any], dict[str, Any], type[Exception], str]] = [
    (Sync, {"reduce": "max"}, ValueError, 'reduce must be "mean" or "sum"'),
    (Sync, {"backup": -1}, ValueError, "backup of Sync must be at least 0, not -1"),
    (Sync, {"backup": 1.0}, TypeError, "backup of Sync must be an int"),
    (Sync, {"backup": True}, TypeError, "backup of Sync must be an int"),
    (Sync, {"timeout_s": 0.0}, ValueError, "timeout_s of Sync must be above 0.0"),
    (Sync, {"timeout_s": -1}, ValueError, "timeout_s of Sync must be above 0.0"),
    (Sync, {"timeout_s": math.nan}, ValueError, "timeout_s of Sync"),
    (Sync, {"timeout_s": math.inf}, ValueError, "timeout_s of Sync"),
    (Sync, {"timeout_s": "1"}, TypeError, "timeout_s of Sync must be a number"),
    (Adaptive, {"factor": 0.0}, ValueError, "factor of Adaptive must be above 0.0"),
    (Adaptive, {"least_s": 0.0}, ValueError, "least_s of Adaptive must be above 0.0"),
    (Async, {"damping": 0.5}, TypeError, "damping must be"),
    (Async, {"drop_after": -1}, ValueError, "drop_after of Async must be at least 0"),
    (Async, {"drop_after": 2.5}, TypeError, "drop_after of Async must be an int"),
    (Async, {"momentum": "less"}, ValueError, 'momentum must be "given"'),
    (BoundedStaleness, {"bound": -1}, ValueError, "bound of BoundedStaleness must be at least 0"),
    (BoundedStaleness, {"bound": 1.5}, TypeError, "bound of BoundedStaleness must be an int"),
    (BoundedStaleness, {"bound": None}, TypeError, "bound of BoundedStaleness"),
    (DelayCompensated, {"lam": -0.1}, ValueError, "lam of DelayCompensated must be at least 0"),
    (DelayCompensated, {"lam": math.nan}, ValueError, "lam of DelayCompensated"),
    (Buffered, {"size": 0}, ValueError, "size of Buffered must be at least 1, not 0"),
    (Buffered, {"size": 2.0}, TypeError, "size of Buffered must be an int"),
    (Buffered, {"size": 2, "damping": "Inverse"}, TypeError, "damping must be"),
    (AsyncLocalSteps, {"every": 0, "outer": SGD(1.0)}, ValueError, "every of AsyncLocalSteps"),
    (AsyncLocalSteps, {"every": 1, "outer": SGD}, TypeError, "outer of AsyncLocalSteps must be"),
    (LocalSteps, {"every": 0}, ValueError, "every of LocalSteps must be at least 1"),
    (LocalSteps, {"outer": "SGD"}, TypeError, "outer of LocalSteps must be a built-in rule"),
    (LocalSteps, {"backup": -1}, ValueError, "backup of Sync"),
    (LocalSteps, {"reduce": "sum"}, ValueError, "reduce of LocalSteps must be 'mean'"),
    (ElasticAverage, {"rho": 0.0}, ValueError, "rho of ElasticAverage must be above 0.0"),
    (ElasticAverage, {"rho": math.inf}, ValueError, "rho of ElasticAverage"),
    (ElasticAverage, {"rho": 0.5, "every": 0}, ValueError, "every of ElasticAverage"),
]


@each_case(("kind", "arguments", "error", "text"), WRONG, ids=[text for *_, text in WRONG])
def test_wrong_argument_is_refused(
    kind: Callable[..., Any], arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        kind(**arguments)


NEEDED: dict[type[Policy], dict[str, Any]] = {
    AsyncLocalSteps: {"every": 2, "outer": DelayedNesterov()},
    BoundedStaleness: {"bound": 1},
    Buffered: {"size": 2},
    ElasticAverage: {"rho": 0.5},
}


@each_case("kind", BUILT_IN.values())
def test_on_nonfinite_is_one_of_two(kind: Any) -> None:
    needed = NEEDED.get(kind, {})
    assert kind(**needed, on_nonfinite="skip").on_nonfinite == "skip"
    with pytest.raises(ValueError, match='on_nonfinite must be "refuse" or "skip"'):
        kind(**needed, on_nonfinite="ignore")


def test_check_count_and_check_number_take_what_is_at_the_edge() -> None:
    check_count("n", 3, least=3)
    check_number("x", 0)
    check_number("x", 1e308, above=0.0)
    with pytest.raises(ValueError, match=r"x must be above 0\.0 and finite, not 0\.0"):
        check_number("x", 0.0, above=0.0)


# --- on the wire --------------------------------------------------------------------------------


def test_build_function_that_servers_do_not_know_is_refused() -> None:
    with pytest.raises(UnknownRule, match="know no function 'halves' for damping"):
        build(spec(Async(damping=halves)))
    assert terms(spec(Async(damping=halves))).policy is None


@each_case("wrong", ["sync", None, Sync, Inverse(0.1)])
def test_spec_of_something_else_is_a_type_error(wrong: Any) -> None:
    words = r"call it: ps\.Sync\(\)" if wrong is Sync else "Sync, Async"
    with pytest.raises(TypeError, match=words):
        spec(wrong)


def test_build_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownRule, match=r"'Sometimes'; known: .*Async"):
        build(structs.replace(spec(Async()), name="Sometimes"))


def test_number_of_own_steps_may_stand_first() -> None:
    outer = SGD(lr=1.0)
    assert LocalSteps(8, outer) == LocalSteps(every=8, outer=outer, reduce="mean")
    assert build(spec(LocalSteps(8)), {}) == LocalSteps(every=8)

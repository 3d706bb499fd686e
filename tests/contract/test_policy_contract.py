"""Every built-in policy, and some as a user would write them, pass the conformance suite; planted
faults do not."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from tests.suites import each_case, passes

from paramserve.consistency.base import (
    ADMIT,
    DROP,
    Admission,
    Apply,
    Buffer,
    GroupView,
    OnPush,
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
from paramserve.consistency.registry import BUILT_IN
from paramserve.rules import SGD, DelayedNesterov
from paramserve_testing.policy_suite import PolicySuite


def halves(staleness: int) -> float:
    return 0.5 if staleness else 1.0


POLICIES: list[Policy] = [
    Sync(),
    Sync(reduce="sum", on_nonfinite="skip"),
    Sync(backup=1),
    Sync(backup=2, timeout_s=0.05),
    Sync(timeout_s=Adaptive(factor=1.5)),
    Async(),
    Async(damping=Inverse(0.5), drop_after=3),
    Async(damping=Exponential(), momentum="corrected", on_nonfinite="skip"),
    Async(damping=halves),
    BoundedStaleness(0),
    BoundedStaleness(4, on_nonfinite="skip"),
    DelayCompensated(lam=0.5),
    Buffered(1),
    Buffered(5, damping=Polynomial(1.0)),
    Buffered(2, damping=None),
    LocalSteps(every=4),
    LocalSteps(every=2, outer=SGD(lr=1.0), backup=1, timeout_s=0.1),
    AsyncLocalSteps(every=4, outer=DelayedNesterov(pushes=2)),
    AsyncLocalSteps(every=2, outer=SGD(lr=0.5), drop_after=3, damping=Inverse(0.5)),
    ElasticAverage(rho=0.5),
]


def in_words(policy: Policy) -> str:
    """Without the addresses of functions, which differ from process to process."""
    return re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", str(policy))


class Quick(PolicySuite):
    """The planted faults below show in the first 5 schedules of a number of workers, and nearly all
    of those of `tests/sim` in a few seeds."""

    schedules = 10
    seeds = 3


class BuiltIn(Quick):
    seeds = 1  # tests/sim has hundreds of most of them


@pytest.mark.parametrize("policy", POLICIES, ids=in_words)
def test_built_in_policy_passes_the_suite(policy: Policy) -> None:
    suite = BuiltIn()
    suite.policy = policy
    passes(suite)


def test_every_built_in_policy_is_in_the_suite() -> None:
    assert {type(policy) for policy in POLICIES} == set(BUILT_IN.values())


@dataclass(frozen=True)
class WaitsForMost(Policy):
    """As BoundedStaleness, but for the slowest `ignored` workers; what is far behind is dropped."""

    bound: int = 2
    ignored: int = 1

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        ahead = max(group.clocks.values(), default=0)
        return DROP if ahead - push.clock > 3 * self.bound else Apply(push.factor)

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        needed = pull.clock - self.bound
        behind = tuple(rank for rank, clock in group.clocks.items() if clock < needed)
        return Wait(behind) if len(behind) > self.ignored else ADMIT


@dataclass(frozen=True)
class Majority(Policy):
    """A clock is decided when more than half of the workers have pushed."""

    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        missing = tuple(rank for rank in group.clocks if rank not in group.arrived)
        return Wait(missing) if 2 * len(missing) >= len(group.clocks) else ADMIT


@dataclass(frozen=True)
class RoundBuffer(Policy):
    """One update for each round of all workers."""

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Buffer(max(1, len(group.clocks)), push.factor)


class TestWaitsForMost(Quick):
    policy = WaitsForMost()


class TestMajority(Quick):
    policy = Majority()


class TestRoundBuffer(Quick):
    policy = RoundBuffer()


# --- planted faults -----------------------------------------------------------------------------


@dataclass(frozen=True)
class NeverAdmits(Policy):
    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        others = tuple(rank for rank in group.clocks if rank != pull.worker)
        return Wait(others) if others else ADMIT


@dataclass(frozen=True)
class WaitsForTheFastest(Policy):
    """Two at the same clock wait for each other to pass."""

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        ahead = [rank for rank, clock in group.clocks.items() if clock > pull.clock]
        others = tuple(rank for rank in group.clocks if rank != pull.worker)
        return ADMIT if ahead or not others else Wait(others)


@dataclass(frozen=True)
class StarvesRankZero(Policy):
    """The others move on for ever."""

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        others = tuple(rank for rank in group.clocks if rank > 0)
        return Wait(others) if pull.worker == 0 and others else ADMIT


@dataclass(frozen=True)
class NeverDecides(Policy):
    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        return Wait((), group.waited_s + 1.0) if len(group.clocks) > 1 else ADMIT


@dataclass(frozen=True)
class NeedsThree(Policy):
    """When fewer are left, there is no third one."""

    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        return ADMIT if len(group.arrived) >= 3 else Wait(tuple(group.clocks))


@dataclass(frozen=True)
class DecidesOnNothing(Policy):
    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        return ADMIT


@dataclass(frozen=True)
class SaysItWaitsForAll(Majority):
    partial = False


@dataclass(frozen=True)
class NamesRankTwo(Policy):
    """Also when it has left."""

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        done = group.clocks.get(2, 0) >= pull.clock - 3
        return ADMIT if done or len(group.clocks) == 1 else Wait((2,))


@dataclass(frozen=True)
class Asks(Policy):
    """Its deadline is now, for ever."""

    collects: ClassVar[bool] = True

    def on_clock(self, group: GroupView) -> Admission:
        missing = tuple(rank for rank in group.clocks if rank not in group.arrived)
        return Wait(missing, group.waited_s) if missing or not group.arrived else ADMIT


@dataclass(frozen=True)
class ChangesTheStanding(Policy):
    def on_push(self, push: Push, group: Any) -> OnPush:
        group.clocks[push.worker] = 0
        return Apply()


@dataclass(frozen=True)
class NaN(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Apply(math.nan)

    def scale(self, weight: float) -> float:
        return math.nan


@dataclass(frozen=True)
class Negative(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Apply(1.0 - push.staleness)


@dataclass(frozen=True)
class Correcting(Policy):
    """Without the reads that it needs."""

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Apply(compensate=0.1)


@dataclass(frozen=True)
class NoBuffer(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Buffer(0)


@dataclass(frozen=True)
class SaysTrue(Policy):
    def on_push(self, push: Push, group: GroupView) -> Any:
        return True


@dataclass(frozen=True)
class LosesItsBuffer(Policy):
    def on_push(self, push: Push, group: GroupView) -> OnPush:
        return Buffer(4)

    def on_membership(self, group: GroupView) -> bool:
        return False


@dataclass(frozen=True)
class FlushesAlways(Policy):
    def on_membership(self, group: GroupView) -> bool:
        return True


@dataclass
class Thawed(Policy):
    bound: int = 1


class NoDataclass(Policy):
    pass


@dataclass(frozen=True)
class Counts(Policy):
    """Remembers how often it was asked."""

    asked: ClassVar[list[int]] = []

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        self.asked.append(1)
        return Apply(float(len(self.asked) % 7))


@dataclass(frozen=True)
class Forgets(Policy):
    """What arrives on the servers differs from what was sent."""

    bound: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "bound", self.bound + 1)


@dataclass(frozen=True)
class RefusesAll(Policy):
    def check(self, workers: int) -> None:
        raise ValueError("never")


Test = Callable[[PolicySuite], None]
DRILLS: Test = PolicySuite.test_everybody_is_admitted_in_the_end
ANSWERS: Test = PolicySuite.test_answers_are_of_the_allowed_kinds
FAULTS: list[tuple[Policy, Test, str]] = [
    (NeverAdmits(), DRILLS, r"no worker can move; worker \d+ \(clock \d+\) waits for \{"),
    (WaitsForTheFastest(), DRILLS, "no worker can move"),
    (StarvesRankZero(), DRILLS, r"workers \[0\] were not admitted in the end"),
    (NeverDecides(), DRILLS, "no worker can move; the clock has"),
    (NeedsThree(), DRILLS, "no worker can move; the clock has"),
    (NeedsThree(), PolicySuite.test_worker_alone_never_waits, "has pushed all"),
    (NeverDecides(), PolicySuite.test_simulated_cluster_keeps_its_invariants, "has not finished"),
    (NeverAdmits(), PolicySuite.test_simulated_cluster_keeps_its_invariants, "has not finished"),
    (DecidesOnNothing(), PolicySuite.test_clock_without_gradients_is_not_decided, "no worker's"),
    (SaysItWaitsForAll(), DRILLS, "although partial is False"),
    (NamesRankTwo(), DRILLS, r"waits for ranks \[2\], which are not there"),
    (NamesRankTwo(), ANSWERS, r"waits for ranks \[2\], which are not there"),
    (Asks(), ANSWERS, "until_s does not lie after"),
    (ChangesTheStanding(), DRILLS, "changed the standing"),
    (ChangesTheStanding(), ANSWERS, "changed the standing"),
    (NaN(), ANSWERS, "nan is no finite number"),
    (NaN(), PolicySuite.test_scale_is_finite_and_not_negative, "nan is no finite number"),
    (Negative(), ANSWERS, "is no finite number of at least 0"),
    (Correcting(), ANSWERS, "keeps_reads"),
    (NoBuffer(), ANSWERS, "no int of at least 1"),
    (SaysTrue(), ANSWERS, "no Apply, Buffer or Drop"),
    (LosesItsBuffer(), PolicySuite.test_buffer_is_applied_when_no_worker_is_there, "never applied"),
    (LosesItsBuffer(), DRILLS, "left a buffer behind"),
    (FlushesAlways(), PolicySuite.test_buffer_is_kept_while_workers_are_there, "flushes_early"),
    (Thawed(), PolicySuite.test_class_can_be_registered, "no frozen dataclass"),
    (NoDataclass(), PolicySuite.test_class_can_be_registered, "no frozen dataclass"),
    (Counts(), PolicySuite.test_same_question_gets_the_same_answer, "was answered"),
    (Forgets(), PolicySuite.test_spec_builds_an_equal_policy_after_the_wire, "was built from"),
    (RefusesAll(), PolicySuite.test_check_accepts_or_raises_value_error, "refuses every number"),
]


def name_of(value: object) -> str:
    return getattr(value, "__name__", type(value).__name__)


@each_case(("policy", "test", "text"), FAULTS, ids=name_of)
def test_planted_fault_is_found(policy: Policy, test: Test, text: str) -> None:
    suite = PolicySuite()
    suite.policy = policy
    with pytest.raises(AssertionError, match=text):
        test(suite)


def test_lambda_in_a_field_cannot_be_registered() -> None:
    suite = PolicySuite()
    suite.policy = Async(damping=operator.neg)  # a builtin: it has no text that could be looked up
    with pytest.raises(TypeError, match="damping of a policy is"):
        suite.test_spec_builds_an_equal_policy_after_the_wire()

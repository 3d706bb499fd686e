"""Every policy that the simulated seeds run under, and a user's own."""

from __future__ import annotations

from dataclasses import dataclass

from paramserve.consistency.base import (
    ADMIT,
    APPLY,
    DROP,
    Admission,
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
    Inverse,
    LocalSteps,
    Sync,
)
from paramserve.rules import DelayedNesterov


@dataclass(frozen=True)
class IgnoreStragglers(Policy):
    """A user's own: who is more than `behind` clocks behind the fastest is not waited for, and what
    it sends is not used."""

    behind: int = 3

    def on_push(self, push: Push, group: GroupView) -> OnPush:
        fastest = max(group.clocks.values(), default=0)
        return DROP if push.worker >= 0 and push.clock < fastest - self.behind else APPLY

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        fastest = max(group.clocks.values(), default=0)
        slow = [
            rank
            for rank, clock in group.clocks.items()
            if fastest - self.behind <= clock < pull.clock - 1
        ]
        return Wait(tuple(slow)) if slow else ADMIT


TABLE_POLICIES: dict[str, Policy] = {
    "sync": Sync(reduce="sum"),
    "sync-backup": Sync(reduce="sum", backup=1),
    "async": Async(),
    "bounded-0": BoundedStaleness(0),
    "bounded-1": BoundedStaleness(1),
}
"""Policies under which the simulated tables are trained: none of them multiplies a gradient."""

OWN_STEPS: dict[str, LocalSteps | AsyncLocalSteps] = {
    "local": LocalSteps(2),
    "fragments": LocalSteps(6, fragments=3, delay=1, merge=0.5),
    "local-backup": LocalSteps(4, fragments=2, backup=1),
    "local-timeout": LocalSteps(3, timeout_s=0.01),
    "local-skip": LocalSteps(2, on_nonfinite="skip"),
    "local-skip-backup": LocalSteps(4, fragments=2, backup=1, on_nonfinite="skip"),
    "async": AsyncLocalSteps(3, DelayedNesterov(pushes=3)),
    "async-drop": AsyncLocalSteps(2, DelayedNesterov(pushes=2, activation=0.25), drop_after=2),
}
"""Policies of clusters whose workers make own steps (`workloads/local_steps.py`)."""

POLICIES: dict[str, Policy] = {
    "sync": Sync(reduce="sum"),
    "sync-mean": Sync(on_nonfinite="skip"),
    "sync-backup": Sync(reduce="sum", backup=1),
    "sync-timeout": Sync(reduce="sum", timeout_s=0.01),
    "sync-adaptive": Sync(backup=1, timeout_s=Adaptive(factor=3.0, least_s=0.005)),
    "async": Async(),
    "async-damped": Async(damping=Inverse(0.5), momentum="corrected", on_nonfinite="skip"),
    "async-drop": Async(drop_after=3),
    "bounded-0": BoundedStaleness(0),
    "bounded-1": BoundedStaleness(1),
    "bounded-4": BoundedStaleness(4),
    # Its corrections show in a counter, and are small for a writer of fewer than 20 pushes.
    "delay-compensated": DelayCompensated(lam=2.0**-40),
    "buffered": Buffered(3, damping=None),
    "local-steps": LocalSteps(every=2),
    "elastic-average": ElasticAverage(rho=0.5),
    "own": IgnoreStragglers(),
}

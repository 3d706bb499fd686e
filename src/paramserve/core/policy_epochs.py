"""The policies of a group, over its clocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import is_built_in, spec
from paramserve.messages import GroupPolicy, Paused

CHANGES_MAX = 16
"""Changes of one group that are remembered: all workers are past the one before the last when
another begins."""


class PolicyEpoch(NamedTuple):
    """A policy, and the first clock that it holds for."""

    clock: int
    policy: Policy
    guarded: bool
    """Whether it has code of a user's, which may raise or answer anything."""


def epoch_from(clock: int, policy: Policy) -> PolicyEpoch:
    """A policy from a clock on."""
    return PolicyEpoch(clock, policy, not is_built_in(policy))


class ChangesRecord(Struct, frozen=True):
    """The policies of one group on one shard, as of one moment.

    Attributes:
        policies: (first clock, policy), in order.
        history: what clients are told of the changes between them.
    """

    policies: tuple[tuple[int, ConsistencySpec], ...]
    history: tuple[GroupPolicy, ...]


@dataclass
class Changes:
    """The policies of one group on one shard, and what this shard knows of a change."""

    first: PolicyEpoch
    later: list[PolicyEpoch] = field(default_factory=list)
    """Policies that came after, in order."""
    history: list[GroupPolicy] = field(default_factory=list)
    """All changes, in order."""
    paused: Paused | None = None
    """What this shard has told the lead, until the lead decides."""
    repeat_at: float = 0.0

    def at(self, clock: int) -> PolicyEpoch:
        """What holds for steps of a clock."""
        for each in reversed(self.later):
            if clock >= each.clock:
                return each
        return self.first

    @property
    def newest(self) -> PolicyEpoch:
        """What holds in the end, when all clocks of before are over."""
        return self.later[-1] if self.later else self.first

    @property
    def change(self) -> GroupPolicy | None:
        """The newest."""
        return self.history[-1] if self.history else None

    @property
    def number(self) -> int:
        """Changes so far."""
        return self.history[-1].number if self.history else 0

    def record(self) -> ChangesRecord:
        """The policies as they are now."""
        epochs = (self.first, *self.later)
        policies = tuple((each.clock, spec(each.policy)) for each in epochs)
        return ChangesRecord(policies, tuple(self.history))

    def restore(self, record: ChangesRecord, registered: Mapping[str, Any]) -> None:
        """Go by the policies of before.

        Args:
            registered: classes by name, besides the built-in ones.
        Raises:
            UnknownRule: one is not registered. Nothing was changed.
        """
        epochs = [epoch_from(at, build_policy(each, registered)) for at, each in record.policies]
        self.first, *self.later = epochs
        self.history = list(record.history)

    def tell_first(self, group: int) -> None:
        """Have clients told of the first policy, too, as of a change: they would take the cluster's
        for it."""
        if not self.history or self.history[0].clock > self.first.clock:
            number = self.history[0].number - 1 if self.history else 1
            first = GroupPolicy(group, number, self.first.clock, spec(self.first.policy))
            self.history.insert(0, first)

    def take(self, change: GroupPolicy, policy: Policy) -> None:
        """The lead has decided."""
        self.history = [*self.history, change][-CHANGES_MAX:]
        self.paused = None
        self.later.append(epoch_from(change.clock, policy))
        if len(self.later) > CHANGES_MAX:
            self.first = self.later.pop(0)

    def next_collecting(self, clock: int) -> int:
        """The first clock from `clock` on that gradients are collected for; `clock` itself if there
        is none."""
        if self.at(clock).policy.collects:
            return clock
        return next((s.clock for s in self.later if s.clock > clock and s.policy.collects), clock)

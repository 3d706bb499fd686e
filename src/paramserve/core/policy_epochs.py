"""The policies of a group, over its clocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paramserve.consistency.base import Policy
from paramserve.consistency.registry import is_built_in
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

"""A group's policies over its clocks, and how all shards agree on the clock of a change.

The lead shard asks all to pause (`Pause`): each holds the steps that nobody has reached yet and
says which is the first of them (`Paused`). The change takes effect behind all of these, and so far
behind that every client hears of it in an answer before it can send a step of that clock: an answer
to a held step carries the news, and no client has more than its window of requests on the way.
All messages may be lost or repeated: both sides repeat theirs until the other has answered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import is_built_in
from paramserve.messages import GroupPolicy, Pause, Paused, Switch

CHANGES_MAX = 16
"""Changes of one group that are remembered: all workers are past the one before the last when
another begins."""


class PolicyEpoch(NamedTuple):
    """A policy, and the first clock that it holds for."""

    clock: int
    policy: Policy
    guarded: bool
    """Whether it has code of a user's, which may raise or answer anything."""


def since(clock: int, policy: Policy) -> PolicyEpoch:
    """A policy from a clock on."""
    return PolicyEpoch(clock, policy, not is_built_in(policy))


@dataclass
class Changes:
    """The policies of one group on one shard, and what this shard knows of a change."""

    first: PolicyEpoch
    later: list[PolicyEpoch] = field(default_factory=list)
    """Policies that came after, in order."""
    taken: list[GroupPolicy] = field(default_factory=list)
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
        return self.taken[-1] if self.taken else None

    @property
    def number(self) -> int:
        """Changes so far."""
        return self.taken[-1].number if self.taken else 0

    def take(self, change: GroupPolicy, policy: Policy) -> None:
        """The lead has decided."""
        self.taken = [*self.taken, change][-CHANGES_MAX:]
        self.paused = None
        self.later.append(since(change.clock, policy))
        if len(self.later) > CHANGES_MAX:
            self.first = self.later.pop(0)

    def next_collecting(self, clock: int) -> int:
        """The first clock from `clock` on that gradients are collected for; `clock` itself if there
        is none."""
        if self.at(clock).policy.collects:
            return clock
        return next((s.clock for s in self.later if s.clock > clock and s.policy.collects), clock)


@dataclass
class Changing:
    """The lead's side of a change that is not decided yet, and the last one that was."""

    number: int
    policy: ConsistencySpec
    shards: int
    told: dict[int, Paused] = field(default_factory=dict)
    decided: GroupPolicy | None = None
    repeat_at: float = 0.0

    def missing(self) -> list[int]:
        """Shards that have not paused."""
        return [shard for shard in range(self.shards) if shard not in self.told]

    def on_paused(self, message: Paused) -> Mapping[int, Switch]:
        """Take one shard's answer; what to send to which shard."""
        if message.number != self.number:
            return {}
        if self.decided is not None:
            return {message.shard: Switch(self.decided)}
        self.told[message.shard] = message
        if self.missing():
            return {}
        first = max(each.clock for each in self.told.values())
        window = max(each.window for each in self.told.values())
        self.decided = GroupPolicy(message.group, self.number, first + window, self.policy)
        return dict.fromkeys(range(self.shards), Switch(self.decided))

    def pauses(self, group: int) -> Mapping[int, Pause]:
        """What to send to those that have not answered."""
        if self.decided is not None:
            return {}
        return dict.fromkeys(self.missing(), Pause(group, self.number))

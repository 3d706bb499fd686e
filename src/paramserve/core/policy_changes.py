"""How all shards agree on the clock from which a group has another policy.

The lead shard asks all to pause (`Pause`): each holds the steps that no worker has reached yet and
says which is the first of them (`Paused`). The change takes effect behind all of these, and so far
behind that every client hears of it in an answer before it can send a step of that clock: an answer
to a held step carries the news, and no client has more than its window of requests on the way.
That clock is an entry of the decision log (`core.decisions`). `Pause` and `Paused` may be lost or
repeated: both sides repeat theirs until it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core import policy_calls
from paramserve.core.decisions import LEAD, DecisionLog
from paramserve.core.events import GroupEffect, Send
from paramserve.core.group_state import GroupState
from paramserve.errors import ParamServeError, ProtocolError, UnknownRule
from paramserve.messages import GroupPolicy, Pause, Paused, SetPolicy, Switch


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

    def on_paused(self, message: Paused) -> Switch | None:
        """Take one shard's answer; the decision, if it is the last one."""
        self.told[message.shard] = message
        if self.missing():
            return None
        first = max(each.clock for each in self.told.values())
        window = max(each.window for each in self.told.values())
        self.decided = GroupPolicy(message.group, self.number, first + window, self.policy)
        return Switch(self.decided)

    def pauses(self, group: int) -> Mapping[int, Pause]:
        """What to send to those that have not answered."""
        if self.decided is not None:
            return {}
        return dict.fromkeys(self.missing(), Pause(group, self.number))


class PolicyAgreement:
    """One shard's part in the changes of one group's policy.

    Args:
        state: the group.
        shard: number of this shard, of `shards`.
        resend_s: after which a message to another shard is sent again.
        policies: classes by name that the owner registered, besides the built-in ones.
        decisions: the log on this shard.
        outbox: takes what the shard is to send.
    """

    def __init__(
        self,
        state: GroupState,
        shard: int,
        shards: int,
        resend_s: float,
        policies: Mapping[str, Any],
        decisions: DecisionLog,
        outbox: deque[GroupEffect],
    ) -> None:
        self.changing: Changing | None = None
        """The lead's side."""
        self._state = state
        self._shard = shard
        self._shards = shards
        self._resend_s = resend_s
        self._policies = policies
        self._decisions = decisions
        self._outbox = outbox

    def propose(self, message: SetPolicy) -> None:
        """Check that this shard could change the policy; on the lead shard, begin to.

        Raises:
            ParamServeError, ValueError: nothing was changed.
        """
        state = self._state
        try:
            policy = build_policy(message.policy, self._policies)
        except UnknownRule as error:
            raise UnknownRule(
                f"group {state.name!r} keeps its policy, since the server of shard {self._shard} "
                f"cannot build the new one: {error.failed}",
                fix=error.fix,
            ) from None
        policy_calls.check(policy, len(state.members.clocks))
        check_table_policy(state.name, policy, state.table is not None)
        if not self._decisions.leads:
            return
        changing = self.changing
        if changing is not None and not self._is_over(changing):
            raise ParamServeError(
                f"group {state.name!r} is about to change its policy to "
                f"{changing.policy.name}; its slowest worker is at clock {state.members.slowest}",
                fix="wait until the slowest worker is past the clock of that change",
            )
        if not message.check:
            number = state.changes.number + 1
            self.changing = Changing(number, message.policy, self._shards)
            self._pause_all(self.changing)

    def _is_over(self, changing: Changing) -> bool:
        """Whether every worker steps by the new policy already, as far as this shard knows. Without
        workers, none is left behind."""
        decided, state = changing.decided, self._state
        return decided is not None and (
            not state.members.clocks or state.members.slowest >= decided.clock
        )

    def _pause_all(self, changing: Changing) -> None:
        changing.repeat_at = self._state.now + self._resend_s
        for shard, message in changing.pauses(self._state.id).items():
            self._outbox.append(Send(shard, message))

    def on_pause(self, message: Pause, window: int) -> bool:
        """Tell the lead from which clock on this shard has executed nothing, and hold those steps.
        A change that the lead does not know of, as a peer may have made it up, holds none.

        Args:
            window: the most calls that one client of this shard may have unanswered.
        Returns:
            Whether steps that were held are to go on.
        """
        state, changes = self._state, self._state.changes
        if message.unknown:
            made_up = changes.paused is not None and changes.paused.number == message.number
            changes.paused = None if made_up else changes.paused
            return made_up
        if message.number <= changes.number:
            return False  # It was decided before.
        if changes.paused is None:
            first = state.frontier()
            changes.paused = Paused(state.id, message.number, self._shard, first, window)
        self._tell_paused(changes.paused)
        return False

    def _tell_paused(self, paused: Paused) -> None:
        self._state.changes.repeat_at = self._state.now + self._resend_s
        self._outbox.append(Send(LEAD, paused))

    def on_paused(self, message: Paused) -> None:
        """On the lead shard: one shard has paused, or does not know the decision yet."""
        if not self._decisions.leads or not 0 <= message.shard < self._shards:
            return
        changing, state = self.changing, self._state
        if message.number <= state.changes.number:
            return  # It is decided, and on its way.
        if changing is not None and changing.number == message.number:
            switch = changing.on_paused(message)
            if switch is not None:
                self._decisions.append(switch, state.now)
        else:
            unknown = Pause(message.group, message.number, unknown=True)
            self._outbox.append(Send(message.shard, unknown))

    def build(self, switch: Switch) -> Policy:
        """The policy that the lead has decided for.

        Raises:
            ProtocolError: it cannot be built here: no lead has checked it.
        """
        spec = switch.change.policy
        try:
            return build_policy(spec, self._policies)
        except (ParamServeError, ValueError, TypeError) as error:
            raise ProtocolError(
                f"a switch of group {self._state.name!r} to {spec.name} was refused: {error}",
                fix="run the same version on all sides",
            ) from error

    def on_switch(self, switch: Switch) -> None:
        """Go by the lead's decision."""
        state, change = self._state, switch.change
        if change.number == state.changes.number + 1:
            state.changes.take(change, self.build(switch))
            state.settle()

    def deadline_reached(self, now: float) -> None:
        """Repeat what was not answered."""
        changing, changes = self.changing, self._state.changes
        if changing is not None and changing.decided is None and changing.repeat_at <= now:
            self._pause_all(changing)
        if changes.paused is not None and changes.repeat_at <= now:
            self._tell_paused(changes.paused)

    def deadlines(self) -> list[float]:
        """When to repeat."""
        changing, changes = self.changing, self._state.changes
        times = []
        if changing is not None and changing.decided is None:
            times.append(changing.repeat_at)
        if changes.paused is not None:
            times.append(changes.repeat_at)
        return times

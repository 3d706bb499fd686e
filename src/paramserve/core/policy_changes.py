"""How all shards agree on the clock from which a group has another policy.

The lead shard has all pause: each holds the steps that no worker has reached yet and says which is
the first of them (`Paused`). The change takes effect behind all of these, and so far behind that
every client hears of it in an answer before it can send a step of that clock: an answer to a held
step carries the news, and no client has more than its window of requests on the way. Both the pause
and that clock are entries of the decision log (`core.decisions`). `Paused` may be lost: it is
repeated until the clock is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paramserve.config import ConsistencySpec
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import OWN_STEPS, Async
from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy, is_for_tables, spec
from paramserve.core import differences, policy_calls
from paramserve.core.decisions import LEAD, DecisionLog
from paramserve.core.events import GroupEffect, Send
from paramserve.core.group_state import GroupState
from paramserve.errors import CheckpointError, ParamServeError, ProtocolError, UnknownRule
from paramserve.messages import GroupPolicy, Pause, Paused, SetPolicy, Switch


@dataclass
class Changing:
    """The lead's side of a change that is not decided yet, and the last one that was."""

    number: int
    policy: ConsistencySpec
    shards: int
    pauses: dict[int, Paused] = field(default_factory=dict)
    decided: GroupPolicy | None = None

    def on_paused(self, message: Paused) -> Switch | None:
        """Take one shard's answer; the decision, if it is the last one."""
        self.pauses[message.shard] = message
        if len(self.pauses) < self.shards:
            return None
        first = max(each.clock for each in self.pauses.values())
        window = max(each.window for each in self.pauses.values())
        self.decided = GroupPolicy(message.group, self.number, first + window, self.policy)
        return Switch(self.decided)


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
            self.begin()

    def record(self) -> tuple[int, ConsistencySpec] | None:
        """The change that the lead was asked for and that is not decided: its number and policy."""
        changing = self.changing
        undecided = changing is not None and changing.decided is None
        return (changing.number, changing.policy) if changing is not None and undecided else None

    def restore(self, undecided: tuple[int, ConsistencySpec] | None) -> None:
        """On the lead, know a change of before that `begin` is to begin anew, or the last one that
        was decided."""
        newest = self._state.changes.change
        if not self._decisions.leads:
            return
        if undecided is not None:
            self.changing = Changing(*undecided, self._shards)
        elif newest is not None:
            self.changing = Changing(newest.number, newest.policy, self._shards, decided=newest)

    def replace_cluster_policy(self, policy: Policy, clock: int | None) -> None:
        """Go by the cluster's policy, which has changed since the checkpoint, as if that had been
        decided at the cut. What held before is told as a change, too: a client takes what was not
        changed for the cluster's policy of now.

        Args:
            clock: the first that no worker has executed, the same for all shards; None: the group's
                policy was changed while the run went on, and stays so.
        Raises:
            CheckpointError: workers would have to step otherwise. The group is not to be used.
        """
        state, changes = self._state, self._state.changes
        if any(each.spec.consistency is not None for each in state.blocks.values()):
            return
        changes.tell_first(state.id)
        if clock is None:
            return
        table = state.table.spec.table if state.table is not None else None
        if table is not None and not is_for_tables(spec(policy), table.dtype):
            policy = Async()
        _check_replaceable(state.name, changes.newest.policy, policy)
        change = GroupPolicy(state.id, changes.number + 1, clock, spec(policy))
        changes.take(change, policy)
        state.settle()
        self.restore(None)

    def begin(self) -> None:
        """Have all shards pause for a change that is not decided, if there is one; on the lead."""
        if self.changing is not None and self.changing.decided is None:
            pause = Pause(self._state.id, self.changing.number)
            self._decisions.append(pause, self._state.now)

    def _is_over(self, changing: Changing) -> bool:
        """Whether every worker steps by the new policy already, as far as this shard knows. Without
        workers, none is left behind."""
        decided, state = changing.decided, self._state
        return decided is not None and (
            not state.members.clocks or state.members.slowest >= decided.clock
        )

    def on_pause(self, pause: Pause, window: int) -> None:
        """Tell the lead from which clock on this shard has executed nothing, and hold those steps.

        Args:
            window: the most calls that one client of this shard may have unanswered.
        """
        state = self._state
        paused = Paused(state.id, pause.number, self._shard, state.frontier(), window)
        state.changes.paused = paused
        self._tell_paused(paused)

    def _tell_paused(self, paused: Paused) -> None:
        self._state.changes.repeat_at = self._state.now + self._resend_s
        self._outbox.append(Send(LEAD, paused))

    def on_paused(self, message: Paused) -> None:
        """Note on the lead shard that one shard has paused, or does not know the decision yet."""
        if not self._decisions.leads or not 0 <= message.shard < self._shards:
            return
        changing = self.changing
        if changing is None or changing.decided is not None or changing.number != message.number:
            return  # It is decided, and on its way.
        switch = changing.on_paused(message)
        if switch is not None:
            self._decisions.append(switch, self._state.now)

    def build(self, switch: Switch) -> Policy:
        """The policy that the lead has decided for.

        Raises:
            ProtocolError: it cannot be built here: no lead has checked it.
        """
        described = switch.change.policy
        try:
            return build_policy(described, self._policies)
        except (ParamServeError, ValueError, TypeError) as error:
            raise ProtocolError(
                f"a switch of group {self._state.name!r} to {described.name} was refused: {error}",
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
        changes = self._state.changes
        if changes.paused is not None and changes.repeat_at <= now:
            self._tell_paused(changes.paused)


def _check_replaceable(name: str, before: Policy, now: Policy) -> None:
    """Refuse a change between policies under which workers' own optimizers step otherwise."""
    if not isinstance(before, OWN_STEPS) and not isinstance(now, OWN_STEPS):
        return
    diff = differences.of_policies(spec(before), spec(now))
    raise CheckpointError(
        f"the checkpoint's policy of group {name!r} is {diff.existing}, the run's "
        f"{diff.incoming}: the workers' own optimizers step otherwise under one of them",
        applied="no",
        fix=f"go on with consistency=ps.{type(before).__name__}(...) as it was, or begin anew in "
        "another folder, ps.Checkpoint(folder, load_state=...) for the values",
    )

"""Changes of a group's policy on a shard; `core.changes` says how the shards agree."""

from __future__ import annotations

from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core import policy_calls
from paramserve.core.commit import lead_of
from paramserve.core.group import Group
from paramserve.core.policy_changes import Changing
from paramserve.core.sessions import Answer
from paramserve.core.shard_clocks import ShardClocks
from paramserve.errors import ParamServeError, UnknownRule
from paramserve.messages import Done, Pause, Paused, SetPolicy, Switch


class ShardChanges(ShardClocks):
    """The part of a shard that changes policies."""

    def _set_policy(self, message: SetPolicy) -> Answer:
        group = self.group(message.group)
        try:
            policy = build_policy(message.policy, self.policies)
        except UnknownRule as error:
            raise UnknownRule(
                f"group {group.name!r} keeps its policy, since the server of shard {self.number} "
                f"cannot build the new one: {error.failed}",
                fix=error.fix,
            ) from None
        policy_calls.check(policy, len(group.clocks))
        check_table_policy(group.name, policy, group.table is not None)
        if group.lead is not None:
            changing = group.changing
            if changing is not None and not self._is_over(group, changing):
                raise ParamServeError(
                    f"group {group.name!r} is about to change its policy to "
                    f"{changing.policy.name}; its slowest worker is at clock {group.slowest}",
                    fix="wait until the slowest worker is past the clock of that change",
                )
            if not message.check:
                number = group.changes.number + 1
                group.changing = Changing(number, message.policy, self.shards)
                self._pause_all(group, group.changing)
        return Answer(Done(message.seq, group.version, group.slowest))

    @staticmethod
    def _is_over(group: Group, changing: Changing) -> bool:
        """Whether every worker steps by the new policy already, as far as this shard knows. Where
        there is none, nobody is left behind."""
        decided = changing.decided
        return decided is not None and (not group.clocks or group.slowest >= decided.clock)

    def _pause_all(self, group: Group, changing: Changing) -> None:
        changing.repeat_at = self._now + self.resend_s
        self._to_shards(changing.pauses(group.id))

    def _on_pause(self, group: Group, message: Pause) -> None:
        changes = group.changes
        if message.number <= changes.number:
            return  # It was decided before.
        if changes.paused is None:
            window = max((each.window for each in self.sessions.values()), default=1)
            changes.paused = Paused(group.id, message.number, self.number, group.frontier(), window)
        self._tell_paused(group, changes.paused)

    def _on_paused(self, group: Group, message: Paused) -> None:
        known = (each for each in group.changes.taken if each.number == message.number)
        decided = next(known, None)
        if decided is not None:  # also of a change before the newest, which that shard has missed
            self._to_shard(message.shard, Switch(decided))
        elif group.changing is not None:
            self._to_shards(group.changing.on_paused(message))

    def _tell_paused(self, group: Group, paused: Paused) -> None:
        group.changes.repeat_at = self._now + self.resend_s
        self._to_shard(lead_of(group.id, self.shards), paused)

    def _on_switch(self, group: Group, message: Switch) -> None:
        change = message.change
        if change.number != group.changes.number + 1:
            return  # Known before.
        group.changes.take(change, build_policy(change.policy, self.policies))
        group.settle()
        self._clocks_changed(group)

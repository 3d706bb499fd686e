"""Bugs that a parameter server could have, each as a small change of one part.

The checkers know none of them. Each function plants one and returns the cluster to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec import structs
from tests.sim.policies import IgnoreStragglers

from paramserve.client import steps as steps_module
from paramserve.client.clocks import ClientClocks
from paramserve.client.steps import Steps
from paramserve.consistency.base import (
    ADMIT,
    APPLY,
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
    BoundedStaleness,
    Buffered,
    DelayCompensated,
    Inverse,
    Sync,
)
from paramserve.core import collecting, policy_calls, stepping
from paramserve.core import group as group_module
from paramserve.core import shard as shard_module
from paramserve.core import shard_sessions as sessions_module
from paramserve.core.client_membership import ClientMembership, Joining
from paramserve.core.decisions import DecisionLog
from paramserve.core.events import Requested
from paramserve.core.followers import Followers
from paramserve.core.group import GroupMachine
from paramserve.core.group_members import GroupMembers, JoinedBy
from paramserve.core.group_membership import MembershipAgreement
from paramserve.core.group_state import Reads
from paramserve.core.leases import Leases, Span
from paramserve.core.partition import Block
from paramserve.core.policy_changes import PolicyAgreement
from paramserve.core.policy_epochs import Changes
from paramserve.core.request_memory import Memory
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import Answer, ReadRequest, Request, Sessions, ShardSession
from paramserve.messages import (
    Done,
    GroupMembership,
    Hello,
    JoinGroup,
    LogEntry,
    ServerBeat,
    SetPolicy,
    Step,
)
from paramserve.rules import Add, PushInfo
from paramserve.server.role import ServerRole
from paramserve_testing import Faults, SimulatedCluster, slow

ADAPTIVE = Adaptive(factor=3.0, least_s=0.002)
STRAGGLER = (slow(worker=2, factor=40),)
CHANGES = Faults(slow=0.1, change=0.05)
UNREGISTERED: dict[str, Any] = {
    "faults": CHANGES,
    "others": (IgnoreStragglers(), BoundedStaleness(1)),
    "unregistered": (1,),
}
LEASES: dict[str, Any] = {"samples": 60, "others": ()}
RESTS: dict[str, Any] = {"others": (), "evaluates": True, "steps": 20}
JOINS = Faults(slow=0.1, join=0.03, leave=0.02)
DEATHS = Faults(slow=0.2, kill=0.03)
REPEATS: dict[str, Any] = {
    "faults": Faults(slow=0.1, cut=0.03, lose=0.02),
    "links": "tcp",
    "others": (),
}
DEATHS_OF_JOINERS = {"faults": Faults(slow=0.1, join=0.03, kill=0.05), "restarts": True}
PATIENCE_S = 0.04
Plant = Callable[[pytest.MonkeyPatch], type[SimulatedCluster]]


def with_shard(kind: type[Shard]) -> type[SimulatedCluster]:
    return type("Planted", (SimulatedCluster,), {"shard_type": kind})


def with_group(monkeypatch: pytest.MonkeyPatch, kind: type[GroupMachine]) -> type[SimulatedCluster]:
    monkeypatch.setattr(shard_module, "GroupMachine", kind)
    return SimulatedCluster


# --- policies that are off by one, or forget something ------------------------------------------


def asked(monkeypatch: pytest.MonkeyPatch, hook: str, kind: type[Policy], answer: Any) -> None:
    """Let shards hear `answer(policy, ...)` from policies of a kind instead of their own."""
    real = getattr(policy_calls, hook)

    def planted(epoch: Any, *arguments: Any) -> Any:
        if isinstance(epoch.policy, kind):
            return answer(epoch.policy, *arguments)
        return real(epoch, *arguments)

    monkeypatch.setattr(policy_calls, hook, planted)


def one_clock_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A read may be bound + 1 clocks ahead of the slowest worker."""

    def on_pull(policy: BoundedStaleness, pull: Pull, group: GroupView) -> Admission:
        return BoundedStaleness(policy.bound + 1).on_pull(pull, group)

    asked(monkeypatch, "on_pull", BoundedStaleness, on_pull)
    return SimulatedCluster


def reads_are_never_held(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A read is answered whatever the others have done."""
    asked(monkeypatch, "on_pull", Policy, lambda policy, pull, group: ADMIT)
    return SimulatedCluster


def one_backup_more(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A clock is decided with one worker less than `backup` allows."""

    def on_clock(policy: Sync, group: GroupView) -> Admission:
        return structs_of(policy, backup=policy.backup + 1).on_clock(group)

    asked(monkeypatch, "on_clock", Sync, on_clock)
    return SimulatedCluster


def one_backup_less(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A clock waits for one worker more than `backup` asks for."""

    def on_clock(policy: Sync, group: GroupView) -> Admission:
        return structs_of(policy, backup=max(0, policy.backup - 1)).on_clock(group)

    asked(monkeypatch, "on_clock", Sync, on_clock)
    return SimulatedCluster


def structs_of(policy: Sync, backup: int) -> Sync:
    return Sync(reduce=policy.reduce, backup=backup, timeout_s=policy.timeout_s)


def deadline_half_as_long(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """`timeout_s` ends a clock in half the time."""

    def on_clock(policy: Sync, group: GroupView) -> Admission:
        assert isinstance(policy.timeout_s, float)
        return Sync(reduce=policy.reduce, timeout_s=policy.timeout_s / 2).on_clock(group)

    asked(monkeypatch, "on_clock", Sync, on_clock)
    return SimulatedCluster


def staleness_one_past_the_limit(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Staleness counts one less: a gradient of staleness drop_after + 1 is applied."""

    def on_push(policy: Async, push: Push, group: GroupView) -> OnPush:
        return policy.on_push(push._replace(staleness=max(0, push.staleness - 1)), group)

    asked(monkeypatch, "on_push", Async, on_push)
    return SimulatedCluster


def staleness_one_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Staleness counts one more: a gradient of staleness drop_after is dropped."""

    def on_push(policy: Async, push: Push, group: GroupView) -> OnPush:
        return policy.on_push(push._replace(staleness=push.staleness + 1), group)

    asked(monkeypatch, "on_push", Async, on_push)
    return SimulatedCluster


def buffer_of_one_more(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """An update waits for size + 1 gradients."""

    def on_push(policy: Buffered, push: Push, group: GroupView) -> OnPush:
        answer = policy.on_push(push, group)
        assert isinstance(answer, Buffer)
        return answer._replace(size=answer.size + 1)

    asked(monkeypatch, "on_push", Buffered, on_push)
    return SimulatedCluster


def buffer_forgets_its_first(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The first gradient of each buffer is applied at once instead of kept."""

    def on_push(policy: Buffered, push: Push, group: GroupView) -> OnPush:
        return APPLY if not group.buffered else policy.on_push(push, group)

    asked(monkeypatch, "on_push", Buffered, on_push)
    return SimulatedCluster


def buffer_not_applied_at_the_end(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What is in the buffer when the last worker leaves stays there."""
    asked(monkeypatch, "on_membership", Buffered, lambda policy, group: False)
    return SimulatedCluster


def late_step_applied(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A gradient that came after its clock's decision is told to be dropped, and applied."""

    class Applies(GroupMachine):
        def _late(self, session: ShardSession, request: Request, at: int) -> Answer:
            step = request.message
            assert isinstance(step, Step)
            for block, header, gradient in stepping.gradients(self.state, step, request.memory):
                push = PushInfo(session.rank, step.clock, 0, 0, 1.0, 1.0)
                block.apply(gradient, header.active, header.hyper, push)
            self.state.advance()
            return super()._late(session, request, at)

    return with_group(monkeypatch, Applies)


def late_worker_not_told(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The answer to a late step does not say where its worker goes on, and that it was dropped."""

    class Hides(GroupMachine):
        def _late(self, session: ShardSession, request: Request, at: int) -> Answer:
            answer = super()._late(session, request, at)
            assert isinstance(answer.message, Done)
            return Answer(structs.replace(answer.message, skipped=False), answer.written)

    return with_group(monkeypatch, Hides)


def change_one_clock_later_on_one_shard(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Shard 1 goes by a new policy one clock later than shard 0."""

    class Later(PolicyAgreement):
        def on_switch(self, switch: Any) -> None:
            if self._shard == 1:
                change = structs.replace(switch.change, clock=switch.change.clock + 1)
                switch = structs.replace(switch, change=change)
            super().on_switch(switch)

    monkeypatch.setattr(group_module, "PolicyAgreement", Later)
    return SimulatedCluster


def class_that_only_the_lead_knows(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Only the lead says whether it could build a policy; another shard fails in the switch."""
    propose = PolicyAgreement.propose

    def on_the_lead(self: PolicyAgreement, message: SetPolicy) -> None:
        if self._decisions.leads:
            propose(self, message)

    monkeypatch.setattr(PolicyAgreement, "propose", on_the_lead)
    return SimulatedCluster


def change_at_the_clock_under_way(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A shard goes by a new policy at once, and not from the clock that was agreed on."""

    def at(self: Changes, clock: int) -> Any:
        return self.later[-1] if self.later else self.first

    monkeypatch.setattr(Changes, "at", at)
    return SimulatedCluster


def joiner_begins_at_clock_0(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank that joins later counts as if it had done nothing: all others wait for it."""

    def clock_of(self: GroupMembers, rank: int, start: int) -> int:
        return self.clocks.get(rank, 0)

    monkeypatch.setattr(GroupMembers, "clock_of", clock_of)
    return SimulatedCluster


def joiner_begins_ahead(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank that joins later begins with the fastest worker's clock: none waits for it."""

    def clock_of(self: GroupMembers, rank: int, start: int) -> int:
        return self.clocks.get(rank, max(self.clocks.values(), default=0) + 2)

    monkeypatch.setattr(GroupMembers, "clock_of", clock_of)
    return SimulatedCluster


def votes_outlive_a_decision_about_members(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A clock is decided with the votes of before a rank became a member of it."""
    monkeypatch.setattr(GroupMachine, "_forget_votes", lambda self: None)
    return SimulatedCluster


def decision_about_members_is_sent_once(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """Where it is lost, a shard does not know who has joined."""
    never = property(lambda self: None, lambda self, at: None)
    monkeypatch.setattr(DecisionLog, "deadline", never, raising=False)
    return SimulatedCluster


def decisions_are_applied_as_they_come(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A shard applies a decision although the one before it was lost."""
    take = DecisionLog.on_entry

    def on_entry(self: DecisionLog, message: LogEntry) -> None:
        self.number = max(self.number, message.number - 1)
        take(self, message)

    monkeypatch.setattr(DecisionLog, "on_entry", on_entry)
    return SimulatedCluster


def leaver_still_waited_for(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Who has left by its own wish counts on."""

    def live(self: Sessions) -> list[int]:
        states = ("expected", "live", "restarting", "retiring", "left")
        return [r for r, m in sorted(self.members.items()) if m.state in states]

    monkeypatch.setattr(Sessions, "live", live)
    return SimulatedCluster


def pull_ends_a_rest(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A read makes its rank a member."""

    class Enters(GroupMachine):
        def read(self, session: ShardSession, request: ReadRequest, now: float) -> Answer | None:
            if session.live and session.rank not in self.state.members.clocks:
                rank, seq = session.rank, request.message.behind
                clock = self.state.members.clock_of(rank, self.state.start)
                self.join_rank(rank, session.client, seq, now, clock)
            return super().read(session, request, now)

    return with_group(monkeypatch, Enters)


def retiring_worker_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Who is asked to end counts no more, though it still steps."""

    def live(self: Sessions) -> list[int]:
        states = ("expected", "live", "restarting")
        return [r for r, m in sorted(self.members.items()) if m.state in states]

    monkeypatch.setattr(Sessions, "live", live)
    return SimulatedCluster


def nan_not_seen(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Neither a shard nor a rule looks whether a gradient is finite."""

    def apply(rule: Add, value: Any, gradient: Any, state: Any, hyper: Any, *rest: Any) -> None:
        runs, push, out = rest
        for start, stop, _, _ in runs:
            value[start:stop] += push.scale * gradient[start:stop]
        if out is not None:
            out[:] = value

    monkeypatch.setattr(stepping, "largest", lambda parts, step=None: 0.0)
    monkeypatch.setattr(collecting, "largest", lambda parts, step=None: 0.0)
    monkeypatch.setattr(Add, "apply", apply)
    return SimulatedCluster


def dropped_but_reported_applied(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A gradient that is too stale is dropped, and its worker is told that it was applied."""

    class Hides(GroupMachine):
        def _with_news(self, session: Any, answer: Answer | None, *rest: Any) -> Answer | None:
            answer = super()._with_news(session, answer, *rest)
            if answer is None or not isinstance(answer.message, Done):
                return answer
            return Answer(structs.replace(answer.message, skipped=False), answer.written)

    return with_group(monkeypatch, Hides)


@dataclass(frozen=True)
class NoReads(Policy):
    """A user's policy that never lets anybody read."""

    def on_pull(self, pull: Pull, group: GroupView) -> Admission:
        return Wait(tuple(group.clocks))


def lease_given_twice(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What was given to a worker stays free for the next one that asks, once."""
    real, twice = Leases._remove, set[Leases]()

    def remove(self: Leases, given: Span) -> None:
        real(self, given)
        if given.start == 8 and self not in twice:
            twice.add(self)
            self._put(given)

    monkeypatch.setattr(Leases, "_remove", remove)
    return SimulatedCluster


def lease_of_a_dead_worker_lost(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What a worker that ended had not finished goes to no other."""

    def release(self: Leases, client: int, highest: object) -> None:
        self.holders.pop(client)

    monkeypatch.setattr(Leases, "release", release)
    return SimulatedCluster


def lease_returned_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """What a dead worker had finished of its lease is given to others, too."""

    def finished(self: Leases, client: int, mark: tuple[int, int]) -> None:
        holder = self.holders.get(client)
        if holder is not None and holder.ended is None:
            real(self, client, mark)

    real = Leases.finished
    monkeypatch.setattr(Leases, "finished", finished)
    return SimulatedCluster


def deadline_without_its_factor(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """An adaptive deadline is always the least that it may be."""

    def on_clock(policy: Sync, group: GroupView) -> Admission:
        if isinstance(policy.timeout_s, Adaptive):
            policy = Sync(backup=policy.backup, timeout_s=policy.timeout_s.least_s)
        return policy.on_clock(group)

    asked(monkeypatch, "on_clock", Sync, on_clock)
    return SimulatedCluster


def deadline_before_a_median_is_known(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """An adaptive deadline leaves workers behind in the first clocks, when no time is known."""

    def on_clock(policy: Sync, group: GroupView) -> Admission:
        answer, limit = policy.on_clock(group), policy.timeout_s
        if isinstance(limit, Adaptive) and isinstance(answer, Wait) and answer.until_s is None:
            return Sync(timeout_s=limit.least_s).on_clock(group)
        return answer

    asked(monkeypatch, "on_clock", Sync, on_clock)
    return SimulatedCluster


def momentum_by_one_worker_more(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Momentum is corrected for one worker more than there are."""

    def on_push(policy: Async, push: Push, group: GroupView) -> OnPush:
        answer = policy.on_push(push, group)
        assert isinstance(answer, Apply)
        return answer._replace(momentum_reduction=1.0 - 1.0 / (len(group.clocks) + 1))

    asked(monkeypatch, "on_push", Async, on_push)
    return SimulatedCluster


def compensated_from_the_newest_read(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A gradient is corrected by the change since the newest read, not since its own."""

    def of(self: Reads, rank: int, version: int) -> Any:
        kept = self.by_rank.get(rank)
        return kept[-1][1] if kept else {}

    monkeypatch.setattr(Reads, "of", of)
    return SimulatedCluster


def compensated_with_half_of_lam(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The correction is half of what it should be."""

    def on_push(policy: DelayCompensated, push: Push, group: GroupView) -> OnPush:
        return Apply(push.factor, compensate=policy.lam / 2)

    asked(monkeypatch, "on_push", DelayCompensated, on_push)
    return SimulatedCluster


def repeated_answer_without_its_values(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """An answer that is repeated carries nothing of what was written for it."""

    class KeepsNone(ShardSession):
        def keep_outcome(self, answer: Answer) -> None:
            super().keep_outcome(structs.replace(answer, written=()))

    monkeypatch.setattr(sessions_module, "ShardSession", KeepsNone)
    return SimulatedCluster


def repeated_step_has_newer_values(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A step that is repeated has the values of now."""
    requested = Shard._requested

    def reads_again(shard: Shard, event: Requested) -> None:
        session, message = shard.sessions.by_client.get(event.client), event.message
        if isinstance(message, Step) and session and message.seq in session._outcomes:
            for place in message.pull:
                block = shard.blocks[place.block]
                event.memory.at(place.arena, place.offset, block)[...] = block.value
        requested(shard, event)

    monkeypatch.setattr(Shard, "_requested", reads_again)
    return SimulatedCluster


def mirror_begins_anew_with_each_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """What lies in the mirror of a client ends with its connection, and not with its session."""
    come = ServerRole._client

    def forgets(role: ServerRole, conn: Any, hello: Hello) -> None:
        session = role.shard.sessions.by_client.get(hello.client)
        if session is not None:
            session.mirror = Memory({}, mirrored=True)
        come(role, conn, hello)

    monkeypatch.setattr(ServerRole, "_client", forgets)
    return SimulatedCluster


def restarted_worker_does_not_enter(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A later incarnation takes itself to be waited for, also where its rank rested."""

    resume = Steps.resume

    def assumes(steps: Steps, told: Sequence[ServerBeat], *, excluded: bool) -> None:
        resume(steps, told, excluded=False)

    monkeypatch.setattr(Steps, "resume", assumes)
    monkeypatch.setattr(steps_module, "not_joined", lambda reports, rank: frozenset())
    return SimulatedCluster


def samples_risked_on_the_way_in(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A worker that comes later does not join before its first step, which may be for a clock that
    is over: nothing of it is applied, and its mark says that its samples are used."""
    monkeypatch.setattr(Steps, "_join_before", lambda steps, ordered: None)
    return SimulatedCluster


OFF_BY_ONE: tuple[tuple[Plant, Policy, dict[str, Any]], ...] = (
    (one_clock_more_than_the_bound, BoundedStaleness(0), {}),
    (one_clock_more_than_the_bound, BoundedStaleness(1), {}),
    (reads_are_never_held, BoundedStaleness(4), {"steps": 14, "script": STRAGGLER}),
    (one_backup_more, Sync(reduce="sum"), {}),
    (one_backup_more, Sync(reduce="sum", backup=1), {}),
    (one_backup_less, Sync(reduce="sum", backup=1), {"faults": Faults(), "script": STRAGGLER}),
    (deadline_half_as_long, Sync(reduce="sum", timeout_s=0.02), {"script": STRAGGLER}),
    (staleness_one_past_the_limit, Async(drop_after=2), {}),
    (staleness_one_before_the_limit, Async(drop_after=2), {}),
    (staleness_one_before_the_limit, Async(damping=Inverse(0.5)), {}),
    (staleness_one_past_the_limit, Async(damping=Inverse(0.5)), {}),
    (momentum_by_one_worker_more, Async(momentum="corrected"), {}),
    (compensated_from_the_newest_read, DelayCompensated(lam=2.0**-40), {"others": ()}),
    (compensated_with_half_of_lam, DelayCompensated(lam=2.0**-40), {"others": ()}),
    (repeated_answer_without_its_values, Sync(reduce="sum"), REPEATS),
    (repeated_step_has_newer_values, Sync(reduce="sum"), REPEATS),
    (mirror_begins_anew_with_each_connection, Sync(reduce="sum"), REPEATS),
    (deadline_without_its_factor, Sync(timeout_s=ADAPTIVE), {"script": STRAGGLER}),
    (deadline_before_a_median_is_known, Sync(timeout_s=ADAPTIVE), {"script": STRAGGLER}),
    (dropped_but_reported_applied, Async(drop_after=1), {}),
    (buffer_of_one_more, Buffered(3, damping=None), {"others": ()}),
    (buffer_forgets_its_first, Buffered(3, damping=None), {"others": ()}),
    (buffer_not_applied_at_the_end, Buffered(3, damping=None), {"others": ()}),
    (late_step_applied, Sync(reduce="sum", backup=1), {}),
    (late_worker_not_told, Sync(reduce="sum", backup=1), {}),
    (change_one_clock_later_on_one_shard, Async(), {"faults": CHANGES}),
    (change_at_the_clock_under_way, Async(), {"faults": CHANGES}),
    (class_that_only_the_lead_knows, Async(), UNREGISTERED),
    (joiner_begins_at_clock_0, BoundedStaleness(1), {"faults": JOINS}),
    (joiner_begins_ahead, Async(), {"faults": JOINS}),
    (votes_outlive_a_decision_about_members, Sync(reduce="sum"), {"faults": JOINS, "servers": 3}),
    (decision_about_members_is_sent_once, Async(), {}),
    (decisions_are_applied_as_they_come, Sync(reduce="sum"), {}),
    (leaver_still_waited_for, Sync(reduce="sum"), {"faults": Faults()}),
    (pull_ends_a_rest, BoundedStaleness(1), RESTS),
    (retiring_worker_not_waited_for, Sync(reduce="sum"), {"faults": JOINS}),
    (nan_not_seen, Sync(reduce="sum"), {}),
    (nan_not_seen, Async(), {}),
    (lease_given_twice, Sync(reduce="sum"), LEASES),
    (lease_given_twice, Async(), LEASES),
    (lease_of_a_dead_worker_lost, Async(), LEASES),
    (lease_returned_from_its_beginning, Sync(reduce="sum"), LEASES),
    (samples_risked_on_the_way_in, Sync(reduce="sum"), LEASES),
    (restarted_worker_does_not_enter, Sync(reduce="sum"), DEATHS_OF_JOINERS),
)
"""What is planted, under which policy, in which scenario."""
# --- memberships of several groups ---------------------------------------------------------------


def only_the_lead_knows_who_is_a_member(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """The other shards go by the members of the beginning."""

    class Alone(MembershipAgreement):
        def on_decision(self, decision: GroupMembership) -> dict[int, JoinedBy]:
            return super().on_decision(decision) if self._decisions.leads else {}

    monkeypatch.setattr(group_module, "MembershipAgreement", Alone)
    return SimulatedCluster


def groups_that_follow_are_joined_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A rank is a member of the others before the first clock of its entry is decided."""
    joined = Shard._join

    def join(
        self: Shard, session: ShardSession, request: Request, message: JoinGroup
    ) -> Answer | None:
        answer = joined(self, session, request, message)
        if answer is not None:
            own = message.group, session.rank, session.client
            self._outbox.extend(self.followers.end_clock(*own, 0, collects=True))
        return answer

    monkeypatch.setattr(Shard, "_join", join)
    return SimulatedCluster


def rank_that_joins_stays_in_the_other_group(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """Who begins at the first group again is waited for in the second one meanwhile."""
    entering = ClientMembership._entering

    def without_leaving(
        self: ClientMembership, collecting: Sequence[Block], defined: Iterable[Block]
    ) -> list[Joining]:
        found = []
        for each in entering(self, collecting, defined):
            kept = [other for other in each.others if self.pending(other.group_name)]
            found.append(each._replace(others=tuple(kept)))
        return found

    monkeypatch.setattr(ClientMembership, "_entering", without_leaving)
    return SimulatedCluster


def own_clock_of_a_group_that_follows(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A client takes the clock that it has counted for that of a group that follows."""

    take = ClientClocks._join_at

    def own(self: ClientClocks, block: Block, clock: int, late: bool) -> None:
        if not self.membership.follows(block.group_name):
            take(self, block, clock, late)

    monkeypatch.setattr(ClientClocks, "_join_at", own)
    return SimulatedCluster


def call_that_broke_between_its_frames_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A rank whose call ended behind its entry begins the next round as if it had not."""
    monkeypatch.setattr(ClientMembership, "mark_resumed", lambda self: None)
    return SimulatedCluster


def follower_begins_at_the_slowest_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A rank does not begin where those are that are as far as it is in its entry."""
    monkeypatch.setattr(Followers, "_where", lambda *_: None)
    return SimulatedCluster


def every_step_of_a_rank_that_is_ahead_ends_a_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A rank does not heed that it has joined further on than in its round."""
    monkeypatch.setattr(ClientMembership, "is_ahead", lambda *_: None)
    return SimulatedCluster


GROUPS: tuple[Plant, ...] = (
    only_the_lead_knows_who_is_a_member,
    groups_that_follow_are_joined_at_once,
    rank_that_joins_stays_in_the_other_group,
    own_clock_of_a_group_that_follows,
    call_that_broke_between_its_frames_goes_on,
)
"""Plants for two groups in Sync."""
GROUPS_WITH_A_BOUND: tuple[tuple[Plant, Policy], ...] = (
    (follower_begins_at_the_slowest_clock, BoundedStaleness(0)),
    (every_step_of_a_rank_that_is_ahead_ends_a_clock, BoundedStaleness(0)),
    (every_step_of_a_rank_that_is_ahead_ends_a_clock, Sync(reduce="sum")),
)
"""Plants for two groups, the second with a bound of 0; and the first one's policy."""

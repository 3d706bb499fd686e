"""Bugs of sessions, commits, fencing and restarts."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.planted import DEATHS, PATIENCE_S, Plant, with_group, with_shard

from paramserve.client import steps as steps_module
from paramserve.client.call_frames import Prepared
from paramserve.client.links import Slot
from paramserve.client.steps import Steps
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import BoundedStaleness, Sync
from paramserve.core import collecting, ended_calls
from paramserve.core import shard as shard_module
from paramserve.core import shard_sessions as sessions_module
from paramserve.core.client_session import ClientSession, Operation
from paramserve.core.commit import Collect, Contribution
from paramserve.core.decisions import DecisionLog
from paramserve.core.events import ClientHere
from paramserve.core.group import GroupMachine
from paramserve.core.group_members import GroupMembers
from paramserve.core.shard import Shard
from paramserve.core.shard_sessions import Answer, Request, Sessions, ShardSession, Verdict
from paramserve.errors import ParamServeError
from paramserve.messages import (
    Commit,
    Done,
    LogEntry,
    PeerMessage,
    Prepare,
    Refused,
    ShardRequest,
    Step,
)
from paramserve_testing import Faults, SimulatedCluster
from paramserve_testing.client import SimulatedClient


def no_duplicate_filter(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A number that was answered before is executed again."""

    class AcceptsRepeats(ShardSession):
        def admit(self, seq: int) -> Verdict:
            verdict = super().admit(seq)
            return Verdict.NEW if verdict is Verdict.REPEATED else verdict

    monkeypatch.setattr(sessions_module, "ShardSession", AcceptsRepeats)
    return SimulatedCluster


def reads_pass_by_what_was_sent_before(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """A read is answered, whatever of its client waits on the shard."""
    monkeypatch.setattr(ShardSession, "has_answered", lambda session, seq: True)
    return SimulatedCluster


def repeated_read_is_executed_again(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Values are written once more to memory that the client may use for something else by then: it
    shows where a gradient lies there, in memory that is shared."""

    class ForgetsReads(ShardSession):
        last_read = property(lambda session: 0, lambda session, seq: None)  # type: ignore[assignment]

    monkeypatch.setattr(sessions_module, "ShardSession", ForgetsReads)
    return SimulatedCluster


def number_restarted_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank keeps its outcomes over incarnations, but the new worker numbers from 1 again."""

    class KeyedByRank(Shard):
        def _client_here(self, event: ClientHere) -> None:
            older = self.sessions.workers.get(event.rank)
            fresh = event.client not in self.sessions.by_client
            super()._client_here(event)
            session = self.sessions.by_client.get(event.client)
            if older is not None and fresh and session is not None:
                session.last, session._outcomes = older.last, dict(older._outcomes)

    return with_shard(KeyedByRank)


def acknowledge_before_apply(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A step is acknowledged when it is collected, before its clock is decided."""

    class Hasty(Shard):
        def _execute(self, session: ShardSession, request: Request) -> None:
            super()._execute(session, request)
            step = request.message
            if session.held is not None and isinstance(step, Step) and step.push:
                self._effects.replies.append((session.client, Answer(Done(step.seq))))

    return with_shard(Hasty)


def slot_freed_on_timeout(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A client that has lost patience uses the slots of its call for the next one."""
    held: dict[Operation, tuple[Steps, list[Slot]]] = {}
    prepare, sending = Steps._prepare, SimulatedClient.sending

    def keep(steps: Steps, *parts: Any) -> Prepared:
        sent = prepare(steps, *parts)
        held[sent.operation] = steps, sent.captured
        return sent

    def lose_patience(operation: Operation) -> None:
        if not operation.complete:
            let_go(*held[operation])

    def send(client: SimulatedClient, requests: Any, operation: Operation) -> Any:
        if operation in held:
            client.later(PATIENCE_S, lose_patience, operation)
        return sending(client, requests, operation)

    monkeypatch.setattr(Steps, "_prepare", keep)
    monkeypatch.setattr(SimulatedClient, "sending", send)
    return SimulatedCluster


def let_go(steps: Steps, slots: list[Slot]) -> None:
    """Give back the slots of a step's gradients, and not once more when it is answered."""
    steps.give_back(slots)
    slots.clear()


def slot_freed_at_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A slot is free when one shard has answered, though the other has not."""
    held: dict[Operation, tuple[Steps, list[Slot]]] = {}
    prepare, answered = Steps._prepare, Operation.answered

    def keep(steps: Steps, *parts: Any) -> Prepared:
        sent = prepare(steps, *parts)
        held[sent.operation] = steps, sent.captured
        return sent

    def take(operation: Operation, shard: int, reply: Done | Refused) -> None:
        if operation in held:
            let_go(*held.pop(operation))
        answered(operation, shard, reply)

    monkeypatch.setattr(Steps, "_prepare", keep)
    monkeypatch.setattr(Operation, "answered", take)
    return SimulatedCluster


def held_reply_lost_on_reconnect(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A held request belongs to its connection and is forgotten with it."""

    class Forgets(Shard):
        def _client_here(self, event: ClientHere) -> None:
            session = self.sessions.by_client.get(event.client)
            if session is not None:
                session.held = session.applied = None
                session.queue.clear()
            super()._client_here(event)

    return with_shard(Forgets)


def gap_accepted_after_reconnect(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A number is taken although one before it never came."""

    class AcceptsGaps(ShardSession):
        def admit(self, seq: int) -> Verdict:
            self.last = max(self.last, seq - 1)
            return super().admit(seq)

    monkeypatch.setattr(sessions_module, "ShardSession", AcceptsGaps)
    return SimulatedCluster


def one_shard_commits_without_the_lead(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Shard 1 applies a clock as soon as it has all gradients, and does not wait."""

    class Alone(GroupMachine):
        def _send_vote(self, contributors: tuple[int, ...], *failed: Any) -> None:
            clock = self.state.committed
            super()._send_vote(contributors, *failed)
            if self.shard == 1:
                self._on_commit(Commit(self.state.id, clock, contributors, 1.0))

    return with_group(monkeypatch, Alone)


def late_gradient_applied_twice(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A decision that comes again is carried out again."""
    take = DecisionLog.on_entry

    def on_entry(self: DecisionLog, message: LogEntry) -> None:
        if message.number <= self.number:
            self._apply(message.decision)
        take(self, message)

    class Repeats(GroupMachine):
        def _on_commit(self, commit: Commit) -> None:
            before: tuple[Commit, dict[int, Contribution]] | None = getattr(self, "before", None)
            if before is not None and before[0] == commit:
                collecting.apply_commit(self.state, commit, before[1], None)
            elif commit.clock == self.state.committed:
                self.before = (commit, dict(self.state.collect.pending))
            super()._on_commit(commit)

    monkeypatch.setattr(DecisionLog, "on_entry", on_entry)
    return with_group(monkeypatch, Repeats)


def left_out_gradient_kept_for_the_next_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """What a decision leaves out is reported as skipped, and applied with the next clock."""

    class Keeps(GroupMachine):
        def _on_commit(self, commit: Commit) -> None:
            pending = dict(self.state.collect.pending)
            if commit.clock == self.state.committed:
                super()._on_commit(commit)
                for rank, each in pending.items():
                    if each.session.client not in commit.contributors and each.gradients:
                        self.state.collect.pending.setdefault(rank, each)

    return with_group(monkeypatch, Keeps)


def propose_ignored(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A shard insists on the set of contributors that it has."""

    class Insists(Shard):
        def _from_shard(self, message: PeerMessage) -> None:
            if not isinstance(message, Prepare):
                super()._from_shard(message)

    return with_shard(Insists)


def commit_not_repeated(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The lead sends its decision once."""
    never = property(lambda self: None, lambda self, at: None)
    monkeypatch.setattr(DecisionLog, "deadline", never, raising=False)
    return SimulatedCluster


def fencing_ignored(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A worker that counts as dead may go on."""

    class LetsIn(Sessions):
        def refuse(self, event: ClientHere) -> ParamServeError | None:
            return None

        def fence(self) -> list[ShardSession]:
            fenced = super().fence()
            for session in self.by_client.values():
                session.fenced_by = None
            return fenced

    monkeypatch.setattr(shard_module, "Sessions", LetsIn)
    return SimulatedCluster


def outcome_forgotten(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Outcomes are not kept: a request that comes again cannot be answered."""

    class KeepsNone(ShardSession):
        def keep_outcome(self, answer: Answer) -> None:
            pass

    monkeypatch.setattr(sessions_module, "ShardSession", KeepsNone)
    return SimulatedCluster


def only_the_newest_sent_again(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """After a reconnect the client sends its last request, and not those before it."""

    class Newest(ClientSession):
        def to_resend(self) -> list[ShardRequest]:
            return super().to_resend()[-1:]

    return type("Planted", (SimulatedCluster,), {"session_type": Newest})


def restarting_worker_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The others go on at once when a worker dies that will be started again."""

    class Impatient(Sessions):
        def live(self) -> list[int]:
            return [r for r in super().live() if self.members[r].state != "restarting"]

    monkeypatch.setattr(shard_module, "Sessions", Impatient)
    return SimulatedCluster


def older_incarnation_of_a_restarting_worker_not_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """An incarnation that was given up goes on until the next one comes."""
    monkeypatch.setattr(sessions_module, "FENCED_STATES", ("left", "dead"))
    return SimulatedCluster


def clock_follows_a_repeated_step(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A step that is repeated sets its rank's clock back where it had been applied before."""

    def ticked(self: GroupMembers, rank: int, clock: int) -> None:
        self._set({**self.clocks, rank: clock + 1})

    monkeypatch.setattr(GroupMembers, "ticked", ticked)
    return SimulatedCluster


def restarted_worker_begins_at_clock_0(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A new incarnation does not ask how far its rank was."""

    def nothing(*reports: object, **options: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(steps_module, "clocks_to_resume", nothing)
    return SimulatedCluster


def own_step_of_a_restarted_worker_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """Gradients that a dead incarnation left on one shard stay in the way of the next one's."""

    def supersede(self: Collect, rank: int) -> None:
        pass

    monkeypatch.setattr(Collect, "supersede", supersede)
    return SimulatedCluster


def rest_of_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank ends while one step of its call is collected: the next one of that call does not
    count."""

    def never(*arguments: object) -> bool:
        return False

    monkeypatch.setattr(ended_calls, "can_collect", never)
    return SimulatedCluster


def refused_step_ends_no_clock(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A shard refuses a worker's step, and goes on waiting for one of that clock."""

    class Waits(GroupMachine):
        def step(self, session: ShardSession, request: Request, now: float) -> Answer | None:
            assert isinstance(request.message, Step)
            if request.message.weight <= 0.0:
                raise ParamServeError("the step's weight is not positive", fix="correct it")
            return super().step(session, request, now)

    return with_group(monkeypatch, Waits)


REPEATED_READS: dict[str, Any] = {
    "faults": Faults(slow=0.2, duplicate=0.4),
    "links": "shared",
    "outstanding": 1,
}
RESTARTS_SYNC: tuple[Plant, ...] = (
    restarting_worker_not_waited_for,
    restarted_worker_begins_at_clock_0,
    own_step_of_a_restarted_worker_refused,
)
RESTARTS_ASYNC: tuple[Plant, ...] = (
    older_incarnation_of_a_restarting_worker_not_fenced,
    clock_follows_a_repeated_step,
    restarted_worker_begins_at_clock_0,
)
SYNC: tuple[Plant, ...] = (
    acknowledge_before_apply,
    one_shard_commits_without_the_lead,
    late_gradient_applied_twice,
    left_out_gradient_kept_for_the_next_clock,
    commit_not_repeated,
    held_reply_lost_on_reconnect,
    slot_freed_on_timeout,
    slot_freed_at_the_first_answer,
    refused_step_ends_no_clock,
    reads_pass_by_what_was_sent_before,
)
ASYNC: tuple[Plant, ...] = (
    no_duplicate_filter,
    gap_accepted_after_reconnect,
    fencing_ignored,
    outcome_forgotten,
    only_the_newest_sent_again,
    number_restarted_with_the_worker,
)
DEATHS_BY_CLOCK: tuple[tuple[Plant, Policy, dict[str, Any]], ...] = (
    (propose_ignored, Sync(reduce="sum"), {"faults": DEATHS}),
    (repeated_read_is_executed_again, BoundedStaleness(4), REPEATED_READS),
)

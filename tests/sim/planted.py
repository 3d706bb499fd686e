"""Bugs that a parameter server could have, each as a small change of one part.

The checkers know none of them. Each function plants one and returns the cluster to run.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paramserve.core import shard as shard_module
from paramserve.core import stepping
from paramserve.core.events import ClientHere
from paramserve.core.group import Group
from paramserve.core.session import ClientSession, Operation
from paramserve.core.shard import Shard
from paramserve.core.shard_session import Answer, Request, ShardSession, Verdict
from paramserve.core.two_stroke import Collect, Contribution, Lead
from paramserve.errors import ParamServeError
from paramserve.messages import Commit, Done, PeerMessage, Propose, Ready, ShardRequest, Step
from paramserve.testing import SimulatedCluster
from paramserve.testing import process as process_module
from paramserve.testing.network import Frame
from paramserve.testing.process import Connection
from paramserve.testing.scripts import SimulatedWorker

Plant = Callable[[pytest.MonkeyPatch], type[SimulatedCluster]]


def with_shard(kind: type[Shard]) -> type[SimulatedCluster]:
    return type("Planted", (SimulatedCluster,), {"shard_type": kind})


def with_worker(kind: type[SimulatedWorker]) -> type[SimulatedCluster]:
    return type("Planted", (SimulatedCluster,), {"worker_type": kind})


def no_duplicate_filter(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A number that was answered before is executed again."""

    class AcceptsRepeats(ShardSession):
        def admit(self, seq: int) -> Verdict:
            verdict = super().admit(seq)
            return Verdict.NEW if verdict is Verdict.REPEATED else verdict

    monkeypatch.setattr(shard_module, "ShardSession", AcceptsRepeats)
    return SimulatedCluster


def number_restarted_with_the_worker(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A rank keeps its outcomes over incarnations, but the new worker numbers from 1 again."""

    class KeyedByRank(Shard):
        def _client_here(self, event: ClientHere) -> None:
            older = self.workers.get(event.rank)
            fresh = event.client not in self.sessions
            super()._client_here(event)
            session = self.sessions.get(event.client)
            if older is not None and fresh and session is not None:
                session.last, session._outcomes = older.last, dict(older._outcomes)

    return with_shard(KeyedByRank)


def acknowledge_before_apply(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A step is acknowledged when it is collected, before its clock is decided."""

    class Hasty(Shard):
        def _step(self, session: ShardSession, request: Request, step: Step) -> Answer | None:
            answer = super()._step(session, request, step)
            if answer is None and step.push:
                self._effects.replies.append((session.client, Answer(Done(step.seq))))
            return answer

    return with_shard(Hasty)


def slot_freed_on_timeout(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A client that has lost patience uses the slots of its call for the next one."""

    class Impatient(SimulatedWorker):
        def timed_out(self, operation: Operation) -> None:
            self.release(operation)

    return with_worker(Impatient)


def slot_freed_at_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A slot is free when one shard has answered, though the other has not."""

    class Hasty(SimulatedWorker):
        def _reply(self, connection: Connection, frame: Frame) -> None:
            super()._reply(connection, frame)
            for operation in list(self._slots):
                if operation.replies:
                    self.release(operation)

    return with_worker(Hasty)


def held_reply_lost_on_reconnect(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A held request belongs to its connection and is forgotten with it."""

    class Forgets(Shard):
        def _client_here(self, event: ClientHere) -> None:
            session = self.sessions.get(event.client)
            if session is not None:
                session.held = session.done = None
                session.queue.clear()
            super()._client_here(event)

    return with_shard(Forgets)


def gap_accepted_after_reconnect(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A number is taken although one before it never came."""

    class AcceptsGaps(ShardSession):
        def admit(self, seq: int) -> Verdict:
            self.last = max(self.last, seq - 1)
            return super().admit(seq)

    monkeypatch.setattr(shard_module, "ShardSession", AcceptsGaps)
    return SimulatedCluster


def one_shard_commits_without_the_lead(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Shard 1 applies a clock as soon as it has all gradients, and does not wait."""

    class Alone(Shard):
        def _send_ready(self, group: Group, contributors: tuple[int, ...]) -> None:
            clock = group.committed
            super()._send_ready(group, contributors)
            if self.number == 1:
                self._commit(group, Commit(group.id, clock, contributors, 1.0))

    return with_shard(Alone)


def late_gradient_applied_twice(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A decision that comes again is carried out again."""

    class Repeats(Shard):
        def _commit(self, group: Group, commit: Commit) -> None:
            before: tuple[Commit, dict[int, Contribution]] | None = getattr(self, "before", None)
            if before is not None and before[0] == commit:
                stepping.apply_commit(group, commit, before[1])
            elif commit.clock == group.committed:
                self.before = (commit, dict(group.collect.held))
            super()._commit(group, commit)

    return with_shard(Repeats)


def left_out_gradient_kept_for_the_next_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """What a decision leaves out is reported as skipped, and applied with the next clock."""

    class Keeps(Shard):
        def _commit(self, group: Group, commit: Commit) -> None:
            held = dict(group.collect.held)
            if commit.clock == group.committed:
                super()._commit(group, commit)
                for rank, each in held.items():
                    if each.client not in commit.contributors and each.gradients:
                        group.collect.held.setdefault(rank, each)

    return with_shard(Keeps)


def propose_ignored(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A shard insists on the set of contributors that it has."""

    class Insists(Shard):
        def _from_shard(self, message: PeerMessage) -> None:
            if not isinstance(message, Propose):
                super()._from_shard(message)

    return with_shard(Insists)


def commit_not_repeated(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The lead forgets its decision once it is sent."""

    class Forgets(Lead):
        def on_ready(self, ready: Ready, clock: int) -> list[tuple[int, Commit | Propose]]:
            decided = super().on_ready(ready, clock)
            self.last = None
            return decided

    monkeypatch.setattr(shard_module, "Lead", Forgets)
    return SimulatedCluster


def fencing_ignored(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A worker that counts as dead may go on."""

    class LetsIn(Shard):
        def _fence(self, event: ClientHere) -> ParamServeError | None:
            return None

        def _belonging_changed(self) -> None:
            super()._belonging_changed()
            for session in self.sessions.values():
                session.fenced = False

    return with_shard(LetsIn)


def outcome_forgotten(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """Outcomes are not kept: a request that comes again cannot be answered."""

    class KeepsNone(ShardSession):
        def record(self, answer: Answer) -> None:
            pass

    monkeypatch.setattr(shard_module, "ShardSession", KeepsNone)
    return SimulatedCluster


def only_the_newest_sent_again(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """After a reconnect the client sends its last request, and not those before it."""

    class Newest(ClientSession):
        def to_resend(self) -> list[ShardRequest]:
            return super().to_resend()[-1:]

    return type("Planted", (SimulatedCluster,), {"session_type": Newest})


def restarting_worker_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """The others go on at once when a worker dies that will be started again."""

    class Impatient(Shard):
        def live(self) -> list[int]:
            return [r for r in super().live() if self.members[r].state != "restarting"]

    return with_shard(Impatient)


def ghost_of_a_restarting_worker_not_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """An incarnation that was given up goes on until the next one comes."""
    monkeypatch.setattr(shard_module, "ENDED", ("left", "dead"))
    return SimulatedCluster


def clock_follows_a_repeated_step(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A step that is repeated sets its rank's clock back where it had been applied before."""

    def ticked(self: Group, rank: int, clock: int) -> None:
        self.clocks[rank] = clock + 1

    monkeypatch.setattr(Group, "ticked", ticked)
    return SimulatedCluster


def restarted_worker_begins_at_clock_0(monkeypatch: pytest.MonkeyPatch) -> type[SimulatedCluster]:
    """A new incarnation does not ask how far its rank was."""

    def nothing(*reports: object, **options: object) -> dict[str, object]:
        return {}

    monkeypatch.setattr(process_module, "resume", nothing)
    return SimulatedCluster


def own_step_of_a_restarted_worker_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> type[SimulatedCluster]:
    """Gradients that a dead incarnation left on one shard stay in the way of the next one's."""

    def make_way(self: Collect, rank: int) -> None:
        pass

    monkeypatch.setattr(Collect, "make_way", make_way)
    return SimulatedCluster


RESTARTS_SYNC: tuple[Plant, ...] = (
    restarting_worker_not_waited_for,
    restarted_worker_begins_at_clock_0,
    own_step_of_a_restarted_worker_refused,
)
RESTARTS_ASYNC: tuple[Plant, ...] = (
    ghost_of_a_restarting_worker_not_fenced,
    clock_follows_a_repeated_step,
    restarted_worker_begins_at_clock_0,
)
SYNC: tuple[Plant, ...] = (
    acknowledge_before_apply,
    one_shard_commits_without_the_lead,
    late_gradient_applied_twice,
    left_out_gradient_kept_for_the_next_clock,
    propose_ignored,
    commit_not_repeated,
    held_reply_lost_on_reconnect,
    slot_freed_on_timeout,
    slot_freed_at_the_first_answer,
)
ASYNC: tuple[Plant, ...] = (
    no_duplicate_filter,
    gap_accepted_after_reconnect,
    fencing_ignored,
    outcome_forgotten,
    only_the_newest_sent_again,
    number_restarted_with_the_worker,
)

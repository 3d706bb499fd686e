"""What waits on a shard: reads that their policy does not admit yet, and why."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection

from msgspec import structs

from paramserve.consistency.base import Pull, Wait
from paramserve.core import policy_calls, replies
from paramserve.core.block import ShardBlock
from paramserve.core.commit import lead_of
from paramserve.core.events import Inquired
from paramserve.core.group import Group
from paramserve.core.replies import refusal
from paramserve.core.sessions import Answer, Request, ShardSession
from paramserve.core.shard_members import ShardMembers
from paramserve.errors import ParamServeError, PolicyFailed
from paramserve.messages import Done, ShardReply, Step, Waiting


class ShardWaiting(ShardMembers):
    """The part of a shard that answers reads now, or when something has changed."""

    @abstractmethod
    def _execute(self, session: ShardSession, request: Request) -> None: ...

    @abstractmethod
    def _maybe_vote(self, group: Group) -> None: ...

    def _with_news(
        self, group: Group, session: ShardSession, answer: Answer, pending: bool = False
    ) -> Answer:
        """Tell a client that did not count yet, or asks, where it goes on, and each one that its
        group has another policy."""
        message = answer.message
        assert isinstance(message, Done)
        asks = group.id in session.asks_clock
        session.asks_clock.discard(group.id)
        if (pending or asks) and message.at < 0:
            message = structs.replace(message, at=group.clock_of(session.rank))
        told = session.told.get(group.id, 0)
        if told < group.changes.number:
            session.told[group.id] = group.changes.number
            news = tuple(each for each in group.changes.taken if each.number > told)
            message = structs.replace(message, news=news)
        return answer if message is answer.message else Answer(message, answer.payload)

    def _hold(self, group: Group, session: ShardSession, request: Request) -> None:
        """Keep a request until something in the group changes."""
        session.held = request
        group.waiting[session.client] = session

    def _read(
        self,
        session: ShardSession,
        group: Group,
        request: Request,
        done: Done | None = None,
        written: Collection[int] = (),
    ) -> Answer | None:
        """Write the values that a step asks for, or hold it until it may read.

        Args:
            done: what the step's push has just done; None for a step that only pulls.
            written: blocks whose values are at their places already.
        """
        step = request.message
        assert isinstance(step, Step)
        rank = session.rank
        if step.pull and rank in group.clocks:
            clock = step.clock + step.tick
            since = group.at(clock)
            try:
                admission = policy_calls.on_pull(since, Pull(rank, clock), group)
            except PolicyFailed as error:
                error.applied = "no" if done is None else "yes"
                raise
            if isinstance(admission, Wait):
                self._hold(group, session, request)
                session.done = done
                return None
            if since.policy.keeps_reads:
                blocks = [self.blocks[place.block] for place in step.pull]
                dense = [block for block in blocks if isinstance(block, ShardBlock)]
                group.reads.keep(rank, group.version, dense)
            else:
                group.reads.forget(rank)
        if done is None:
            done = Done(step.seq, group.version, group.slowest)
        return replies.with_values(self, step, request.memory, done, written)

    def _clocks_changed(self, group: Group) -> None:
        self._maybe_vote(group)
        self._release_waiting(group)

    def _release_waiting(self, group: Group) -> None:
        """Look again at all that waits for this group, until nothing more comes of it."""
        if group.releasing:
            group.look_again = True  # whoever is at it does
            return
        group.releasing = True
        try:
            again = bool(group.waiting)
            while again:
                again = group.look_again = False
                for session in list(group.waiting.values()):
                    held = session.held
                    if held is not None and group.waiting.get(session.client) is session:
                        again = self._release(session, group, held) or again
                again = again or group.look_again
        finally:
            group.releasing = False

    def _release(self, session: ShardSession, group: Group, held: Request) -> bool:
        """Do a held request if it may be done now; whether it was answered or collected."""
        step = held.message
        assert isinstance(step, Step), "nothing else is ever held"
        done = session.done
        del group.waiting[session.client]
        if done is None:  # nothing of it was done: all of it comes now, or waits on
            session.held = None
            self._execute(session, held)
            if group.waiting.get(session.client) is session:
                return False
            self._drain(session)
            return True
        try:
            answer = self._read(session, group, held, done)
        except ParamServeError as error:
            answer = Answer(refusal(step.seq, error))
        if answer is None:
            return False
        if isinstance(answer.message, Done):
            message = structs.replace(done, version=group.version, clock=group.slowest)
            answer = self._with_news(group, session, Answer(message, answer.payload))
        self._answer(session, answer)
        self._drain(session)
        return True

    def _inquired(self, event: Inquired) -> None:
        group = self.groups.get(event.message.group)
        missing: tuple[tuple[int, int], ...] = ()
        reason = "the group is not defined here"
        clock = 0
        if group is not None:
            clock = group.slowest
            reason, ranks = self._why(group, event.client)
            missing = tuple((rank, group.clocks[rank]) for rank in ranks if rank in group.clocks)
        answer: ShardReply = Waiting(event.message.group, clock, missing, reason)
        self._effects.replies.append((event.client, Answer(answer)))

    def _why(self, group: Group, client: int) -> tuple[str, tuple[int, ...]]:
        """What a client of this group waits for, and which ranks."""
        lead = lead_of(group.id, self.shards)
        session = group.waiting.get(client)
        if session is not None and session.held is not None:
            step = session.held.message
            assert isinstance(step, Step), "nothing else is ever held"
            if group.changes.paused is not None:
                return f"shard {self.number} waits for the change of policy on shard {lead}", ()
            clock = step.clock + step.tick
            since = group.at(clock)
            try:
                answer = policy_calls.on_pull(since, Pull(session.rank, clock), group)
            except PolicyFailed as error:
                return error.failed, ()
            name = type(since.policy).__name__
            return f"{name} does not let worker {session.rank} read at clock {clock} yet", (
                answer.workers if isinstance(answer, Wait) else ()
            )
        held = group.collect.pending
        if group.collect.sent is not None:
            return f"shard {self.number} waits for the decision of shard {lead}", ()
        if held:
            absent = tuple(rank for rank in sorted(group.clocks) if rank not in held)
            return "the clock waits for its slowest workers", group.collect.missing or absent
        slow = tuple(r for r, c in sorted(group.clocks.items()) if c == group.slowest)
        return "nothing is held here", slow

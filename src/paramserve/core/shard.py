"""The shard: the whole server logic as `step(event, now) -> Effects`, with no input or output.

It runs serially and has no locks. It decides what a request does to the blocks, who is answered
when, and what the other shards are told; the server role moves the bytes.
"""

from __future__ import annotations

import numpy as np
from msgspec import structs

from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core import collecting, replies, stepping
from paramserve.core.block import ShardBlock, check_spec
from paramserve.core.commit import Lead, lead_of
from paramserve.core.events import (
    AnswersRead,
    ClientBye,
    ClientGone,
    ClientHere,
    DeadlineReached,
    Effects,
    Event,
    FromShard,
    Inquired,
    MembersChanged,
    Requested,
)
from paramserve.core.group import Group, Watching
from paramserve.core.replies import no_memory, refusal
from paramserve.core.sessions import Answer, Memory, Request, ShardSession, Verdict
from paramserve.core.shard_changes import ShardChanges
from paramserve.core.shard_members import ENDED, SESSION_KEEP_S
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import (
    DefineMismatch,
    Overloaded,
    ParamServeError,
)
from paramserve.ids import NO_RANK
from paramserve.messages import (
    CURRENT_CLOCK,
    Assign,
    Define,
    Done,
    Fetch,
    Forgetting,
    GroupReport,
    Put,
    Scan,
    SetPolicy,
    Step,
    SuspendMembership,
    TakeSnapshot,
    Undefine,
    Watch,
)
from paramserve.rules.registry import build as build_rule

__all__ = ["ENDED", "Shard", "refusal"]


class Shard(ShardChanges):
    """One slice of the parameter space; its arguments are those of `ShardMembers`."""

    def step(self, event: Event, now: float) -> Effects:
        """Let one event happen.

        Args:
            event: see the classes above.
            now: seconds on a clock that never goes back.
        """
        self._now = now
        effects = self._effects = Effects()
        match event:
            case Requested():
                self._requested(event)
            case FromShard():
                self._from_shard(event.message)
            case ClientHere():
                self._client_here(event)
            case ClientGone():
                self._client_gone(event.client)
            case ClientBye():
                self._client_bye(event.client)
            case AnswersRead():
                session = self.sessions.get(event.client)
                if session is not None:
                    session.forget(min(event.oldest, session.last + 1))
            case Inquired():
                self._inquired(event)
            case MembersChanged():
                self._members_changed(event.message)
            case DeadlineReached():
                self._deadline_reached()
        effects.deadline = self._next_deadline()
        return effects

    def report(self, *, notes: bool = False) -> tuple[GroupReport, ...]:
        """What this shard has done, group by group; with `notes`, those of the ranks as well."""
        return tuple(group.report(notes=notes) for _, group in sorted(self.groups.items()))

    # --- numbered requests -----------------------------------------------------------------------

    def _requested(self, event: Requested) -> None:
        session = self.sessions.get(event.client)
        if session is None:
            self._effects.drops.append(event.client)
            return
        seq = event.message.seq
        verdict = session.admit(seq)
        if verdict is Verdict.NEW:
            request = Request(event.message, event.memory)
            if isinstance(event.message, Forgetting):
                session.forget(min(event.message.oldest, seq))
            if session.held is not None:
                session.queue.append(request)
            else:
                self._execute(session, request)
        elif verdict is Verdict.REPEATED:
            self._effects.replies.append((session.client, session.outcome(seq)))
        elif verdict is Verdict.GAP:
            self._effects.drops.append(session.client)
        elif verdict is Verdict.FORGOTTEN:
            gone = ParamServeError(
                f"request {seq} of client {session.client} is older than the outcomes kept",
                applied="unknown",
                fix="keep no more requests unanswered than the window that was agreed",
            )
            self._effects.replies.append((session.client, Answer(refusal(seq, gone))))

    def _execute(self, session: ShardSession, request: Request) -> None:
        """Run a request; answer it, or leave it held."""
        try:
            if session.fenced:
                raise self._fenced(session.rank, session.incarnation, self.members[session.rank])
            answer = self._dispatch(session, request)
        except ParamServeError as error:
            answer = Answer(refusal(request.message.seq, error))
        except (ValueError, TypeError) as error:
            # A rule's own check of hyper-parameters, before anything was written.
            wrong = ParamServeError(str(error), fix="correct the argument")
            answer = Answer(refusal(request.message.seq, wrong))
        except MemoryError:
            what = f"a {type(request.message).__name__}"
            answer = Answer(refusal(request.message.seq, no_memory(self.number, what, "unknown")))
        if answer is not None:
            self._answer(session, answer)

    def _drain(self, session: ShardSession) -> None:
        """Execute what waits behind a request that is answered now.

        That may answer other sessions' requests, whose queues the active call drains after this
        one: a chain of them needs no deeper stack.
        """
        self._to_drain.append(session)
        if self._draining:
            return
        self._draining = True
        try:
            while self._to_drain:
                session = self._to_drain.popleft()
                while session.queue and session.held is None:
                    self._execute(session, session.queue.popleft())
        finally:
            self._draining = False

    def _dispatch(self, session: ShardSession, request: Request) -> Answer | None:
        match request.message:
            case Step():
                return self._step(session, request, request.message)
            case Define():
                return self._define(request.message, request.memory)
            case Undefine() as message:
                return self._undefine(message)
            case Assign() as message:
                return replies.assign(self, message, request.memory)
            case Fetch() as message:
                return replies.fetch(self, message, request.memory)
            case Scan() as message:
                return replies.scan(self, message, request.memory)
            case Put() as message:
                return replies.put(self, message, request.memory)
            case Watch() as message:
                return self._watch(session, message)
            case TakeSnapshot() as message:
                return replies.take_snapshot(self, session.client, message, request.memory)
            case SuspendMembership() as message:
                return self._rest(session, message)
            case SetPolicy() as message:
                return self._set_policy(message)

    def _define(self, message: Define, memory: Memory) -> Answer:
        spec = message.spec
        known = self.blocks.get(spec.block)
        if known is not None and known.spec != spec:
            raise DefineMismatch(
                f"block {spec.block} is defined as {known.spec}, not as {spec}",
                fix="define a name with one shape, dtype, rule and group",
            )
        if known is None or known.attempt < message.attempt:
            block = self._new_block(message)
            if isinstance(block, ShardBlock):
                np.copyto(block.value, replies.one(block, message.arena, message.offset, memory))
            group = self.groups.get(spec.group)
            if group is None:
                group = self._new_group(message)
            self.blocks[spec.block] = group.blocks[spec.block] = block
            group.table = block if isinstance(block, KeyedBlock) else None
        return Answer(Done(message.seq, self.groups[spec.group].version))

    def _undefine(self, message: Undefine) -> Answer:
        """No client knows of the block yet, but the one that has tried to define it."""
        block = self.blocks.get(message.block)
        if block is not None and block.attempt <= message.attempt:
            group = self.groups[block.spec.group]
            del self.blocks[message.block], group.blocks[message.block]
            group.table = None
            if not group.blocks:
                del self.groups[group.id]
        return Answer(Done(message.seq))

    def _new_block(self, message: Define) -> ShardBlock | KeyedBlock:
        spec = message.spec
        if spec.table is None:
            check_spec(spec, self.shards)
        rule = None if spec.rule is None else build_rule(spec.rule, self.rules)
        if spec.table is not None and rule is None:
            raise ParamServeError(f"table {spec.group_name!r} has no rule", fix="give it one")
        try:
            if spec.table is not None and rule is not None:
                return KeyedBlock(spec, self.shards, rule, message.attempt)
            return ShardBlock(spec, self.number, rule, message.attempt)
        except MemoryError:
            size = sum(spec.cuts[self.number + 1 :][:1]) - sum(spec.cuts[self.number :][:1])
            what = f"{size} elements of {spec.dtype}" if spec.table is None else "a table"
            raise Overloaded(
                f"shard {self.number} has no memory for block {spec.block} ({what})",
                fix="use more servers on more machines, or smaller parameters",
            ) from None

    def _new_group(self, message: Define) -> Group:
        number, own = message.spec.group, message.spec.consistency
        policy = self.policy if own is None else build_policy(own, self.policies)
        lead = Lead(self.shards) if lead_of(number, self.shards) == self.number else None
        check_table_policy(message.spec.group_name, policy, message.spec.table is not None)
        group = Group(number, message.spec.group_name, policy, lead, self.live())
        self.groups[number] = group
        return group

    def _watch(self, session: ShardSession, message: Watch) -> Answer:
        group = self.group(message.group)
        if group.table is not None:
            raise ParamServeError(
                f"{group.name!r} is a table, of which no snapshots are kept",
                fix="read it with the methods of the table",
            )
        if message.every <= 0:
            group.watching.pop(session.client, None)
        else:
            keep = min(max(1, message.keep), self.limits.snapshots_max)
            group.watching[session.client] = Watching(message.every, keep)
        return Answer(Done(message.seq, group.version))

    def _rest(self, session: ShardSession, message: SuspendMembership) -> Answer:
        group = self.group(message.group)
        if session.rank in group.clocks:
            group.rest(session.rank)
            self._count(group, self.live())
        return Answer(Done(message.seq, group.version, group.slowest))

    # --- steps -----------------------------------------------------------------------------------

    def _step(self, session: ShardSession, request: Request, step: Step) -> Answer | None:
        group = self.group(step.group)
        if group.table is not None:
            group.table.clock = group.slowest
            group.table.collects = group.collects
        asked = request
        if step.clock == CURRENT_CLOCK:
            session.asks_clock.add(group.id)
            session.asked = request
            step = structs.replace(step, clock=group.clocks.get(session.rank, group.start))
            request = request._replace(message=step)
        parts: list[stepping.Part] = []
        wrong: Exception | None = None
        try:
            parts = stepping.gradients(self, step, request.memory)
        except (ParamServeError, ValueError, TypeError) as error:
            if not step.tick:
                raise
            wrong = error  # it ends a clock all the same: the worker has counted it
        paused = group.changes.paused
        if paused is not None and session.rank >= 0 and step.clock >= paused.clock:
            self._hold(group, session, asked)
            return None
        pending = session.rank not in group.clocks and self._may_enter(session)
        steps = bool(step.push or step.tick or step.skip)
        collects = group.collects
        rests = session.rank in group.resting and not (steps or group.id in step.enters)
        if pending and not (collects or rests):
            if wrong is not None:
                raise wrong
            group.enter(session.rank)
        elif pending and collects and step.clock > group.start and self.shards > 1:
            self._hold(group, session, request)  # until the clocks before are decided here, too
            return None
        if wrong is None and step.note and step.tick and session.rank >= 0:
            group.keep_note(session.rank, step.clock, step.note)
        self._catch_up(group, session, step)
        since = group.of(session.rank, max(step.clock, group.start) if pending else step.clock)
        if pending and steps and step.clock < since.clock:
            # Of before a change of policy, which other shards may have handled the old way.
            if wrong is not None:
                raise wrong
            late = collecting.late(self, group, request, session, group.start)
            return self._with_news(group, session, late, pending)
        if not steps:
            answer = self._read(session, group, request)
        elif since.policy.collects:
            answer = self._bring(group, session, request, parts, pending, wrong)
        else:
            try:
                if wrong is not None:
                    raise wrong
                done, written = stepping.apply_now(
                    group, session, step, parts, request.memory, since
                )
            finally:
                self._tick(group, session, step)
            if done.version != group.version:  # whom the tick has released has pushed as well
                done, written = structs.replace(done, version=group.version), ()
            answer = self._read(session, group, request, done, written)
            if since.guarded:  # a user's policy may look at anything
                self._release_waiting(group)
        if answer is None or not isinstance(answer.message, Done):
            return answer
        return self._with_news(group, session, answer, pending)

    def _catch_up(self, group: Group, session: ShardSession, step: Step) -> None:
        """A worker that has entered on another shard at a later clock goes on from there: on this
        one, too, or all would wait for steps that it will never send."""
        known = group.clocks.get(session.rank, step.clock)
        if known < step.clock and not group.at(known).policy.collects:
            group.ticked(session.rank, step.clock - 1)
            self._release_waiting(group)

    def _tick(self, group: Group, session: ShardSession, step: Step) -> None:
        """A step ends its worker's clock, also if it was refused: the worker has counted it. Under
        a policy that collects, the commit does that."""
        if (
            not step.tick
            or session.rank not in group.clocks
            or group.at(step.clock).policy.collects
        ):
            return
        slowest = group.slowest
        group.ticked(session.rank, step.clock)
        if group.slowest != slowest:
            self._release_waiting(group)

    # --- time ------------------------------------------------------------------------------------

    def _deadline_reached(self) -> None:
        for group in list(self.groups.values()):  # what is released may define a new one
            group.now = self._now
            collect, changes, changing = group.collect, group.changes, group.changing
            if collect.sent is not None and collect.repeat_at <= self._now:
                self._repeat_vote(group, collect.sent)
            if collect.due is not None and collect.due <= self._now:
                collect.due = None
                self._maybe_vote(group)
            undecided = changing is not None and changing.decided is None
            if changing is not None and undecided and changing.repeat_at <= self._now:
                self._pause_all(group, changing)
            if changes.paused is not None and changes.repeat_at <= self._now:
                self._tell_paused(group, changes.paused)
        expired = [
            session.client
            for session in self.sessions.values()
            if (session.rank == NO_RANK or session.fenced)
            and session.gone_at is not None
            and self._now - session.gone_at >= SESSION_KEEP_S
        ]
        for client in expired:
            self._client_bye(client)

    def _next_deadline(self) -> float | None:
        times = []
        for group in self.groups.values():
            if group.collect.due is not None:
                times.append(group.collect.due)
            if self.shards == 1:
                continue  # Its own lead: nothing is ever repeated.
            if group.collect.sent is not None:
                times.append(group.collect.repeat_at)
            if group.changing is not None and group.changing.decided is None:
                times.append(group.changing.repeat_at)
            if group.changes.paused is not None:
                times.append(group.changes.repeat_at)
        return min(times, default=None)

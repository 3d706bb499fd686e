"""The shard: the whole server logic as `step(event, now) -> Effects`, with no input or output.

It runs serially and has no locks. It decides what a request does to the blocks, who is answered
when, and what the other shards are told; the server role moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import structs

from paramserve.config import Limits
from paramserve.core import stepping
from paramserve.core.block import ShardBlock, check_spec
from paramserve.core.consistency import Consistency
from paramserve.core.events import (
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
from paramserve.core.shard_session import Answer, Memory, Request, ShardSession, Verdict
from paramserve.core.two_stroke import Lead, lead_of
from paramserve.errors import (
    ClientClosed,
    DefineMismatch,
    Overloaded,
    ParamServeError,
    UnknownName,
    WorkerFenced,
)
from paramserve.ids import NO_RANK
from paramserve.messages import (
    Assign,
    Commit,
    Define,
    Done,
    Fetch,
    GroupReport,
    Member,
    Members,
    PeerMessage,
    Propose,
    Ready,
    Refused,
    ShardReply,
    Step,
    TakeSnapshot,
    Waiting,
    Watch,
)
from paramserve.rules.registry import NONE
from paramserve.rules.registry import build as build_rule

SESSION_KEEP_S = 60.0
"""A client that is no live worker is forgotten this long after its connection ended."""
ENDED = ("left", "dead", "restarting")
"""States of a member whose present incarnation may change nothing any more."""


class Shard:
    """One slice of the parameter space.

    Args:
        number: which of the cluster's shards this is.
        shards: how many there are.
        workers: ranks that are expected; each counts as live until the coordinator says otherwise.
        policy: consistency of every group.
        resend_s: after which a `Ready` is sent again.
        rules: classes by name that the owner registered, besides the built-in ones.
        allocate: gives memory [bytes] for the values of a reply that travel in it.
    """

    def __init__(
        self,
        number: int,
        shards: int,
        workers: int,
        policy: Consistency,
        *,
        limits: Limits,
        resend_s: float,
        rules: Mapping[str, type[Any]] = NONE,
        allocate: Callable[[int], stepping.Bytes] = stepping.fresh,
    ) -> None:
        self.number = number
        self.shards = shards
        self.groups: dict[int, Group] = {}
        self.blocks: dict[int, ShardBlock] = {}
        self.sessions: dict[int, ShardSession] = {}
        self.members = {rank: Member(rank, 0, 0, "expected") for rank in range(workers)}
        self.workers: dict[int, ShardSession] = {}
        """Sessions of the newest incarnation of each rank."""
        self.policy = policy
        self.limits = limits
        self.resend_s = resend_s
        self.rules = rules
        self.allocate = allocate
        self._members_number = 0
        self._now = 0.0
        self._effects = Effects()

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
            case Inquired():
                self._inquired(event)
            case MembersChanged():
                self._members_changed(event.message)
            case DeadlineReached():
                self._deadline_reached()
        effects.deadline = self._next_deadline()
        return effects

    def live(self) -> list[int]:
        """Ranks that a synchronous clock waits for, in order."""
        awaited = ("expected", "live", "restarting")
        return [r for r, m in sorted(self.members.items()) if m.state in awaited]

    def report(self) -> tuple[GroupReport, ...]:
        """What this shard has done, group by group."""
        return tuple(group.report() for _, group in sorted(self.groups.items()))

    # --- who is here ---------------------------------------------------------------------------

    def _client_here(self, event: ClientHere) -> None:
        refused = self._fence(event)
        if refused is not None:
            self._effects.refused = refused
            return
        session = self.sessions.get(event.client)
        if session is None:
            session = ShardSession(event.client, event.incarnation, event.rank, event.window)
            self.sessions[event.client] = session
        session.gone_at = None
        if event.rank == NO_RANK:
            return
        self.workers[event.rank] = session
        member = self.members.get(event.rank)
        if member is not None and event.incarnation > member.incarnation:
            # It came before the coordinator's news of it; only the coordinator gives incarnations.
            self.members[event.rank] = Member(event.rank, event.client, event.incarnation, "live")
            self._belonging_changed()

    def _fence(self, event: ClientHere) -> ParamServeError | None:
        if not 1 <= event.window <= self.limits.outstanding_max:
            return Overloaded(
                f"client {event.client} wants {event.window} requests outstanding, "
                f"outstanding_max is {self.limits.outstanding_max}",
                fix="ask for fewer",
            )
        if event.again and event.client not in self.sessions:
            return ClientClosed(
                f"client {event.client} came back after its session on shard {self.number} was "
                f"forgotten ({SESSION_KEEP_S:.0f} s without a connection)",
                applied="unknown",
                fix="make a new client",
            )
        if event.client not in self.sessions and len(self.sessions) >= self.limits.clients_max:
            return Overloaded(
                f"shard {self.number} has {len(self.sessions)} clients, its clients_max",
                fix="close clients that are not used, or add servers",
            )
        member = self.members.get(event.rank)
        if member is None:
            return None
        older = event.incarnation < member.incarnation
        ended = event.incarnation == member.incarnation and member.state in ENDED
        if older or ended:
            return self._fenced(event.rank, event.incarnation, member)
        return None

    def _fenced(self, rank: int, incarnation: int, member: Member) -> WorkerFenced:
        return WorkerFenced(
            f"worker {rank} (incarnation {incarnation}) is {member.state} for the cluster, "
            f"which knows incarnation {member.incarnation}",
            fix="let this process end; a new one may join",
        )

    def _client_gone(self, client: int) -> None:
        session = self.sessions.get(client)
        if session is not None:
            session.gone_at = self._now

    def _client_bye(self, client: int) -> None:
        session = self.sessions.pop(client, None)
        for group in self.groups.values():
            group.watching.pop(client, None)
        if session is not None and self.workers.get(session.rank) is session:
            del self.workers[session.rank]

    def _members_changed(self, message: Members) -> None:
        if message.number <= self._members_number:
            return
        self._members_number = message.number
        for member in message.members:
            known = self.members.get(member.rank)
            if known is None or known.incarnation <= member.incarnation:
                self.members[member.rank] = member
        self._belonging_changed()

    def _belonging_changed(self) -> None:
        """Fence the sessions of those who have ended, and go on with those who live."""
        for session in list(self.sessions.values()):
            member = self.members.get(session.rank)
            if member is None or session.fenced:
                continue
            ended = member.client == session.client and member.state in ENDED
            if ended or session.incarnation < member.incarnation:
                session.fenced = True
                self._let_go(session, member)
        live = self.live()
        for group in list(self.groups.values()):  # what is released may define a new one
            group.belong(live)
            self._clocks_changed(group)

    def _let_go(self, session: ShardSession, member: Member) -> None:
        """Refuse what a fenced session waits for; what is collected waits for its commit."""
        held = session.held
        if held is None or self._collected(session, held):
            return
        error = self._fenced(session.rank, session.incarnation, member)
        error.applied = "no" if session.done is None else "yes"
        self._answer(session, Answer(refusal(held.message.seq, error)))
        self._drain(session)

    def _collected(self, session: ShardSession, held: Request) -> bool:
        """Whether a held request is part of a synchronous clock, and not a pull that waits."""
        assert isinstance(held.message, Step), "nothing else is ever held"
        return self.groups[held.message.group].collect.has_step(held.message)

    def _clocks_changed(self, group: Group) -> None:
        self._maybe_ready(group)
        for session in list(self.workers.values()):
            held = session.held
            if held is None or self._collected(session, held):
                continue
            assert isinstance(held.message, Step), "nothing else is ever held"
            if held.message.group == group.id:
                self._release(session, group, held)

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
        if answer is not None:
            self._answer(session, answer)

    def _answer(self, session: ShardSession, answer: Answer) -> None:
        session.record(answer)
        session.held = session.done = None
        self._effects.replies.append((session.client, answer))

    def _drain(self, session: ShardSession) -> None:
        while session.queue and session.held is None:
            self._execute(session, session.queue.popleft())

    def _dispatch(self, session: ShardSession, request: Request) -> Answer | None:
        match request.message:
            case Step():
                return self._step(session, request, request.message)
            case Define():
                return self._define(request.message, request.memory)
            case Assign() as message:
                block = self.block(message.block)
                source = stepping.one(block, message.arena, message.offset, request.memory)
                block.assign(message.field, source, message.active, message.counts)
                return Answer(Done(message.seq, self.groups[block.spec.group].version))
            case Fetch() as message:
                return stepping.fetch(self, message, request.memory)
            case Watch() as message:
                return self._watch(session, message)
            case TakeSnapshot() as message:
                return stepping.take_snapshot(self, session.client, message, request.memory)

    def group(self, number: int) -> Group:
        """The group of this number.

        Raises:
            UnknownName: nothing was defined in it. Nothing was applied.
        """
        group = self.groups.get(number)
        if group is None:
            raise UnknownName(
                f"shard {self.number} has no group {number}", fix="define parameters in it first"
            )
        return group

    def block(self, number: int) -> ShardBlock:
        """The block of this number.

        Raises:
            UnknownName: it was never defined. Nothing was applied.
        """
        block = self.blocks.get(number)
        if block is None:
            raise UnknownName(f"shard {self.number} has no block {number}", fix="define it first")
        return block

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
            np.copyto(block.value, stepping.one(block, message.arena, message.offset, memory))
            group = self.groups.get(spec.group)
            if group is None:
                group = self._new_group(spec.group, spec.group_name)
            self.blocks[spec.block] = group.blocks[spec.block] = block
        return Answer(Done(message.seq, self.groups[spec.group].version))

    def _new_block(self, message: Define) -> ShardBlock:
        spec = message.spec
        check_spec(spec, self.shards)
        rule = None if spec.rule is None else build_rule(spec.rule, self.rules)
        try:
            return ShardBlock(spec, self.number, rule, message.attempt)
        except MemoryError:
            raise Overloaded(
                f"shard {self.number} has no memory for block {spec.block} "
                f"({spec.cuts[self.number + 1] - spec.cuts[self.number]} elements of {spec.dtype})",
                fix="use more servers on more machines, or smaller parameters",
            ) from None

    def _new_group(self, number: int, name: str) -> Group:
        leads = lead_of(number, self.shards) == self.number
        lead = Lead(self.shards, self.policy) if leads else None
        group = self.groups[number] = Group(number, name, self.policy, lead)
        group.clocks = dict.fromkeys(self.live(), 0)
        return group

    def _watch(self, session: ShardSession, message: Watch) -> Answer:
        group = self.group(message.group)
        if message.every <= 0:
            group.watching.pop(session.client, None)
        else:
            keep = min(max(1, message.keep), self.limits.snapshots_max)
            group.watching[session.client] = Watching(message.every, keep)
        return Answer(Done(message.seq, group.version))

    # --- steps -----------------------------------------------------------------------------------

    def _step(self, session: ShardSession, request: Request, step: Step) -> Answer | None:
        group = self.group(step.group)
        parts = stepping.gradients(self, step, request.memory)
        if not (step.push or step.tick or step.skip):
            return self._read(session, group, request)
        if group.collects:
            return self._bring(group, session, request, parts)
        done = stepping.apply_now(group, session, step, parts, request.memory)
        if step.tick and session.rank in group.clocks:
            group.ticked(session.rank, step.clock)
            self._clocks_changed(group)
        return self._read(session, group, request, done)

    def _read(
        self, session: ShardSession, group: Group, request: Request, done: Done | None = None
    ) -> Answer | None:
        """Write the values that a step asks for, or hold it until it may read.

        Args:
            done: what the step's push has just done; None for a step that only pulls.
        """
        step = request.message
        assert isinstance(step, Step)
        if step.pull and session.rank in group.clocks:
            needed = group.policy.on_pull(step.clock + step.tick)
            if group.slowest() < needed:
                session.held, session.done = request, done
                return None
        written = stepping.written_by(step, done) if done is not None else ()
        if done is None:
            done = Done(step.seq, group.version, group.slowest())
        return stepping.with_values(self, step, request.memory, done, written)

    def _release(self, session: ShardSession, group: Group, held: Request) -> None:
        """Answer a held pull if it may read now."""
        assert isinstance(held.message, Step), "nothing else is ever held"
        if group.collects and (held.message.push or held.message.tick or held.message.skip):
            session.held = None  # It came before its clock.
            self._execute(session, held)
            self._drain(session)
            return
        done = session.done
        answer = self._read(session, group, held)
        if answer is None:
            session.done = done
            return
        if done is not None:
            message = structs.replace(done, version=group.version, clock=group.slowest())
            answer = Answer(message, answer.payload)
        self._answer(session, answer)
        self._drain(session)

    # --- synchronous clocks ----------------------------------------------------------------------

    def _bring(
        self, group: Group, session: ShardSession, request: Request, parts: list[stepping.Part]
    ) -> Answer | None:
        """Collect a step for the present clock; answered when the clock is decided.

        The first step of a newer incarnation may find the clock with its predecessor's gradients,
        or just closed with them, or without any while the rank had ended.
        """
        step, rank = request.message, session.rank
        assert isinstance(step, Step)
        collect = group.collect
        first = session.incarnation > 1 and group.brought.get(rank) != session.client
        if first and step.tick and rank in group.clocks:
            if step.clock == group.committed + 1:
                session.held = request  # The present clock's decision is on its way.
                return None
            if step.clock == group.committed - 1:
                group.brought[rank] = session.client
                closed = Done(step.seq, group.version, group.slowest(), skipped=True)
                return stepping.with_values(self, step, request.memory, closed)
            older = collect.held.get(rank)
            if older is not None and step.clock == group.committed:
                collect.make_way(rank)
                forgotten = self.sessions.get(older.client)
                if forgotten is not None:
                    self._let_go(forgotten, self.members[rank])
        stepping.collect(self, group, session, request, parts)
        group.brought[rank] = session.client
        session.held = request
        if collect.sent is not None and collect.has(group.clocks):
            collect.sent = None  # The lead is told of what has come since.
        self._maybe_ready(group)
        return None

    def _maybe_ready(self, group: Group) -> None:
        """Tell the lead that every live worker's gradients of this clock are here."""
        collect = group.collect
        if collect.held and collect.sent is None and collect.has(group.clocks):
            self._send_ready(group, collect.clients())

    def _send_ready(self, group: Group, contributors: tuple[int, ...]) -> None:
        ready = stepping.ready(group, self.number, contributors)
        group.collect.sent = ready
        group.collect.repeat_at = self._now + self.resend_s
        self._to_shard(lead_of(group.id, self.shards), ready)

    def _to_shard(self, shard: int, message: PeerMessage) -> None:
        if shard == self.number:
            self._from_shard(message)
        else:
            self._effects.peers.append((shard, message))

    def _from_shard(self, message: PeerMessage) -> None:
        group = self.groups.get(message.group)
        if group is None:
            return  # Its define is still on the way; the sender repeats.
        match message:
            case Ready():
                if group.lead is not None:
                    for shard, answer in group.lead.on_ready(message, group.committed):
                        self._to_shard(shard, answer)
            case Propose():
                collect = group.collect
                settled = collect.sent is not None or collect.has(group.clocks)
                # Of a rank that still counts, this shard and another have two incarnations'.
                differs = any(
                    rank in group.clocks and each.client not in message.contributors
                    for rank, each in collect.held.items()
                )
                if message.clock == group.committed and settled and not differs:
                    agreed = (c for c in collect.clients() if c in message.contributors)
                    self._send_ready(group, tuple(agreed))
            case Commit():
                self._commit(group, message)

    def _commit(self, group: Group, commit: Commit) -> None:
        if commit.clock != group.committed:
            return  # Answered before.
        held = group.collect.everything()
        chosen = group.collect.chosen(commit.contributors)
        group.collect.clear()
        stepping.apply_commit(group, commit, chosen)
        group.committed += 1
        group.clocks = dict.fromkeys(group.clocks, group.committed)
        waiting = []
        for each in held:
            session = self.sessions.get(each.client)
            if session is not None and session.held is not None:
                waiting.append(session)
                self._answer(
                    session, stepping.after_commit(self, group, commit, each.step, session)
                )
        for session in waiting:
            self._drain(session)
        self._clocks_changed(group)

    def _deadline_reached(self) -> None:
        for group in list(self.groups.values()):  # what is released may define a new one
            collect = group.collect
            if collect.sent is not None and collect.repeat_at <= self._now:
                collect.repeat_at = self._now + self.resend_s
                self._to_shard(lead_of(group.id, self.shards), collect.sent)
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
        if self.shards == 1:
            return None  # Its own lead: nothing is ever repeated.
        times = [
            group.collect.repeat_at
            for group in self.groups.values()
            if group.collect.sent is not None
        ]
        return min(times, default=None)

    def _inquired(self, event: Inquired) -> None:
        group = self.groups.get(event.message.group)
        missing: tuple[tuple[int, int], ...] = ()
        reason = "the group is not defined here"
        clock = 0
        if group is not None:
            clock = group.slowest()
            held = group.collect.held
            if group.collect.sent is not None:
                lead = lead_of(group.id, self.shards)
                reason = f"shard {self.number} waits for the decision of shard {lead}"
            elif held:
                missing = tuple((r, c) for r, c in sorted(group.clocks.items()) if r not in held)
                reason = "the clock waits for its slowest workers"
            else:
                missing = tuple((r, c) for r, c in sorted(group.clocks.items()) if c == clock)
                reason = "nothing is held here"
        answer: ShardReply = Waiting(event.message.group, clock, missing, reason)
        self._effects.replies.append((event.client, Answer(answer)))


def refusal(seq: int, error: ParamServeError) -> Refused:
    """An error as the reply that carries it."""
    return Refused(seq, type(error).__name__, error.failed, error.applied, error.fix)

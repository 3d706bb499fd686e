"""One group on one shard, as a machine: which steps wait, and the outcome of each.

Steps, messages of other shards, changes of the membership and time come in. A step is answered at
once, or is held; everything else that is to be done is put into the outbox, which the shard works
off. `core.commit` says how shards agree on a synchronous clock, `core.policy_changes` how they do
on the clock of a new policy; what is agreed on comes in the order of the decision log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from msgspec import structs

from paramserve.config import NO_RANK
from paramserve.consistency.base import ADMIT, Admit, Wait, new_pull
from paramserve.core import collecting, group_waits, policy_calls, stepping
from paramserve.core.commit import Contribution, Lead
from paramserve.core.decisions import LEAD, DecisionLog
from paramserve.core.events import Counted, GroupEffect, RecheckHeld, Reply, Send, StopBehindFlush
from paramserve.core.followers import Followers
from paramserve.core.group_membership import MembershipAgreement
from paramserve.core.group_reads import GroupReads
from paramserve.core.group_state import GroupRecord, GroupState, Proposed
from paramserve.core.policy_changes import PolicyAgreement
from paramserve.core.policy_epochs import PolicyEpoch
from paramserve.core.replies import Replies, no_memory, refusal
from paramserve.core.shard_sessions import Answer, ReadRequest, Request, Round, ShardSession
from paramserve.errors import NotAMember, ParamServeError, PolicyFailed, rebuild
from paramserve.messages import (
    Commit,
    Decision,
    Done,
    GroupMembership,
    Member,
    Pause,
    Paused,
    PeerMessage,
    Prepare,
    Refused,
    SetPolicy,
    Step,
    Switch,
    Values,
    Vote,
    Waiting,
)
from paramserve.rules.base import new_push_info

ASK_AGAIN_S = 1e-4
"""A policy that waits for a time is not asked again sooner than this."""


class GroupMachine:
    """What one shard does for one group.

    Args:
        state: the group, before anything has happened.
        shard: number of this shard, of `shards`.
        resend_s: after which a message to another shard is sent again.
        policies: classes by name that the owner registered, besides the built-in ones.
        decisions: the log on this shard.
        followers: the joiners of all groups.
        outbox: takes what the shard is to do, in order.
    """

    def __init__(
        self,
        state: GroupState,
        *,
        shard: int,
        shards: int,
        resend_s: float,
        policies: Mapping[str, Any],
        decisions: DecisionLog,
        followers: Followers,
        replies: Replies,
        outbox: deque[GroupEffect],
    ) -> None:
        self.state = state
        self.shard = shard
        self.shards = shards
        self.lead = Lead(shards) if decisions.leads else None
        """Votes of all shards on the next clock; None: this shard is not the lead."""
        self.policies = PolicyAgreement(state, shard, shards, resend_s, policies, decisions, outbox)
        self.membership = MembershipAgreement(state, decisions)
        self.waiting: dict[int, ShardSession] = {}
        """Sessions whose held request waits for a change in this group, by client; steps that are
        collected wait elsewhere."""
        self.reads = GroupReads(state, replies)
        self.deadline: float | None = None
        """When `deadline_reached` is to be called."""
        self._resend_s = resend_s
        self._decisions = decisions
        self._followers = followers
        self._replies = replies
        self._outbox = outbox
        self._looking = False
        """Whether `RecheckHeld` is in the outbox."""

    def record(self, unfinished: Mapping[int, int]) -> GroupRecord:
        """The group as it is now; `unfinished` as for `GroupState.record`."""
        record = self.state.record(unfinished)
        return structs.replace(record, undecided=self.policies.record())

    def restore(self, record: GroupRecord, policies: Mapping[str, Any], now: float) -> None:
        """Go on from a cut. Args and Raises as for `GroupState.restore`."""
        self.state.now = now
        self.state.restore(record, policies)
        self.policies.restore(record.undecided)
        self.replan()

    # --- steps -----------------------------------------------------------------------------------

    def step(self, session: ShardSession, request: Request, now: float) -> Answer | None:
        """Execute a step, or what is left of one that was held; None: it is held.

        Raises:
            ParamServeError, ValueError, TypeError, MemoryError: why the step is refused.
        """
        state, rank, step = self.state, session.rank, request.message
        assert type(step) is Step
        state.now = now
        if session.applied is not None:
            return self._read_at_last(session, request, session.applied)
        if state.table is not None:
            state.table.clock = state.members.slowest
        steps = bool(step.push or step.tick or step.skip)
        clocks, changes = state.members.clocks, state.changes
        member = rank in clocks
        parts: list[stepping.Part] = []
        wrong: Exception | None = None
        try:
            if rank in state.saved.by_rank or (step.saved and rank >= 0):
                state.saved.step(rank, step)
            parts = stepping.gradients(state, step, request.memory)
        except (ParamServeError, ValueError, TypeError, MemoryError) as error:
            if not step.tick:
                raise  # else it ends a clock all the same: the worker has counted it
            lacks = isinstance(error, MemoryError)
            wrong = no_memory(self.shard, "a Step", "no") if lacks else error
        paused = changes.paused
        if paused is not None and rank >= 0 and step.clock >= paused.clock:
            self.hold(session, request)
            return None
        if steps and session.live and not member:
            if wrong is not None:
                raise wrong
            return self._with_news(session, self._not_a_member(session, request))
        if wrong is None and step.push and state.unapplied is not None:
            wrong, parts = state.unapplied, []  # forgotten with the answer: it may be held yet
        if wrong is None and step.note and step.tick and rank >= 0:
            state.keep_note(rank, step.clock, step.note)
        if member and clocks[rank] < step.clock:
            self._catch_up(rank, step.clock)
        if step.tick and member:
            session.ticks[state.id] = step.seq
        epoch = state.of(rank, step.clock) if changes.later else changes.first
        answer: Answer | None
        if not steps:
            answer = self._read(session, request)
        elif rank in state.already_applied and wrong is None and state.has_step(rank, step):
            answer = self._apply(session, request, [], epoch, None)  # nothing a second time
        elif epoch.policy.collects:
            answer = self._collect(session, request, parts, wrong)
        else:
            answer = self._apply(session, request, parts, epoch, wrong)
        return None if answer is None else self._with_news(session, answer)

    def _catch_up(self, rank: int, clock: int) -> None:
        """A member is at a later clock than here: it has joined on another shard at that one, and
        sends no step of those before."""
        members = self.state.members
        if not self.state.at(members.clocks[rank]).policy.collects:
            members.ticked(rank, clock - 1)
            self.look_again()

    def _apply(
        self,
        session: ShardSession,
        request: Request,
        parts: list[stepping.Part],
        epoch: PolicyEpoch,
        wrong: Exception | None,
    ) -> Answer | None:
        """Execute a step by itself, under a policy that does not collect."""
        step, memory = request.message, request.memory
        assert type(step) is Step
        try:
            if wrong is not None:
                raise self._refuse(wrong)
            done, written = stepping.apply_now(self.state, session, step, parts, memory, epoch)
        finally:
            if step.tick:
                self._tick(session, step)
        if self._looking:  # what the tick has released may push before this step reads
            self.hold(session, request)
            session.applied = done
            return None
        answer = self._read(session, request, done, written)
        if epoch.guarded:  # a user's policy may look at anything
            self.look_again()
        return answer

    def _refuse(self, wrong: Exception) -> Exception:
        """Why a step is refused, now: a lost buffer is told once."""
        if wrong is self.state.unapplied:
            self.state.unapplied = None
        return wrong

    def _tick(self, session: ShardSession, step: Step) -> None:
        """A step ends its worker's clock, also if it was refused: the worker has counted it. Under
        a policy that collects, the commit does that."""
        members, changes, rank = self.state.members, self.state.changes, session.rank
        epoch = self.state.at(step.clock) if changes.later else changes.first
        if rank in members.clocks and not epoch.policy.collects:
            slowest = members.slowest
            members.ticked(rank, step.clock)
            if self._followers.joiners:
                self._end_clock(session, members.clocks[rank], collects=False)
            if (self.waiting or self.reads.waiting) and members.slowest != slowest:
                self.look_again()

    def _end_clock(self, session: ShardSession, clock: int, *, collects: bool = True) -> None:
        """A rank goes on at this clock here: it may be a member of other groups from now on."""
        own = self.state.id, session.rank, session.client
        self._outbox.extend(self._followers.end_clock(*own, clock, collects=collects))

    def _late(self, session: ShardSession, request: Request, at: int) -> Answer:
        """The answer to a step whose clock was over without it: it changes nothing, and its worker
        goes on at another one."""
        step, state = request.message, self.state
        assert isinstance(step, Step)
        if step.push:
            state.drop(session.rank)
        state.mark(session.client, step.mark)
        done = Done(step.seq, state.version, state.members.slowest, skipped=True, at=at)
        return self._replies.with_values(state.blocks, request, done)

    def _not_a_member(self, session: ShardSession, request: Request) -> Answer:
        """The answer to a step of a rank that is no member, and did not know it: its samples count
        as not used."""
        step, state = request.message, self.state
        assert isinstance(step, Step)
        if step.push:
            state.drop(session.rank)
        at = state.members.clock_of(session.rank, state.start)
        done = Done(
            step.seq, state.version, state.members.slowest, skipped=True, at=at, pending=True
        )
        return self._replies.with_values(state.blocks, request, done)

    def _with_news(self, session: ShardSession, answer: Answer) -> Answer:
        """Tell a client that its group has another policy. The answer of a read may be lost, so the
        next one tells it again."""
        message = answer.message
        if type(message) is not Done and type(message) is not Values:
            return answer
        state, changes = self.state, self.state.changes.history
        if changes:
            number = session.policy_numbers.get(state.id, 0)
            if number < changes[-1].number:
                if type(message) is Done:
                    session.policy_numbers[state.id] = changes[-1].number
                news = tuple(each for each in changes if each.number > number)
                message = structs.replace(message, news=news)
        return answer if message is answer.message else structs.replace(answer, message=message)

    # --- reads, and what waits -------------------------------------------------------------------

    def _read(
        self,
        session: ShardSession,
        request: Request,
        done: Done | None = None,
        written: Collection[int] = (),
    ) -> Answer | None:
        """Write the values that a step asks for, or hold it until it may read.

        Args:
            done: what the step's push has just done; None for a step that only pulls.
            written: blocks whose values are at their places already.
        """
        step, state, rank = request.message, self.state, session.rank
        assert type(step) is Step
        if step.pull and rank in state.members.clocks:
            clock = step.clock + step.tick
            epoch = state.at(clock) if state.changes.later else state.changes.first
            try:
                admission = policy_calls.on_pull(epoch, new_pull((rank, clock)), state)
            except PolicyFailed as error:
                error.applied = "no" if done is None else "yes"
                raise
            if admission is not ADMIT and isinstance(admission, Wait):
                self.hold(session, request)
                session.applied = done
                return None
            if epoch.policy.keeps_reads or state.reads.by_rank:
                self.reads.keep(epoch, rank, step.pull)
        if done is None:
            done = Done(step.seq, state.version, state.members.slowest)
        return self._replies.with_values(state.blocks, request, done, written)

    def read(self, session: ShardSession, request: ReadRequest, now: float) -> Answer | None:
        """Answer a read; None: the group's policy lets it wait. Raises what `GroupReads.answer`
        does."""
        self.state.now = now
        rank, clock, clocks = session.rank, request.message.clock, self.state.members.clocks
        if rank in clocks and clocks[rank] < clock:
            self._catch_up(rank, clock)
        answer = self.reads.answer(session, request)
        return None if answer is None else self._with_news(session, answer)

    def _read_at_last(self, session: ShardSession, request: Request, done: Done) -> Answer | None:
        """The read of a step whose push was done before, and which waited to read."""
        state = self.state
        done = structs.replace(done, version=state.version, clock=state.members.slowest)
        answer = self._read(session, request, done)
        return None if answer is None else self._with_news(session, answer)

    def hold(self, session: ShardSession, request: Request) -> None:
        """Keep a request until something in the group changes."""
        session.held = request
        self.waiting[session.client] = session

    def look_again(self) -> None:
        """Something has changed that waiting requests may wait for."""
        if (self.waiting or self.reads.waiting) and not self._looking:
            self._looking = True
            self._outbox.append(RecheckHeld(self.state.id))

    def take_waiting(self) -> list[ShardSession]:
        """The sessions whose requests are to be executed again; they wait no more."""
        self._looking = False
        waiting = list(self.waiting.values())
        self.waiting = {}
        return waiting

    def let_go(self, session: ShardSession) -> None:
        """Refuse what a fenced session waits for; what is collected waits for its commit."""
        request = session.held
        if request is None or self.state.collect.has_step(request.message):
            return
        self.waiting.pop(session.client, None)
        error = session.fenced()
        pushed = session.applied is not None and isinstance(request.message, Step)
        error.applied = "yes" if pushed else "no"
        self._outbox.append(Reply(session, Answer(refusal(request.message.seq, error))))

    def _let_go_of(self, older: Contribution) -> None:
        """Refuse a step of an ended rank that is collected no more. One that waits behind another
        step of its session is refused when its turn comes."""
        request = older.session.held
        if request is not None and request.message is older.step:
            self.let_go(older.session)

    def forget(self, client: int) -> None:
        """A client has ended."""
        self.state.watching.pop(client, None)
        self.waiting.pop(client, None)
        self.reads.waiting.pop(client, None)

    def members_changed(self, members: Mapping[int, Member], live: list[int], now: float) -> None:
        """Workers have come or gone: go on with the members that are left.

        Args:
            members: by rank.
            live: ranks that clocks wait for, in order.
        """
        state = self.state
        state.now = now
        state.members_changed(members, live)
        self.membership.members_changed()
        self._go_on()

    def _go_on(self) -> None:
        """Do what other members allow."""
        state = self.state
        if state.buffered and policy_calls.on_membership(state.at(state.members.slowest), state):
            stepping.flush(state)
        self._maybe_vote()
        self.look_again()
        self.replan()

    # --- joining and suspending ------------------------------------------------------------------

    def check_join(self, session: ShardSession) -> None:
        """Whether a client may ask to be a member of this group.

        Raises:
            NotAMember: it is not a worker's client. Nothing was changed.
        """
        if session.rank == NO_RANK:
            raise NotAMember(
                f"client {session.client} is no worker: it cannot join group {self.state.name!r}",
                fix="step from a worker",
            )

    def join(
        self, session: ShardSession, request: Request, now: float, place: Round | None = None
    ) -> Answer | None:
        """A rank is to be a member from the clock under way on; None: it waits for the lead. One
        that has followed another group here is told at which clock it began, though that may be
        over without it.

        Args:
            place: where members are that are as far as the rank in another group.
        """
        state, rank, seq = self.state, session.rank, request.message.seq
        members = state.members
        by = members.joined.get(rank)
        if by is None or by.client != session.client or rank not in members.clocks:
            clock = members.clock_of(rank, state.start)
            if place is not None:
                clock = max(clock, place.at)
            elif by is not None and rank in members.clocks and not state.collects:
                clock = by.clock  # it goes on at its own, which may be another one elsewhere
            self.join_rank(rank, session.client, seq, now, clock)
            if not members.knows(rank, session.client, seq, member=True):
                self.hold(session, request)
                return None
            by = members.joined.get(rank)
        at = members.clock_of(rank, state.start)
        if by is not None and rank in members.clocks and session.ticks.get(state.id, 0) < by.seq:
            at = by.clock
        return self._answer_join(session, seq, at, place)

    def _answer_join(self, session: ShardSession, seq: int, at: int, place: Round | None) -> Answer:
        state, counts = self.state, tuple[int, ...]()
        if place is not None and at > place.at:
            counts = (at - place.at,)
            session.rounds[state.id] = Round(place.entry, place.clock + counts[0], at, seq)
        done = Done(seq, state.version, state.members.slowest, counts=counts, at=at)
        return self._with_news(session, Answer(done))

    def suspend(self, session: ShardSession, request: Request, now: float) -> Answer | None:
        """A rank is to be no member any more; None: it waits for the lead."""
        state, rank, seq = self.state, session.rank, request.message.seq
        self.suspend_rank(rank, session.client, seq, now)
        if not state.members.is_settled(rank, session.client, seq):
            self.hold(session, request)
            return None
        return Answer(Done(seq, state.version, state.members.slowest))

    def join_rank(
        self, rank: int, client: int, seq: int, now: float, clock: int | None = None
    ) -> None:
        """Make a rank a member from a clock on, on the lead shard; None: a member stays, at its."""
        self.state.now = now
        own = self.state.members.joined[rank].clock if clock is None else clock
        self.membership.join(rank, client, seq, own)

    def suspend_rank(self, rank: int, client: int, seq: int, now: float) -> None:
        """End a rank's membership, on the lead shard."""
        self.state.now = now
        self.membership.suspend(rank, client, seq)

    def _forget_votes(self) -> None:
        """Other members decide the present clock: all shards vote again."""
        self.state.collect.last_vote = None
        if self.lead is not None:
            self.lead.forget_votes()

    def inquire(self, client: int) -> Waiting:
        """What a client of this group waits for, and which ranks."""
        session = self.waiting.get(client)
        request: Request | ReadRequest | None = None if session is None else session.held
        read = self.reads.first_of(client) if request is None else None
        if read is not None:
            session, request = read
        return group_waits.waiting(self.state, session, request, shard=self.shard)

    # --- synchronous clocks ----------------------------------------------------------------------

    def _collect(
        self,
        session: ShardSession,
        request: Request,
        parts: list[stepping.Part],
        wrong: Exception | None,
    ) -> Answer | None:
        """Collect a step for the present clock; answered when the clock is decided.

        A step that this shard refuses (`wrong`) is collected as well, with its refusal: then the
        clock is refused to all its workers, and none of them waits for this one.

        A step of the next clock waits: the present one was decided without this worker, and the
        news is on its way. One of an older clock came too late. The first step of a newer
        incarnation may find the clock with its predecessor's gradients, or just closed with them,
        or without any while the rank had ended.
        """
        state, collect, rank, step = self.state, self.state.collect, session.rank, request.message
        assert type(step) is Step
        if step.tick and rank in state.members.clocks:
            if step.clock < state.committed:
                state.last_sender[rank] = session.client
                if self._followers.joiners:
                    self._end_clock(session, state.committed)
                if wrong is not None:
                    raise self._refuse(wrong)
                return self._late(session, request, state.committed)
            ahead = self.shards > 1 or rank in collect.pending  # of an older incarnation
            if step.clock == state.committed + 1 and ahead:
                self.hold(session, request)
                return None
            alone = self.shards == 1 and len(state.members.clocks) == 1
            if wrong is None and alone and session.held is None:
                answer = self._commit_single_worker(session, request, parts)
                if answer is not None:
                    return answer
            older = collect.pending.get(rank)
            first = session.incarnation > 1 and state.last_sender.get(rank) != session.client
            if first and older is not None and step.clock == state.committed:
                collect.supersede(rank)
                self._let_go_of(older)
        if state.buffer.count:
            stepping.flush(state)  # of a policy before
        refused = None
        if wrong is not None:
            refused = collecting.refusal_with(state, self.shard, rank, wrong)
        collecting.collect(state, session, request, parts, refused)
        if wrong is not None:
            collect.pending[rank].unapplied = wrong is state.unapplied
        state.last_sender[rank] = session.client
        state.on_contribution(rank)
        session.held = request
        if collect.last_vote is not None and (
            state.at(state.committed).policy.partial or collect.has(state.members.clocks)
        ):
            collect.last_vote = None  # The lead is told of what has come since.
        self._maybe_vote()
        self.replan()
        return None

    def _commit_single_worker(
        self, session: ShardSession, request: Request, parts: list[stepping.Part]
    ) -> Answer | None:
        """Collect, decide and apply a clock in one: the only member steps on the only shard. None:
        the step needs the general path, which has the same result."""
        state, step, rank = self.state, request.message, session.rank
        assert type(step) is Step
        changes, clocks = state.changes, state.members.clocks
        epoch = state.at(state.committed) if changes.later else changes.first
        if epoch.guarded or rank not in clocks:
            return None
        plain = step.weight == step.factor == 1.0 and not step.skip and step.clip_norm == 0.0
        plain = plain and not self._followers.joiners
        if not plain or step.flush or state.collect.pending or state.buffer.count:
            return None
        if step.clock != state.committed or not collecting.cannot_fail(step, parts):
            return None
        commit = Commit(state.id, step.clock, (session.client,), epoch.policy.scale(1.0))
        push = new_push_info((-1, step.clock, state.version, 0, 1.0, commit.scale))
        written: Collection[int] = ()
        if parts:
            written = stepping.apply_parts(state, step, parts, request.memory, push)
        state.count_staleness(rank, 0)
        if step.mark is not None:
            state.mark(session.client, step.mark)
        assert self.lead is not None, "the only shard leads all groups"
        self.lead.last = commit
        state.commit()
        state.last_sender[rank] = session.client
        if self.waiting or self.reads.waiting:
            self.look_again()
        done = Done(step.seq, state.version, state.members.slowest)
        return self._replies.with_values(state.blocks, request, done, written)

    def _maybe_vote(self) -> None:
        """Tell the lead that the gradients of this clock that its policy waits for are here."""
        state, collect = self.state, self.state.collect
        if not collect.pending or collect.last_vote is not None:
            return
        epoch = state.at(state.committed) if state.changes.later else state.changes.first
        if not epoch.policy.collects:
            return
        try:
            # What ranks have left that are not waited for is decided at once.
            admission = policy_calls.on_clock(epoch, state) if state.members.clocks else ADMIT
        except PolicyFailed as error:
            self._send_vote(collect.clients(), error)
            return
        if admission is ADMIT or isinstance(admission, Admit):
            self._send_vote(collect.clients())
        else:
            collect.missing = admission.workers
            collect.due = None
            if admission.until_s is not None and collect.since is not None:
                later = state.now + ASK_AGAIN_S  # rounding may put its time a little too early
                collect.due = max(collect.since + admission.until_s, later)

    def _send_vote(self, contributors: tuple[int, ...], failed: PolicyFailed | None = None) -> None:
        collect = self.state.collect
        vote = collecting.vote(self.state, self.shard, contributors, self._decisions.number)
        if failed is not None and not vote.refusal:
            text = (type(failed).__name__, failed.failed, failed.fix)
            vote = structs.replace(vote, refusal=text)
        collect.last_vote = vote
        collect.due = None
        collect.repeat_at = self.state.now + self._resend_s
        self._outbox.append(Send(LEAD, vote))

    def _repeat_vote(self, vote: Vote) -> None:
        """Tell the lead again. Proposals of before may have made each shard's part smaller in
        another way, until what all have is too little for the clock: so all that is here by now."""
        collect = self.state.collect
        clients = collect.clients()
        if set(vote.contributors) != set(clients):
            self._send_vote(clients)
            return
        collect.repeat_at = self.state.now + self._resend_s
        self._outbox.append(Send(LEAD, vote))

    def _on_vote(self, message: Vote) -> None:
        """On the lead: count a shard's vote, and decide the clock or propose what all shards
        hold."""
        if self.lead is None:
            return
        if message.known < self.membership.newest:
            return  # It is by other members; the shard votes again when it knows these.
        state = self.state
        epoch = state.at(state.committed)
        enough = partial(self._enough, epoch)
        outcome = self.lead.on_vote(message, state.committed, epoch, enough)
        if isinstance(outcome, Commit):
            self._decisions.append(outcome, state.now)
        else:
            self._outbox.extend([Send(shard, proposal) for shard, proposal in outcome])

    def _enough(self, epoch: PolicyEpoch, clients: frozenset[int]) -> bool:
        """Whether a clock that need not wait for all members may be decided with only these."""
        if not epoch.policy.partial:
            return True
        state = self.state
        if not state.arrived:
            return True  # pending members are not kept waiting: nothing else is left of the clock
        pending = state.collect.pending
        arrived = {rank for rank in state.arrived if pending[rank].session.client in clients}
        if not arrived:
            return False
        try:
            return isinstance(policy_calls.on_clock(epoch, Proposed(state, arrived)), Admit)
        except PolicyFailed:
            return True  # which its own `Vote` says

    def _on_prepare(self, message: Prepare) -> None:
        """Vote for what the lead has proposed, as far as it is here."""
        state, collect = self.state, self.state.collect
        partial = state.at(state.committed).policy.partial
        settled = collect.last_vote is not None or collect.has(state.members.clocks)
        # Of a rank that still counts, this shard and another have two incarnations'.
        differs = not partial and any(
            rank in state.members.clocks and each.session.client not in message.contributors
            for rank, each in collect.pending.items()
        )
        if message.clock == state.committed and settled and not differs:
            agreed = tuple([c for c in collect.clients() if c in message.contributors])
            if collect.last_vote is not None and collect.last_vote.contributors == agreed:
                # The lead may decide by it now: the update that was prepared for it is kept.
                self._outbox.append(Send(LEAD, collect.last_vote))
            else:
                self._send_vote(agreed)

    def _on_commit(self, commit: Commit) -> None:
        state, collect = self.state, self.state.collect
        if commit.clock != state.committed:
            return  # Answered before.
        collected = collect.everything()
        if state.unapplied is not None and any(each.unapplied for each in collected):
            state.unapplied = None
        contributions, prepared = collect.of_clients(commit.contributors), collect.prepared
        collect.clear()
        failure = collecting.apply_commit(state, commit, contributions, prepared)
        flush = 0
        for rank in contributions:  # also of clients that have ended since
            if (
                contributions[rank].step.flush and not flush
            ):  # before anything that is sent behind it
                flush = collecting.flush_of(state, contributions)
                self._outbox.append(StopBehindFlush(flush))
            if contributions[rank].step.mark is not None:
                state.mark(contributions[rank].session.client, contributions[rank].step.mark)
        state.commit()
        if self._followers.joiners:
            for each in collected:  # before any that steps both groups goes on in the others
                self._end_clock(each.session, state.committed)
        for each in collected:
            session = each.session
            request = session.held
            # Its client has ended, or it was collected behind a step that is held, or queued still.
            if request is None or request.message is not each.step:
                if session.fenced_by is None or session.client in commit.contributors:
                    self._outbox.append(Counted(session.client, each.step.seq))
                continue
            answer = self._after_commit(commit, each, request, failure)
            self._outbox.append(Reply(session, self._with_news(session, answer)))
        self.look_again()

    def _after_commit(
        self, commit: Commit, each: Contribution, request: Request, failure: ParamServeError | None
    ) -> Answer:
        """The answer to a step that was held until its clock was decided.

        Args:
            failure: why this shard could not apply the clock.
        """
        state, session, step = self.state, each.session, each.step
        if each.refusal is not None:  # also if the clock was decided without it; its reads may be
            kind, failed, fix = each.refusal  # wrong, too
            return Answer(Refused(step.seq, kind, failed, "no", fix))
        skipped = session.client not in commit.contributors
        if skipped and commit.refusal:
            kind, failed, fix = commit.refusal
            error = rebuild(kind, failed, "no", fix)
            return Answer(Refused(step.seq, type(error).__name__, failed, "no", fix))
        if skipped and session.fenced_by is not None:
            text = f"worker {session.rank} counted as dead when clock {commit.clock} was applied"
            return Answer(Refused(step.seq, "WorkerFenced", text, "no", "let this process end"))
        if step.mark is not None:
            state.mark(session.client, step.mark)
        if session.fenced_at < step.seq:
            session.fenced_at = step.seq  # counts if it is fenced: the clock had it
        left_out = step.skip and state.at(commit.clock).policy.skips_alone
        if skipped and commit.contributors and (step.push or left_out):
            state.drop(session.rank)  # decided without it, as its policy has it
        if failure is not None and not skipped:
            return Answer(refusal(step.seq, failure))
        done = Done(step.seq, state.version, state.members.slowest, 0, skipped)
        return self._replies.with_values(state.blocks, request, done)

    # --- other shards, and time ------------------------------------------------------------------

    def set_policy(self, message: SetPolicy, now: float) -> Answer:
        """Begin to change the policy, on the lead shard; the others check that they could."""
        state = self.state
        state.now = now
        self.policies.propose(message)
        self.replan()
        return Answer(Done(message.seq, state.version, state.members.slowest))

    def on_message(self, message: PeerMessage, now: float) -> None:
        """A shard, which may be this one, speaks about a clock or a change of the policy."""
        self.state.now = now
        match message:
            case Vote():
                self._on_vote(message)
            case Prepare():
                self._on_prepare(message)
            case Paused():
                self.policies.on_paused(message)
        self.replan()

    def apply(self, decision: Decision, window: int, now: float) -> None:
        """The next entry of the decision log that is about this group.

        Args:
            window: the most calls that one client of this shard may have unanswered.
        """
        self.state.now = now
        match decision:
            case Commit():
                self._on_commit(decision)
            case GroupMembership():
                for rank, by in self.membership.on_decision(decision).items():
                    older = self.state.collect.forget(rank, by.client)
                    if older is not None and older.session.fenced_by is not None:
                        self._let_go_of(older)
                self._forget_votes()
                self._go_on()
            case Pause():
                self.policies.on_pause(decision, window)
            case Switch():
                self.policies.on_switch(decision)
                self._maybe_vote()
                self.look_again()
        self.replan()

    def deadline_reached(self, now: float) -> None:
        """Repeat what was not answered, and ask policies that wait for a time."""
        state, collect = self.state, self.state.collect
        state.now = now
        if collect.last_vote is not None and collect.repeat_at <= now:
            self._repeat_vote(collect.last_vote)
        if collect.due is not None and collect.due <= now:
            collect.due = None
            self._maybe_vote()
        self.policies.deadline_reached(now)
        self.replan()

    def replan(self) -> None:
        """Set `deadline`; the only shard is its own lead, and repeats nothing."""
        collect = self.state.collect
        due, changes = collect.due, self.state.changes
        if self.shards > 1:
            if collect.last_vote is not None and (due is None or collect.repeat_at < due):
                due = collect.repeat_at
            if changes.paused is not None and (due is None or changes.repeat_at < due):
                due = changes.repeat_at
        self.deadline = due

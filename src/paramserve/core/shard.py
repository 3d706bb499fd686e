"""The shard: the whole server logic as `step(event, now) -> Effects`, with no input or output.

It runs serially and has no locks. `Sessions` says which request is new and who may send one, a
`GroupMachine` for each group the outcome of its steps; the server role moves the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from functools import partial
from itertools import count
from typing import Any

import numpy as np
from msgspec import structs

from paramserve.config import Limits
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core.block import ShardBlock, check_spec
from paramserve.core.cut import CutAgreement
from paramserve.core.cut_parts import CutMemory, ShardCut
from paramserve.core.decisions import LEAD, DecisionLog
from paramserve.core.ended_calls import EndedCalls
from paramserve.core.events import (
    CheckpointEnded,
    ClientBye,
    ClientGone,
    Counted,
    CutWanted,
    DeadlineReached,
    Effects,
    Enter,
    Event,
    FromShard,
    GroupEffect,
    Inquired,
    MembersChanged,
    NotifyCoordinator,
    RecheckHeld,
    RecheckStopped,
    Reply,
    Requested,
    Send,
    StopBehindFlush,
)
from paramserve.core.flush import note
from paramserve.core.followers import Followers
from paramserve.core.group import GroupMachine
from paramserve.core.group_members import JoinedBy
from paramserve.core.group_state import GroupState, Watching
from paramserve.core.replies import (
    Replies,
    assign,
    delete,
    no_memory,
    put,
    refusal,
    refusal_of,
)
from paramserve.core.request_memory import Memory
from paramserve.core.shard_reads import ShardReads
from paramserve.core.shard_sessions import (
    Answer,
    ClientHere,
    ReadRequest,
    Request,
    Sessions,
    ShardSession,
    Verdict,
)
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import DefineMismatch, Overloaded, ParamServeError, UnknownName
from paramserve.messages import (
    Acknowledge,
    Assign,
    BlockSpec,
    Commit,
    Contains,
    CutAsk,
    CutAt,
    CutDone,
    CutOver,
    CutTo,
    Decision,
    Define,
    Delete,
    Done,
    DropCut,
    Fetch,
    GroupMembership,
    GroupReport,
    JoinGroup,
    LogEntry,
    Pause,
    PeerMessage,
    Put,
    Read,
    Refused,
    Scan,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
    Switch,
    TakeCut,
    TakeSnapshot,
    Undefine,
    Vote,
    Waiting,
    Watch,
)
from paramserve.rules.registry import NONE
from paramserve.rules.registry import build as build_rule


class Shard:
    """One slice of the parameter space.

    Args:
        number: which of the cluster's shards this is.
        shards: how many there are.
        workers: ranks that are expected; each counts as live until the coordinator says otherwise.
        policy: consistency of the groups that have none of their own.
        resend_s: after which a message to another shard is sent again.
        rules: classes by name that the owner registered, besides the built-in ones.
        policies: the same for policies, and functions.
        codecs: the same for codecs.
        cut_memory: of copies for cuts.
        first_stream: id of its first delta stream, and of no other one that any server has begun or
            is likely to begin: drawn at random, from 1 to 2**62.
    """

    def __init__(
        self,
        number: int,
        shards: int,
        workers: int,
        policy: Policy,
        *,
        limits: Limits,
        resend_s: float,
        rules: Mapping[str, type[Any]] = NONE,
        policies: Mapping[str, Any] = NONE,
        codecs: Mapping[str, type[Any]] = NONE,
        cut_memory: CutMemory | None = None,
        first_stream: int = 1,
    ) -> None:
        self.number = number
        self.shards = shards
        self.sessions = Sessions(number, workers, limits)
        self.groups: dict[int, GroupMachine] = {}
        self.blocks: dict[int, ShardBlock | KeyedBlock] = {}
        self.policy = policy
        self._limits = limits
        self._resend_s = resend_s
        self.rules = rules
        self.policies = policies
        self.codecs = codecs
        self._streams = count(first_stream)
        self._replies = Replies(number)
        self._outbox = deque[GroupEffect]()
        """Effects that groups, cuts and the decision log ask for while one event is executed."""
        self.cuts = CutAgreement(
            number, shards, self.sessions, self.groups, resend_s, self._outbox, self._freeze
        )
        self.decisions = DecisionLog(
            number,
            shards,
            resend_s,
            self._outbox,
            allows=self._allows,
            apply=self._apply,
        )
        self.ended_calls = EndedCalls(self.groups)
        self.reads = ShardReads(self.sessions, self._group, self._refusal)
        self.followers = Followers(self._state_of, self.sessions.of_rank)
        self._members: dict[int, GroupMembership] = {}
        """Newest decision about each group's members, kept for a define that arrives later, or
        again after an `Undefine`."""
        self.cut_memory = cut_memory if cut_memory is not None else CutMemory()
        self._deferred: list[FromShard | ClientBye] = []
        """Messages of shards, and goodbyes of clients, that wait until the cut is over."""
        self._now = 0.0
        self._effects = Effects()

    def step(self, event: Event, now: float) -> Effects:
        """Let one event happen.

        Args:
            event: see `core.events`.
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
                session = self.sessions.by_client.get(event.client)
                if session is not None:
                    session.gone_at = now
            case ClientBye():
                self._client_bye(event)
            case Inquired():
                self._inquired(event)
            case MembersChanged():
                if self.sessions.update(event.message):
                    self._members_changed()
            case CutWanted(checkpoint, full, flush_s):
                if checkpoint:
                    self.cuts.want_checkpoint(checkpoint, full, flush_s, now)
                elif not self.cuts.under_way:
                    self.cuts.want((), True, None, now)
            case CheckpointEnded(checkpoint, committed):
                self.cuts.end_checkpoint(checkpoint, committed=committed)
                for block in self.blocks.values():
                    if isinstance(block, KeyedBlock) and block.changes is not None:
                        block.changes.end_checkpoint(checkpoint, committed=committed)
            case DeadlineReached():
                self.cuts.deadline_reached(now)
                self.decisions.deadline_reached(now)
                for machine in self.groups.values():
                    machine.deadline_reached(now)
                for client in self.sessions.expired(now):
                    self._client_bye(ClientBye(client))
        if self._outbox or self.cuts.settling:
            self._drain_outbox()
        if self.cuts.flush is not None and self.cuts.look_at_flush(now):
            self._drain_outbox()
        deadline, due = self.cuts.deadline, self.decisions.deadline
        if due is not None and (deadline is None or due < deadline):
            deadline = due
        for number in self.groups:
            due = self.groups[number].deadline
            if due is not None and (deadline is None or due < deadline):
                deadline = due
        effects.deadline = deadline
        return effects

    @property
    def waiting(self) -> int:
        """Requests that are held until something has come, and those behind them."""
        return sum(each.waiting for each in self.sessions.by_client.values())

    def report(
        self, *, notes: bool = False, saved: tuple[str, int, int] | None = None
    ) -> tuple[GroupReport, ...]:
        """What this shard has done, group by group.

        Args:
            notes: whether the notes of the ranks are wanted as well.
            saved: (group, rank, clock) where it is wanted what the rank had saved.
        """
        reports = []
        for _, machine in sorted(self.groups.items()):
            report = machine.state.report(notes=notes)
            if saved is not None and machine.state.name == saved[0]:
                before = machine.state.saved.before(*saved[1:])
                report = structs.replace(report, saved=before)
            reports.append(report)
        return tuple(reports)

    def _drain_outbox(self) -> None:
        """Do what the groups' machines ask for, and what follows from it."""
        self._empty_outbox()
        while self.cuts.settling:
            self.cuts.settle()
            if not self._outbox:
                break
            self._empty_outbox()

    def _empty_outbox(self) -> None:
        """Carry out what was decided here, and what follows from that, until nothing is left to
        do."""
        outbox = self._outbox
        while outbox:
            effect = outbox.popleft()
            match effect:
                case Reply(session, answer):
                    self._answer(session, answer)
                    if session.queue:
                        self._run_queue(session)
                case Send(shard, message):
                    if shard == self.number:
                        self._from_shard(message)
                    else:
                        self._effects.peers.append((shard, message))
                case Enter(rank, client, seq, group, clock):
                    newest = self.sessions.workers.get(rank)
                    own = newest is not None and newest.client == client and newest.live
                    if own and group in self.groups:
                        self.groups[group].join_rank(rank, client, seq, self._now, clock)
                case Counted(client, seq):
                    self.sessions.count_ended(client, seq)
                case RecheckHeld(number):
                    waiting = self.groups.get(number)
                    for session in waiting.take_waiting() if waiting is not None else ():
                        request, session.held = session.held, None
                        if request is None:
                            continue
                        assert waiting is not None
                        if session.applied is None and self._stops(session, request.message.seq):
                            waiting.hold(session, request)
                            continue
                        self._execute(session, request)
                        self._run_queue(session)
                    for session in waiting.reads.take_waiting() if waiting is not None else ():
                        self.reads.answer_waiting(session, self._now, self._effects.replies)
                case NotifyCoordinator(message):
                    self._effects.notices.append(message)
                case StopBehindFlush(flush):
                    self.cuts.stop_behind(flush, self._now)
                case RecheckStopped():
                    self._recheck_stopped()

    def _run_queue(self, session: ShardSession) -> None:
        """Execute what waits behind a request that is answered now."""
        while session.queue and session.held is None:
            if self._stops(session, session.queue[0].message.seq):
                break
            self._execute(session, session.queue.popleft())

    def _stops(self, session: ShardSession, seq: int) -> bool:
        """Whether a request is not executed before a cut is over."""
        return self.cuts.stops and not self.cuts.allows(session, seq)

    def _recheck_stopped(self) -> None:
        """Do what waits behind a cut that is over, or allows more."""
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            if isinstance(event, FromShard):
                self._from_shard(event.message)
        for machine in self.groups.values():
            machine.look_again()
        for session in list(self.sessions.by_client.values()):
            self._run_queue(session)
        byes = [event for event in deferred if isinstance(event, ClientBye)]
        if byes:  # what they have sent may wait for steps that are released only now
            self._empty_outbox()
        for event in byes:
            self._client_bye(event)
        self.decisions.go_on()

    def _freeze(self, ask: CutAsk, clients: Mapping[int, int]) -> ShardCut:
        """This shard's part of a cut, as of now."""
        memory = self.cut_memory
        return ShardCut(self.number, ask, clients, self.groups, self.sessions, memory)

    def _from_shard(self, message: PeerMessage) -> None:
        if type(message) is Vote:
            self.decisions.on_acknowledge(message.shard, message.known)
        if self.cuts.stops and self._waits_for_cut(message):
            if FromShard(message) not in self._deferred:
                self._deferred.append(FromShard(message))
            return
        match message:
            case CutAsk() | CutAt() | CutTo() | CutDone() | CutOver():
                self.cuts.on_message(message, self._now)
            case LogEntry():
                self.decisions.on_entry(message)
            case Acknowledge():
                self.decisions.on_acknowledge(message.shard, message.number)
            case _:
                machine = self.groups.get(message.group)
                if machine is not None:  # else its define is on the way, and the sender repeats
                    machine.on_message(message, self._now)

    def _waits_for_cut(self, message: PeerMessage) -> bool:
        """Whether the lead is to decide a clock by this message that the cut does not have."""
        return isinstance(message, Vote) and not self.cuts.allows_commit(
            message.group, message.clock
        )

    # --- decisions -------------------------------------------------------------------------------

    def _allows(self, decision: Decision) -> bool:
        """Whether an entry of the log may be applied now; a commit or a pause may be behind a cut.

        Raises:
            ProtocolError: this shard cannot apply it.
        """
        if isinstance(decision, Commit):
            cuts = self.cuts
            return not cuts.stops or cuts.allows_commit(decision.group, decision.clock)
        if isinstance(decision, Pause):  # shard 0 may have its part of a cut, without that change
            return not self.cuts.stops
        if isinstance(decision, Switch) and decision.change.group in self.groups:
            self.groups[decision.change.group].policies.build(decision)
        return True

    def _apply(self, decision: Decision) -> None:
        """Apply this entry of the log."""
        group = decision.change.group if isinstance(decision, Switch) else decision.group
        if isinstance(decision, GroupMembership):
            self._members[group] = decision
        machine = self.groups.get(group)
        if machine is not None:
            window = self.sessions.window() if type(decision) is Pause else 0
            machine.apply(decision, window, self._now)

    # --- clients and members ---------------------------------------------------------------------

    def _client_here(self, event: ClientHere) -> None:
        refused = self.sessions.refuse(event)
        if refused is not None:
            self._effects.refused = refused
        elif self.sessions.open(event, self._now):
            self._members_changed()

    def _client_bye(self, event: ClientBye) -> None:
        """Forget a client that has closed itself, or is forgotten; what it has sent comes first."""
        client = event.client
        session = self.sessions.by_client.get(client)
        if self.cuts.stops and session is not None and session.queue:
            self._deferred.append(event)  # what it has sent comes first
            return
        self.cuts.forget(client)
        for machine in self.groups.values():
            machine.forget(client)
        if self.sessions.close(client, event.answered):
            self._members_changed()

    def _members_changed(self) -> None:
        """Fence the sessions of ranks that have ended, and go on with the others."""
        for session in self.sessions.fence():
            message = None if session.held is None else session.held.message
            # Not what waits for a cut: that is taken all the same.
            if isinstance(message, Step | JoinGroup | SuspendMembership):
                self.groups[message.group].let_go(session)
            self.ended_calls.collect(session, self._now)
            self.reads.answer_waiting(session, self._now, self._effects.replies)  # refuses
        live = self.sessions.live()
        for machine in self.groups.values():
            machine.members_changed(self.sessions.members, live, self._now)
        if self.followers.joiners:
            workers = self.sessions.workers.values()
            self.followers.keep([each.client for each in workers if each.live])

    def _inquired(self, event: Inquired) -> None:
        number = event.message.group
        machine = self.groups.get(number)
        if machine is None:
            answer = Waiting(number, 0, (), "the group is not defined here")
        else:
            answer = machine.inquire(event.client)
        self._effects.replies.append((event.client, Answer(answer)))

    # --- numbered requests -----------------------------------------------------------------------

    def _requested(self, event: Requested) -> None:
        """Execute a client's request, queue it or answer it again, by its number."""
        if event.client not in self.sessions.by_client:
            self._effects.drops.append(event.client)
            return
        session, message = self.sessions.by_client[event.client], event.message
        if type(message) is Read:
            read, replies = ReadRequest(message, event.memory), self._effects.replies
            if not self.reads.come(session, read, self._now, replies):
                self._effects.drops.append(session.client)
            return
        seq = message.seq
        verdict = session.admit(seq)
        if verdict is Verdict.NEW:
            request = Request(message, event.memory)
            if session.held is not None or (self.cuts.stops and self._stops(session, seq)):
                session.queue.append(request)
            else:
                self._execute(session, request)
        elif verdict is Verdict.REPEATED:
            self._effects.replies.append((session.client, session.answer_again(seq)))
        elif verdict is Verdict.GAP:
            self._effects.drops.append(session.client)
        elif verdict is Verdict.FORGOTTEN:
            error = ParamServeError(
                f"request {seq} of client {session.client} is older than the outcomes kept",
                applied="unknown",
                fix="keep no more requests unanswered than the window that was agreed",
            )
            self._effects.replies.append((session.client, Answer(refusal(seq, error))))

    def _execute(self, session: ShardSession, request: Request) -> None:
        """Run a request; answer it, or leave it held."""
        try:
            message = request.message
            if session.fenced_by is not None:
                self._begin_part(session, self.ended_calls.hold(session, request))
                answer = None
            elif type(message) is Step and message.group in self.groups:
                if message.push and (message.leaves or session.left_out):
                    session.pushed = message
                if message.more or session.rank in self.sessions.calls:
                    self._begin_part(session, message)
                answer = self.groups[message.group].step(session, request, self._now)
            else:
                answer = self._dispatch(session, request)
        except (ParamServeError, ValueError, TypeError, MemoryError) as error:
            answer = Answer(self._refusal(request.message, error))
        if answer is not None:
            self._answer(session, answer)

    def _begin_part(self, session: ShardSession, step: Step) -> None:
        """A step of a call that steps several groups, or the next one, begins."""
        rank = session.rank
        steps = rank >= 0 and bool(step.push or step.tick or step.skip)
        if not (steps and self.sessions.begin_part(session, step)):
            return
        for machine in self.groups.values():
            state = machine.state
            # The rank does not make the call again that was not over: this one has other groups.
            if rank in state.already_applied and state.id != step.group and not state.collects:
                del state.already_applied[rank]

    def _refusal(self, message: ShardRequest, error: Exception) -> Refused:
        """Why a request is refused, from what it raised."""
        if isinstance(error, MemoryError):
            error = no_memory(self.number, f"a {type(message).__name__}", "unknown")
        elif not isinstance(error, ParamServeError):
            # A rule's own check of hyper-parameters, before anything was written.
            error = ParamServeError(str(error), fix="correct the argument")
        return refusal_of(message, error)

    def _answer(self, session: ShardSession, answer: Answer) -> None:
        """Keep a request's outcome and answer it, with what its client is to hear besides: that it
        is to end, or to flush."""
        if session.rank in self.sessions.retiring and type(answer.message) is Done:
            answer = structs.replace(answer, message=structs.replace(answer.message, retire=True))
        if session.pushed is not None:
            note(session, session.pushed, answer, self._now)
            session.pushed = None
        flush = self.cuts.flush
        if flush is not None and session.left_out and type(answer.message) is Done:
            message = structs.replace(answer.message, flush=flush.request)
            answer = structs.replace(answer, message=message)
        session.keep_outcome(answer)
        session.held = session.applied = None
        self._effects.replies.append((session.client, answer))
        if session.reads:
            self.reads.answer_waiting(session, self._now, self._effects.replies)

    def _dispatch(self, session: ShardSession, request: Request) -> Answer | None:
        memory = request.memory
        match request.message:
            case Step() as message:
                return self._group(message.group).step(session, request, self._now)
            case Define() as message:
                return self._define(message, memory)
            case Undefine() as message:
                return self._undefine(message)
            case Assign() as message:
                return assign(self._group_of(message.block), message, memory)
            case Fetch() | Scan() | Contains() | TakeSnapshot() as message:
                return self._answer_numbered_read(session, message, memory)
            case Put() as message:
                return put(self._group_of(message.block), message, memory)
            case Delete() as message:
                return delete(self._group_of(message.block), message, memory)
            case Watch() as message:
                return self._watch(session, message)
            case JoinGroup() as message:
                return self._join(session, request, message)
            case SuspendMembership() as message:
                return self._suspend(session, request, message)
            case SetPolicy() as message:
                return self._group(message.group).set_policy(message, self._now)
            case TakeCut() as message:
                return self._take_cut(session, request, message)
            case DropCut() as message:
                self.cuts.let_go(message.cut)
                return Answer(Done(message.seq))

    def _take_cut(self, session: ShardSession, request: Request, message: TakeCut) -> Answer | None:
        """Hold the request on shard 0 until the cut is complete; it has no other effect."""
        if self.number != LEAD:
            return Answer(Done(message.seq))
        session.held, session.applied = request, Done(message.seq)
        self.cuts.want(message.groups, False, session, self._now)
        return None

    def _answer_numbered_read(
        self,
        session: ShardSession,
        message: Fetch | Scan | Contains | TakeSnapshot,
        memory: Memory,
    ) -> Answer:
        """Answer a request that only reads."""
        match message:
            case Fetch():
                part = self.cuts.part(message.cut, self._now) if message.cut else None
                return self._replies.fetch(self._group_of(message.block), message, memory, part)
            case Scan():
                return self._replies.scan(self._group_of(message.block), message, memory)
            case Contains():
                return self._replies.contains(self._group_of(message.block), message, memory)
            case TakeSnapshot():
                state = self._group(message.group).state
                return self._replies.take_snapshot(state, session.client, message, memory)

    def _group(self, number: int) -> GroupMachine:
        """The group of this number.

        Raises:
            UnknownName: nothing was defined in it. Nothing was applied.
        """
        machine = self.groups.get(number)
        if machine is None:
            raise UnknownName(
                f"shard {self.number} has no group {number}", fix="define parameters in it first"
            )
        return machine

    def _state_of(self, number: int) -> GroupState | None:
        machine = self.groups.get(number)
        return None if machine is None else machine.state

    def _group_of(self, number: int) -> GroupState:
        """The group of the block of this number.

        Raises:
            UnknownName: it was never defined. Nothing was applied.
        """
        block = self.blocks.get(number)
        if block is None:
            raise UnknownName(f"shard {self.number} has no block {number}", fix="define it first")
        return self.groups[block.spec.group].state

    def _define(self, message: Define, memory: Memory) -> Answer:
        spec = message.spec
        existing = self.blocks.get(spec.block)
        if existing is not None and existing.spec != spec:
            raise DefineMismatch(
                f"{existing.names} is defined as block {spec.block}, and another block came "
                "with that number",
                fix="run the same version on all sides",
            )
        if existing is None or existing.attempt < message.attempt:
            block = self.new_block(spec, message.attempt)
            if isinstance(block, ShardBlock):
                np.copyto(block.value, memory.at(message.arena, message.offset, block))
            machine = self.groups.get(spec.group)
            if machine is None:
                added = self._added_members()
                machine = self.groups[spec.group] = self._new_group_of(message)
                # The first group may arrive at this shard behind this one, and others know of both.
                later = spec.group > 0 and machine.state.collects
                if added is not None or later:
                    machine.membership.begin(added or {}, self._now)
                if spec.group in self._members and self.number != LEAD:
                    machine.apply(self._members[spec.group], 0, self._now)
                machine.members_changed(self.sessions.members, self.sessions.live(), self._now)
            self.add_block(block)
        return Answer(Done(message.seq, self.groups[spec.group].state.version))

    def _undefine(self, message: Undefine) -> Answer:
        """No client knows of the block yet, but the one that has tried to define it."""
        block = self.blocks.get(message.block)
        if block is not None and block.attempt <= message.attempt:
            state = self.groups[block.spec.group].state
            del self.blocks[message.block], state.blocks[message.block]
            state.table = None
            if not state.blocks:
                del self.groups[state.id]
        return Answer(Done(message.seq))

    def add_block(self, block: ShardBlock | KeyedBlock) -> None:
        """Know a block, which its group has from now on."""
        state, number = self.groups[block.spec.group].state, block.spec.block
        self.blocks[number] = state.blocks[number] = block
        state.table = block if isinstance(block, KeyedBlock) else None

    def new_block(self, spec: BlockSpec, attempt: int) -> ShardBlock | KeyedBlock:
        """A block of zeros, or a table without rows, which is not known yet.

        Raises:
            ParamServeError: this shard cannot have it. Nothing was changed.
        """
        if spec.table is None:
            check_spec(spec, self.shards)
        rule = None if spec.rule is None else build_rule(spec.rule, self.rules)
        if spec.table is not None and rule is None:
            raise ParamServeError(f"table {spec.group_name!r} has no rule", fix="give it one")
        try:
            if spec.table is not None and rule is not None:
                return KeyedBlock(spec, self.shards, rule, attempt)
            return ShardBlock(spec, self.number, rule, attempt, self.codecs, self._streams)
        except MemoryError:
            size = sum(spec.cuts[self.number + 1 :][:1]) - sum(spec.cuts[self.number :][:1])
            what = f"{size} elements of {spec.dtype}" if spec.table is None else "a table"
            raise Overloaded(
                f"shard {self.number} has no memory for block {spec.block} ({what})",
                fix="use more servers on more machines, or smaller parameters",
            ) from None

    def _added_members(self) -> dict[int, JoinedBy] | None:
        """Ranks that were added, or have come again, and are members of the first group that
        collects gradients: of one that is defined now they are as well. None: no group does."""
        first = self.sessions.first
        for _, machine in sorted(self.groups.items()):
            if machine.state.collects:
                joined = machine.state.members.joined.items()
                return {r: by._replace(clock=0) for r, by in joined if r not in first}
        return None

    def _new_group_of(self, message: Define) -> GroupMachine:
        spec, own = message.spec, message.spec.consistency
        policy = self.policy if own is None else build_policy(own, self.policies)
        check_table_policy(spec.group_name, policy, spec.table is not None)
        return self.new_group(spec.group, spec.group_name, policy)

    def new_group(self, number: int, name: str, policy: Policy) -> GroupMachine:
        """A group to which nothing has happened, which is not known yet."""
        state = GroupState(number, name, policy, self.sessions.first, self.sessions.live())
        state.buffer_lost = self._buffer_lost
        if self.shards > 1:
            state.snapshot_due = partial(self._snapshot_due, number)
        return GroupMachine(
            state,
            shard=self.number,
            shards=self.shards,
            resend_s=self._resend_s,
            policies=self.policies,
            decisions=self.decisions,
            followers=self.followers,
            replies=self._replies,
            outbox=self._outbox,
        )

    def _buffer_lost(self, why: ParamServeError) -> None:
        self._effects.losses.append(why)

    def _snapshot_due(self, group: int) -> None:
        if self.number == LEAD:
            self.cuts.want_snapshot(group, self._now)

    def _watch(self, session: ShardSession, message: Watch) -> Answer:
        """Keep snapshots of a group for a client from now on, or no more."""
        state = self._group(message.group).state
        if state.table is not None:
            raise ParamServeError(
                f"{state.name!r} is a table, of which no snapshots are kept",
                fix="read it with the methods of the table",
            )
        if message.every <= 0:
            state.watching.pop(session.client, None)
        else:
            keep = min(max(1, message.keep), self._limits.snapshots_max)
            state.watching[session.client] = Watching(message.every, keep)
        return Answer(Done(message.seq, state.version))

    def _join(self, session: ShardSession, request: Request, message: JoinGroup) -> Answer | None:
        """Make a rank a member of a group, once it is known here whether it is one of the others;
        None: a decision about that is on its way."""
        machine = self._group(message.group)
        others = [self.groups[each] for each in message.others if each in self.groups]
        rank, client = session.rank, session.client
        if session.applied is None:  # else it was held
            machine.check_join(session)
            stays = self.followers.begin(rank, client, message) if self.decisions.leads else ()
            session.applied = Done(message.seq)
            if message.others:
                self.sessions.break_call(rank)
            for other in others:
                session.rounds.pop(other.state.id, None)
                decide = other.join_rank if other.state.id in stays else other.suspend_rank
                decide(rank, client, message.seq, self._now)
        for other in others:
            if not other.state.members.is_settled(rank, client, message.seq):
                other.hold(session, request)
                return None
        place = None
        if self.decisions.leads and not message.others:
            groups = [each.state for each in self.groups.values()]
            place = self.followers.round_of(rank, machine.state, groups)
        return machine.join(session, request, self._now, place)

    def _suspend(
        self, session: ShardSession, request: Request, message: SuspendMembership
    ) -> Answer | None:
        machine = self._group(message.group)
        session.rounds.pop(message.group, None)
        self.followers.leave(session.rank, message.group)
        self.sessions.break_call(session.rank)
        return machine.suspend(session, request, self._now)

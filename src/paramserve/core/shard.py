"""The shard: the whole server logic as `step(event, now) -> Effects`, with no input or output.

It runs serially and has no locks. `Sessions` says which request is new and who may send one, a
`GroupMachine` for each group what its steps come to; the server role moves the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from msgspec import structs

from paramserve.config import Limits
from paramserve.consistency.base import Policy
from paramserve.consistency.registry import build as build_policy
from paramserve.consistency.registry import check_table_policy
from paramserve.core.block import ShardBlock, check_spec
from paramserve.core.events import (
    ClientBye,
    ClientGone,
    ClientHere,
    DeadlineReached,
    Effects,
    EnterGroups,
    Event,
    FromShard,
    GroupEffect,
    Inquired,
    LookAgain,
    MembersChanged,
    Reply,
    Requested,
    Send,
)
from paramserve.core.group import GroupMachine
from paramserve.core.group_state import GroupState, Watching
from paramserve.core.replies import (
    Bytes,
    Replies,
    assign,
    fresh,
    no_memory,
    put,
    refusal,
)
from paramserve.core.shard_sessions import (
    Answer,
    Memory,
    Request,
    Sessions,
    ShardSession,
    Verdict,
)
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import DefineMismatch, Overloaded, ParamServeError, UnknownName
from paramserve.messages import (
    Assign,
    Define,
    Done,
    Fetch,
    GroupReport,
    JoinGroup,
    Pause,
    PeerMessage,
    Put,
    Refused,
    Scan,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
    Switch,
    TakeSnapshot,
    Undefine,
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
        allocate: gives memory [bytes] for the values of a reply that travel in it.
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
        allocate: Callable[[int], Bytes] = fresh,
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
        self._policies = policies
        self._replies = Replies(number, limits.payload_bytes_max, allocate)
        self._outbox = deque[GroupEffect]()
        """What the groups' machines want done, within one event."""
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
                self._client_bye(event.client)
            case Inquired():
                self._inquired(event)
            case MembersChanged():
                if self.sessions.update(event.message):
                    self._members_changed()
            case DeadlineReached():
                for machine in self.groups.values():
                    machine.deadline_reached(now)
                for client in self.sessions.expired(now):
                    self._client_bye(client)
        if self._outbox:
            self._work_off()
        deadline = None
        for machine in self.groups.values():
            due = machine.deadline
            if due is not None and (deadline is None or due < deadline):
                deadline = due
        effects.deadline = deadline
        return effects

    def report(self, *, notes: bool = False) -> tuple[GroupReport, ...]:
        """What this shard has done, group by group; with `notes`, those of the ranks as well."""
        return tuple(each.state.report(notes=notes) for _, each in sorted(self.groups.items()))

    def _work_off(self) -> None:
        """Do what the groups' machines ask for, and what follows from it."""
        outbox = self._outbox
        while outbox:
            effect = outbox.popleft()
            match effect:
                case Reply(session, answer):
                    self._answer(session, answer)
                    self._resume(session)
                case Send(shard, message):
                    if shard == self.number:
                        self._from_shard(message)
                    else:
                        self._effects.peers.append((shard, message))
                case EnterGroups(rank, client, seq, groups):
                    newest = self.sessions.workers.get(rank)
                    own = newest is not None and newest.client == client and newest.live
                    for number in groups if own else ():
                        if number in self.groups:
                            self.groups[number].join_rank(rank, client, seq, self._now)
                case LookAgain(number):
                    waiting = self.groups.get(number)
                    for session in waiting.take_waiting() if waiting is not None else ():
                        held, session.held = session.held, None
                        if held is not None:
                            self._execute(session, held)
                            self._resume(session)

    def _resume(self, session: ShardSession) -> None:
        """Execute what waits behind a request that is answered now."""
        while session.queue and session.held is None:
            self._execute(session, session.queue.popleft())

    def _from_shard(self, message: PeerMessage) -> None:
        number = message.change.group if isinstance(message, Switch) else message.group
        machine = self.groups.get(number)
        if machine is None:
            return  # Its define is still on the way; the sender repeats.
        window = self.sessions.window() if isinstance(message, Pause) else 0
        machine.on_message(message, window, self._now)

    # --- clients and members ---------------------------------------------------------------------

    def _client_here(self, event: ClientHere) -> None:
        refused = self.sessions.refuse(event)
        if refused is not None:
            self._effects.refused = refused
        elif self.sessions.open(event):
            self._members_changed()

    def _client_bye(self, client: int) -> None:
        """A client has closed itself, or is forgotten."""
        for machine in self.groups.values():
            machine.forget(client)
        if self.sessions.close(client):
            self._members_changed()

    def _members_changed(self) -> None:
        """Fence the sessions of ranks that have ended, and go on with the others."""
        for session in self.sessions.fence():
            if session.held is not None:
                assert isinstance(session.held.message, Step | JoinGroup | SuspendMembership)
                self.groups[session.held.message.group].let_go(session)
        live = self.sessions.live()
        for machine in self.groups.values():
            machine.members_changed(self.sessions.members, live, self._now)

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
        session = self.sessions.by_client.get(event.client)
        if session is None:
            self._effects.drops.append(event.client)
            return
        seq = event.message.seq
        verdict = session.admit(seq)
        if verdict is Verdict.NEW:
            request = Request(event.message, event.memory)
            if session.unread and isinstance(event.message, Step):
                session.have_read(event.message.oldest)
            if session.held is not None:
                session.queue.append(request)
            else:
                self._execute(session, request)
        elif verdict is Verdict.REPEATED:
            self._repeat(session, Request(event.message, event.memory))
        elif verdict is Verdict.GAP:
            self._effects.drops.append(session.client)
        elif verdict is Verdict.FORGOTTEN:
            gone = ParamServeError(
                f"request {seq} of client {session.client} is older than the outcomes kept",
                applied="unknown",
                fix="keep no more requests unanswered than the window that was agreed",
            )
            self._effects.replies.append((session.client, Answer(refusal(seq, gone))))

    def _repeat(self, session: ShardSession, request: Request) -> None:
        """Answer a request again whose answer may be lost: values that went out in its frame are
        read again, and the answer says which version they have."""
        message, memory = request.message, request.memory
        outcome = session.outcome(message.seq)
        values = session.unread.get(message.seq)
        answer = Answer(outcome, values, exact=values is not None)
        if values is None and message.seq in session.unread and isinstance(outcome, Done):
            try:
                match message:
                    case Step():
                        machine = self._group(message.group)
                        answer = machine.read_again(session, request, outcome)
                    case Fetch() | Scan() | TakeSnapshot():
                        answer = self._read(session, message, memory)
            except (ParamServeError, ValueError, TypeError, MemoryError) as error:
                refused = self._refusal(message, error)
                answer = Answer(structs.replace(refused, applied="unknown"))
        self._effects.replies.append((session.client, answer))

    def _execute(self, session: ShardSession, request: Request) -> None:
        """Run a request; answer it, or leave it held."""
        try:
            if session.fenced_by is not None:
                raise session.fenced()
            answer = self._dispatch(session, request)
        except (ParamServeError, ValueError, TypeError, MemoryError) as error:
            answer = Answer(self._refusal(request.message, error))
        if answer is not None:
            self._answer(session, answer)

    def _refusal(self, message: ShardRequest, error: Exception) -> Refused:
        """Why a request is refused, from what it raised."""
        if isinstance(error, MemoryError):
            error = no_memory(self.number, f"a {type(message).__name__}", "unknown")
        elif not isinstance(error, ParamServeError):
            # A rule's own check of hyper-parameters, before anything was written.
            error = ParamServeError(str(error), fix="correct the argument")
        return refusal(message.seq, error)

    def _answer(self, session: ShardSession, answer: Answer) -> None:
        if session.rank in self.sessions.retiring and isinstance(answer.message, Done):
            answer = answer._replace(message=structs.replace(answer.message, retire=True))
        session.record(answer)
        session.held = session.done = None
        self._effects.replies.append((session.client, answer))

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
            case Fetch() | Scan() | TakeSnapshot() as message:
                return self._read(session, message, memory)
            case Put() as message:
                return put(self._group_of(message.block), message, memory)
            case Watch() as message:
                return self._watch(session, message)
            case JoinGroup() as message:
                return self._join(session, request, message)
            case SuspendMembership() as message:
                return self._suspend(session, request, message)
            case SetPolicy() as message:
                return self._group(message.group).set_policy(message, self._now)

    def _read(
        self, session: ShardSession, message: Fetch | Scan | TakeSnapshot, memory: Memory
    ) -> Answer:
        """Answer a request that only reads; it may be executed again."""
        match message:
            case Fetch():
                return self._replies.fetch(self._group_of(message.block), message, memory)
            case Scan():
                return self._replies.scan(self._group_of(message.block), message, memory)
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
        known = self.blocks.get(spec.block)
        if known is not None and known.spec != spec:
            raise DefineMismatch(
                f"{known.names} is defined as block {spec.block}, and another block came with that "
                "number",
                fix="run the same version on all sides",
            )
        if known is None or known.attempt < message.attempt:
            block = self._new_block(message)
            if isinstance(block, ShardBlock):
                np.copyto(block.value, block.at(memory, message.arena, message.offset))
            machine = self.groups.get(spec.group)
            if machine is None:
                machine = self.groups[spec.group] = self._new_group(message)
                machine.members_changed(self.sessions.members, self.sessions.live(), self._now)
            self.blocks[spec.block] = machine.state.blocks[spec.block] = block
            machine.state.table = block if isinstance(block, KeyedBlock) else None
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

    def _new_group(self, message: Define) -> GroupMachine:
        spec, own = message.spec, message.spec.consistency
        policy = self.policy if own is None else build_policy(own, self._policies)
        check_table_policy(spec.group_name, policy, spec.table is not None)
        return GroupMachine(
            GroupState(
                spec.group, spec.group_name, policy, self.sessions.first, self.sessions.live()
            ),
            shard=self.number,
            shards=self.shards,
            resend_s=self._resend_s,
            policies=self._policies,
            replies=self._replies,
            outbox=self._outbox,
        )

    def _watch(self, session: ShardSession, message: Watch) -> Answer:
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
        """Make a rank a member of a group, once it is known here as none of the groups that follow;
        None: a decision about that is on its way."""
        machine = self._group(message.group)
        others = [self.groups[each] for each in message.others if each in self.groups]
        if session.done is None:  # else it was held
            machine.begin_join(session, message)
            session.done = Done(message.seq)
            for other in others:
                other.suspend_rank(session.rank, session.client, message.seq, self._now)
        for other in others:
            if not other.is_out(session.rank, session.client, message.seq):
                other.hold(session, request)
                return None
        return machine.join(session, request, self._now)

    def _suspend(
        self, session: ShardSession, request: Request, message: SuspendMembership
    ) -> Answer | None:
        machine = self._group(message.group)
        for each in self.groups.values():
            each.membership.stay_out(session.rank, message.group)
        return machine.suspend(session, request, self._now)

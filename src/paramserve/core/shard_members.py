"""Who a shard knows: sessions of clients, members of the cluster, and who is fenced off."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec import structs

from paramserve.config import Limits
from paramserve.consistency.base import Policy
from paramserve.core import policy_calls, replies
from paramserve.core.block import ShardBlock
from paramserve.core.events import ClientHere, Effects
from paramserve.core.group import Group
from paramserve.core.replies import refusal
from paramserve.core.sessions import Answer, Request, ShardSession
from paramserve.core.stepping import flush
from paramserve.core.table.block import KeyedBlock
from paramserve.errors import (
    ClientClosed,
    Overloaded,
    ParamServeError,
    UnknownName,
    WorkerFenced,
)
from paramserve.ids import NO_RANK
from paramserve.messages import Done, Member, Members, Step
from paramserve.rules.registry import NONE

SESSION_KEEP_S = 60.0
"""A client that is no live worker is forgotten this long after its connection ended."""
ENDED = ("left", "dead", "restarting")
"""States of a member whose present incarnation may change nothing any more."""
AWAITED = ("expected", "live", "restarting", "retiring")
"""States of a member for which a synchronous clock waits."""


class ShardMembers(ABC):
    """The part of a shard that knows its clients; see `core.shard.Shard`.

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
        allocate: Callable[[int], replies.Bytes] = replies.fresh,
    ) -> None:
        self.number = number
        self.shards = shards
        self.groups: dict[int, Group] = {}
        self.blocks: dict[int, ShardBlock | KeyedBlock] = {}
        self.sessions: dict[int, ShardSession] = {}
        self.members = {rank: Member(rank, 0, 0, "expected") for rank in range(workers)}
        self.workers: dict[int, ShardSession] = {}
        """Sessions of the newest incarnation of each rank."""
        self.policy = policy
        self.limits = limits
        self.resend_s = resend_s
        self.rules = rules
        self.policies = policies
        self.allocate = allocate
        self.members_number = 0
        """Of the membership that it was told last."""
        self._retiring: frozenset[int] = frozenset()
        self._to_drain = deque[ShardSession]()
        """Sessions whose queues can go on, within one event."""
        self._draining = False
        self._now = 0.0
        self._effects = Effects()

    def live(self) -> list[int]:
        """Ranks that a synchronous clock waits for, in order."""
        return [r for r, m in sorted(self.members.items()) if m.state in AWAITED]

    def _may_enter(self, session: ShardSession) -> bool:
        """Whether this is a live worker, which begins to count with its first step: where gradients
        are collected, with the first that is in a clock, so that all shards count it alike."""
        if session.rank == NO_RANK or self.workers.get(session.rank) is not session:
            return False
        member = self.members.get(session.rank)
        return member is not None and member.state in AWAITED

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
        group.now = self._now
        return group

    def block(self, number: int) -> ShardBlock | KeyedBlock:
        """The block of this number.

        Raises:
            UnknownName: it was never defined. Nothing was applied.
        """
        block = self.blocks.get(number)
        if block is None:
            raise UnknownName(f"shard {self.number} has no block {number}", fix="define it first")
        return block

    @abstractmethod
    def _drain(self, session: ShardSession) -> None: ...

    @abstractmethod
    def _clocks_changed(self, group: Group) -> None: ...

    # --- sessions --------------------------------------------------------------------------------

    def _client_here(self, event: ClientHere) -> None:
        refused = self._fence(event)
        if refused is not None:
            self._effects.refused = refused
            return
        session = self.sessions.get(event.client)
        if session is None:
            requests = event.requests or event.window
            session = ShardSession(
                event.client, event.incarnation, event.rank, event.window, requests
            )
            self.sessions[event.client] = session
        session.gone_at = None
        if event.rank == NO_RANK:
            return
        self.workers[event.rank] = session
        member = self.members.get(event.rank)
        if member is None or event.incarnation > member.incarnation:
            # It came before the coordinator's news of it; only the coordinator gives incarnations.
            self.members[event.rank] = Member(event.rank, event.client, event.incarnation, "live")
            self._retiring -= {event.rank}
            self._belonging_changed()

    def _fence(self, event: ClientHere) -> ParamServeError | None:
        requests = event.requests or event.window
        if not 1 <= event.window <= requests <= self.limits.outstanding_max:
            return Overloaded(
                f"client {event.client} wants {event.window} calls with {requests} requests "
                "outstanding, "
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
        """A client has ended by its own wish, or is forgotten."""
        session = self.sessions.pop(client, None)
        for group in self.groups.values():
            group.watching.pop(client, None)
            group.waiting.pop(client, None)
        if session is None or self.workers.get(session.rank) is not session:
            return
        del self.workers[session.rank]
        member = self.members.get(session.rank)
        own = member is not None and member.incarnation == session.incarnation
        if member is not None and own and member.state in AWAITED:
            # The coordinator will say so, too, a little later.
            self.members[session.rank] = structs.replace(member, client=client, state="left")
            self._belonging_changed()

    # --- members ---------------------------------------------------------------------------------

    def _members_changed(self, message: Members) -> None:
        if message.number <= self.members_number:
            return
        self.members_number = message.number
        for member in message.members:
            known = self.members.get(member.rank)
            if known is None or known.incarnation < member.incarnation:
                self.members[member.rank] = member
            elif known.incarnation == member.incarnation and known.state != "left":
                self.members[member.rank] = member  # who has left does not come to life again
        self._retiring = frozenset(r for r, m in self.members.items() if m.state == "retiring")
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
            self._count(group, live)

    def _count(self, group: Group, live: list[int]) -> None:
        """Workers have come, gone or begun to rest: go on with those who count."""
        group.now = self._now
        group.belong(live)
        for rank, member in self.members.items():
            if member.incarnation == 0 and member.state in ENDED:
                group.never_came(rank)
        group.forget_notes([r for r, m in self.members.items() if m.state == "left"], live)
        if group.buffered and policy_calls.on_membership(group.at(group.slowest), group):
            flush(group)
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
        """Whether a held request is part of a synchronous clock, and not one that waits."""
        assert isinstance(held.message, Step), "nothing else is ever held"
        return self.groups[held.message.group].collect.has_step(held.message)

    def _answer(self, session: ShardSession, answer: Answer) -> None:
        message = answer.message
        if session.held is not None:
            held = session.held.message
            assert isinstance(held, Step), "nothing else is ever held"
            self.groups[held.group].waiting.pop(session.client, None)
        if session.rank in self._retiring and isinstance(message, Done):
            answer = Answer(structs.replace(message, retire=True), answer.payload)
        session.record(answer)
        session.held = session.done = session.asked = None
        self._effects.replies.append((session.client, answer))

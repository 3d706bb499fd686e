"""Synchronous clocks on a shard: gradients are collected, and applied when the lead has decided.

`core.two_stroke` says how the shards agree.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from msgspec import structs

from paramserve.consistency.base import ADMIT, Admit
from paramserve.core import collecting, policy_calls, stepping
from paramserve.core.commit import Contribution, lead_of
from paramserve.core.group import Group, Proposed
from paramserve.core.policy_changes import PolicyEpoch
from paramserve.core.sessions import Answer, Request, ShardSession
from paramserve.core.shard_members import AWAITED
from paramserve.core.shard_waiting import ShardWaiting
from paramserve.errors import PolicyFailed
from paramserve.messages import (
    Commit,
    Done,
    Pause,
    Paused,
    PeerMessage,
    Prepare,
    Step,
    Switch,
    Vote,
)

ASK_AGAIN_S = 1e-4
"""A policy that waits for a time is not asked again sooner than this."""


class ShardClocks(ShardWaiting):
    """The part of a shard that collects, and speaks with the other shards."""

    @abstractmethod
    def _on_pause(self, group: Group, message: Pause) -> None: ...

    @abstractmethod
    def _on_paused(self, group: Group, message: Paused) -> None: ...

    @abstractmethod
    def _on_switch(self, group: Group, message: Switch) -> None: ...

    def _bring(
        self,
        group: Group,
        session: ShardSession,
        request: Request,
        parts: list[stepping.Part],
        pending: bool,
        wrong: Exception | None = None,
    ) -> Answer | None:
        """Collect a step for the present clock; answered when the clock is decided.

        A step that this shard refuses (`wrong`) is collected as well, with its refusal: then the
        clock is refused to all its workers, and none of them waits for this one.

        A pending member is not waited for, and counts from the clock on that it is in. A step of
        the next clock waits: the present one was decided without this worker, and the news is on
        its way. One of an older clock came too late. The first step of a newer incarnation may find
        the clock with its predecessor's gradients, or just closed with them, or without any while
        the rank had ended.
        """
        step, rank = request.message, session.rank
        assert isinstance(step, Step)
        collect = group.collect
        if step.tick and (pending or rank in group.clocks):
            if step.clock < group.committed:
                group.brought_by[rank] = session.client
                if wrong is not None:
                    raise wrong
                return collecting.late(self, group, request, session, group.committed)
            ahead = self.shards > 1 or rank in collect.pending  # of an older incarnation
            if step.clock == group.committed + 1 and ahead:
                self._hold(group, session, request)
                return None
            answer = None
            if wrong is None:
                answer = collecting.commit_single_worker(self, group, session, request, parts)
            if answer is not None:
                group.brought_by[rank] = session.client
                self._release_waiting(group)
                return answer
            older = collect.pending.get(rank)
            first = session.incarnation > 1 and group.brought_by.get(rank) != session.client
            if first and older is not None and step.clock == group.committed:
                collect.supersede(rank)
                forgotten = self.sessions.get(older.client)
                if forgotten is not None:
                    self._let_go(forgotten, self.members[rank])
        stepping.flush(group)  # of a policy before
        refusal = None
        if wrong is not None:
            refusal = collecting.refusal_with(group, self.number, rank, wrong)
        collecting.collect(group, session, request, parts, pending, refusal)
        group.brought_by[rank] = session.client
        group.came(rank)
        session.held = request
        partial = group.at(group.committed).policy.partial
        if collect.sent is not None and (partial or collect.has(group.clocks)):
            collect.sent = None  # The lead is told of what has come since.
        self._maybe_vote(group)
        return None

    def _maybe_vote(self, group: Group) -> None:
        """Tell the lead that the gradients of this clock that its policy waits for are here."""
        collect = group.collect
        if not collect.pending or collect.sent is not None:
            return
        since = group.at(group.committed)
        if not since.policy.collects:
            return
        group.now = self._now
        try:
            # Pending members alone wait for nobody.
            admission = policy_calls.on_clock(since, group) if group.clocks else ADMIT
        except PolicyFailed as error:
            self._send_vote(group, collect.clients(), error)
            return
        if isinstance(admission, Admit):
            self._send_vote(group, collect.clients())
        else:
            collect.missing = admission.workers
            collect.due = None
            if admission.until_s is not None and collect.since is not None:
                later = self._now + ASK_AGAIN_S  # rounding may put its time a little too early
                collect.due = max(collect.since + admission.until_s, later)

    def _send_vote(
        self, group: Group, contributors: tuple[int, ...], failed: PolicyFailed | None = None
    ) -> None:
        vote = collecting.vote(group, self.number, contributors)
        if failed is not None and not vote.refusal:
            text = (type(failed).__name__, failed.failed, failed.fix)
            vote = structs.replace(vote, refusal=text)
        group.collect.sent = vote
        group.collect.due = None
        group.collect.repeat_at = self._now + self.resend_s
        self._to_shard(lead_of(group.id, self.shards), vote)

    def _repeat_vote(self, group: Group, sent: Vote) -> None:
        """Tell the lead again. Proposals of before may have made each shard's part smaller in
        another way, until what all have is too little for the clock: so all that is here by now."""
        clients = group.collect.clients()
        if set(sent.contributors) != set(clients):
            self._send_vote(group, clients)
            return
        group.collect.repeat_at = self._now + self.resend_s
        self._to_shard(lead_of(group.id, self.shards), sent)

    def _to_shard(self, shard: int, message: PeerMessage) -> None:
        if shard == self.number:
            self._from_shard(message)
        else:
            self._effects.peers.append((shard, message))

    def _to_shards(self, messages: Mapping[int, PeerMessage]) -> None:
        for shard, message in messages.items():
            self._to_shard(shard, message)

    def _on_vote(self, group: Group, message: Vote) -> None:
        if group.lead is None:
            return
        since = group.at(group.committed)

        def enough(clients: frozenset[int]) -> bool:
            return self._enough(group, since, clients)

        for shard, answer in group.lead.on_vote(message, group.committed, since, enough):
            self._to_shard(shard, answer)

    def _enough(self, group: Group, since: PolicyEpoch, clients: frozenset[int]) -> bool:
        """Whether a clock that does not wait for everybody may be decided with only these."""
        if not since.policy.partial:
            return True
        if not group.brought:
            return True  # who counts is not kept waiting: what nobody may wait for is closed
        held = group.collect.pending
        brought = {rank for rank in group.brought if held[rank].client in clients}
        if not brought:
            return False
        try:
            return isinstance(policy_calls.on_clock(since, Proposed(group, brought)), Admit)
        except PolicyFailed:
            return True  # which its own `Vote` says

    def _on_propose(self, group: Group, message: Prepare) -> None:
        collect = group.collect
        partial = group.at(group.committed).policy.partial
        settled = collect.sent is not None or collect.has(group.clocks)
        # Of a rank that still counts, this shard and another have two incarnations'.
        differs = not partial and any(
            rank in group.clocks and each.client not in message.contributors
            for rank, each in collect.pending.items()
        )
        if message.clock == group.committed and settled and not differs:
            agreed = (c for c in collect.clients() if c in message.contributors)
            self._send_vote(group, tuple(agreed))

    def _commit(self, group: Group, commit: Commit) -> None:
        if commit.clock != group.committed:
            return  # Answered before.
        held = group.collect.everything()
        chosen = group.collect.chosen(commit.contributors)
        group.collect.clear()
        collecting.apply_commit(group, commit, chosen)
        for each in chosen.values():  # also of those who have left since
            group.mark(each.client, each.step.mark)
        for each in held:
            self._enter_with(group, each, commit)
        group.commit(rank for rank in chosen if self.members[rank].state in AWAITED)
        waiting, again = list[ShardSession](), list[tuple[ShardSession, Request]]()
        for each in held:
            session = self.sessions.get(each.client)
            if session is not None and session.held is not None:
                waiting.append(session)
                if session.asked is not None and each.client not in commit.decided:
                    again.append((session, session.asked))
                    session.held = None
                    continue
                answer = collecting.after_commit(
                    self, group, commit, each.step, session, each.refusal
                )
                if isinstance(answer.message, Done):
                    answer = self._with_news(group, session, answer)
                self._answer(session, answer)
        for session, request in again:
            self._execute(session, request)
        for session in waiting:
            self._drain(session)
        self._clocks_changed(group)

    def _enter_with(self, group: Group, brought: Contribution, commit: Commit) -> None:
        """Wait for a worker from now on in the groups that its step names, if this clock had to
        wait for it, or took it in.

        All shards do so before anybody else of this clock who steps in both groups can go on in the
        others: they agree on the clock there. Where there is nobody else, one shard may be a clock
        behind; its step for that clock is made again when that is decided (`_commit`).
        """
        session = self.sessions.get(brought.client)
        if not brought.step.enters or session is None or not self._may_enter(session):
            return
        if session.rank in group.clocks or brought.client in commit.contributors:
            for number in brought.step.enters:
                other = self.groups.get(number)
                if other is not None and other is not group and session.rank not in other.clocks:
                    other.enter(session.rank)

    def _from_shard(self, message: PeerMessage) -> None:
        number = message.change.group if isinstance(message, Switch) else message.group
        group = self.groups.get(number)
        if group is None:
            return  # Its define is still on the way; the sender repeats.
        group.now = self._now
        match message:
            case Vote():
                self._on_vote(group, message)
            case Prepare():
                self._on_propose(group, message)
            case Commit():
                self._commit(group, message)
            case Pause():
                self._on_pause(group, message)
            case Paused():
                self._on_paused(group, message)
            case Switch():
                self._on_switch(group, message)

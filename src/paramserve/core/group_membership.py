"""How all shards agree on who is a member of a group: its lead shard decides.

A rank joins or suspends its membership with a numbered request to every shard. The lead decides
when it executes the request, and tells the others (`GroupMembership`), until each has said that it
knows. Where gradients are collected the decision holds from the lead's undecided clock on: the lead
counts no vote of a shard that does not know it yet. So a clock has the same members everywhere.
While a clock is decided and not committed on the lead, as it stops for a cut, a rank that joins
waits for the commit.

A group that is defined later has the members that the first one has then, besides the ranks that
the cluster was started with: else those that step both would wait for an added rank in one of them,
and it for them in the other.

A rank that steps several groups joins the first one by itself, and the others when its first step
there is answered: where that one's clock is decided with it, all who step both are at the same
clock of the others. Meanwhile it is no member there, on any shard that has answered its request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from paramserve.core.commit import Lead, lead_of
from paramserve.core.events import EnterGroups, GroupEffect, Send
from paramserve.core.group_members import JoinedBy
from paramserve.core.group_state import GroupState
from paramserve.messages import GroupMembership, MembershipKnown


class MembershipAgreement:
    """One shard's part in the decisions about one group's members.

    Args:
        state: the group.
        shard: number of this shard, of `shards`.
        resend_s: after which a decision that a shard does not know is sent again.
        outbox: takes what the shard is to do.
        clocks: on the lead, its decisions about clocks.
    """

    def __init__(
        self,
        state: GroupState,
        shard: int,
        shards: int,
        resend_s: float,
        outbox: deque[GroupEffect],
        clocks: Lead | None,
    ) -> None:
        self._state = state
        self._shard = shard
        self._lead = lead_of(state.id, shards)
        self.unacknowledged: dict[int, None] = {}
        """On the lead: the shards that are not known to go by the newest decision."""
        self._holds_from = 0
        """On the lead: its undecided clock when it decided last."""
        self._others = [each for each in range(shards) if each != shard]
        self._resend_s = resend_s
        self._repeat_at = 0.0
        self._next: GroupMembership | None = None
        """A decision that holds from a clock on which this shard has not come to."""
        self.entering: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        """By rank: the client that has joined, with which request, and the groups where it is a
        member when its first step is answered."""
        self._outbox = outbox
        self._clocks = clocks
        self._joining: dict[int, tuple[int, int]] = {}
        """On the lead: by rank that joins behind a clock that is decided, the client and its
        request."""

    # --- what the lead decides -------------------------------------------------------------------

    def begin(self, added: Mapping[int, JoinedBy], now: float) -> None:
        """The group is new and not the first, and these are members besides the ranks that the
        cluster was started with: on the lead a decision, also without any, since others may have
        heard of more than it; they take theirs for what it will be."""
        self._state.now = now
        members = self._state.members
        joined = {**members.joined, **added}
        if self._clocks is None:
            members.decided(members.number, joined, self._state.start)
        else:
            self._decide(joined)

    def join(self, rank: int, client: int, seq: int) -> bool:
        """On the lead, make a live rank a member, as this request of a client asks; whether the
        decision is new."""
        state = self._state
        if self._clocks is None or state.members.knows(rank, client, seq, member=True):
            return False
        if self._clocks.has_decided(state.committed):
            self._joining[rank] = client, seq
            return False
        clock = state.members.clock_of(rank, state.start)
        return self._decide({**state.members.joined, rank: JoinedBy(client, seq, clock)})

    def suspend(self, rank: int, client: int, seq: int) -> bool:
        """On the lead, end a rank's membership, as this request of a client asks; whether the
        decision is new."""
        self._joining.pop(rank, None)
        joined = self._state.members.joined
        known = self._state.members.knows(rank, client, seq, member=False)
        if self._shard != self._lead or known:
            return False
        return self._decide({each: by for each, by in joined.items() if each != rank})

    def members_changed(self) -> bool:
        """Forget who has ended; on the lead, end their memberships. Whether the decision is new."""
        members = self._state.members
        for rank in [each for each in self.entering if each not in members.live]:
            del self.entering[rank]
        left = {rank: by for rank, by in members.joined.items() if rank in members.live}
        if self._shard != self._lead or len(left) == len(members.joined):
            return False
        return self._decide(left)

    def join_behind(self) -> None:
        """The clock is committed that was decided without ranks that join."""
        for rank, (client, seq) in self._joining.items():
            self._outbox.append(EnterGroups(rank, client, seq, (self._state.id,)))
        self._joining = {}

    def _decide(self, joined: dict[int, JoinedBy]) -> bool:
        state = self._state
        self._holds_from = state.committed
        self.unacknowledged.update(dict.fromkeys(self._others))
        state.members.decided(state.members.number + 1, joined, state.start)
        self._tell_all()
        return True

    def _tell_all(self) -> None:
        self._repeat_at = self._state.now + self._resend_s
        for shard in self.unacknowledged:
            self.tell(shard)

    def tell(self, shard: int) -> None:
        """Send the newest decision to a shard."""
        state, members = self._state, self._state.members
        entries = tuple((rank, *by) for rank, by in sorted(members.joined.items()))
        message = GroupMembership(state.id, members.number, self._holds_from, entries)
        self._outbox.append(Send(shard, message))

    def on_known(self, message: MembershipKnown) -> None:
        """On the lead: a shard goes by a decision."""
        if message.number >= self._state.members.number:
            self.unacknowledged.pop(message.shard, None)

    # --- what the others know --------------------------------------------------------------------

    def on_decision(self, message: GroupMembership) -> bool:
        """Take the lead's decision, as soon as it holds here; whether it does, and is new."""
        newest = max(self._state.members.number, self._next.number if self._next else 0)
        if message.number > newest:
            self._next = message
        elif self._next is None:
            self._acknowledge()
        return self.settle()

    def settle(self) -> bool:
        """Go by a decision whose clock has come; whether there was one."""
        message, state = self._next, self._state
        if message is None or state.committed < message.clock:
            return False
        self._next = None
        joined = {rank: JoinedBy(*by) for rank, *by in message.members}
        # Members that wait for it may be further here than on the lead, but on no shard further
        # than its own first step, so it begins where the lead has said.
        start = state.start if state.collects else 0
        state.members.decided(message.number, joined, start)
        self._acknowledge()
        return True

    def _acknowledge(self) -> None:
        message = MembershipKnown(self._state.id, self._state.members.number, self._shard)
        self._outbox.append(Send(self._lead, message))

    # --- further groups --------------------------------------------------------------------------

    def enter_later(self, rank: int, client: int, seq: int, groups: tuple[int, ...]) -> None:
        """A client joins with this request, and the groups that it steps after this one later."""
        self.entering.pop(rank, None)
        if groups:
            self.entering[rank] = client, seq, groups

    def stay_out(self, rank: int, group: int) -> None:
        """A rank has suspended its membership of a group: of this one, or of one of those."""
        client, seq, groups = self.entering.pop(rank, (0, 0, ()))
        left = tuple(each for each in groups if each != group)
        if left and group != self._state.id:
            self.entering[rank] = client, seq, left

    def enter_others(self, rank: int, client: int) -> None:
        """A member's first step is answered: its further groups wait for it from now on."""
        found = self.entering.get(rank)
        if found is not None and found[0] == client:
            del self.entering[rank]
            self._outbox.append(EnterGroups(rank, *found))

    # --- time ------------------------------------------------------------------------------------

    def deadline_reached(self, now: float) -> None:
        """Repeat what a shard does not know."""
        if self.unacknowledged and self._repeat_at <= now:
            self._tell_all()

    def deadlines(self) -> list[float]:
        """When to repeat."""
        return [self._repeat_at] if self.unacknowledged else []

"""How all shards agree on who is a member of a group: the lead shard decides.

A rank joins or suspends its membership with a numbered request to every shard. The lead decides
when it executes the request, and appends the members to the decision log (`core.decisions`): so
they hold behind the clocks decided before, on every shard. The lead counts no vote of a shard that
does not know the newest of these decisions: so a clock has the same members everywhere.

A group that is defined later has the members that the first one has then, besides the ranks that
the cluster was started with: else those that step both would wait for an added rank in one of them,
and it for them in the other.

A rank that steps several groups joins the first one by itself, and becomes a member of the others
later (`core.followers`). Meanwhile it is no member there, on any shard that has answered its
request.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserve.core.decisions import DecisionLog
from paramserve.core.group_members import JoinedBy
from paramserve.core.group_state import GroupState
from paramserve.messages import GroupMembership


class MembershipAgreement:
    """One shard's part in the decisions about one group's members.

    Args:
        state: the group.
        decisions: the log on this shard.
    """

    def __init__(self, state: GroupState, decisions: DecisionLog) -> None:
        self.newest = 0
        """Number of the newest decision about this group's members that this shard has applied."""
        self._state = state
        self._decisions = decisions

    # --- what the lead decides -------------------------------------------------------------------

    def begin(self, added: Mapping[int, JoinedBy], now: float) -> None:
        """The group is new and not the first, and these are members besides the ranks that the
        cluster was started with: on the lead a decision, also without any, since others may know
        of more than it; they take theirs for what it will be."""
        self._state.now = now
        members = self._state.members
        joined = {**members.joined, **added}
        if self._decisions.leads:
            self._decide(joined)
        else:
            members.decided(joined, self._state.start)

    def join(self, rank: int, client: int, seq: int, clock: int) -> None:
        """Make a live rank a member from a clock on, as this request of a client asks; on the
        lead."""
        members = self._state.members
        if self._decisions.leads and not members.knows(rank, client, seq, member=True):
            self._decide({**members.joined, rank: JoinedBy(client, seq, clock)})

    def suspend(self, rank: int, client: int, seq: int) -> None:
        """End a rank's membership, as this request of a client asks; on the lead."""
        members = self._state.members
        if self._decisions.leads and not members.knows(rank, client, seq, member=False):
            self._decide({each: by for each, by in members.joined.items() if each != rank})

    def members_changed(self) -> None:
        """End the memberships of ranks that have ended; on the lead."""
        members = self._state.members
        remaining = {rank: by for rank, by in members.joined.items() if rank in members.live}
        if self._decisions.leads and len(remaining) < len(members.joined):
            self._decide(remaining)

    def _decide(self, joined: Mapping[int, JoinedBy]) -> None:
        entries = tuple((rank, *by) for rank, by in sorted(joined.items()))
        self._decisions.append(GroupMembership(self._state.id, entries), self._state.now)

    def on_decision(self, decision: GroupMembership) -> dict[int, JoinedBy]:
        """Go by the lead's decision; who has joined by it and was no member before."""
        state, members = self._state, self._state.members
        self.newest = self._decisions.number
        joined = {rank: JoinedBy(*by) for rank, *by in decision.members}
        # A rank that has stayed a member goes on behind a step that all shards have.
        new = {rank: by for rank, by in joined.items() if rank not in members.joined}
        members.decided(joined, state.start if state.collects else 0)
        return new

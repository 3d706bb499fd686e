"""Where a rank that has joined one group becomes a member of the others that it steps.

A rank that steps several groups joins the first one, its *entry*, by itself. In the others, which
follow, it becomes a member when it has ended its first clock of the entry, where members are that
have ended the same clock there: else it waits in one group for a member that waits for it in
another. A restarted rank may be there already: then it stays a member, at its own clock.

Where the entry's gradients are collected, those are the members of the clock that was decided.
Elsewhere members may be further on, or not as far. All step their groups in turn, so where one of
them is says where it is, was or will be with the joiner's clock of the entry. No clock goes back:
if the joiner or all others are further on already, its next steps there end none.

Shard 0 decides, since it executes the steps of all groups and leads the log. The other shards hear
of it as of any other member (`core.group_membership`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from paramserve.core.events import Enter
from paramserve.core.group_state import GroupState
from paramserve.core.shard_sessions import Round, ShardSession
from paramserve.messages import JoinGroup

StateOf = Callable[[int], GroupState | None]
"""The group of a number; None: it is not defined here."""
SessionOf = Callable[[int], ShardSession]
"""Session of a live rank's newest client."""


class Joiner(NamedTuple):
    """A rank that has joined its entry, and is no member yet of the groups that follow."""

    client: int
    seq: int
    """Sequence number of the request by which it has joined."""
    entry: int
    others: tuple[int, ...]
    """The groups that follow."""


class Followers:
    """The joiners that shard 0 knows; the other shards know of none."""

    def __init__(self, state_of: StateOf, session_of: SessionOf) -> None:
        self.joiners: dict[int, Joiner] = {}
        """Joiners by rank."""
        self._state_of = state_of
        self._session_of = session_of

    def begin(self, rank: int, client: int, message: JoinGroup) -> list[int]:
        """A client joins a group, and others are to follow: those of them in which the rank is a
        member and stays one, since it is where others are in their round of groups."""
        self.leave(rank, message.group)
        entry = self._state_of(message.group)
        clock, *clocks = message.clocks or (0,)
        stays = [
            number
            for number, own in zip(message.others, clocks, strict=False)
            if entry is not None and self._in_round(entry, number, rank, clock, own)
        ]
        others = tuple(each for each in message.others if each not in stays)
        if others:
            self.joiners[rank] = Joiner(client, message.seq, message.group, others)
        return stays

    def _in_round(self, entry: GroupState, number: int, rank: int, clock: int, own: int) -> bool:
        """Whether a member of the entry is as far in another group as members will be that end its
        next clock of the entry: it waits in none of them for one that waits for it.

        Args:
            clock: of the entry, which it is to end.
            own: its clock of the other group.
        """
        other = self._state_of(number)
        if other is None or not (rank in entry.clocks and rank in other.clocks):
            return False
        if entry.collects or other.collects:
            return False
        return self._where(entry, other, rank, clock + 1, collects=False) == own

    def leave(self, rank: int, group: int) -> None:
        """A rank suspends its membership of a group, or joins it: of its entry, or of one that
        follows."""
        joiner = self.joiners.pop(rank, None)
        if joiner is not None and joiner.entry != group:
            others = tuple(each for each in joiner.others if each != group)
            if others:
                self.joiners[rank] = joiner._replace(others=others)

    def keep(self, clients: Collection[int]) -> None:
        """Forget joiners of other clients than these."""
        for rank in [each for each, by in self.joiners.items() if by.client not in clients]:
            del self.joiners[rank]

    def end_clock(
        self, group: int, rank: int, client: int, clock: int, *, collects: bool
    ) -> list[Enter]:
        """A rank has ended a clock of a group, or was told that this was over without it: what it
        becomes a member of.

        Args:
            clock: the one that comes next.
            collects: whether gradients of the one that was ended were collected.
        """
        joiner, entry = self.joiners.get(rank), self._state_of(group)
        if joiner is None or joiner.entry != group or joiner.client != client or entry is None:
            return []
        del self.joiners[rank]
        members = []
        for number in joiner.others:
            state = self._state_of(number)
            if state is not None:
                own = state.members.clock_of(rank, state.start)  # it does not go back
                at = self._where(entry, state, rank, clock, collects=collects)
                if at is not None and own > at:
                    ahead = Round(group, clock + own - at, own, joiner.seq)
                    self._session_of(rank).rounds[number] = ahead
                members.append(Enter(rank, client, joiner.seq, number, max(own, at or 0)))
        return members

    def round_of(self, rank: int, group: GroupState, others: Iterable[GroupState]) -> Round | None:
        """Place of a group's members that are as far in another one as a rank which asks to be one;
        None: that is not known.

        Args:
            others: of the cluster.
        """
        others_waiting = [e for e in others if e.id != group.id and e.waits and rank in e.clocks]
        if group.collects or not (group.waits and others_waiting):
            return None
        ticks = self._session_of(rank).ticks
        last = max(others_waiting, key=lambda each: (each.collects, ticks.get(each.id, 0)))
        if not (last.collects or last.id in ticks):
            return None
        clock = last.clocks[rank]
        at = self._where(last, group, rank, clock, collects=False)
        return None if at is None else Round(last.id, clock, at)

    def _where(
        self, entry: GroupState, other: GroupState, rank: int, clock: int, *, collects: bool
    ) -> int | None:
        """The clock of another group at which members are that have just ended a clock of the
        entry; None: there is no member of both.

        Args:
            clock: of the entry, the one that comes next.
        """
        both = [each for each in other.clocks if each in entry.clocks and each != rank]
        if not both:
            return None
        if collects:
            return max(other.clocks[each] for each in both)
        sessions = {each: self._session_of(each) for each in both}
        near = min(
            both, key=lambda each: (not sessions[each].ticks, abs(entry.clocks[each] - clock))
        )
        session = sessions[near]
        round_to_come = self._round_to_come(near, other, entry)
        if round_to_come is not None:  # it comes there with steps that end no clock
            return round_to_come.at + clock - round_to_come.clock
        round_to_come = self._round_to_come(near, entry, other)
        if round_to_come is not None:  # so it does to the entry, which it steps after this one
            return round_to_come.clock - 1 + clock - round_to_come.at
        between = session.ticks.get(entry.id, 0) > session.ticks.get(other.id, 0)
        between = between and near not in entry.collect.pending  # this one is not ended
        return other.clocks[near] - (not between) + clock - entry.clocks[near]

    def _round_to_come(self, rank: int, group: GroupState, entry: GroupState) -> Round | None:
        """Where a rank is in a group that has followed this entry, while its steps there end no
        clock."""
        session = self._session_of(rank)
        candidate = session.rounds.get(group.id)
        if candidate is None or candidate.entry != entry.id:
            return None
        return candidate if candidate.seq > session.ticks.get(group.id, 0) else None

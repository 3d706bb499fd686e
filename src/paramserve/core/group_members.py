"""Which ranks a group on one shard waits for, and how many steps each has finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct


class JoinedBy(NamedTuple):
    """How a rank became a member."""

    client: int
    """Client that has joined; 0: the rank is a member from the beginning."""
    seq: int
    """Sequence number of the client's join request, the same on all shards."""
    clock: int
    """Clock of the group at which the membership began."""


class MembersRecord(Struct, frozen=True):
    """The members of a group on one shard, as of one moment.

    Attributes:
        joined: the members, by rank.
        clocks: by rank, the steps finished of all that are waited for, or were.
        slowest: the smallest clock of those that are waited for.
    """

    joined: dict[int, JoinedBy]
    clocks: dict[int, int]
    slowest: int


class GroupMembers:
    """The members of one group, with their clocks.

    The lead shard decides who is a member (`core.group_membership`); a live one is waited for, and
    has a clock here.

    Args:
        ranks: members from the beginning: those that the cluster was started with.
        live: of the cluster, those that clocks wait for.
    """

    def __init__(self, ranks: Iterable[int], live: Sequence[int]) -> None:
        self.joined: Mapping[int, JoinedBy] = dict.fromkeys(ranks, JoinedBy(0, 0, 0))
        """The members by rank, live or not."""
        self.clocks: dict[int, int] = {}
        """Steps that each live member has finished. Changed by the methods of this class only."""
        self.slowest = 0
        """Smallest clock of the live members; without live members, the last one."""
        self.live = live
        """Ranks of the cluster in a state that clocks wait for, members of the group or not."""
        self._at_slowest = 0
        """Number of live members at the smallest clock."""
        self._former_clocks: dict[int, int] = {}
        """Clocks of ranks that were live members before; each goes on from there if it comes
        back."""
        self._passed: dict[int, int] = {}
        """Number of clocks that each rank has skipped by joining, or coming back, at a later
        one."""
        self._recount(0, {})

    def update(self, live: Sequence[int], start: int) -> None:
        """These ranks are live. One that comes back goes on at its own clock, but not behind the
        slowest of the others.

        Args:
            start: the clock at which a rank that comes now begins.
        """
        self.live = live
        self._recount(start, {})

    def decided(self, joined: Mapping[int, JoinedBy], start: int) -> None:
        """The lead has decided who is a member, by rank. The others' clocks stay."""
        new = {rank: by.clock for rank, by in joined.items() if by != self.joined.get(rank)}
        self.joined = joined
        self._recount(start, new)

    def record(self) -> MembersRecord:
        """The members and clocks as they are now."""
        return MembersRecord(
            dict(self.joined), {**self._former_clocks, **self.clocks}, self.slowest
        )

    def restore(self, record: MembersRecord) -> None:
        """Take over members and clocks of before; ranks that are not live may come back. The
        members may be those of the lead, whose last decision had not come here: no member is behind
        the clock at which it began."""
        joined = record.joined
        self.joined, self.slowest = joined, record.slowest
        self.clocks, self._former_clocks = {}, dict(record.clocks)
        self._passed = {rank: by.clock for rank, by in joined.items() if by.clock}
        self._recount(0, {rank: by.clock for rank, by in joined.items()})

    def knows(self, rank: int, client: int, seq: int, *, member: bool) -> bool:
        """Whether the lead's decision about a client's request is known here, or a later one.

        Args:
            member: what the request asks for.
        """
        by = self.joined.get(rank)
        if by is None:
            return not member
        newest = (by.client, by.seq)
        return newest >= (client, seq) if member else newest > (client, seq)

    def is_settled(self, rank: int, client: int, seq: int) -> bool:
        """Whether a rank is known to be no member since a client's request, or to be one by it or
        a later one."""
        return rank not in self.clocks or self.knows(rank, client, seq, member=True)

    def clock_of(self, rank: int, start: int) -> int:
        """The clock of a live member, or the one at which the rank would begin."""
        return self.clocks.get(rank, max(start, self._former_clocks.get(rank, 0)))

    def ticked(self, rank: int, clock: int) -> None:
        """A member has ended a step. Its clock stays where it is if the step repeats one that an
        older incarnation has sent here before."""
        before = self.clocks[rank]
        if clock + 1 <= before:
            return
        self.clocks[rank] = clock + 1
        if before == self.slowest:
            self._at_slowest -= 1
            if not self._at_slowest:
                self._count()

    def commit(self, clock: int, *, together: bool) -> None:
        """All before `clock` is committed.

        Args:
            together: whether all members are at that clock; else one may be at a later one.
        """
        if together:
            clocks = self.clocks
            for rank in clocks:
                clocks[rank] = clock
            if clocks:
                self.slowest, self._at_slowest = clock, len(clocks)
        else:
            self._set({rank: max(own, clock) for rank, own in self.clocks.items()})

    def left(self) -> tuple[tuple[int, int], ...]:
        """(rank, clock) of each rank that is not waited for any more: where it was."""
        return tuple(
            sorted(each for each in self._former_clocks.items() if each[0] not in self.clocks)
        )

    def passed(self) -> tuple[tuple[int, int], ...]:
        """(rank, clocks) of each rank that has begun or come back at a later clock than its own."""
        return tuple(sorted(self._passed.items()))

    def fastest(self) -> int:
        """The largest clock, also of ranks that are not waited for any more."""
        return max((*self.clocks.values(), *self._former_clocks.values()), default=self.slowest)

    def _recount(self, start: int, least: Mapping[int, int]) -> None:
        """Set the clocks of the members that live: their own, or the clock where they begin. What
        they pass over by that is noted."""
        self._former_clocks.update(self.clocks)
        clocks = {
            rank: max(self.clock_of(rank, start), least.get(rank, 0))
            for rank in self.live
            if rank in self.joined
        }
        for rank, clock in clocks.items():
            if (over := clock - self._former_clocks.get(rank, 0)) > 0:
                self._passed[rank] = self._passed.get(rank, 0) + over
        self._set(clocks)

    def _set(self, clocks: dict[int, int]) -> None:
        self.clocks = clocks
        self._count()

    def _count(self) -> None:
        clocks, at_slowest = self.clocks, 0
        for rank in clocks:
            if not at_slowest or clocks[rank] < self.slowest:
                self.slowest, at_slowest = clocks[rank], 1
            elif clocks[rank] == self.slowest:
                at_slowest += 1
        self._at_slowest = at_slowest

"""Which ranks a group on one shard waits for, and how many steps each has finished."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paramserve.core.sessions import ENDED
from paramserve.messages import Member


class GroupMembers:
    """The members of one group, with their clocks.

    A live rank that is no member yet is a pending member: it becomes one where it enters, or where
    gradients are collected with the first clock that it is in.

    Args:
        live: ranks that are members from the beginning.
    """

    def __init__(self, live: Sequence[int]) -> None:
        self.clocks: dict[int, int] = {}
        """Steps that each member has finished. Changed by the methods of this class only."""
        self.slowest = 0
        """The smallest clock; without members, what it was last."""
        self.live: Sequence[int] = ()
        """Ranks of the cluster that synchronous clocks wait for."""
        self.suspended: dict[int, int] = {}
        """Live ranks that are not waited for until they enter again, with the client that has
        suspended each."""
        self._at_slowest = 0
        """How many members are at the smallest clock."""
        self._first = frozenset(live)
        self._ended: dict[int, int] = {}
        """Clocks of ranks that have ended or are suspended, and may come back."""
        self.update({}, live, 0)

    def update(self, members: Mapping[int, Member], live: Sequence[int], start: int) -> None:
        """These ranks are live or waited for. One that was here before, and comes back, goes on at
        its own clock, but not behind the slowest of the others.

        Args:
            members: of the cluster, by rank.
            start: the clock at which a worker that comes now begins.
        """
        self.live = live
        self._ended.update(self.clocks)
        counted = (r for r in live if r in self._first or r in self.clocks or r in self._ended)
        self._set(
            {
                rank: self.clocks.get(rank, max(start, self._ended.get(rank, 0)))
                for rank in counted
                if rank not in self.suspended
            }
        )
        self.suspended = {rank: by for rank, by in self.suspended.items() if rank in live}
        for rank, member in members.items():
            if member.incarnation == 0 and member.state in ENDED:
                # It never came, and is a pending member if it comes later.
                self._first -= {rank}
                self._ended.pop(rank, None)

    def enter(self, rank: int, start: int) -> None:
        """A live rank becomes a member, with its first step here or after it was suspended."""
        self.suspended.pop(rank, None)
        self._set({**self.clocks, rank: self.clock_of(rank, start)})

    def clock_of(self, rank: int, start: int) -> int:
        """The clock of a member, or the one at which the rank would begin."""
        return self.clocks.get(rank, max(start, self._ended.get(rank, 0)))

    def suspend(self, rank: int, client: int) -> None:
        """This worker is not waited for until it enters again."""
        self.suspended[rank] = client
        self._ended.update(self.clocks)
        self._set({r: clock for r, clock in self.clocks.items() if r != rank})

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

    def commit(
        self, contributors: Iterable[tuple[int, int]], clock: int, *, together: bool
    ) -> None:
        """All before `clock` is committed, with these workers, which are members from now on.

        Gradients of an older incarnation are no reason to wait for a rank whose newer one has
        suspended its membership meanwhile: another shard may have had them in the other order.

        Args:
            contributors: rank and client.
            together: whether all members are at that clock; else one may be at a later one.
        """
        for rank, client in contributors:
            if rank not in self.clocks and client >= self.suspended.get(rank, 0):
                self.suspended.pop(rank, None)
                self.clocks[rank] = clock
        if together:
            self._set(dict.fromkeys(self.clocks, clock))
        else:
            self._set({rank: max(own, clock) for rank, own in self.clocks.items()})

    def fastest(self) -> int:
        """The largest clock, also of ranks that have ended or are suspended."""
        return max((*self.clocks.values(), *self._ended.values()), default=self.slowest)

    def _set(self, clocks: dict[int, int]) -> None:
        self.clocks = clocks
        self._count()

    def _count(self) -> None:
        if self.clocks:
            clocks = list(self.clocks.values())
            self.slowest = min(clocks)
            self._at_slowest = clocks.count(self.slowest)

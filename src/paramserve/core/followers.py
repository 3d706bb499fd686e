"""Where a rank that has joined one group becomes a member of the others that it steps.

A rank that steps several groups joins the first one, its *entry*, by itself. In the others, which
follow, it becomes a member when it has ended its first clock of the entry, where members are that
have ended the same clock there: else it waits in one group for a member that waits for it in
another.

Where the entry's gradients are collected, those are the members of the clock that was decided.
Elsewhere members may be further on, or not as far. All step their groups in turn, so where one of
them is says where it is, was or will be with the joiner's clock of the entry. No clock goes back:
if the others are further on there already, the joiner passes clocks of the entry, too.

Shard 0 decides, since it executes the steps of all groups and leads the log. The other shards hear
of it as of any other member (`core.group_membership`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from paramserve.core.events import Enter
from paramserve.core.group_state import GroupState

StateOf = Callable[[int], GroupState | None]
"""The group of a number; None: it is not defined here."""
LastTicks = Callable[[int], Mapping[int, int]]
"""Of a rank by group: the number of the last request by which it has ended a clock there."""


class Joiner(NamedTuple):
    """A rank that has joined its entry, and is no member yet of the groups that follow."""

    client: int
    seq: int
    """Of the request by which it has joined."""
    entry: int
    others: tuple[int, ...]
    """The groups that follow."""


class Followers:
    """The joiners that shard 0 knows; the other shards know of none."""

    def __init__(self, state_of: StateOf, last_ticks: LastTicks) -> None:
        self.joiners: dict[int, Joiner] = {}
        """By rank."""
        self._state_of = state_of
        self._last_ticks = last_ticks

    def begin(self, rank: int, client: int, seq: int, group: int, others: tuple[int, ...]) -> None:
        """A client joins a group with this request, and others are to follow."""
        self.leave(rank, group)
        if others:
            self.joiners[rank] = Joiner(client, seq, group, others)

    def leave(self, rank: int, group: int) -> None:
        """A rank suspends its membership of a group, or joins it: of its entry, or of one that
        follows."""
        known = self.joiners.pop(rank, None)
        if known is not None and known.entry != group:
            others = tuple(each for each in known.others if each != group)
            if others:
                self.joiners[rank] = known._replace(others=others)

    def keep(self, clients: Collection[int]) -> None:
        """Forget joiners of other clients than these."""
        for rank in [each for each, by in self.joiners.items() if by.client not in clients]:
            del self.joiners[rank]

    def end_clock(self, group: int, rank: int, client: int, clock: int) -> list[Enter]:
        """A rank has ended a clock of a group, or was told that this was over without it: what it
        becomes a member of.

        Args:
            clock: the one that comes next.
        """
        known, entry = self.joiners.get(rank), self._state_of(group)
        if known is None or known.entry != group or known.client != client or entry is None:
            return []
        del self.joiners[rank]
        places: dict[int, tuple[int, int]] = {}
        """By group: where members are, and the clock behind which the rank does not go back."""
        for number in known.others:
            state = self._state_of(number)
            if state is not None:
                own = state.members.clock_of(rank, state.start)
                at = self._where(entry, state, rank, clock)
                places[number] = own if at is None else at, own
        passed = max((own - at for at, own in places.values()), default=0)
        passed = 0 if entry.collects or passed < 0 else passed
        found = [
            Enter(rank, client, known.seq, number, max(at + passed, own))
            for number, (at, own) in places.items()
        ]
        if passed:  # as by its step: the decision about its request is known
            found.insert(0, Enter(rank, client, known.seq + 1, group, clock + passed))
        return found

    def _where(self, entry: GroupState, other: GroupState, rank: int, clock: int) -> int | None:
        """The clock of another group at which members are that have just ended a clock of the
        entry; None: there is no member of both.

        Args:
            clock: of the entry, the one that comes next.
        """
        both = [each for each in other.clocks if each in entry.clocks and each != rank]
        if not both:
            return None
        if entry.collects:
            return max(other.clocks[each] for each in both)
        # One that has joined may still have clocks of the entry to pass.
        own = {each: max(entry.clocks[each], entry.members.joined[each].clock) for each in both}
        ticks = {each: self._last_ticks(each) for each in both}
        near = min(both, key=lambda each: (not ticks[each], abs(own[each] - clock)))
        between = ticks[near].get(entry.id, 0) > ticks[near].get(other.id, 0)
        return other.clocks[near] - (not between) + clock - own[near]

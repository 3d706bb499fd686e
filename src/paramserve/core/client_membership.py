"""In which groups a client's rank is a member, and with which request it becomes one.

A rank that came later than the others, came back, or has suspended its membership is *pending* in a
group: no clock waits for it there, and none takes its gradients. Before it steps there it joins
(`JoinGroup`).

Of several groups it joins one first, the *entry*: the first that it steps of those whose gradients
are collected, or else whose members may be waited for. The others of these follow: shard 0 makes it
a member there when it has stepped the entry, where members are that have stepped that as often
(`core.followers`). Before it steps one of them it asks for that: the answer says at which clock it
is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from paramserve.core.partition import Block

LATE = 0
"""The suspension of groups that were there before the rank."""
UNNUMBERED = -1
"""Number of groups that were to follow one which the rank has suspended: it may rest in that one
alone."""


class Joining(NamedTuple):
    """A request to join: blocks of the group and of those that follow."""

    block: Block
    collects: bool
    """Whether the group's gradients are collected, as far as the client knows."""
    others: tuple[Block, ...] = ()
    follows: bool = False
    """Whether the group follows an entry that was stepped: the answer comes when it is time."""


def _names(blocks: Iterable[Block]) -> list[str]:
    return [each.group_name for each in blocks]


class ClientMembership:
    """The memberships of one client, as it knows them.

    Args:
        collects: whether the gradients of a block's group are collected at this client's clock.
        waits: whether members of the group may be waited for, as where gradients are collected.
    """

    def __init__(self, collects: Callable[[Block], bool], waits: Callable[[Block], bool]) -> None:
        self.any_pending = False
        """Whether a step may have to join first. An attribute: each step asks."""
        self._collects = collects
        self._waits = waits
        self._pending: dict[str, int] = {}
        """Groups in which it is pending, with the number of the suspension. Suspensions with no
        step in between have one number: they end together."""
        self._suspensions = 0
        self._stepped_since = True
        """Whether a clock was ended since the last suspension."""
        self._suspending: dict[str, None] = {}
        """Groups in which shards may not know of a suspension: that was interrupted, if it is not
        under way."""
        self._lead: dict[str, int] = {}
        """Lead over its round, by group: its next steps there that end no clock."""
        self._resuming = False
        """Whether it goes on for an older incarnation, which may have ended between two groups."""
        self._join_unconfirmed: Joining | None = None
        """What it has asked for, and does not know the answer: it may be a member, and what it has
        named then follows. It asks again before a step."""
        self._first_group = ""
        """The group that it has joined first and has not stepped since."""
        self._followers: dict[str, None] = {}
        """Groups that follow it."""
        self._following: dict[str, None] = {}
        """Groups that follow an entry that was stepped, and where it has not joined since."""

    def pending(self, group: str) -> bool:
        """Whether no clock of a group waits for this rank yet."""
        return group in self._pending or group in self._followers

    def may_be_out(self, group: str) -> bool:
        """Whether a request to join whose answer it does not know may have suspended the rank in a
        group: a read there may show clocks that it had no part in."""
        return self._join_unconfirmed is not None and group in _names(self._join_unconfirmed.others)

    def mark_pending(self, group: str) -> None:
        """The rank is no member of a group that it has not joined yet."""
        self._leave(group, LATE)

    def mark_resumed(self) -> None:
        """The rank goes on where an older incarnation has ended, and is a member of several groups.

        That one may have ended between two of them. Then the others wait in a group that comes
        later in their round than the one with which this incarnation begins.
        """
        self._resuming = self.any_pending = True

    def suspended(self, group: str) -> None:
        """The rank suspends its membership of a group: it joins before its next step there."""
        self._suspensions += self._stepped_since
        self._stepped_since = False
        self._suspending[group] = None
        self._leave(group, self._suspensions)

    def suspends(self, group: str) -> bool:
        """Whether shards may not know that the rank has suspended its membership of a group."""
        return group in self._suspending

    def membership_ended(self, group: str) -> None:
        """The shards know that the rank is no member of a group."""
        self._suspending.pop(group, None)
        if self._asks_for(group):
            self._join_unconfirmed = None

    def _leave(self, group: str, number: int) -> None:
        """Mark a group as one to join before its next step, and the groups that were to follow
        it."""
        self._pending[group] = number
        self._followers.pop(group, None)
        self._following.pop(group, None)
        self._lead.pop(group, None)
        if self._join_unconfirmed is not None and self._asks_for(group):
            # The shards may have suspended it in what was to follow.
            self._pending |= dict.fromkeys(_names(self._join_unconfirmed.others), UNNUMBERED)
        if group == self._first_group:  # what was to follow does not
            self._pending |= dict.fromkeys(self._followers, UNNUMBERED)
            self._first_group, self._followers = "", {}
        self.any_pending = True

    def before(self, stepped: Sequence[Block], defined: Iterable[Block]) -> list[Joining]:
        """What to send before a call that steps these groups, in order, one after the other.

        Args:
            stepped: a block of each group that the call steps, in the order of its steps.
            defined: a block of each group that the client knows.
        """
        if not self.any_pending:
            return []
        groups = list({each.group_name: each for each in defined}.values())
        entry = self._entry_of(stepped, groups)
        requests: list[Joining] = []
        for each in stepped:
            waits = self._waits(each)
            # Of a group with a bound the answer says whether its clock of this round is over.
            joins = self.pending(each.group_name) or (self._resuming and waits)
            if joins and not (waits and entry is not None):
                requests.append(Joining(each, False))
        if entry is not None:
            requests += self._entering(entry, stepped, groups)
        named = {e.group_name for joining in requests for e in (joining.block, *joining.others)}
        for each in stepped:
            if each.group_name in self._following and each.group_name not in named:
                requests.append(Joining(each, self._collects(each), follows=True))
        return requests

    def _entry_of(self, stepped: Sequence[Block], groups: Sequence[Block]) -> Block | None:
        """The entry of a call; None: it steps none that can be one."""
        if any(self._collects(each) for each in (*stepped, *groups)):
            return next((each for each in stepped if self._collects(each)), None)
        return next((each for each in stepped if self._waits(each)), None)

    def before_entering(self, block: Block, defined: Iterable[Block]) -> list[Joining]:
        """What to send so that the rank is a member of a group before it steps it; nothing if it is
        one already, or the group follows one that was joined."""
        name = block.group_name
        if name not in self._pending:
            return []
        groups = list(defined)
        if self._entry_of([block], groups) is None:
            return [Joining(block, False)]
        entry = next((each for each in groups if each.group_name == self._first_group), block)
        if self._collects(block) and not self._collects(entry):
            entry = block
        return self._entering(entry, [block], groups)

    def _entering(
        self, entry: Block, stepped: Sequence[Block], defined: Iterable[Block]
    ) -> list[Joining]:
        """What to send before a call that steps these groups, of which `entry` is the entry."""
        first = entry.group_name
        numbers = {self._pending.get(each.group_name) for each in (entry, *stepped)}
        moves = bool(self._first_group) and first != self._first_group
        begins = first in self._pending or moves or self._join_unconfirmed is not None
        restarts = begins or self._resuming
        others: dict[str, Block] = {}
        for each in (*stepped, *defined):
            name = each.group_name
            if name == first or name in others or not self._waits(each):
                continue
            requested = each in stepped or self._pending.get(name) in (LATE, *numbers)
            follows = name in self._followers or (requested and name in self._pending)
            # Who begins at the first group cannot be waited for in another one meanwhile.
            leaves = restarts and self._may_be_in(name)
            if follows or leaves:
                others[name] = each
        new = any(name in self._pending for name in others)
        if not others and self._resuming:  # there is nothing to come between
            self._resuming, restarts = False, begins
            self._plan()
        if not (restarts or new):
            return []
        return [Joining(entry, self._collects(entry), tuple(others.values()))]

    def _may_be_in(self, name: str) -> bool:
        return self._asks_for(name) or not self.pending(name)

    def _asks_for(self, group: str) -> bool:
        return (
            self._join_unconfirmed is not None and self._join_unconfirmed.block.group_name == group
        )

    def asks(self, joining: Joining) -> None:
        """A request to join is about to be sent: it may be interrupted before it is answered."""
        self._join_unconfirmed = joining
        self._plan()

    def joined(self, joining: Joining) -> None:
        """The shards know of this one. If they have said meanwhile that the group collects, the
        rank has to join it once more, with what follows."""
        if self._collects(joining.block) and not joining.collects:
            return
        name = joining.block.group_name
        behind, entry = self._followers, self._first_group
        if joining.follows:
            pass
        elif joining.collects or joining.others:
            behind = dict.fromkeys(_names(joining.others))
            entry = name if behind else ""
            self._resuming = False
        else:
            behind = dict.fromkeys(each for each in self._followers if each != name)
            entry = self._first_group if behind else ""
        names = {name, *behind}
        pending = {each: number for each, number in self._pending.items() if each not in names}
        following = {each: None for each in self._following if each not in names}
        self._join_unconfirmed = None
        # In one line: an interrupt finds all of it, or nothing.
        self._pending, self._followers, self._first_group, self._following = (
            pending,
            behind,
            entry,
            following,
        )
        self._plan()

    def _plan(self) -> None:
        groups = self._pending or self._followers or self._following or self._lead
        self.any_pending = bool(groups or self._resuming or self._join_unconfirmed)

    def is_entry(self, block: Block) -> bool:
        """Whether other groups follow when a block's group is stepped."""
        return block.group_name == self._first_group

    def is_ahead(self, group: str, clocks: int) -> None:
        """The rank has joined so many clocks behind the one at which it would step a group in this
        round."""
        self._lead[group] = clocks
        self._plan()

    def stepped_within(self, group: str) -> None:
        """A step that ends no clock of a group is on its way."""
        clocks = self._lead.pop(group, 0) - 1
        if clocks > 0:
            self._lead[group] = clocks
        self._plan()

    def ends_no_clock(self, group: str) -> bool:
        """Whether the next step of a group counts and ends no clock."""
        return group in self._lead

    def begins(self, group: str) -> bool:
        """Whether the answer to a request to join says where the rank begins in a group."""
        return self.pending(group) or group in self._following

    def follows(self, group: str) -> bool:
        """Whether a group follows an entry, and is to be joined before it is stepped."""
        return group in self._followers or group in self._following

    def steps_after(self, block: Block, call: Sequence[Block]) -> bool:
        """Whether a group that follows is stepped after the entry of a call, wherever it stands."""
        name = block.group_name
        return name in self._followers and any(
            each.group_name == self._first_group for each in call
        )

    def stepped(self, block: Block) -> None:
        """A step that ends a clock of a block's group is on its way."""
        self._stepped_since = True
        if block.group_name == self._first_group:
            self._first_group, self._followers, self._following = (
                "",
                {},
                {**self._following, **self._followers},
            )

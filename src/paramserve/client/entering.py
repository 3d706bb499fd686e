"""How a worker that joined late, or rests, begins to be waited for in the groups of its calls.

Where gradients are collected, a pending member's step counts only if all shards have it in time. In
one group, an empty step goes first, again until it was in time: then nobody goes on there without
this worker, and no gradient is dropped on the way in.

In several groups it could not do so one after the other: in the first one the others would wait for
its next step, before they come to the clock that it waits for in the second. So it goes on from
there: its next step of the first group names the rest. When that clock is decided, all shards wait
for this worker in those as well, from the clock on that is under way there. Nobody who steps in
both can be further: so the next step of this worker there, and theirs, are of one clock.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paramserve.client.clocks import ClientClocks
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.core.policy_traits import GroupTraits
from paramserve.errors import ParamServeError, PushTimeout, Timeout


@dataclass
class Coming:
    """What a pending member does to enter a group."""

    group: int
    left: deque[Block]
    """Groups of the others' round that are still to be ended."""
    named: bool
    """Whether the last of these names the group; else its own clocks are ended, until one has taken
    this worker in."""
    ticket: Ticket | None
    """Of the step that was sent last."""


class Entering(ClientClocks):
    """The part of `steps.Steps` that takes part in groups again."""

    def __init__(self, terms: GroupTraits) -> None:
        super().__init__(terms)
        self._coming: Coming | None = None
        """What an error has interrupted: the others may wait for the rest of it."""

    def rests(self, group: str) -> None:
        """As `ClientClocks` says."""
        super().rests(group)
        self._coming = None

    @abstractmethod
    def _send_join(self, block: Block, until: float | None, enters: Sequence[Block]) -> Ticket:
        """Send a step that ends a clock of a group with nothing, and names others."""

    @abstractmethod
    def _defined(self) -> Iterator[Block]:
        """A block of each group, at least."""

    def enter(self, blocks: Sequence[Block], limit_s: float | None) -> tuple[Block, ...]:
        """Before a call that ends clocks of these groups, in this order: be waited for in them, and
        in those where this worker is a pending member as well and has not rested longer.

        Returns:
            A block of each group that the first step of the call is to name; `named` follows, when
            it is on its way.
        Raises:
            PushTimeout: the others' clock was not decided in `limit_s`, or with None as long as
                `Steps.wait` waits for a ticket. Nothing of the call was sent; the others may wait
                for this worker from now on, and a call that steps the same group goes on from
                there.
        """
        if self._came_back:
            self._ask_first_clocks(blocks)
        if not self._may_be_pending:
            return ()
        self._enter_at_once(blocks)
        collecting = [each for each in blocks if self.traits_of(each).collects]
        if not collecting:
            return ()
        first, until = collecting[0], until_of(limit_s)
        pending = self._pending_in(collecting)
        if self.is_pending(first.group_name):
            pending = tuple(each for each in pending if each.group != first.group)
            self._come_in(first, self._round(collecting), until)
        for each in pending:
            self._ask_clock(each.group_name)
        return pending

    def _come_in(self, first: Block, others: Sequence[Block], until: float | None) -> None:
        """Enter the first group of a call. Where the others wait for this worker in their round of
        groups, it ends that round with nothing: the last one names the group."""
        if self._coming is None or self._coming.group != first.group:
            self._coming = Coming(first.group, deque(others), bool(others), None)
        coming = self._coming
        try:
            while not self._has_come(coming, until):
                here = coming.left[0] if coming.left else first
                names = (first,) if len(coming.left) == 1 else ()
                coming.ticket = self._send_join(here, until, names)
                if coming.left:
                    coming.left.popleft()
        except PushTimeout as error:
            error.applied = "no"  # of the call
            raise
        self._coming = None
        if coming.named:
            self._ask_clock(first.group_name)
        self._entered(first.group_name)

    def _has_come(self, coming: Coming, until: float | None) -> bool:
        """Wait for the step that was sent last; whether it was all that it takes."""
        ticket = coming.ticket
        if ticket is None:
            return False
        try:
            outcome = ticket.result(left_until(until))
        except ParamServeError as error:
            if not isinstance(error, Timeout):
                coming.ticket = None
            raise
        # Where it is waited for it was in the clock, also of one that came to nothing.
        return not coming.left and (coming.named or not outcome.skipped)

    def named(self, pending: Sequence[Block]) -> None:
        """A step that names these groups is on its way."""
        for each in pending:
            self._entered(each.group_name)

    def enter_ahead(self, block: Block, limit_s: float | None) -> bool:
        """Be waited for in one group, before the step that does the same, if no other one that
        collects could come first.

        Returns:
            Whether this worker was a pending member.
        Raises:
            PushTimeout: as `enter`.
        """
        name, until = block.group_name, until_of(limit_s)
        if not self.is_pending(name):
            return False
        self._enter_at_once([block])
        others = any(
            each.group != block.group and each.rule is not None and self.traits_of(each).collects
            for each in self._defined()
        )
        comes_first = self._stepped.get(name) == 0 if self._stepped else not others
        if self.is_pending(name) and comes_first and not self._round([block]):
            self._come_in(block, (), until)
        return True

    def _steps_in(self, block: Block) -> None:
        """This worker ends a clock of a block's group."""
        self._rested = False
        name = block.group_name
        if name not in self._stepped and self.traits_of(block).collects:
            self._stepped[name] = len(self._stepped)

    def _enter_at_once(self, blocks: Sequence[Block]) -> None:
        """Where gradients are not collected, the first step enters."""
        for each in blocks:
            if not self.traits_of(each).collects:
                self._entered(each.group_name)

    def _pending_in(self, stepped: Sequence[Block]) -> tuple[Block, ...]:
        """One block of each group that collects and where nobody waits for this worker: of those
        that are stepped, and of those that it has not rested in for longer than in these."""
        since = [self._resting.get(each.group_name) for each in stepped]
        found: dict[int, Block] = {}
        for each in (*stepped, *self._defined()):
            name = each.group_name
            known = each in stepped or self._resting.get(name) in (None, *since)
            if known and self.is_pending(name) and self.traits_of(each).collects:
                found.setdefault(each.group, each)
        return tuple(found.values())

    def _round(self, stepped: Sequence[Block]) -> list[Block]:
        """The groups in whose clocks this worker is, in the order in which the others come to them
        after the first of this call's: those of the call, then those that it steps in other ones.
        One that it has never stepped may be one that nobody steps."""
        in_call = {each.group for each in stepped}
        numbers = [self._stepped.get(each.group_name, -1) for each in stepped]
        elsewhere = {
            each.group: each
            for each in self._defined()
            if each.group not in in_call and each.group_name in self._stepped
        }
        later = sorted(
            elsewhere.values(),
            key=lambda each: (
                self._stepped[each.group_name] < max(numbers),
                self._stepped[each.group_name],
            ),
        )
        return [
            each
            for each in (*stepped, *later)
            if not self.is_pending(each.group_name) and self.traits_of(each).collects
        ]


def until_of(limit_s: float | None) -> float | None:
    """When a wait that begins now ends; None: as long as `Steps.wait` waits."""
    return None if limit_s is None else time.monotonic() + limit_s


def left_until(until: float | None) -> float | None:
    """What is left of such a wait, in seconds."""
    return None if until is None else max(until - time.monotonic(), 0.0)

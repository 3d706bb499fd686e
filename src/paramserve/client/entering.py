"""How a worker that joined late, or rests, begins to be waited for in the groups of its calls.

Where gradients are collected, a guest's step counts only if all shards have it in time. In one
group, an empty step goes first, again until it was in time: then nobody goes on there without this
worker, and no gradient is dropped on the way in.

In several groups it could not do so one after the other: in the first one the others would wait for
its next step, before they come to the clock that it waits for in the second. So it goes on from
there: its next step of the first group names the rest. When that clock is decided, all shards wait
for this worker in those as well, from the clock on that is under way there. Nobody who steps in
both can be further: so the next step of this worker there, and theirs, are of one clock.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from paramserve.client.clocks import ClientClocks
from paramserve.core.partition import Block


class Entering(ClientClocks):
    """The part of `steps.Steps` that takes part in groups again."""

    @abstractmethod
    def _knock(self, block: Block, until: float, enters: tuple[int, ...] = ()) -> bool:
        """End one clock of a group with nothing; whether it was in time."""

    @abstractmethod
    def _defined(self) -> Iterator[Block]:
        """A block of each group, at least."""

    def enter(self, blocks: Sequence[Block], limit_s: float) -> tuple[int, ...]:
        """Before a call that ends clocks of these groups, in this order: be waited for in all that
        this worker knows.

        Returns:
            The groups that the first step of the call is to name.
        Raises:
            PushTimeout: the others' clock was not decided in `limit_s`.
        """
        if not self._may_be_guest:
            return ()
        self._enter_at_once(blocks)
        collecting = [each for each in blocks if self.terms_of(each).collects]
        if not collecting:
            return ()
        first, until = collecting[0], time.monotonic() + limit_s
        if self.is_guest(first.group_name):
            leader = self._leader(collecting)
            if leader is not None:  # the others wait for this worker there
                self._knock(leader, until, self._named(leader))
                return ()
            while not self._knock(first, until):
                pass
            self._entered(first.group_name)
        return self._named(first)

    def enter_ahead(self, block: Block, limit_s: float) -> bool:
        """Be waited for in one group, before the step that does the same, if no other one that
        collects could come first.

        Returns:
            Whether this worker was a guest.
        Raises:
            PushTimeout: as `enter`.
        """
        name, until = block.group_name, time.monotonic() + limit_s
        if not self.is_guest(name):
            return False
        self._enter_at_once([block])
        others = any(
            each.group != block.group and self.terms_of(each).collects for each in self._defined()
        )
        comes_first = self._stepped.get(name) == 0 if self._stepped else not others
        if self.is_guest(name) and comes_first and self._leader([block]) is None:
            while not self._knock(block, until):
                pass
            self._entered(name)
        return True

    def _steps_in(self, block: Block) -> None:
        """This worker ends a clock of a block's group."""
        name = block.group_name
        if name not in self._stepped and self.terms_of(block).collects:
            self._stepped[name] = len(self._stepped)

    def _enter_at_once(self, blocks: Sequence[Block]) -> None:
        """Where gradients are not collected, the first step enters."""
        for each in blocks:
            if not self.terms_of(each).collects:
                self._entered(each.group_name)

    def _guests(self) -> list[Block]:
        """One block of each group that collects, and where nobody waits for this worker."""
        found = {
            each.group: each
            for each in self._defined()
            if self.is_guest(each.group_name) and self.terms_of(each).collects
        }
        return list(found.values())

    def _leader(self, blocks: Sequence[Block]) -> Block | None:
        """A group in whose clocks this worker is, of these blocks' or else one that it has stepped:
        there, the others wait for it."""
        stepped = (each for each in self._defined() if each.group_name in self._stepped)
        for each in (*blocks, *stepped):
            if not self.is_guest(each.group_name) and self.terms_of(each).collects:
                return each
        return None

    def _named(self, leader: Block) -> tuple[int, ...]:
        """The groups to enter with a step of this one; this client does not know its clocks there
        until an answer says them."""
        guests = [each for each in self._guests() if each.group != leader.group]
        for each in guests:
            self._entered(each.group_name)
            self._ask_clock(each.group_name)
        return tuple(each.group for each in guests)

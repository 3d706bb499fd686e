"""Where the values lie that a client reads: slots for blocks, and which shards write to them.

Of a block that is read by name, the slot stays with the caller who looks at it, until the block is
next read by name.
"""

from __future__ import annotations

from paramserve.client.exchange import Exchange, Slot
from paramserve.client.step_parts import StepParts, offset_of
from paramserve.client.ticket import Ticket
from paramserve.core.partition import Block
from paramserve.messages import Read, ReadTarget

# Loops and `+=`, no comprehensions: each of those is a call, and a small step has few.


class ValueSlots:
    """The slots of one client's reads. Its caller holds the client's lock."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._shards = len(exchange.shards)
        self._viewed: dict[int, Slot] = {}
        """Values by block that a caller was given to look at, until the block is next read by name:
        into the same slot."""

    def take(self, parts: StepParts, values: list[Slot]) -> list[tuple[Block, Slot]]:
        """Slots for the values of blocks that are read.

        Args:
            values: gets them.
        """
        viewed = self._viewed if parts.by_name else {}
        new: list[Block] = []
        sizes: list[int] = []
        for block in parts.pull:
            if block.id not in viewed:
                new += [block]
                if block.pull_codec is None or self._exchange.shared:
                    sizes += [block.nbytes]
                else:
                    sizes += [self._exchange.decoder.layout(block)[-1][0]]
        slots = self._exchange.take_each(sizes) if new else []
        values += slots
        places = list(zip(new, slots, strict=True))
        for block in parts.pull:
            if block.id in viewed:
                slot = viewed[block.id]
                values += [slot]
                del viewed[block.id]  # no call since it is in `values`: no interrupt comes
                places += [(block, slot)]
        return places

    def targets(self, block: Block, slot: Slot) -> tuple[ReadTarget, ...]:
        """Where each shard writes its part of a block; the slot keeps it for the next read."""
        parts = [
            ReadTarget(block.id, slot.arena, offset_of(block, slot, shard))
            for shard in range(self._shards)
        ]
        if block.pull_codec is None or self._exchange.shared:
            slot.pulled = block, tuple(parts)
            return tuple(parts)
        slot.pulled, decoder = None, self._exchange.decoder
        for shard in self._exchange.shards:
            # A slot that was taken for servers on this host has no room for more than the values.
            link = shard.link  # another thread may make it anew
            remote = link is None or not link.shared
            if remote and decoder.layout(block)[-1][0] <= slot.bytes.size:
                target = decoder.read_target(block, shard.number, slot.arena, slot.offset)
                parts[shard.number] = target if target is not None else parts[shard.number]
        return tuple(parts)

    def requests(
        self, parts: StepParts, clock: int, values: list[Slot]
    ) -> tuple[list[Read | None], list[tuple[Block, Slot]], int]:
        """What each shard is asked for, None where it has nothing of it; where the values go; and
        how many shards are asked, at least one.

        Args:
            clock: of the client in the group.
            values: gets the slots that are taken.
        """
        group = parts.block.group
        by_shard: list[tuple[ReadTarget, ...]] = [()] * self._shards
        places = self.take(parts, values) if parts.pull else []
        for block, slot in places:
            pulled, cuts = slot.pulled, block.spec.cuts
            same = pulled is not None and pulled[0] is block
            targets = pulled[1] if pulled is not None and same else self.targets(block, slot)
            for shard, target in enumerate(targets):
                if cuts[shard] < cuts[shard + 1]:
                    by_shard[shard] += (target,)
        for read in parts.row_pulls:
            places += [(read.block, read.slot)]
            for shard, target in enumerate(read.places):
                if target.keys is not None and target.keys.rows:
                    by_shard[shard] += (target,)
        requests: list[Read | None] = []
        count = 0
        for pull in by_shard:
            if pull:
                requests += [Read(0, 0, group, clock, pull)]
                count += 1
            else:
                requests += [None]
        if not count:  # of what has no elements
            requests[0], count = Read(0, 0, group, clock, ()), 1
        return requests, places, count

    def view(self, ticket: Ticket) -> None:
        """The caller looks at a ticket's values until their blocks are next read by name."""
        viewed = self._viewed
        slots: dict[int, Slot] = {}
        before: list[Slot] = []
        for block, slot in ticket.places:
            slots[block.id] = slot
            if block.id in viewed:
                before += [viewed[block.id]]
        ticket.released = True  # no call until they are kept: no interrupt comes
        viewed |= slots
        if before:  # another thread's
            self._exchange.give_back(before)

"""What one call sends: its steps as they are prepared, and which of them go in one frame.

That is all of them in the order of their groups, but where the rank joins: then a group that
follows its entry comes in a second frame, and a step may count without ending a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from paramserve.client.encoding import Encoded
from paramserve.client.exchange import Slot
from paramserve.client.step_parts import StepParts
from paramserve.client.ticket import Ticket
from paramserve.core.client_membership import ClientMembership
from paramserve.core.client_session import Operation
from paramserve.messages import Saved, Step

NOT_LEASED = (0, 0)
"""Mark of a call without leased samples."""


class Prepared(Struct, frozen=True, eq=False):
    """A step that is about to be sent."""

    parts: StepParts
    ticket: Ticket
    requests: list[Step]
    operation: Operation
    captured: list[Slot]
    """Go back when all shards have answered."""
    clock: int
    """Client's clock in that group before the request."""
    saved: tuple[Saved, ...] = ()
    """What it tells of what the worker has saved."""
    encoded: Mapping[int, Encoded] = {}
    """Encoded gradients by block."""


def stepping(parts: Sequence[StepParts]) -> list[StepParts]:
    """Parts of a call that are steps, and not only reads."""
    return [
        each
        for each in parts
        if each.options.tick or each.options.skip or each.pushes or each.row_pushes
    ]


def _entry_first(membership: ClientMembership, ordered: Sequence[StepParts]) -> list[StepParts]:
    """The parts of a call in which a rank joins: a group that follows the entry comes after it.
    Where the others step it before the entry, this step of it is none of their rounds: it ends no
    clock."""
    call = [each.block for each in ordered]
    entered, first, after = False, list[StepParts](), list[StepParts]()
    for each in ordered:
        if not entered and membership.steps_after(each.block, call):
            after.append(replace(each, options=replace(each.options, tick=False)))
        else:
            first.append(each)
        entered = entered or membership.is_entry(each.block)
    return [*first, *after]


def in_round(membership: ClientMembership, ordered: Sequence[StepParts]) -> list[StepParts]:
    """The parts of a call: a step of a group in which the rank is ahead of its round ends no
    clock."""
    return [
        replace(each, options=replace(each.options, tick=False, ahead=True))
        if each.options.tick and membership.ends_no_clock(each.block.group_name)
        else each
        for each in ordered
    ]


def arrange(
    membership: ClientMembership, ordered: Sequence[StepParts]
) -> list[Sequence[StepParts]]:
    """The parts of a call in which a rank joins, by frame, in their order: a group that follows
    comes when it is a member there."""
    parts = in_round(membership, _entry_first(membership, ordered))
    for place, each in enumerate(parts):
        steps = place > 0 and stepping([each]) != []
        if steps and membership.follows(each.block.group_name):
            return [parts[:place], parts[place:]]
    return [parts]

"""What a step is made of, as its callers give it, and the checks before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt
from msgspec import Struct

from paramserve.client.exchange import Slot
from paramserve.client.links import Pushed
from paramserve.client.row_slots import RowPull, RowPush
from paramserve.client.ticket import Ticket
from paramserve.config import RuleSpec
from paramserve.core.partition import Block
from paramserve.errors import ParamServeError
from paramserve.messages import Gradient
from paramserve.rules.base import Hyper
from paramserve.rules.registry import BUILT_IN
from paramserve.rules.registry import build as build_rule
from paramserve.rules.rows import check_rows, row_layout

Array = npt.NDArray[Any]


class BlockPush(Struct, frozen=True, eq=False, gc=False):
    """One block's gradient for `Dense.step`.

    `gradient` is what `gradient_slot` gave; `active` lists the pieces that have a gradient (None:
    all); `hyper` are the rule's hyper-parameters for this push (None: as defined).
    """

    block: Block
    gradient: Array
    active: tuple[int, ...] | None = None
    hyper: Hyper | None = None


def check_rule(block: Block) -> RuleSpec:
    """The block's rule. Raises `ParamServeError` if it has none: it cannot be pushed to."""
    if block.rule is None:
        raise ParamServeError(
            f"{block.pieces[0].name!r} has no rule: it cannot be pushed to",
            fix="define it with a rule, or use assign",
        )
    return block.rule


def check_push(push: BlockPush) -> None:
    """Refuse what the shards would refuse, before anything is sent to any of them.

    Raises:
        ParamServeError, ValueError: the block has no rule, a hyper-parameter is out of range, or
            the rule's state does not suffice for them. Of a rule that is not built in, which need
            not be known here, only the first is checked.
    """
    block, hyper = push.block, push.hyper
    described = check_rule(block)
    if hyper is not None and described.name in BUILT_IN:  # the shards check what others are
        rule = build_rule(described)
        rule.check(hyper)
        needed = rule.states(hyper)
        if len(needed) > len(rule.states(rule.hyper())):
            raise ParamServeError(
                f"{rule.name} with {hyper} needs the state {', '.join(needed)}, but the block of "
                f"{block.pieces[0].name!r} was defined without it",
                fix="define the parameters with these hyper-parameters (momentum > 0) at the start",
            )


def check_row_hyper(block: Block, hyper: Hyper) -> None:
    """Refuse hyper-parameters that the shards would refuse for a table's rows, before anything is
    sent: a synchronous clock that only some count cannot be ended any more.

    Raises:
        ValueError: one is out of range, or needs more than the rows hold. Of a rule that is not
            built in, which need not be known here, nothing is checked.
    """
    described = check_rule(block)
    if described.name in BUILT_IN:
        assert block.table is not None
        rule = build_rule(described)
        rule.check(hyper)
        check_rows(rule, row_layout(rule, block.table.dim, block.table.dtype), hyper)


class Filling(Struct, eq=False, gc=False):
    """A slot that one block's gradient is written to."""

    block: Block
    slot: Slot
    flat: Array
    """The slot as the block's array."""
    lent: dict[int, Array] | None = None
    """Memory by piece that the caller was given for its gradient, and has not pushed yet."""
    staged: frozenset[int] = frozenset()
    """Pieces whose gradients lie in it."""
    largest: float = 0.0
    """The largest size of an element of these; below 0: it has to be looked for."""


Captured = Sequence[tuple[BlockPush, Slot]]
"""Gradients with the slots that they lie in."""


class StepOptions(Struct, frozen=True, gc=False):
    """How a step is meant; see `messages.Step`. `ahead`: it would end a clock, but its rank is
    further on there than in its round."""

    tick: bool = False
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0
    note: bytes = b""
    largest: float = -1.0
    ahead: bool = False


class StepParts(Struct, frozen=True, eq=False):
    """One group's part of a call.

    `pushes` and `row_pushes` are captured: their slots go back when all shards have answered, or
    where nothing is sent.
    """

    what: str
    """"push", "pull", "tick" or "step", for messages."""
    block: Block
    """Any of the group."""
    pushes: Captured = ()
    pull: Sequence[Block] = ()
    options: StepOptions = StepOptions()
    row_pushes: Sequence[RowPush] = ()
    row_pulls: Sequence[RowPull] = ()
    leased: bool = False
    """Whether a table's step counts the samples of its call; where it has dense layers, they do."""
    staged: Sequence[Ticket] = ()
    """Tickets of pushes that waited for this tick: they resolve to its outcome."""
    by_name: bool = False
    """Whether blocks are read by name, which ends the views of an earlier such read."""
    lent: bool = False
    """Whether the slots of `pushes` stay the caller's until the call is numbered."""
    numbered: Callable[[Ticket], object] | None = None
    """Called as soon as the call is certain to be sent, before anything of it is. An interrupt
    within it closes the client."""

    def order(self) -> tuple[bool, int]:
        """Sort key of a call's parts, the same for all clients: tables first, then by group.

        A shard runs a client's requests one after the other, so two workers whose steps come in
        different orders could wait for each other's second one, for ever."""
        return self.block.table is None, self.block.group

    @property
    def slots(self) -> list[Slot]:
        """Slots of the gradients."""
        return [slot for _, slot in self.pushes] + [each.slot for each in self.row_pushes]

    @property
    def taken_slots(self) -> list[Slot]:
        """Slots that are released where nothing is sent."""
        gradients = [] if self.lent else [slot for _, slot in self.pushes]
        rows = [each.slot for each in self.row_pushes]
        return [*gradients, *rows, *(each.slot for each in self.row_pulls)]


def check_weight(weight: float | None) -> None:
    """Refuse a number of samples that is none; None stands for 1."""
    if weight is not None and not 0.0 < weight < math.inf:
        raise ValueError(f"weight must be > 0 and finite, not {weight}")


def offset_of(block: Block, slot: Slot, shard: int) -> int:
    """Where a shard's part of a gradient, or of values that a step reads, begins in the slot's
    arena, in bytes."""
    return slot.offset + block.spec.cuts[shard] * block.dtype.itemsize


def kept_offset(block: Block, slot: Slot, shard: int) -> int:
    """Offset in a slot of the shard's values as the servers keep them."""
    return slot.offset + block.spec.cuts[shard] * block.kept.itemsize


def say_pushed(push: BlockPush, slot: Slot, shards: int) -> Pushed:
    """The header parts of a gradient; its slot keeps them for the next one."""
    block, active, hyper = push.block, push.active, push.hyper
    check_push(push)
    parts = tuple(
        Gradient(block.id, slot.arena, offset_of(block, slot, shard), active, hyper)
        for shard in range(shards)
    )
    slot.pushed = header = block, active, hyper, parts
    return header

"""A client's gradients on their way into shared memory: captured now, or staged until a tick."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import Exchange, Slot
from paramserve.client.names import NamedPiece, Part, Selection
from paramserve.client.step_parts import BlockPush, Filling, check_rule
from paramserve.config import NO_RANK
from paramserve.core.commit import CLIP_EPSILON
from paramserve.core.partition import Block
from paramserve.errors import NonFinite, ShapeMismatch
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]
Pushes = list[tuple[BlockPush, Slot]]


class Gradients:
    """Slots that gradients are written to, from when they are given out until they are sent.

    Each method that gives gradients to be sent says how large their largest element is, and inf if
    one is NaN or Inf; under a policy that refuses, it raises `NonFinite` instead, and everything is
    as it was before. The servers believe it: a gradient is looked at once.

    Args:
        refuses: whether the policy of a block's group, for the step under way, does.
    """

    def __init__(self, exchange: Exchange, refuses: Callable[[Block], bool], rank: int) -> None:
        self._exchange = exchange
        self._refuses = refuses
        self._rank = rank
        self.caller_slots: dict[int, tuple[Slot, Array]] = {}
        """Memory that `slot` has given out, by block, with the slot, until its step is numbered."""
        self._lent: dict[int, Filling] = {}
        """Slot of each block whose pieces `lend` gives out."""

    # --- by block ----------------------------------------------------------------------------

    def slot(self, block: Block) -> Array:
        """[block.size] of shared memory to write a gradient to; the same until a step takes it."""
        if block.id not in self.caller_slots:
            (slot,) = self._exchange.take_each([block.nbytes])
            self.caller_slots[block.id] = slot, slot.array(block)
        return self.caller_slots[block.id][1]

    def take(self, push: Sequence[BlockPush]) -> tuple[Pushes, float]:
        """Gradients that were written to their slots: to be sent, and their largest element. The
        slots stay given out.

        Raises:
            ValueError: one does not lie in its block's slot.
            ShapeMismatch: it is said to have a piece that its block does not have. In both cases
                everything is as it was.
        """
        pushes = self._with_slots(push)
        largest = 0.0
        for each in push:
            size = _largest(each)
            largest = size if size > largest else largest
        if largest == math.inf and self._refuses(push[0].block):
            raise self._nonfinite(_first_nonfinite(push))
        return pushes, largest

    def drop(self, push: Sequence[BlockPush]) -> None:
        """Give back the slots of gradients that will not be sent."""
        pushes = self._with_slots(push)
        for each in push:
            del self.caller_slots[each.block.id]
        self._exchange.give_back([slot for _, slot in pushes])

    def _with_slots(self, push: Sequence[BlockPush]) -> Pushes:
        """Gradients with the slots that they were given out in."""
        pushes: Pushes = []
        slots, visited = self.caller_slots, set[int]()
        for each in push:
            block, active = each.block, each.active
            is_lent = block.id in slots and block.id not in visited
            if not is_lent or each.gradient is not slots[block.id][1]:
                raise ValueError(
                    f"the gradient of block {block.id} is not what gradient_slot gave for this "
                    "step: get one with client.dense.gradient_slot(block), fill it, push it once"
                )
            visited |= {block.id}
            pushes += [(each, slots[block.id][0])]
            if active is None:
                continue
            count = len(block.pieces)
            if not all(0 <= piece < count for piece in active):
                raise ShapeMismatch(
                    f"a push names pieces {active}, the block of {block.pieces[0].name!r} has "
                    f"{count}",
                    fix="give the indices of the block's tensors that have a gradient",
                )
        return pushes

    # --- by name -----------------------------------------------------------------------------

    def lend(self, block: Block, piece: NamedPiece) -> Array:
        """Shared memory [*shape] for one tensor's gradient: the same until it is pushed."""
        lent = self._lent.get(block.id)
        if lent is None:
            slot = self._exchange.take(block.nbytes)
            lent = self._lent[block.id] = Filling(block, slot, slot.array(block), {})
        assert lent.lent is not None
        array = lent.lent.get(piece.index)
        if array is None:
            # A view of its own: its shape is the caller's to change.
            array = lent.lent[piece.index] = lent.slot.tensors(block)[piece.index][...]
        return array

    def capture(self, selection: Selection, arrays: Sequence[Array]) -> tuple[Pushes, float]:
        """Copy gradients by name into slots, and look for their largest element.

        Raises:
            Overloaded: there is no memory for them. Everything is as it was.
        """
        largest = 0.0
        fillings = self._fillings(selection.parts)
        pushes: Pushes = []
        try:
            for part, filling in zip(selection.parts, fillings, strict=True):
                gradients = arrays[part.span] if part.span is not None else part.pick(arrays)
                size = _fill(part, gradients, filling)
                largest = size if size > largest else largest
                pushes += [(BlockPush(part.block, filling.flat, part.active), filling.slot)]
            if largest == math.inf and self._refuses(selection.blocks[0]):
                raise self._nonfinite(_first_nonfinite([push for push, _ in pushes]))
        except BaseException:
            self._undo(fillings)
            raise
        return pushes, largest

    def stage(
        self,
        selection: Selection,
        arrays: Sequence[Array],
        into: dict[int, Filling],
        at_once: bool = False,
    ) -> None:
        """Keep gradients by name until their group's tick; a second one adds to the first.

        Args:
            into: what was kept before, by block; gets these.
            at_once: the same call ticks. Else the program may write to what it was lent until its
                tick, which looks at that again.
        Raises:
            ParamServeError: a block has no rule, or there is no memory. Everything is as it was.
        """
        for block in selection.blocks:
            check_rule(block)
        bad, largest = "", dict[int, float]()
        new = self._fillings([part for part in selection.parts if part.block.id not in into])
        fillings = into | {filling.block.id: filling for filling in new}
        sums = []
        try:
            for part in selection.parts:
                gradients, filling = part.pick(arrays), fillings[part.block.id]
                if part.block.id not in into:
                    size = largest[part.block.id] = _fill(part, gradients, filling)
                    if size == math.inf and not bad:
                        bad = _first_nonfinite([BlockPush(part.block, filling.flat, part.active)])
                    continue
                most = filling.largest
                for piece, gradient in zip(part.pieces, gradients, strict=True):
                    if piece.index in filling.staged:
                        size = 0.0 if piece.is_finite(gradient) else math.inf
                        sums.append((piece, filling.flat, gradient))
                        most = -1.0
                    else:
                        size = piece.fill(filling.flat, gradient, False)
                        most = max(most, size) if most >= 0.0 else most
                    if size == math.inf and not bad:
                        bad = piece.name
                largest[part.block.id] = most
            if bad and self._refuses(selection.blocks[0]):
                raise self._nonfinite(bad)
        except BaseException:
            self._undo(new)
            raise
        self._exchange.interrupted_in = "a push"
        if sums:
            with np.errstate(over="ignore"):  # what overflows is found when the step ends
                for piece, flat, gradient in sums:
                    piece.add(flat, gradient)
        for part in selection.parts:
            filling = fillings[part.block.id]
            filling.staged |= frozenset(part.indices)
            filling.largest = largest[part.block.id] if at_once or not filling.lent else -1.0
            filling.lent = None
            into[part.block.id] = filling
        self._exchange.interrupted_in = ""

    def staged(self, fillings: Mapping[int, Filling]) -> tuple[Pushes, float]:
        """What was kept, by block: to be sent with the tick, and its largest element."""
        pushes: Pushes = []
        largest = 0.0
        for _, filling in sorted(fillings.items()):
            block, pieces = filling.block, filling.staged
            whole = None if len(pieces) == len(block.pieces) else tuple(sorted(pieces))
            push = BlockPush(block, filling.flat, whole)
            pushes.append((push, filling.slot))
            size = filling.largest if filling.largest >= 0.0 else _largest(push)
            largest = size if size > largest else largest
        if largest == math.inf and self._refuses(pushes[0][0].block):
            self._exchange.give_back([slot for _, slot in pushes])
            raise self._nonfinite(_first_nonfinite([push for push, _ in pushes]))
        return pushes, largest

    def _fillings(self, parts: Sequence[Part]) -> list[Filling]:
        """A slot for the gradients of each part: the lent one, if nothing in it stays with the
        caller.

        Raises:
            Overloaded: there is no memory for them. None is taken.
        """
        lent, by_block = self._lent, dict[int, Filling]()
        new: list[Block] = []
        for part in parts:
            number = part.block.id
            if number in lent and (part.active is None or _comes_back(lent[number], part.active)):
                by_block[number] = lent[number]
            else:
                new += [part.block]
        if new:
            slots = self._exchange.take_each([block.nbytes for block in new])
            for block, slot in zip(new, slots, strict=True):
                by_block[block.id] = Filling(block, slot, slot.array(block))
        fillings: list[Filling] = []
        for part in parts:
            filling = by_block[part.block.id]
            fillings += [filling]
            if filling.lent:
                del lent[part.block.id]
        return fillings

    def _undo(self, fillings: Sequence[Filling]) -> None:
        for filling in fillings:
            if filling.lent:
                self._lent[filling.block.id] = filling
            else:
                self._exchange.give_back([filling.slot])

    def _nonfinite(self, name: str) -> NonFinite:
        who = f"rank {self._rank}" if self._rank != NO_RANK else "a client without a rank"
        return NonFinite(
            f"the gradient of {name!r} on {who} holds NaN or Inf",
            fix="lower the learning rate, clip, or use on_nonfinite='skip' in the policy",
        )


def _comes_back(filling: Filling, active: tuple[int, ...]) -> bool:
    """Whether all that was lent of a slot is among these pieces."""
    return filling.lent is None or filling.lent.keys() <= set(active)


def _fill(part: Part, gradients: Sequence[Array], filling: Filling) -> float:
    """Write gradients to their places in a slot; the largest size of their elements."""
    lent, flat = filling.lent, filling.flat
    in_place = lent is not None
    for index, gradient in zip(part.indices, gradients, strict=True):
        if lent is None or index not in lent or lent[index] is not gradient:
            in_place = False
            break
    if part.small and not in_place:
        tensors = filling.slot.tensors(part.block)
        for piece, gradient in zip(part.pieces, gradients, strict=True):
            if gradient.dtype is piece.dtype:
                tensors[piece.index][...] = gradient
            else:
                piece.fill(flat, gradient, False)
        in_place = True
    largest: Callable[[Array], float] = compiled().largest
    if in_place and part.active is None:
        return largest(flat)
    most = 0.0
    for piece, gradient in zip(part.pieces, gradients, strict=True):
        lies_there = in_place or (lent is not None and gradient is lent.get(piece.index))
        size = piece.fill(flat, gradient, lies_there)
        most = size if size > most else most
    return most


def _largest(push: BlockPush) -> float:
    """The largest size of an element of the active pieces; inf if one is NaN or Inf."""
    largest: Callable[[Array], float] = compiled().largest
    if push.active is None:
        return largest(push.gradient)
    return max([largest(part) for _, part in active_parts(push)], default=0.0)


def _first_nonfinite(push: Sequence[BlockPush]) -> str:
    """The name of the first tensor with a NaN or Inf among the active pieces, of which one has."""
    largest = compiled().largest
    for each in push:
        for index, part in active_parts(each):
            if largest(part) == math.inf:
                return each.block.pieces[index].name
    raise ValueError("all of these gradients are finite")


def active_parts(push: BlockPush) -> list[tuple[int, Array]]:
    """The gradients of the active pieces, flat, with the pieces' indices."""
    starts = push.block.starts
    pieces = range(len(push.block.pieces)) if push.active is None else push.active
    return [(i, push.gradient[starts[i] : starts[i + 1]]) for i in pieces]


def clip(pushes: Pushes, clip_norm: float) -> None:
    """Clip one worker's gradients by their global norm, in place, as torch does."""
    kernels = compiled()
    parts = [part for push, _ in pushes for _, part in active_parts(push)]
    norm = sum(kernels.squared_norm(part) for part in parts) ** 0.5
    factor = clip_norm / (norm + CLIP_EPSILON)
    if factor < 1.0:
        for part in parts:
            if part.dtype.kind == "f":
                part *= part.dtype.type(factor)
            else:
                kernels.multiply(part, factor)

"""A client's gradients on their way into shared memory: captured now, or staged until a tick."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import Exchange, Slot
from paramserve.client.names import NamedPiece, Names
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

    Each method that checks says whether all numbers were finite; under a policy that refuses, it
    raises `NonFinite` instead, and everything is as it was before.

    Args:
        refuses: whether the policy of a block's group, for the step under way, does.
    """

    def __init__(
        self, exchange: Exchange, names: Names, refuses: Callable[[Block], bool], rank: int
    ) -> None:
        self._exchange = exchange
        self._names = names
        self._refuses = refuses
        self._rank = rank
        self._given: dict[int, Slot] = {}
        """By block: what `slot` has given out and no step has taken yet."""
        self._lent: dict[int, Filling] = {}
        """By block: the slot whose pieces `lend` gives out."""

    # --- by block ----------------------------------------------------------------------------

    def slot(self, block: Block) -> Array:
        """[block.size] of shared memory to write a gradient to; the same until a step takes it."""
        slot = self._given.get(block.id)
        if slot is None:
            slot = self._given[block.id] = self._exchange.take(block.nbytes)
        return slot.array(block)

    def take(self, push: Sequence[BlockPush]) -> tuple[Pushes, bool]:
        """Gradients that were written to their slots: to be sent, and whether they are finite.

        Raises:
            ValueError: one does not lie in its block's slot.
            ShapeMismatch: it is said to have a piece that its block does not have. In both cases
                everything is as it was.
        """
        self._check_given(push)
        bad = _first_nonfinite(push)
        if bad is not None and self._refuses(push[0].block):
            raise self._nonfinite(bad)
        return [(each, self._given.pop(each.block.id)) for each in push], bad is None

    def drop(self, push: Sequence[BlockPush]) -> None:
        """Gradients that will not be sent."""
        self._check_given(push)
        self._exchange.give_back([self._given.pop(each.block.id) for each in push])

    def _check_given(self, push: Sequence[BlockPush]) -> None:
        seen = set()
        for block, gradient, active, _ in push:
            slot = self._given.get(block.id)
            if slot is None or gradient is not slot.array(block) or block.id in seen:
                raise ValueError(
                    f"the gradient of block {block.id} is not what gradient_slot gave for this "
                    "step: get one with client.dense.gradient_slot(block), fill it, push it once"
                )
            seen.add(block.id)
            count = len(block.pieces)
            if active is not None and not all(0 <= piece < count for piece in active):
                raise ShapeMismatch(
                    f"a push names pieces {active}, the block of {block.pieces[0].name!r} has "
                    f"{count}",
                    fix="give the indices of the block's tensors that have a gradient",
                )

    # --- by name -----------------------------------------------------------------------------

    def lend(self, block: Block, piece: NamedPiece) -> Array:
        """Shared memory [*shape] for one tensor's gradient: the same until it is pushed."""
        lent = self._lent.get(block.id)
        if lent is None:
            slot = self._exchange.take(block.nbytes)
            lent = self._lent[block.id] = Filling(block, slot)
        lent.lent.add(piece.index)
        return piece.view(lent.slot.array(block))

    def capture(self, blocks: Sequence[Block], arrays: Mapping[str, Array]) -> tuple[Pushes, bool]:
        """Copy gradients by name into slots, checking them in the same pass.

        Raises:
            Overloaded: there is no memory for them. Everything is as it was.
        """
        bad = None
        fillings: list[Filling] = []
        pushes: Pushes = []
        try:
            for block in blocks:
                filling = self._filling(block, arrays)
                fillings.append(filling)
                flat = filling.slot.array(block)
                active = []
                for piece in self._names.pieces(block):
                    gradient = arrays.get(piece.name)
                    if gradient is not None:
                        active.append(piece.index)
                        lent = piece.index in filling.lent
                        if not piece.fill(flat, gradient, lent) and bad is None:
                            bad = piece.name
                whole = None if len(active) == len(block.pieces) else tuple(active)
                pushes.append((BlockPush(block, flat, whole), filling.slot))
            if bad is not None and self._refuses(blocks[0]):
                raise self._nonfinite(bad)
        except BaseException:
            self._undo(fillings)
            raise
        return pushes, bad is None

    def stage(
        self, blocks: Sequence[Block], arrays: Mapping[str, Array], into: dict[int, Filling]
    ) -> None:
        """Keep gradients by name until their group's tick; a second one adds to the first.

        Args:
            into: what was kept before, by block; gets these.
        Raises:
            ParamServeError: a block has no rule, or there is no memory. Everything is as it was.
        """
        for block in blocks:
            check_rule(block)
        bad = None
        new: list[Filling] = []
        fillings, sums = [], []
        try:
            for block in blocks:
                filling = into.get(block.id)
                if filling is None:
                    filling = self._filling(block, arrays)
                    new.append(filling)
                fillings.append(filling)
                flat = filling.slot.array(block)
                for piece in self._names.pieces(block):
                    gradient = arrays.get(piece.name)
                    if gradient is None:
                        continue
                    if piece.index in filling.staged:
                        finite = bool(np.isfinite(gradient).all())
                        sums.append((piece.view(flat), gradient))
                    else:
                        finite = piece.fill(flat, gradient, piece.index in filling.lent)
                    if not finite and bad is None:
                        bad = piece.name
            if bad is not None and self._refuses(blocks[0]):
                raise self._nonfinite(bad)
        except BaseException:
            self._undo(new)
            raise
        self._exchange.unfinished = "a push"
        with np.errstate(over="ignore"):  # what overflows is found when the step ends
            for total, gradient in sums:
                total += gradient
        for filling in fillings:
            block = filling.block
            pieces = self._names.pieces(block)
            filling.staged |= {piece.index for piece in pieces if piece.name in arrays}
            filling.lent = set()
            into[block.id] = filling
        self._exchange.unfinished = ""

    def staged(self, fillings: Mapping[int, Filling]) -> tuple[Pushes, bool]:
        """What was kept, by block: to be sent with the tick."""
        pushes: Pushes = []
        for _, filling in sorted(fillings.items()):
            block, slot, pieces = filling.block, filling.slot, filling.staged
            whole = None if len(pieces) == len(block.pieces) else tuple(sorted(pieces))
            pushes.append((BlockPush(block, slot.array(block), whole), slot))
        bad = _first_nonfinite([push for push, _ in pushes])
        if bad is not None and self._refuses(pushes[0][0].block):
            self._exchange.give_back([slot for _, slot in pushes])
            raise self._nonfinite(bad)
        return pushes, bad is None

    def _filling(self, block: Block, arrays: Mapping[str, Array]) -> Filling:
        """A slot for these gradients: the lent one, if nothing in it stays with the caller."""
        lent = self._lent.get(block.id)
        if lent is not None:
            pieces = self._names.pieces(block)
            if all(pieces[index].name in arrays for index in lent.lent):
                return self._lent.pop(block.id)
        return Filling(block, self._exchange.take(block.nbytes))

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


def _first_nonfinite(push: Sequence[BlockPush]) -> str | None:
    """The name of the first tensor with a NaN or Inf among the active pieces."""
    kernels = compiled()
    for each in push:
        if each.active is None and kernels.finite(each.gradient):
            continue
        for index, part in active_parts(each):
            if not kernels.finite(part):
                return each.block.pieces[index].name
    return None


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
            part *= part.dtype.type(factor)

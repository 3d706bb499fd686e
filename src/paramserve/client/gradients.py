"""A client's gradients on their way into shared memory: captured now, or staged until a tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from paramserve.client.exchange import Exchange, Slot
from paramserve.client.names import Names
from paramserve.client.steps import BlockPush
from paramserve.core.consistency import Consistency
from paramserve.core.partition import Block
from paramserve.errors import NonFinite

Array = npt.NDArray[Any]
Pushes = list[tuple[BlockPush, Slot]]

CLIP_EPSILON = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds it to the norm."""


class Gradients:
    """Slots that gradients are written to, from when they are given out until they are sent.

    Each method that checks says whether all numbers were finite; under a policy that refuses, it
    raises `NonFinite` instead, and nothing stays captured.
    """

    def __init__(self, exchange: Exchange, names: Names, policy: Consistency, rank: int) -> None:
        self._exchange = exchange
        self._names = names
        self._policy = policy
        self._rank = rank
        self._given: dict[int, Slot] = {}
        """By block: what `slot` has given out and nobody has pushed yet."""
        self._staged: dict[str, dict[int, set[int]]] = {}
        """By group and block: pieces pushed in the synchronous step under way."""

    def slot(self, block: Block, *, fresh: bool = False) -> Array:
        """[block.size] of shared memory to write a gradient to.

        Args:
            fresh: never one that was given out before.
        """
        given = self._given.get(block.id)
        if given is None or fresh:
            if given is not None:
                self._exchange.give_back([given])
            given = self._given[block.id] = self._exchange.take(block.nbytes)
        return given.array(block)

    def take(self, push: Sequence[BlockPush]) -> tuple[Pushes, bool]:
        """Gradients that were written to their slots: to be sent, and whether they are finite."""
        pushes = [(each, self._given.pop(each.block.id)) for each in push]
        return pushes, self._check(pushes)

    def drop(self, push: Sequence[BlockPush]) -> None:
        """Gradients that will not be sent."""
        self._exchange.give_back([self._given.pop(each.block.id) for each in push])

    def capture(self, blocks: Sequence[Block], arrays: Mapping[str, Array]) -> tuple[Pushes, bool]:
        """Copy gradients by name into slots, checking them in the same pass."""
        pushes: Pushes = []
        bad = None
        for block in blocks:
            known = block.id in self._given
            flat = self.slot(block)
            active = []
            for index, piece in enumerate(self._names.pieces(block)):
                gradient = arrays.get(piece.name)
                if gradient is not None:
                    active.append(index)
                    if not piece.fill(flat, gradient, known) and bad is None:
                        bad = piece.name
            whole = None if len(active) == len(block.pieces) else tuple(active)
            pushes.append((BlockPush(block, flat, whole), self._given.pop(block.id)))
        return pushes, self._judge(pushes, bad)

    def stage(self, blocks: Sequence[Block], arrays: Mapping[str, Array]) -> None:
        """Keep gradients by name until their group's tick; a second one adds to the first."""
        for block in blocks:
            known = block.id in self._given
            flat = self.slot(block)
            done = self._staged.setdefault(block.group_name, {}).setdefault(block.id, set())
            for index, piece in enumerate(self._names.pieces(block)):
                gradient = arrays.get(piece.name)
                if gradient is None:
                    continue
                if index in done:
                    piece.view(flat)[...] += gradient
                elif not piece.fill(flat, gradient, known):
                    self._judge([], piece.name)
                done.add(index)

    def staged(self, group: str) -> tuple[Pushes, bool]:
        """What was staged for a group: to be sent with its tick."""
        pushes: Pushes = []
        for number, pieces in sorted(self._staged.pop(group, {}).items()):
            block = self._exchange.blocks[number]
            whole = None if len(pieces) == len(block.pieces) else tuple(sorted(pieces))
            slot = self._given.pop(number)
            pushes.append((BlockPush(block, slot.array(block), whole), slot))
        return pushes, self._check(pushes)

    def _check(self, pushes: Pushes) -> bool:
        return self._judge(pushes, _first_nonfinite([push for push, _ in pushes]))

    def _judge(self, pushes: Pushes, bad: str | None) -> bool:
        """Whether all was finite; `bad` names the first tensor that was not."""
        if bad is None:
            return True
        if self._policy.on_nonfinite == "skip":
            return False
        self._exchange.give_back([slot for _, slot in pushes])
        raise NonFinite(
            f"the gradient of {bad!r} on rank {self._rank} holds NaN or Inf",
            fix="lower the learning rate, clip, or use on_nonfinite='skip' in the policy",
        )


def _first_nonfinite(push: Sequence[BlockPush]) -> str | None:
    """The name of the first tensor with a NaN or Inf among the active pieces."""
    from paramserve.rules import kernels

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
    from paramserve.rules import kernels

    parts = [part for push, _ in pushes for _, part in active_parts(push)]
    norm = sum(kernels.squared_norm(part) for part in parts) ** 0.5
    factor = clip_norm / (norm + CLIP_EPSILON)
    if factor < 1.0:
        for part in parts:
            part *= part.dtype.type(factor)

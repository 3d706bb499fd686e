"""Gradients encoded by their blocks' codecs, and what is left out of them (error feedback).

What a codec has left out of a block's gradients, the *residual*, is added to the next one before
that is encoded. A gradient that a shard has not applied, since it was dropped, skipped or refused,
changes no residual: then it is as if it had not been pushed. So of all gradients that were applied
the sum is that of the gradients less the residual. A residual changes when the call is certain to
be sent, since one that is interrupted before sends nothing.

Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback
Fixes SignSGD, 2019.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import Slot
from paramserve.client.step_parts import BlockPush, check_push
from paramserve.codecs.base import Codec
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.messages import ALIGN, Done, Gradient
from paramserve.rules.compiled import compiled

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Encoded:
    """A gradient that is on its way.

    Attributes:
        headers: by shard.
        slot: where its bytes lie.
        change: of the residual, [block.size]; None: the codec has none, or it is over.
        counted: whether the residual has it.
    """

    block: Block
    headers: tuple[Gradient, ...]
    slot: Slot
    change: Floats | None
    counted: bool = False


class Encoder:
    """Encodes this client's gradients, and keeps the residuals of its blocks.

    Args:
        rank: of the client; what is drawn at random depends on it.
        take: gives slots of these sizes.
    """

    def __init__(self, rank: int, take: Callable[[Sequence[int]], list[Slot]]) -> None:
        self.sent_bytes = 0
        """Of encoded gradients."""
        self.plain_bytes = 0
        """Of the same gradients, as they were."""
        self._rank = rank
        self._take = take
        self._residuals: dict[int, Floats] = {}
        self._free: dict[int, list[Floats]] = {}
        """By block: memory for one more change, or for what is to be encoded."""
        self._pushes: dict[int, int] = {}
        self._lock = threading.Lock()
        """Of the residuals: answers come in any thread."""

    def residual(self, block: Block) -> Floats | None:
        """A copy of what was left out of a block's gradients, [block.size]; None: nothing was."""
        with self._lock:
            found = self._residuals.get(block.id)
            return None if found is None else found.copy()

    def encode(self, push: BlockPush, slot: Slot, taken: list[Slot]) -> Encoded:
        """Encode a gradient, which is finite; its slot's inactive pieces become zeros.

        Args:
            taken: gets the slot of the bytes, also where this fails afterwards.
        Raises:
            ParamServeError, ValueError: the shards would refuse it, or there is no memory for it.
        """
        block = push.block
        codec = block.push_codec
        assert codec is not None
        check_push(push)
        gradient: Floats = slot.array(block)
        inactive = _inactive(push)
        for start, stop in inactive:
            gradient[start:stop] = 0.0
        ranges = [block.range(shard) for shard in range(len(block.spec.cuts) - 1)]
        offsets, total = [], 0
        codecs = block.push_codecs
        for each, (low, high) in zip(codecs, ranges, strict=True):
            offsets.append(total)
            total += -(-each.size(high - low) // ALIGN) * ALIGN
        taken += self._take([total])
        into = taken[-1]
        with self._lock:
            number = self._pushes[block.id] = self._pushes.get(block.id, 0) + 1
            given, change = self._to_encode(block, codec, gradient, inactive)
            headers = []
            for shard, (low, high) in enumerate(ranges):
                each = codecs[shard]
                out = into.bytes[offsets[shard] : offsets[shard] + each.size(high - low)]
                written = each.encode(given[low:high], out, self._seed(block, number, shard))
                if change is not None and high > low:
                    each.decode(out[:written], change[low:high])
                place = into.offset + offsets[shard]
                headers.append(
                    Gradient(block.id, into.arena, place, push.active, push.hyper, written)
                )
            if change is not None:
                np.subtract(gradient, change, out=change)
                for start, stop in inactive:
                    change[start:stop] = 0.0
                self._free[block.id].append(given)
        return Encoded(block, tuple(headers), into, change)

    def _to_encode(
        self, block: Block, codec: Codec, gradient: Floats, inactive: Sequence[tuple[int, int]]
    ) -> tuple[Floats, Floats | None]:
        """The gradient with the residual, and memory for what was decoded of it."""
        if not codec.feedback:
            return gradient, None
        residual = self._residuals.get(block.id)
        if residual is None:
            residual = self._residuals[block.id] = np.zeros(block.size, np.float32)
        given, change = self._memory(block), self._memory(block)
        with np.errstate(over="ignore"):
            np.add(gradient, residual, out=given)
        for start, stop in inactive:
            given[start:stop] = 0.0
        largest: Callable[[Floats], float] = compiled().largest
        if largest(given) == math.inf:  # what was left out is too large to be added: it is lost
            residual.fill(0.0)
            np.copyto(given, gradient)
        return given, change

    def _seed(self, block: Block, number: int, shard: int) -> int:
        return zlib.crc32(b"%d %d %d %d" % (self._rank, block.id, number, shard))

    def _memory(self, block: Block) -> Floats:
        free = self._free.setdefault(block.id, [])
        return free.pop() if free else np.empty(block.size, np.float32)

    def sent(self, encoded: Sequence[Encoded]) -> None:
        """These are certain to be sent."""
        with self._lock:
            for each in encoded:
                self.sent_bytes += sum(header.extent for header in each.headers)
                self.plain_bytes += each.block.nbytes
                if each.change is not None:
                    self._residuals[each.block.id] += each.change
                    each.counted = True

    def answered(self, encoded: Sequence[Encoded], operation: Operation) -> None:
        """All shards have answered, or none will: take back what was not applied."""
        with self._lock:
            for each in encoded:
                change, each.change = each.change, None
                if change is None or not each.counted:
                    continue
                residual = self._residuals[each.block.id]
                for shard in range(len(each.headers)):
                    if not _applied(operation.replies.get(shard)):
                        low, high = each.block.range(shard)
                        residual[low:high] -= change[low:high]
                self._free[each.block.id].append(change)


def _applied(reply: Any) -> bool:
    """Whether a shard has taken a gradient as its policy has it, and not left it out."""
    return isinstance(reply, Done) and not reply.skipped


def _inactive(push: BlockPush) -> list[tuple[int, int]]:
    """The elements of pieces without a gradient."""
    if push.active is None:
        return []
    starts, active = push.block.starts, set(push.active)
    pieces = range(len(push.block.pieces))
    return [(starts[i], starts[i + 1]) for i in pieces if i not in active]

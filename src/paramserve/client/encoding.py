"""Gradients encoded by their blocks' codecs, and what is left out of them (error feedback).

What a codec has left out of a block's gradients, the *residual*, is added to the next one before
that is encoded. A gradient that a shard has not applied, since it was dropped, skipped or refused,
changes no residual: then it is as if it had not been pushed. So of all gradients that were applied
the sum is that of the gradients less the residual. What a gradient changes of it counts for the
next one when the call is certain to be sent, since one that is interrupted before sends nothing;
the residual itself has it when the shards have answered, as far as they have applied it.

`Feedback` discards a part of the residual each time that it is added to a gradient. A push that
was not applied has discarded nothing either, and the pushes that were sent behind it have discarded
less: they had what it left out, which counts no more.

A checkpoint has no residuals. Before its cut a push goes whole, with all that was left out, when an
answer has asked for it (`Done.flush`): then a residual of zero remains (`core.flush`).

Source: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback
Fixes SignSGD, 2019.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.client.exchange import Slot
from paramserve.client.step_parts import BlockPush, check_push
from paramserve.codecs.base import Codec, Feedback
from paramserve.codecs.delta import Delta
from paramserve.core.client_session import Operation
from paramserve.core.partition import Block
from paramserve.messages import ALIGN, Done, Gradient, Refused, SentGradients
from paramserve.rules.compiled import compiled

Floats = npt.NDArray[np.float32]


@dataclass(eq=False)
class Encoded:
    """A gradient that is on its way.

    Attributes:
        headers: by shard; none: it is sent as it is, with what was left out before.
        slot: where its bytes lie.
        change: of the residual, [block.size]; None: the codec has none, or it is over.
        inactive: elements of pieces without a gradient, as (start, stop).
        residual_share: the part of the residual that was added to it; the rest is discarded.
        counted: whether the next gradient counts with it.
        rest: of one that goes whole, whether pieces without a gradient keep what was left out.
    """

    block: Block
    headers: tuple[Gradient, ...]
    slot: Slot
    change: Floats | None
    inactive: Sequence[tuple[int, int]] = ()
    residual_share: float = 1.0
    counted: bool = False
    rest: bool = False


class Encoder:
    """Encodes this client's gradients, and keeps the residuals of its blocks.

    Args:
        rank: of the client; what is drawn at random depends on it.
        take: gives slots of these sizes.
    """

    def __init__(self, rank: int, take: Callable[[Sequence[int]], list[Slot]]) -> None:
        self.sent_bytes = 0
        """Bytes of encoded gradients, as sent."""
        self.plain_bytes = 0
        """Bytes of the encoded gradients before they were encoded."""
        self._rank = rank
        self._take = take
        self._groups: dict[str, tuple[int, int]] = {}
        """Bytes sent and plain, for each group."""
        self._blocks: dict[int, Block] = {}
        """Blocks by number that have, or had, a residual."""
        self._residuals: dict[int, Floats] = {}
        """Residual of each block's answered gradients."""
        self._unanswered: dict[int, list[Encoded]] = {}
        """Unanswered gradients by block, in the order sent, and behind them what is about to be."""
        self._newest_flush: tuple[int, ...] = ()
        """The newest `Done.flush`."""
        self._flushed = 0
        """The number of the one that was sent last, unless a shard has not applied it."""
        self._free: dict[int, list[Floats]] = {}
        """Free memory by block, for one more change or for what is to be encoded."""
        self._pushes: dict[int, tuple[int, int]] = {}
        """Clock of each block's last push, and how many there were in it before."""
        self._lock = threading.Lock()
        """Guards the residuals: any thread may read an answer."""

    def residual(self, block: Block) -> Floats | None:
        """A copy of what was left out of a block's gradients, [block.size], with those that are on
        their way; None: nothing was."""
        with self._lock:
            if block.id not in self._residuals:
                return None
            residual = np.empty(block.size, np.float32)
            self._left_out(block, residual)
            return residual

    def _left_out(self, block: Block, into: Floats) -> None:
        """What the next gradient has to make up for, if all that was sent is applied."""
        np.copyto(into, self._residuals[block.id])
        for each in self._unanswered.get(block.id, ()):
            if each.counted:
                assert each.change is not None
                into += each.change

    def encode_all(
        self,
        pushes: Sequence[tuple[BlockPush, Slot]],
        slots: list[Slot],
        clock: int,
        *,
        flush: bool,
        shared: bool,
    ) -> dict[int, Encoded]:
        """Encode the gradients of a step whose block has a codec, by block.

        Args:
            pushes: with the slots that they lie in.
            slots: gets the slots that are taken.
            clock: as for `encode`.
            flush: whether the codecs leave nothing out that a later gradient is to make up for.
            shared: whether the servers are reached through shared memory.
        """
        encoded: dict[int, Encoded] = {}
        for push, slot in pushes:
            codec = push.block.push_codec
            if codec is None:
                continue
            remote = codec.even_local or not shared
            if remote and not (flush and codec.feedback):
                encoded[push.block.id] = self.encode(push, slot, slots, clock)
            else:
                whole = self.whole(push, slots)
                if whole is not None:
                    encoded[push.block.id] = whole
        return encoded

    def encode(self, push: BlockPush, slot: Slot, slots: list[Slot], clock: int = 0) -> Encoded:
        """Encode a gradient, which is finite; its slot's inactive pieces become zeros.

        Args:
            slots: gets the slot of the bytes, also where this fails afterwards.
            clock: of this client in the group: what is drawn depends on it, and not on how many
                pushes there were since the client came, so that a run that goes on from a
                checkpoint draws as one that was never stopped.
        Raises:
            ParamServeError, ValueError: the shards would refuse it, or there is no memory for it.
        """
        block = push.block
        codec = block.push_codec
        assert codec is not None
        check_push(push)
        gradient = _widened(block, slot.array(block))
        inactive = _inactive(push)
        for start, stop in inactive:
            gradient[start:stop] = 0.0
        ranges = [block.range(shard) for shard in range(len(block.spec.cuts) - 1)]
        offsets, total = [], 0
        codecs = block.push_codecs
        for each, (low, high) in zip(codecs, ranges, strict=True):
            offsets.append(total)
            total += -(-each.size(high - low) // ALIGN) * ALIGN
        slots += self._take([total])
        into = slots[-1]
        with self._lock:
            at, nth = self._pushes.get(block.id, (clock, -1))
            nth = nth + 1 if at == clock else 0
            self._pushes[block.id] = clock, nth
            source, change, share = self._to_encode(block, codec, gradient, inactive)
            headers = []
            for shard, (low, high) in enumerate(ranges):
                each = codecs[shard]
                out = into.bytes[offsets[shard] : offsets[shard] + each.size(high - low)]
                written = each.encode(source[low:high], out, self._seed(block, clock, nth, shard))
                if change is not None and high > low:
                    each.decode(out[:written], change[low:high])
                place = into.offset + offsets[shard]
                headers.append(
                    Gradient(block.id, into.arena, place, push.active, push.hyper, 0, written)
                )
            if change is not None:
                if share == 1.0:
                    np.subtract(gradient, change, out=change)
                else:
                    np.subtract(source, change, out=change)
                    self._left_out(block, source)
                    change -= source
                for start, stop in inactive:
                    change[start:stop] = 0.0
                self._free[block.id].append(source)
            encoded = Encoded(block, tuple(headers), into, change, inactive, share)
            if change is not None:
                self._about_to_send(encoded)
        return encoded

    def whole(self, push: BlockPush, slots: list[Slot]) -> Encoded | None:
        """A gradient that is sent as it is, with what was left out: as a flush, or since its
        servers can be reached through shared memory by now; None: nothing was. Else as `encode`.
        """
        block = push.block
        if block.id not in self._residuals:
            return None
        slots += self._take([block.nbytes])
        into, inactive = slots[-1], _inactive(push)
        with self._lock:
            change = self._memory(block)
            self._left_out(block, change)
            np.negative(change, out=change)
            halves = block.spec.half is not None
            content: Floats = self._memory(block) if halves else into.array(block)
            gradient = _widened(block, push.gradient)
            with np.errstate(over="ignore"):
                np.subtract(gradient, change, out=content)
            rest = False
            for start, stop in inactive:
                rest = rest or bool(change[start:stop].any())
                content[start:stop] = change[start:stop] = 0.0
            if self._is_too_large(block, content):
                np.copyto(content, gradient)
                change.fill(0.0)
            if halves:
                compiled().round_into(into.array(block), content)
                self._free[block.id].append(content)
            encoded = Encoded(block, (), into, change, inactive, rest=rest)
            self._about_to_send(encoded)
        return encoded

    def _about_to_send(self, encoded: Encoded) -> None:
        """Remember it, and forget what was interrupted before it was sent."""
        before = self._unanswered.get(encoded.block.id, ())
        self._unanswered[encoded.block.id] = [*(e for e in before if e.counted), encoded]

    def _residual_of(self, block: Block) -> Floats:
        residual = self._residuals.get(block.id)
        if residual is None:
            self._blocks[block.id] = block  # first: `report` takes no lock
            residual = self._residuals[block.id] = np.zeros(block.size, np.float32)
        return residual

    def _is_too_large(self, block: Block, gradient: Floats) -> bool:
        """Whether what was left out is too large to be added to a gradient, so that it is lost."""
        largest: Callable[[Floats], float] = compiled().largest
        if largest(gradient) < math.inf:
            return False
        self._residuals[block.id].fill(0.0)
        for each in self._unanswered.get(block.id, ()):
            assert each.change is not None
            each.change.fill(0.0)
        return True

    def _to_encode(
        self, block: Block, codec: Codec, gradient: Floats, inactive: Sequence[tuple[int, int]]
    ) -> tuple[Floats, Floats | None, float]:
        """The gradient with the residual, memory for what was decoded of it, and how much of the
        residual was added."""
        if not codec.feedback:
            return gradient, None, 1.0
        residual = self._residual_of(block)
        source, change, share = self._memory(block), self._memory(block), 1.0
        if self._unanswered.get(block.id) or isinstance(codec.feedback, Feedback):
            self._left_out(block, source)
            residual = source
        if isinstance(codec.feedback, Feedback):
            for start, stop in inactive:
                source[start:stop] = 0.0
            share = _residual_share(codec.feedback, source)
        with np.errstate(over="ignore"):
            if share == 1.0:
                np.add(gradient, residual, out=source)
            else:
                source *= np.float32(share)
                source += gradient
        for start, stop in inactive:
            source[start:stop] = 0.0
        if self._is_too_large(block, source):
            np.copyto(source, gradient)
            share = 1.0
        return source, change, share

    def _seed(self, block: Block, clock: int, nth: int, shard: int) -> int:
        return zlib.crc32(b"%d %d %d %d %d" % (self._rank, block.id, clock, nth, shard))

    def _memory(self, block: Block) -> Floats:
        free = self._free.setdefault(block.id, [])
        return free.pop() if free else np.empty(block.size, np.float32)

    def mark_sent(self, encoded: Sequence[Encoded], flush: int = 0) -> None:
        """Count gradients that are certain to be sent, as a flush (`Step.flush`) or not."""
        with self._lock:
            for each in encoded:
                block, size = each.block, sum(header.encoded_bytes for header in each.headers)
                if each.headers:
                    encoded_bytes, plain = self._groups.get(block.group_name, (0, 0))
                    self._groups[block.group_name] = encoded_bytes + size, plain + block.nbytes
                    self.sent_bytes += size
                    self.plain_bytes += block.nbytes
                if each.change is not None:
                    each.counted = True
            self._flushed = flush or self._flushed

    def report(self) -> tuple[SentGradients, ...]:
        """Bytes sent so far, and the residual's norm, for each group.

        It waits for no push: a norm is of what was answered, and of what an answer changes
        meanwhile somewhere between the two."""
        squared_norm: Callable[[Floats], float] = compiled().squared_norm
        squares = dict.fromkeys(list(self._groups), 0.0)
        for block, residual in list(self._residuals.items()):
            group = self._blocks[block].group_name
            squares[group] = squares.get(group, 0.0) + squared_norm(residual)
        return tuple(
            SentGradients(group, *self._groups.get(group, (0, 0)), math.sqrt(square))
            for group, square in squares.items()
        )

    def answered(self, encoded: Sequence[Encoded], operation: Operation) -> None:
        """Keep what gradients that were applied leave out: all shards have answered, or none
        will."""
        with self._lock:
            replies = operation.replies | operation.refused
            for reply in replies.values():
                if (
                    isinstance(reply, Done)
                    and reply.flush
                    and reply.flush[:1] >= self._newest_flush[:1]
                ):
                    self._newest_flush = reply.flush  # of one number the latest, of whichever group
            for each in encoded:
                change, each.change = each.change, None
                if change is None or not each.counted:
                    continue
                block, unanswered = each.block, self._unanswered[each.block.id]
                unanswered.remove(each)
                residual = self._residuals[block.id]
                for shard in range(len(block.spec.cuts) - 1):
                    low, high = block.range(shard)
                    if _applied(replies.get(shard)):
                        residual[low:high] += change[low:high]
                        continue
                    self._not_applied(block, change, low, high)
                    if not each.headers:
                        self._flushed = 0  # the next one goes whole
                self._free[block.id].append(change)
                if not (each.headers or unanswered or residual.any()):
                    del self._residuals[block.id]

    @property
    def waits(self) -> bool:
        """Whether gradients are on their way that count only if they are applied."""
        with self._lock:
            return any(each.counted for every in self._unanswered.values() for each in every)

    def flush_of(self, calls: Sequence[tuple[int, int]], blocks: Iterable[Block]) -> int:
        """The number of the flush that a call is to be (`Done.flush`); 0: of none.

        Args:
            calls: (group, clock) of its steps that end one.
            blocks: that it pushes to; without a codec with feedback it is not just any next one.
        """
        with self._lock:
            if not self._newest_flush:
                return 0
            number, group, clock = self._newest_flush
            if group >= 0:
                return number if (group, clock) in calls else 0
            codecs = [block.push_codec for block in blocks if self._flushed != number]
            return number if any(codec is not None and codec.feedback for codec in codecs) else 0

    def leaves(self, group: int, encoded: Mapping[int, Encoded]) -> bool:
        """Whether something of a group is left out behind a step, as `Step.leaves`.

        Args:
            encoded: its gradients by block.
        """
        for each in encoded.values():
            if each.rest or (each.headers and each.change is not None):
                return True
        with self._lock:
            others = [number for number in self._residuals if number not in encoded]
        return any(self._blocks[number].group == group for number in others)

    def _not_applied(self, block: Block, change: Floats, low: int, high: int) -> None:
        """A shard, which has the elements [low, high), has not applied a gradient: what those
        behind it have discarded becomes what it were without it.

        Args:
            change: its own; gets other values there.
        """
        lacking = change[low:high]
        for each in self._unanswered[block.id]:
            if each.residual_share == 1.0:
                continue
            more = lacking * np.float32(1.0 - each.residual_share)
            for start, stop in each.inactive:
                more[max(start - low, 0) : max(stop - low, 0)] = 0.0
            assert each.change is not None
            each.change[low:high] += more
            lacking -= more


def _residual_share(feedback: Feedback, residual: Floats) -> float:
    """How much of a residual, as far as it is to be added, is added."""
    share = float(feedback.decay)
    if feedback.clip_norm is not None:
        squared_norm: Callable[[Floats], float] = compiled().squared_norm
        norm = share * math.sqrt(squared_norm(residual))
        if norm > feedback.clip_norm:
            share *= feedback.clip_norm / norm
    return share


def _applied(reply: Any) -> bool:
    """Whether a shard has taken a gradient as its policy has it, and not left it out; also where
    only what came behind that failed."""
    if isinstance(reply, Refused):
        return reply.applied == "yes"
    return isinstance(reply, Done) and not reply.skipped


def _widened(block: Block, gradient: npt.NDArray[Any]) -> Floats:
    """A gradient of 16 bits in new memory; any other one as it is."""
    if block.spec.half is None:
        return gradient
    wide = np.empty(block.size, np.float32)
    compiled().scaled_into(wide, 1.0, gradient)
    return wide


def _inactive(push: BlockPush) -> list[tuple[int, int]]:
    """The elements of pieces without a gradient."""
    if push.active is None:
        return []
    starts, active = push.block.starts, set(push.active)
    pieces = range(len(push.block.pieces))
    return [(starts[i], starts[i + 1]) for i in pieces if i not in active]


def in_words(group: str, blocks: Sequence[Block], *, local: bool, lost_before: int = 0) -> str:
    """What the codecs of a group do to its bytes, for the user of rank 0; empty: it has none.

    Args:
        local: whether all servers are on this client's host.
        lost_before: the clock before which what rank 0 left out of gradients is lost; 0: nothing.
    """
    parts, whole = list[str](), list[str]()
    plain = sum(block.nbytes for block in blocks)
    pushed = [(block.push_codec, _pushed_bytes(block)) for block in blocks]
    pulled = [(block.pull_codec, _pulled_bytes(block)) for block in blocks]
    for way, verb, sizes in (("pushes", "sends", pushed), ("pulls", "gets", pulled)):
        codecs = [codec for codec, _ in sizes if codec is not None]
        if not plain or not codecs:
            continue
        *others, last = dict.fromkeys(codec.called for codec in codecs)
        named = f"{', '.join(others)} and {last}" if others else last
        most = "" if all(codec.fixed for codec in codecs) else "at most "
        share = 100 * sum(nbytes for _, nbytes in sizes) / plain
        each = " for each delta" if any(isinstance(codec, Delta) for codec in codecs) else ""
        parts.append(f"{way} {named} ({most}{share:.3g}% of the bytes{each})")
        if local and not any(codec.even_local for codec in codecs):
            whole.append(verb)
    text = f"group {group!r} {' and '.join(parts)}" if parts else ""
    if whole:
        text += f"; rank 0 {' and '.join(whole)} whole values, since its servers are on its host"
    feeds = any(codec is not None and codec.feedback for codec, _ in pushed)
    if lost_before and feeds and "sends" not in whole:
        text += f"; what was left out of the gradients of rank 0 before clock {lost_before} is lost"
    return text


def _pushed_bytes(block: Block) -> int:
    """Bytes of a gradient as sent, all shards' parts together."""
    if block.push_codec is None:
        return block.nbytes
    return sum(codec.size(_count(block, at)) for at, codec in enumerate(block.push_codecs))


def _pulled_bytes(block: Block) -> int:
    """Bytes of the values as read, all shards' parts together."""
    codec, shards = block.pull_codec, range(len(block.spec.cuts) - 1)
    if codec is None:
        return block.nbytes
    return sum(codec.size(_count(block, shard)) for shard in shards)


def _count(block: Block, shard: int) -> int:
    low, high = block.range(shard)
    return high - low

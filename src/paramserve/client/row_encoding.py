"""Gradients of rows encoded by their tables' codecs, when they are captured.

A resend has the same bytes. There is no residual (`client.encoding`): one of each row that was
pushed would grow with the table. Where a codec rounds at random, what is drawn depends on the
client's rank, the table, the number of the push and the shard.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from paramserve.client.links import Links, Slot
from paramserve.client.row_slots import RowPush, class_bytes
from paramserve.codecs.keys import order_of
from paramserve.core.table.encoded import RowCodecs
from paramserve.core.table.parts import gradient_at, padded
from paramserve.messages import Gradient
from paramserve.rules.base import Array


class RowEncoder:
    """Encodes this client's gradients of rows; the caller holds the client's lock.

    Args:
        rank: of the client.
    """

    def __init__(self, rank: int, links: Links) -> None:
        self.sent_bytes = 0
        """Bytes of encoded gradients and their keys, as sent."""
        self.plain_bytes = 0
        """Bytes of the encoded gradients and their keys before they were encoded."""
        self._rank = rank
        self._links = links
        self._pushes: dict[int, int] = {}
        """Pushes by block."""

    def encoded(self, push: RowPush) -> RowPush:
        """Encode the gradients of a push in a slot of their own; the push's slot is released, also
        where this fails.

        Args:
            push: finite.
        Raises:
            Overloaded: there is no memory for it. Nothing is captured.
        """
        codecs = push.block.row_codecs
        assert codecs is not None
        slots = [push.slot]
        try:
            parts = [self._part(push, header) for header in push.headers]
            sizes = [codecs.gradient_bytes(keys) if keys.size else 0 for keys, _ in parts]
            slots += self._links.take_each([class_bytes(sum(map(padded, sizes)))])
            encoded = self._write(push, codecs, parts, sizes, slots[-1])
        except BaseException:
            self._links.give_back(slots)
            raise
        self._links.give_back(slots[:1])
        return encoded

    def _part(self, push: RowPush, header: Gradient) -> tuple[Array, Array]:
        """A shard's keys, rising, and their gradients."""
        assert push.block.table is not None
        offset = header.offset - push.slot.offset
        keys, values = gradient_at(push.slot.bytes, offset, header.rows, push.block.table.dim)
        order = order_of(keys)
        return keys[order], values[order]

    def _write(
        self,
        push: RowPush,
        codecs: RowCodecs,
        parts: Sequence[tuple[Array, Array]],
        sizes: Sequence[int],
        slot: Slot,
    ) -> RowPush:
        block = push.block
        number = self._pushes[block.id] = self._pushes.get(block.id, 0) + 1
        headers: list[Gradient] = []
        at = 0
        for shard, ((keys, values), size) in enumerate(zip(parts, sizes, strict=True)):
            if size:
                seed = zlib.crc32(b"%d %d %d %d" % (self._rank, block.id, number, shard))
                codecs.write_gradient(keys, values, slot.bytes[at : at + size], seed)
            hyper = push.headers[shard].hyper
            headers.append(Gradient(block.id, slot.arena, slot.offset + at, None, hyper, 0, size))
            at += padded(size)
            self.sent_bytes += size
            self.plain_bytes += keys.nbytes + values.nbytes
        return RowPush(block, tuple(headers), slot, push.bad)

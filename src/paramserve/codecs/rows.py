"""Codecs on rows of tables: each row is encoded by itself, as a tensor of as many values would be.

A row is cut in blocks of at most the codec's `block`; the last one may be shorter, and where a row
has no more values than that, it is one block. So what is decoded of a row depends neither on the
rows beside it nor on which server holds it; where something is drawn, only the draw does.

A codec that leaves values out needs a residual (`client.encoding`), and that of a table's rows
would grow with the table, on each worker. So these codecs are not for rows, and what is rounded to
one of a few levels is rounded at random where gradients are encoded, which leaves their mean as it
is: Alistarh et al., QSGD, 2017.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paramserve.codecs.base import Bytes, Codec, Floats
from paramserve.codecs.built_in import (
    SCALE_BYTES,
    BFloat16,
    Blockwise,
    Float16,
    Int2,
    Int4,
    Int8,
    Integers,
    Sign,
)
from paramserve.codecs.compiled import ON_ROWS, codec_kernels

FOR_ROWS: tuple[type[Codec], ...] = (BFloat16, Float16, Int8, Int4, Int2, Sign)


def why_not_rows(codec: Codec) -> str | None:
    """Why a codec cannot encode rows of a table; None: it can."""
    if type(codec) in FOR_ROWS:
        return None
    *others, last = (f"ps.{kind.__name__}" for kind in FOR_ROWS)
    return f"{codec!r} is not for rows of a table: {', '.join(others)} and {last} are"


class RowCodec:
    """How rows of one width are encoded.

    Args:
        codec: None: they stay float32.
        dim: values of a row.
        random: whether what the codec rounds to a few levels is rounded at random, whatever its own
            rounding; else to the nearest.
    Raises:
        ValueError: the codec is not for rows.
    """

    def __init__(self, codec: Codec | None, dim: int, *, random: bool) -> None:
        wrong = None if codec is None else why_not_rows(codec)
        if wrong is not None:
            raise ValueError(wrong)
        self.codec = codec
        self._dim = dim
        self._random = random
        self.row_bytes = 4 * dim if codec is None else codec.size(dim)

    def size(self, rows: int) -> int:
        """Bytes of so many rows."""
        return rows * self.row_bytes

    def encode(self, values: Floats, out: Bytes, seed: int) -> None:
        """Encode rows.

        Args:
            values: [rows * dim], finite.
            out: [size(rows)], 8-byte aligned; gets the bytes.
            seed: of what is drawn.
        """
        codec = self.codec
        if codec is None:
            out.view(np.float32)[...] = values
        elif not isinstance(codec, Blockwise):
            codec.encode(values, out, seed)
        else:
            scales, rest = self._parts(codec, out)
            kernel: Any = getattr(codec_kernels(), ON_ROWS[codec.name][0])
            options = (int(self._random), seed & 0xFFFFFFFF) if isinstance(codec, Integers) else ()
            kernel(values, scales, rest, self._dim, codec.block, *options)

    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode into [rows * dim].

        Args:
            data: 8-byte aligned; may come from a peer.
        Raises:
            ValueError: it does not stand for so many rows. `out` has any content.
        """
        codec, size = self.codec, self.size(out.size // self._dim)
        if data.size != size:
            raise ValueError(f"{data.size} bytes came where {size} are needed")
        if codec is None:
            out[...] = data.view(np.float32)
        elif not isinstance(codec, Blockwise):
            codec.decode(data, out)
        else:
            scales, rest = self._parts(codec, data)
            codec.check_scales(scales)
            kernel: Any = getattr(codec_kernels(), ON_ROWS[codec.name][1])
            kernel(rest, scales, out, self._dim, codec.block)

    def _parts(self, codec: Blockwise, data: Bytes) -> tuple[Floats, Bytes]:
        """The scales of all rows, and the rest."""
        rows, blocks = data.size // self.row_bytes, -(-self._dim // codec.block)
        end = SCALE_BYTES * rows * blocks
        return data[:end].view(np.float32), data[end:]

"""Which shard holds which elements: by bytes, in equal parts, decided once per block.

A part has `PIECE_BYTES_MIN` or more, so a block below twice that stays whole on one shard.

The tensors of a block are laid end to end; shard k holds one contiguous range of that. Most rules
are element-wise, so a range may begin in the middle of a tensor; for the others it begins with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from paramserve.codecs.base import Codec
from paramserve.codecs.delta import Delta
from paramserve.config import RuleSpec
from paramserve.core.table.encoded import RowCodecs, row_codecs
from paramserve.core.user_codecs import codec_of
from paramserve.messages import ALIGN, BlockSpec, Piece, TableSpec

PIECE_BYTES_MIN = 64 << 10
"""Smallest part of a block on a shard: one more message would cost more than a smaller part spares.
"""

DTYPES = ("float32", "float64")
"""What rules update."""
HALVES: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {"bfloat16": np.dtype(np.uint16), "float16": np.dtype(np.int16)}
)
"""What gradients and values of float32 blocks may be in clients' memory (`BlockSpec.half`), and the
dtype of their bits there, by which kernels tell the two apart."""
PLAIN_DTYPES = (*DTYPES, "int64")
"""What blocks without a rule (model buffers) may hold."""
NARROW: Mapping[str, str] = MappingProxyType(
    {
        "bool": "int64",
        "uint8": "int64",
        "int8": "int64",
        "int16": "int64",
        "int32": "int64",
        "float16": "float32",
        "bfloat16": "float32",
    }
)
"""What models may have besides, and what holds each of its values exactly (`BlockSpec.dtypes`)."""
METADATA = "__metadata__"
"""No tensor's name: a safetensors file has it for what it tells of itself."""


def size_of(pieces: Sequence[Piece]) -> int:
    """Elements of all pieces together."""
    return sum(prod(piece.shape) for piece in pieces)


def borders(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """Element offset of each piece, and the end of the last."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + prod(piece.shape))
    return tuple(offsets)


def cut(
    size: int, itemsize: int, loads: Sequence[int], at: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Boundaries of the shards' ranges for a block of `size` elements.

    Args:
        size: elements in the block.
        itemsize: bytes of one element.
        loads: bytes that each shard holds already.
        at: the only offsets where it may be cut, rising; None: anywhere.
    Returns:
        `len(loads) + 1` element offsets, not falling; without `at`, inner ones on multiples of
        `ALIGN` bytes.
    """
    owners = max(1, min(len(loads), size * itemsize // PIECE_BYTES_MIN))
    lightest = sorted(range(len(loads)), key=loads.__getitem__)[:owners]
    step = max(1, ALIGN // itemsize)
    cuts = [0]
    for shard in range(len(loads)):
        part = sum(owner <= shard for owner in lightest)
        if part == owners:
            cuts.append(size)
        elif at is not None:
            cuts.append(_nearest(at, part * size / owners))
        else:
            cuts.append(min(size, round(part * size / owners / step) * step))
    return tuple(cuts)


def _nearest(offsets: Sequence[int], ideal: float) -> int:
    return min(offsets, key=lambda offset: abs(offset - ideal))


def bound(codec: Codec, pieces: Sequence[Piece], low: int, high: int) -> Codec:
    """A codec of the elements [low, high) of tensors laid end to end; one that looks at whole
    tensors knows the shapes of those that are there, but for empty ones."""
    if not codec.whole_tensors:
        return codec
    inside = [
        piece.shape
        for piece, (start, stop) in zip(pieces, pairwise(borders(pieces)), strict=True)
        if low <= start < stop <= high
    ]
    return codec.bound(inside)


@dataclass(frozen=True)
class Block:
    """A block as its clients see it: the tensors that were defined together.

    Attributes:
        codecs: the classes of the user's own that this client knows, by name.
    """

    spec: BlockSpec
    codecs: Mapping[str, type[Codec]] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def id(self) -> int:
        return self.spec.block

    @cached_property
    def group(self) -> int:
        return self.spec.group

    @cached_property
    def group_name(self) -> str:
        return self.spec.group_name

    @cached_property
    def kept(self) -> np.dtype[Any]:
        """Dtype in which the servers keep its values and its rule's state."""
        return np.dtype(self.spec.dtype)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Dtype in which gradients, and values that steps read, lie in a client's memory; of 16
        bits, that of the bits (`HALVES`)."""
        return self.kept if self.spec.half is None else HALVES[self.spec.half]

    @cached_property
    def shown(self) -> np.dtype[Any]:
        """Dtype as users see it: float16 as such. Of bfloat16, which numpy has not, the bits."""
        return np.dtype(np.float16) if self.spec.half == "float16" else self.dtype

    @cached_property
    def rule(self) -> RuleSpec | None:
        return self.spec.rule

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return self.spec.pieces

    @cached_property
    def table(self) -> TableSpec | None:
        """Set where the block is a table."""
        return self.spec.table

    @cached_property
    def push_codec(self) -> Codec | None:
        """How its gradients are encoded between hosts.

        Raises:
            UnknownCodec: by a codec of the user's own that this client does not know.
        """
        return codec_of(self.spec.push, self.codecs)

    @cached_property
    def push_codecs(self) -> tuple[Codec, ...]:
        """Codec by shard: `push_codec` of the tensors there.

        Raises:
            UnknownCodec: as `push_codec`. CodecFailed: it is not one of ours, and failed.
        """
        codec = self.push_codec
        assert codec is not None
        shards = range(len(self.spec.cuts) - 1)
        return tuple(bound(codec, self.pieces, *self.range(shard)) for shard in shards)

    @cached_property
    def pull_codec(self) -> Codec | None:
        """How values that steps read are encoded between hosts; raises as `push_codec`."""
        return codec_of(self.spec.pull, self.codecs)

    def delta(self, shard: int) -> Delta | None:
        """How a shard's part is pulled between hosts, if that is as what has changed."""
        codec = self.pull_codec
        if not isinstance(codec, Delta):
            return None
        low, high = self.range(shard)
        return codec if high > low else None

    @cached_property
    def row_codecs(self) -> RowCodecs | None:
        """How its rows are encoded between hosts, where it is a table with a codec."""
        return row_codecs(self.spec)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return borders(self.pieces)

    @cached_property
    def size(self) -> int:
        """Elements."""
        return self.starts[-1]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a gradient, or of values that a step reads."""
        return self.size * self.dtype.itemsize

    @cached_property
    def kept_bytes(self) -> int:
        """Bytes of the block's values on all servers."""
        return self.size * self.kept.itemsize

    def range(self, shard: int) -> tuple[int, int]:
        """Elements [low, high) that this shard holds; low == high where it holds none."""
        return self.spec.cuts[shard], self.spec.cuts[shard + 1]

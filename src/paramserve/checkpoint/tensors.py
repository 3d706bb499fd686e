"""Safetensors files: where each tensor lies, as their header says.

Source: github.com/huggingface/safetensors, "Format": 8 bytes of length, a JSON object, the bytes of
all tensors without a gap. The library itself writes whole files from memory; here several
processes write ranges of one, so the header is made by us. What a header says is checked
before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np

from paramserve.core.partition import METADATA
from paramserve.messages import ALIGN, BlockSpec

HEADER_MAX = 100_000_000
"""Bytes of a header. Source: the library's MAX_HEADER_SIZE."""
LENGTH_BYTES = 8

KINDS: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "int16": "I16",
        "float16": "F16",
        "bfloat16": "BF16",
        "uint32": "U32",
        "int32": "I32",
        "float32": "F32",
        "uint64": "U64",
        "int64": "I64",
        "float64": "F64",
    }
)
"""The names of dtypes in a header. numpy has no bfloat16: its bits are in uint16."""
DTYPES: Mapping[str, str] = MappingProxyType({kind: dtype for dtype, kind in KINDS.items()})


def dtype_of(array: np.ndarray[Any, Any]) -> str:
    """What an array of a state is of: the servers hold no uint16, so those are bits of bfloat16."""
    return "bfloat16" if array.dtype == np.uint16 else array.dtype.name


class Tensor(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    """A key of `KINDS`."""
    shape: tuple[int, ...]
    offset: int = 0
    """Bytes from the start of the file to the tensor's first byte."""

    @property
    def carrier(self) -> np.dtype[Any]:
        """The numpy dtype of its elements, or of their bits."""
        return np.dtype(np.uint16 if self.dtype == "bfloat16" else self.dtype)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.carrier.itemsize


class Layout(NamedTuple):
    """A file before it is written."""

    header: bytes
    tensors: dict[str, Tensor]
    size: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def layout(tensors: Iterable[Tensor]) -> Layout:
    """The file with these tensors, end to end in this order.

    The same tensors give the same bytes everywhere. The first tensor begins at a multiple of
    `ALIGN`.
    """
    entries, placed, end = dict[str, _Entry](), list[Tensor](), 0
    for each in tensors:
        if each.name == METADATA:
            raise ValueError(f"no tensor of a safetensors file can be called {METADATA!r}")
        if each.name in entries:
            raise ValueError(f"two tensors are called {each.name!r}")
        entries[each.name] = _Entry(KINDS[each.dtype], each.shape, (end, end + each.nbytes))
        placed.append(each._replace(offset=end))
        end += each.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGN)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    start = len(header)
    placed_tensors = {each.name: each._replace(offset=start + each.offset) for each in placed}
    return Layout(header, placed_tensors, start + end)


def header_bytes(head: bytes) -> int:
    """How long the header is whose first 8 bytes are these.

    Raises:
        ValueError: no safetensors file begins so.
    """
    length = int.from_bytes(head, "little")
    if len(head) < LENGTH_BYTES or not 2 <= length <= HEADER_MAX:
        raise ValueError(f"it begins with {head!r} and is no safetensors file{_pickle(head)}")
    return LENGTH_BYTES + length


def _pickle(head: bytes) -> str:
    pickled = head[:1] == b"\x80" or head[:2] == b"PK"
    return ", but looks like a pickle, which is never read" if pickled else ""


def parse(header: bytes, size: int) -> dict[str, Tensor]:
    """The tensors of a file of `size` bytes.

    Raises:
        ValueError: the header is none, or does not fit the file.
    """
    if header_bytes(header[:LENGTH_BYTES]) != len(header):
        raise ValueError(f"its header has {len(header)} bytes and names another length")
    try:
        entries = msgspec.json.decode(header[LENGTH_BYTES:], type=dict[str, Any])
        entries.pop(METADATA, None)
        parts = msgspec.convert(entries, type=dict[str, _Entry])
    except msgspec.MsgspecError as error:
        raise ValueError(f"its header is no header of safetensors: {error}") from None
    tensors, end, start = dict[str, Tensor](), 0, len(header)
    for name, each in sorted(parts.items(), key=lambda item: item[1].data_offsets):
        if each.dtype not in DTYPES:
            raise ValueError(f"the tensor {name!r} has the unknown dtype {each.dtype!r}")
        low, high = each.data_offsets
        tensors[name] = Tensor(name, DTYPES[each.dtype], each.shape, start + low)
        negative = min(each.shape, default=0) < 0
        if negative or low != end or high - low != tensors[name].nbytes:
            raise ValueError(
                f"the tensor {name!r} of shape {each.shape} cannot lie at bytes {low} to {high} "
                f"behind byte {end}"
            )
        end = high
    if start + end != size:
        raise ValueError(f"its tensors end at byte {start + end}, and it has {size}")
    return tensors


def dense(blocks: Iterable[BlockSpec]) -> Layout:
    """The file of a group's values, or of one state of its rule: all its blocks end to end.

    Blocks of wider elements come first, so that every element is aligned.
    """
    return layout(
        Tensor(piece.name, block.dtype, tuple(piece.shape))
        for block in in_order(blocks)
        for piece in block.pieces
    )


def in_order(blocks: Iterable[BlockSpec]) -> list[BlockSpec]:
    """The blocks of a group as they lie in its files."""
    return sorted(blocks, key=lambda each: (-np.dtype(each.dtype).itemsize, each.block))

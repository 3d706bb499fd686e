"""Tensors of any dtype in a pickle: torch's own form in it knows the older dtypes only.

What is pickled here goes from a worker to its run by the engine's own way, and over no socket.
"""

from __future__ import annotations

import io
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from paramserve.pytorch.block import INTEGERS


def dumped(value: Any) -> bytes:
    """A value for `cloudpickle.loads`."""
    stream = io.BytesIO()
    _Pickler(stream).dump(value)
    return stream.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is Tensor and obj.dtype not in _OLDER and _has_bits(obj):
            return _as, (obj.contiguous().view(INTEGERS[obj.itemsize]), obj.dtype)
        return super().reducer_override(obj)


_OLDER = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
"""Dtypes of torch's typed storages, which its form names."""


def _has_bits(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not (tensor.requires_grad or tensor.is_quantized)
    return plain and tensor.device.type == "cpu" and tensor.itemsize in INTEGERS


def _as(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits.view(dtype)

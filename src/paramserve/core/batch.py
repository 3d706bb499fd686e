"""Requests that came in one frame, and each one's part of its payload."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paramserve.errors import ProtocolError
from paramserve.messages import Batch, Define, ShardRequest

Bytes = npt.NDArray[np.uint8]


def apart(message: Batch, payload: Bytes | None) -> list[tuple[ShardRequest, Bytes | None]]:
    """Each request with its bytes, if it has any, in order.

    Raises:
        ProtocolError: the sizes do not fit, or one is a definition, which may have to wait for
            kernels and so comes in a frame of its own. None of them is to be executed.
    """
    have, sizes = 0 if payload is None else payload.size, message.sizes
    fits = len(sizes) == len(message.requests) and min(sizes, default=0) >= 0
    plain = not any(isinstance(each, Define) for each in message.requests)
    if not (fits and plain) or sum(sizes) != have:
        kinds = sorted({type(each).__name__ for each in message.requests})
        raise ProtocolError(
            f"{len(message.requests)} requests name {sizes} bytes, their payload has {have}; they "
            f"are {', '.join(kinds)}",
            fix="run the same version on both sides",
        )
    parts: list[tuple[ShardRequest, Bytes | None]] = []
    cursor = 0
    for request, size in zip(message.requests, sizes, strict=True):
        parts.append((request, payload[cursor : cursor + size] if payload is not None else None))
        cursor += size
    return parts

"""Keys of a table's rows on the wire: rising, and each as its distance from the one before.

Keys are compared as integers of 64 bits without a sign. A distance takes seven bits to a byte, the
low ones first, and the highest bit says that another byte follows: at most ten. So ids that lie
close take 1 or 2 bytes. Hashes of 64 bits lie 2**64 / n apart: of n = 65,536 each takes 7.1 bytes.
Where that would be no shorter, the keys lie there as they are: 8 bytes each, which their size
tells.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Bytes
from paramserve.codecs.compiled import codec_kernels

Keys = npt.NDArray[np.int64]
KEY_BYTES = 8

ONCE, REPEATED = 1, 0
"""The least distance of two keys: of those that stand there once each, and of those that may
repeat."""


def order_of(keys: Keys) -> npt.NDArray[np.int64]:
    """The places of keys, int64 [n], in their order on the wire."""
    return np.argsort(keys.view(np.uint64), kind="stable")


def keys_bytes(keys: Keys, least: int) -> int:
    """What `write_keys` takes."""
    gaps: int = codec_kernels().key_gaps_bytes(keys.view(np.uint64), least)
    return min(gaps, KEY_BYTES * keys.size)


def write_keys(keys: Keys, out: Bytes, least: int) -> None:
    """Write keys that rise by at least so much.

    Args:
        out: [keys_bytes(keys, least)].
    """
    if out.size == KEY_BYTES * keys.size:
        out[...] = keys.view(np.uint8)
    else:
        codec_kernels().to_key_gaps(keys.view(np.uint64), out, least)


def read_keys(data: Bytes, count: int, least: int) -> Keys:
    """The keys that were written, int64 [count].

    Args:
        data: may come from a peer.
    Raises:
        ValueError: it does not stand for so many keys that rise by at least `least`.
    """
    if not 0 <= count <= data.size <= KEY_BYTES * count:
        raise ValueError(f"{data.size} bytes came for {count} keys")
    if data.size == KEY_BYTES * count:
        numbers: Any = data.view(np.uint64).copy()
        before, after = numbers[:-1], numbers[1:]
        good = bool((after > before).all() if least else (after >= before).all())
    else:
        numbers = np.empty(count, np.uint64)
        good = codec_kernels().from_key_gaps(data, numbers, least) == data.size
    if not good:
        raise ValueError(f"{data.size} bytes are not {count} keys that rise")
    keys: Keys = numbers.view(np.int64)
    return keys

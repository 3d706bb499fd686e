"""Which shard a key belongs to, and the streams that random numbers are drawn from.

The hash that tells the shard is the same on all clients and servers, and public: a choice of keys
can put all of them on one shard. Where a key lies in an index is told by another hash
(`kernels.home`) with a secret of that index, so that no choice of keys makes them collide there.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from secrets import randbits

import numpy as np
import numpy.typing as npt

GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64: Steele, Lea and Flood, OOPSLA 2014."""

Keys = npt.NDArray[np.int64]


def hashes(keys: Keys) -> npt.NDArray[np.uint64]:
    """The hash of each key: splitmix64, which gives every key another one."""
    z = keys.view(np.uint64) + np.uint64(GOLDEN)
    z ^= z >> np.uint64(30)
    z *= np.uint64(MIX1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(MIX2)
    z ^= z >> np.uint64(31)
    return z


def shard_of(keys: Keys, shards: int) -> npt.NDArray[np.int64]:
    """The shard, in [0, shards), that holds each key."""
    low = hashes(keys) & np.uint64(0xFFFFFFFF)
    low *= np.uint64(shards)
    low >>= np.uint64(32)
    return low.view(np.int64)


def stream_of(seed: int, name: str) -> int:
    """What the initial values and the rounding of a table are drawn from: 64 bits."""
    digest = blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def new_secret() -> int:
    """A random number of 64 bits, with a sign, which is known to this process only."""
    return randbits(64) - (1 << 63)


@cache
def own_secret() -> int:
    """The secret of what is hashed during one call: drawn at its first use in this process."""
    return new_secret()

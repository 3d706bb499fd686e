"""Memory for payloads, used again: fresh memory costs about as much as filling it.

A buffer comes back by itself when nothing refers to it any more, wherever that was, and is given
out again then and not before. What is kept meanwhile has a bound; what is in use is bounded by
its senders and holders.
"""

from __future__ import annotations

import threading
import weakref
from typing import Final

import numpy as np

from paramserve.transport.framing import ByteArray, aligned_empty

POOLED_BYTES_MIN: Final = 256 << 10
"""Below it the allocator itself keeps memory; above it memory comes fresh from the system."""
_ROUND: Final = 64 << 10
"""Multiple of buffer sizes, so that payloads of almost one size share a buffer."""


class Buffers:
    """Gives out arrays to receive in, and takes each back after its last use.

    Attributes:
        idle_bytes: what it keeps at the moment, at most `bytes_max`.
    """

    def __init__(self, bytes_max: int) -> None:
        self.idle_bytes = 0
        self._bytes_max = bytes_max
        self._idle: list[ByteArray] = []
        # The last reference can go in any thread, and within `take` as well, in a garbage
        # collection.
        self._lock = threading.RLock()

    def take(self, size: int) -> ByteArray:
        """An array [size] of any content whose first byte lies at a multiple of `ALIGN`.

        It is the caller's, with all views of it, as long as there is one.
        """
        if size < POOLED_BYTES_MIN:
            return aligned_empty(size)
        memory = self._reuse(size)
        if memory is None:
            memory = aligned_empty(-(-size // _ROUND) * _ROUND)
        # Every view of an array on a memoryview keeps that array alive: numpy looks for the owner
        # of a view's memory through arrays only. So the end of this one is the end of all.
        array = np.frombuffer(memory.data[:size], np.uint8)
        weakref.finalize(array, self._back, memory).atexit = False
        return array

    def close(self) -> None:
        """Keep nothing from now on."""
        with self._lock:
            self._bytes_max = 0
            self._trim()

    def _reuse(self, size: int) -> ByteArray | None:
        """The smallest that fits, unless half of it would lie idle."""
        with self._lock:
            fitting = [memory for memory in self._idle if size <= memory.size <= 2 * size]
            if not fitting:
                return None
            smallest = min(fitting, key=len)
            self._idle = [memory for memory in self._idle if memory is not smallest]
            self.idle_bytes -= smallest.size
            return smallest

    def _back(self, memory: ByteArray) -> None:
        with self._lock:
            self._idle.append(memory)
            self.idle_bytes += memory.size
            self._trim()

    def _trim(self) -> None:
        """Release those that have been idle longest."""
        while self.idle_bytes > self._bytes_max:
            self.idle_bytes -= self._idle.pop(0).size

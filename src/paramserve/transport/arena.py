"""Memory of one client: it makes, seals and passes it, servers check and map it, or mirror it.

It has no name in any file system and is gone when the last process that maps it is. How it is cut
into slots is the client's business, except that its first `RESERVED_BYTES` belong to the transport.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Mapping, Sequence
from typing import Final
from weakref import ref

import numpy as np

from paramserve.config import Limits
from paramserve.errors import Overloaded, ProtocolError
from paramserve.messages import ALIGN
from paramserve.transport.framing import ByteArray

NONCE_BYTES: Final = 16
RESERVED_BYTES: Final = ALIGN
"""Bytes at the start of an arena where each connection writes its nonce. Slots begin after it."""

# Linux's fcntl numbers (fcntl.h, kernel ABI); Python names them only where libc did when it was
# built.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEAL_SEAL: Final = 1
_SEAL_SHRINK: Final = 2
_SEAL_GROW: Final = 4


class Arena:
    """Memory that a client shares with the servers of its host.

    Attributes:
        number: 1, 2, ...: what messages call it.
        nbytes: its size.
        fd: the descriptor that is passed to servers; None where the system has no `memfd`, and
            then the memory is this process's own.
        memory: uint8 [nbytes], writable, zero at first.
    """

    def __init__(self, number: int, fd: int | None, mapping: mmap.mmap) -> None:
        self.number = number
        self.nbytes = len(mapping)
        self.fd = fd
        self.memory: ByteArray = np.frombuffer(mapping, np.uint8)
        self._mapping: mmap.mmap | None = mapping

    @classmethod
    def create(cls, nbytes: int, number: int) -> Arena:
        """Allocate `nbytes` of shared memory that can neither shrink nor grow.

        Raises:
            ValueError: a size under `RESERVED_BYTES`, or a number under 1.
            Overloaded: the system has not this much memory. Nothing is left allocated.
        """
        if nbytes < RESERVED_BYTES or number < 1:
            raise ValueError(
                f"an arena needs at least {RESERVED_BYTES} bytes and a number from 1, "
                f"got {nbytes} bytes and number {number}"
            )
        if not hasattr(os, "memfd_create"):
            return cls.private(nbytes, number)
        fd = os.memfd_create("paramserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # Allocated now: a full machine is an error here, and not SIGBUS at a later write.
            os.posix_fallocate(fd, 0, nbytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
                raise
            raise Overloaded(
                f"no shared memory for an arena of {nbytes} bytes: {error.strerror}",
                fix="free memory, use fewer workers on this machine, or a smaller model",
            ) from error
        return cls(number, fd, mapping)

    @classmethod
    def private(cls, nbytes: int, number: int) -> Arena:
        """Allocate `nbytes` of this process's own memory, which no server can map."""
        return cls(number, None, mmap.mmap(-1, nbytes))

    def close(self) -> None:
        """Give up the descriptor and this object's hold on the memory; repeating is safe.

        The memory itself goes when the last array on it does, here and in the servers.
        """
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)
        self.memory = np.empty(0, np.uint8)
        self._mapping = None

    def give_up(self) -> None:
        """Close, and release the memory at once: it reads as zeros wherever it is still mapped.
        Nothing of it may be in use."""
        if self._mapping is not None and self.fd is not None:
            self._mapping.madvise(mmap.MADV_REMOVE)
        else:
            self.memory.fill(0)
        self.close()


def map_arena(fd: int, nbytes: int, limits_left: int) -> ByteArray:
    """Map an arena that a client passed, after checking it, and close the descriptor in any case.

    Args:
        fd: the received descriptor.
        nbytes: the size that the client names; the array has this size.
        limits_left: bytes that this client may still have mapped.
    Returns:
        uint8 [nbytes], shared and writable; the mapping lives as long as an array on it.
    Raises:
        Overloaded: larger than `limits_left`. Nothing is mapped.
        ProtocolError: not a sealed `memfd`, or smaller than it is said to be. Nothing is mapped.
    """
    try:
        if nbytes > limits_left:
            raise Overloaded(
                f"an arena of {nbytes} bytes was refused: "
                f"{limits_left} bytes are left to the client",
                fix="raise arena_bytes_max, or close unused clients",
            )
        _check(fd, nbytes)
        return np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    except OSError as error:
        raise _refused(f"it cannot be mapped: {error.strerror}") from error
    finally:
        os.close(fd)


def new_mirror(
    mirror: Mapping[int, ByteArray],
    replaced: list[ref[ByteArray]],
    arenas: Sequence[tuple[int, int]],
    limits: Limits,
) -> dict[int, ByteArray]:
    """Memory for each arena of a client on another host, and for no other. One that stays keeps its
    bytes. Memory is used as it is written to.

    Args:
        mirror: the one before, which stays as it is.
        replaced: arenas of mirrors before that, which count as long as something refers to them.
            Those that are replaced now are added, and count from the next call on.
        arenas: number and bytes of each, as the client says.
    Raises:
        ProtocolError: they are none. Overloaded: they are too many or too large, or there is no
            memory for them. In both cases nothing was changed.
    """
    sizes = dict(arenas)
    if len(sizes) != len(arenas) or min(sizes, default=1) < 1 or min(sizes.values(), default=1) < 1:
        raise ProtocolError(
            f"arenas {arenas} were named", fix="number arenas from 1, each once, of 1 byte or more"
        )
    in_use = [arena for each in replaced if (arena := each()) is not None]
    check_arenas(sizes, limits, sum(each.nbytes for each in in_use))
    result = {n: each for n, each in mirror.items() if sizes.get(n) == each.nbytes}
    in_use += [each for number, each in mirror.items() if number not in result]
    try:
        for number in sizes.keys() - result.keys():
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            result[number] = np.frombuffer(mmap.mmap(-1, sizes[number], flags), np.uint8)
    except OSError as error:
        raise Overloaded(
            f"no memory for a mirror of {sum(sizes.values())} bytes: {error.strerror}",
            fix="use more servers on more machines, fewer clients, or smaller models",
        ) from error
    replaced[:] = map(ref, in_use)
    return result


def check_arenas(sizes: Mapping[int, int], limits: Limits, in_use: int = 0) -> None:
    """Refuse more arenas of one client than a server maps or mirrors.

    Args:
        in_use: bytes of arenas that the client has no more, and which its requests still need.
    Raises:
        Overloaded: they are too many, or too large.
    """
    total = sum(sizes.values()) + in_use
    if total > limits.arena_bytes_max or len(sizes) > limits.arenas_max:
        raise Overloaded(
            f"a client would have {len(sizes)} arenas of {total} bytes, arenas_max is "
            f"{limits.arenas_max}, arena_bytes_max {limits.arena_bytes_max}",
            fix="use smaller blocks or fewer outstanding steps, or raise the limit",
        )


def _check(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, _F_GET_SEALS)
    except OSError as error:
        raise _refused("it is no memfd") from error
    if not seals & _SEAL_SHRINK:
        # A client that shrinks its arena would kill the server with SIGBUS.
        raise _refused("it is not sealed against shrinking")
    size = os.fstat(fd).st_size
    if nbytes < RESERVED_BYTES or size < nbytes:
        raise _refused(f"it is said to have {nbytes} bytes and has {size}")


def _refused(why: str) -> ProtocolError:
    return ProtocolError(
        f"an arena was refused: {why}", fix="make arenas with paramserve.transport.Arena.create"
    )

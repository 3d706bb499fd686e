"""What a fork leaves in the child: connections that belong to the parent are closed there, and
memory that a caller was given is the child's own.

Both processes would read from and write to the same stream. `os.fork` runs the hook in the child
before any other code; it closes the descriptors without a word to the peer, so that the parent's
connection goes on. Arrays that a caller may keep lie in memory that is mapped shared: the parent
copies them before the fork, and the child maps the copies in their place.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paramserve.errors import ClientClosed

logger = logging.getLogger("paramserve")


class Inherited(Protocol):
    def abandon(self) -> None:
        """Close descriptors without a message, a lock or a wait; every later use raises."""


class Lendable(Protocol):
    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """Bytes of the memory."""


lent: dict[Lendable, None] = {}
"""What callers were given to keep. Entered and deleted as items, which costs a pull no call."""
_MAP_FIXED = 0x10
"""Value of MAP_FIXED on Linux and macOS; `mmap` does not name it."""


class _Forking(threading.local):
    """A fork that this thread makes; another thread may make one at the same time."""

    copies: Sequence[tuple[int, bytes]] = ()
    """Pages that hold what is lent, by address, until the fork is made."""


_forking = _Forking()
_open: weakref.WeakSet[Inherited] = weakref.WeakSet()
_hooked = False


def watch(connection: Inherited) -> None:
    """Have `connection` abandoned in each child that this process forks from now on."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(
            before=_copy_lent, after_in_parent=_drop_copies, after_in_child=_after_in_child
        )
    _open.add(connection)


def _after_in_child() -> None:
    for connection in list(_open):
        connection.abandon()
    _open.clear()
    if _forking.copies:
        _own_lent()


def _drop_copies() -> None:
    _forking.copies = ()


def _copy_lent() -> None:
    _drop_copies()
    if not lent:
        return
    try:
        _forking.copies = _copies()
    except MemoryError:
        logger.error(  # a traceback would say no more
            "no memory to copy the rows that Table.pull has returned to process %d, which forks: "
            "the child shares them with it, and each sees what the other writes to them or pulls "
            "in their place. To fix: delete arrays that are no longer needed before the fork, or "
            "start the child with the method spawn",
            os.getpid(),
        )


def _copies() -> list[tuple[int, bytes]]:
    import ctypes  # in the parent: a child of several threads may wait for an import for ever

    ends: dict[int, int] = {}
    for each in list(lent):
        start, size = each.bytes.ctypes.data, each.bytes.nbytes
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        end = -(-(start + size) // mmap.PAGESIZE) * mmap.PAGESIZE
        ends[first] = max(end, ends.get(first, 0))
    done, copies = 0, list[tuple[int, bytes]]()
    for first in sorted(ends):
        begin = max(first, done)
        if begin < ends[first]:
            copies.append((begin, ctypes.string_at(begin, ends[first] - begin)))
            done = ends[first]
    return copies


def _own_lent() -> None:
    import ctypes

    place: Any = ctypes.CDLL(None, use_errno=True).mmap
    place.restype = ctypes.c_void_p
    place.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for begin, pages in _forking.copies:
        if place(begin, len(pages), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != begin:
            raise OSError(ctypes.get_errno(), "rows of a table are shared with the parent")
        ctypes.memmove(begin, pages, len(pages))
    _drop_copies()


def forked(address: str, pid: int) -> ClientClosed:
    """The error for using a connection in another process than the one that made it."""
    return ClientClosed(
        f"the connection to {address} belongs to process {pid}, this is its fork {os.getpid()}",
        fix="connect anew in the child",
    )


def ended(address: str) -> ClientClosed:
    """The error for using a connection after `close`."""
    return ClientClosed(f"the connection to {address} was closed here", fix="connect anew")

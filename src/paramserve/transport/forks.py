"""What a fork leaves in the child: connections that belong to the parent are closed there.

Both processes would read from and write to the same stream. `os.fork` runs the hook in the child
before any other code; it closes the descriptors without a word to the peer, so that the parent's
connection goes on.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

from paramserve.errors import ClientClosed


class Inherited(Protocol):
    def abandon(self) -> None:
        """Close descriptors without a message, a lock or a wait; every later use raises."""


_open: weakref.WeakSet[Inherited] = weakref.WeakSet()
_hooked = False


def watch(connection: Inherited) -> None:
    """Have `connection` abandoned in each child that this process forks from now on."""
    global _hooked
    if not _hooked:
        _hooked = True
        os.register_at_fork(after_in_child=_abandon_all)
    _open.add(connection)


def _abandon_all() -> None:
    for connection in list(_open):
        connection.abandon()
    _open.clear()


def forked(address: str, pid: int) -> ClientClosed:
    """The error for using a connection in another process than the one that made it."""
    return ClientClosed(
        f"the connection to {address} belongs to process {pid}, this is its fork {os.getpid()}",
        fix="connect anew in the child",
    )


def ended(address: str) -> ClientClosed:
    """The error for using a connection after `close`."""
    return ClientClosed(f"the connection to {address} was closed here", fix="connect anew")

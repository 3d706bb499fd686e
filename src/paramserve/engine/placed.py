"""What the child of an agent does first: it puts what the agent knows into its `Bootstrap`.

The child itself is one of `Local`. Nothing here comes from a pickle: code is imported by the names
that the agent was started with.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from paramserve.engine.child import Bootstrap, find

SERVER = "paramserve.server:main"
"""The entry that is given rules; every other one is given a training function, if anything."""


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """What an agent tells its child: the driver's entry and payload, and what it knows itself."""

    entry: str
    payload: bytes
    host: str
    """This node's address, as the driver's connection has it."""
    reference: str
    """As `base.Role.reference`; it is what the agent was started with."""


def main(boot: Bootstrap) -> None:
    """Entry of the child: run the entry that the driver named."""
    placed = msgspec.msgpack.decode(boot.payload, type=Placed)
    find(placed.entry)(
        replace(
            boot,
            payload=placed.payload,
            load=lambda: load(placed.entry, placed.reference),
            host=placed.host,
            plain=True,
        )
    )


def load(entry: str, reference: str) -> Any:
    """Import what the reference names, in the form in which `entry` takes it."""
    if not reference:
        return None
    if entry == SERVER:
        return tuple(find(each) for each in reference.split(","))
    return find(reference), (), {}

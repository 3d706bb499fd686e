"""The first message on a connection, and its answer."""

from __future__ import annotations

from msgspec import Struct

COORDINATOR_ROLES = frozenset({"join", "register", "driver"})
"""`Hello.role` of a peer that calls the coordinator; every other one calls a shard."""


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First frame on every connection, sent after the peer proved to belong here.

    `role`, to a shard: "client", "attach" (one more arena for a client), "server" (another shard),
    "probe" (does it answer?); to the coordinator: "join" (a client), "register" (a server),
    "driver". They are all distinct:
    one port may serve both. `window`: calls that the client leaves unanswered at most, each of
    which ends at most one step of a group; `requests`: numbered requests of these calls together
    (0: as many). `again`: it has been connected before. `arenas` lists (number, bytes) of the
    arenas whose descriptors came along; `nonce` lies at the start of the last one. `cluster`, to a
    shard: which cluster the peer belongs to. Addresses and tokens may be used again, and numbers of
    clients and shards are.
    """

    role: str
    client: int = 0
    incarnation: int = 0
    rank: int = -1
    window: int = 4
    again: bool = False
    arenas: tuple[tuple[int, int], ...] = ()
    nonce: bytes = b""
    cluster: bytes = b""
    requests: int = 0


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to `Hello`: `nonce` as read from the arena."""

    nonce: bytes = b""

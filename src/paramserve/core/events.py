"""What can happen to a shard, what its groups ask of it, and what its role must then do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from paramserve.core.shard_sessions import Answer, Memory, ShardSession
from paramserve.errors import ParamServeError
from paramserve.messages import Inquire, Members, PeerMessage, ShardRequest


class ClientHere(NamedTuple):
    """A client opened a connection (its older one is closed after this)."""

    client: int
    incarnation: int
    rank: int
    window: int
    again: bool = False
    """It has been connected before: a session that is forgotten must not begin anew."""
    requests: int = 0
    """As `Hello` says; 0: as `window`."""


class ClientGone(NamedTuple):
    """A client's connection ended. It may come back: nothing of it is forgotten yet."""

    client: int


class ClientBye(NamedTuple):
    """A client closed itself: its session is forgotten."""

    client: int


class Requested(NamedTuple):
    """A numbered request came in. `memory` has the client's arenas by number; 0 is the payload."""

    client: int
    message: ShardRequest
    memory: Memory


class Inquired(NamedTuple):
    client: int
    message: Inquire


class FromShard(NamedTuple):
    """Another shard (or this one) speaks about a clock, the members, or a change of policy."""

    message: PeerMessage


class MembersChanged(NamedTuple):
    message: Members


class DeadlineReached(NamedTuple):
    """The `deadline` of the last effects has passed."""


Event = (
    ClientHere
    | ClientGone
    | ClientBye
    | Requested
    | Inquired
    | FromShard
    | MembersChanged
    | DeadlineReached
)


class Reply(NamedTuple):
    """Answer the request that a session holds, and go on with those behind it."""

    session: ShardSession
    answer: Answer


class Send(NamedTuple):
    """Send a message to a shard, which may be this one."""

    shard: int
    message: PeerMessage


class EnterGroups(NamedTuple):
    """A client's rank is to be a member of these groups as well, from now on."""

    rank: int
    client: int
    seq: int
    """Of its request to join."""
    groups: tuple[int, ...]


class LookAgain(NamedTuple):
    """Execute the waiting requests of a group again: something has changed that they wait for."""

    group: int


GroupEffect = Reply | Send | EnterGroups | LookAgain
"""What the machine of a group asks of its shard."""


@dataclass(slots=True)
class Effects:
    """What the role must do after an event, in order.

    `replies`: to which client, what. `peers`: to which other shard, what. `drops`: clients whose
    connection broke the protocol. `refused`: why a `ClientHere` was not admitted.
    """

    replies: list[tuple[int, Answer]] = field(default_factory=list)
    peers: list[tuple[int, PeerMessage]] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    refused: ParamServeError | None = None
    deadline: float | None = None

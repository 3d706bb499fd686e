"""What can happen to a shard, what its groups ask of it, and what its role must then do."""

from __future__ import annotations

from math import inf

from msgspec import Struct

from paramserve.core.request_memory import Memory
from paramserve.core.shard_sessions import Answer, ClientHere, ShardSession
from paramserve.errors import ParamServeError
from paramserve.messages import (
    CutTaken,
    Inquire,
    Members,
    PeerMessage,
    ShardRequest,
)


class ClientGone(Struct, frozen=True):
    """A client's connection ended. It may come back: nothing of it is forgotten yet."""

    client: int


class ClientBye(Struct, frozen=True):
    """A client closed itself: its session is forgotten.

    `answered`: as `Bye` says.
    """

    client: int
    answered: bool = False


class Requested(Struct, frozen=True):
    """A request came in. `memory` has the client's arenas by number."""

    client: int
    message: ShardRequest
    memory: Memory


class Inquired(Struct, frozen=True):
    client: int
    message: Inquire


class FromShard(Struct, frozen=True):
    """Another shard (or this one) speaks about a clock, the members, or a change of policy."""

    message: PeerMessage


class MembersChanged(Struct, frozen=True):
    message: Members


class CutWanted(Struct, frozen=True):
    """Shard 0 is to begin a whole cut, unless one is under way; or the cut for the checkpoint of
    this number, and is to say when it is there. A flush before that may take up to `flush_s` from
    now on."""

    checkpoint: int = 0
    full: bool = True
    flush_s: float = inf


class CheckpointEnded(Struct, frozen=True):
    """A checkpoint is committed or given up: the cut for it is not needed any more."""

    checkpoint: int
    committed: bool


class DeadlineReached(Struct, frozen=True):
    """The `deadline` of the last effects has passed."""


Event = (
    ClientHere
    | ClientGone
    | ClientBye
    | Requested
    | Inquired
    | FromShard
    | MembersChanged
    | CutWanted
    | CheckpointEnded
    | DeadlineReached
)


class Reply(Struct, frozen=True):
    """Answer the request that a session holds, and go on with those behind it."""

    session: ShardSession
    answer: Answer


class Send(Struct, frozen=True):
    """Send a message to a shard, which may be this one."""

    shard: int
    message: PeerMessage


class Enter(Struct, frozen=True):
    """Make a joiner a member of a group that follows (`core.followers`)."""

    rank: int
    client: int
    seq: int
    """Sequence number of its request to join."""
    group: int
    clock: int
    """The one under way for it."""


class Counted(Struct, frozen=True):
    """A clock was decided with a step of a client that has ended since: it is in cuts."""

    client: int
    seq: int


class RecheckHeld(Struct, frozen=True):
    """Execute the waiting requests of a group again: something has changed that they wait for."""

    group: int


class NotifyCoordinator(Struct, frozen=True):
    """Tell the coordinator."""

    message: CutTaken


class StopBehindFlush(Struct, frozen=True):
    """Stop the shard until the cut begins that waits for a flush: the flush has been committed."""

    flush: int
    """Number of that flush; 0: the clock was none, and the shard does not stop."""


class RecheckStopped(Struct, frozen=True):
    """Execute what waits while the shard stops for a cut, as far as it is allowed now."""


GroupEffect = (
    Reply
    | Send
    | Enter
    | Counted
    | RecheckHeld
    | NotifyCoordinator
    | StopBehindFlush
    | RecheckStopped
)
"""What the machine of a group, or a cut, asks of its shard."""


class Effects(Struct):
    """What the role must do after an event, in order.

    `replies`: to which client, what. `peers`: to which other shard, what. `drops`: clients whose
    connection broke the protocol. `refused`: why a `ClientHere` was not admitted. `notices`: what
    the coordinator is told. `losses`: why gradients are lost that no step waits for.
    """

    replies: list[tuple[int, Answer]] = []
    peers: list[tuple[int, PeerMessage]] = []
    drops: list[int] = []
    refused: ParamServeError | None = None
    deadline: float | None = None
    notices: list[CutTaken] = []
    losses: list[ParamServeError] = []

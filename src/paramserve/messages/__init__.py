"""Everything that crosses a process: the header of each frame as a typed struct.

A frame is a fixed prelude (`transport/framing.py`), one of these structs in msgpack, and a raw
payload. Bulk values never lie in a header. Where a part of a request has an `arena`, number 0 means
that its bytes follow in the frame's payload (or come back in the reply's), part after part, each
padded to `ALIGN`; another number names a shared arena of this client, and `offset` a place in it.

By who talks to whom: `opening` (the first on every connection), `requests` (client to shard) and
`answers` (shard to client), `peers` (shard to shard), `coordinator`, and of its messages `leases`
(who takes which samples) and `collectives` (barriers and reduced values). `blocks` says what a
block is, `wire` how a message becomes bytes.
"""

from paramserve.messages.answers import (
    Done,
    GroupPolicy,
    GroupReport,
    Refused,
    ServerBeat,
    ShardReply,
    TableReport,
    Waiting,
)
from paramserve.messages.blocks import VALUE, BlockSpec, Piece, TableSpec
from paramserve.messages.collectives import AllReduce, AllReduced
from paramserve.messages.coordinator import (
    AskStatus,
    CoordinatorNotice,
    CoordinatorReply,
    CoordinatorRequest,
    Defined,
    Enlist,
    Enlisted,
    Failed,
    Found,
    Join,
    Joined,
    Leave,
    Lookup,
    MarkDead,
    Member,
    Members,
    Ok,
    PlaceBlock,
    Placed,
    Reconnect,
    Record,
    Register,
    Scale,
    Status,
    WorkerBeat,
)
from paramserve.messages.leases import GiveBack, Lease, Leased, LeasePlan, LeaseReport
from paramserve.messages.opening import Hello, Welcome
from paramserve.messages.peers import (
    Commit,
    GroupMembership,
    MembershipKnown,
    Pause,
    Paused,
    PeerMessage,
    Prepare,
    Switch,
    Vote,
)
from paramserve.messages.requests import (
    CURRENT_CLOCK,
    NOTE_BYTES_MAX,
    AskReport,
    Assign,
    Batch,
    Bye,
    Define,
    Fetch,
    Gradient,
    Inquire,
    JoinGroup,
    Keys,
    Put,
    ReadTarget,
    Scan,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
    TakeSnapshot,
    Undefine,
    Watch,
)
from paramserve.messages.wire import ALIGN, PROTOCOL_VERSION, decoder, encode

Message = (
    Hello
    | Welcome
    | ShardRequest
    | Batch
    | Inquire
    | AskReport
    | Bye
    | ShardReply
    | PeerMessage
    | CoordinatorRequest
    | CoordinatorNotice
    | CoordinatorReply
    | Members
)

__all__ = [
    # how they lie in bytes
    "PROTOCOL_VERSION",
    "CURRENT_CLOCK",
    "ALIGN",
    "Message",
    "encode",
    "decoder",
    # what a block is
    "VALUE",
    "Piece",
    "BlockSpec",
    "TableSpec",
    # first message on a connection
    "Hello",
    "Welcome",
    # client to shard
    "Gradient",
    "Keys",
    "ReadTarget",
    "Define",
    "Undefine",
    "Step",
    "NOTE_BYTES_MAX",
    "JoinGroup",
    "SuspendMembership",
    "SetPolicy",
    "Assign",
    "Fetch",
    "Scan",
    "Put",
    "Watch",
    "TakeSnapshot",
    "ShardRequest",
    "Batch",
    "Inquire",
    "AskReport",
    "Bye",
    # shard to client
    "GroupPolicy",
    "Done",
    "Refused",
    "Waiting",
    "TableReport",
    "GroupReport",
    "ServerBeat",
    "ShardReply",
    # shard to shard
    "Vote",
    "Prepare",
    "Commit",
    "GroupMembership",
    "MembershipKnown",
    "Pause",
    "Paused",
    "Switch",
    "PeerMessage",
    # to and from the coordinator
    "Register",
    "Enlist",
    "Enlisted",
    "Join",
    "Joined",
    "Reconnect",
    "PlaceBlock",
    "Placed",
    "Defined",
    "Lookup",
    "Found",
    "Record",
    "WorkerBeat",
    "Member",
    "Members",
    "Leave",
    "MarkDead",
    "Scale",
    "AskStatus",
    "Status",
    "Ok",
    "Failed",
    "CoordinatorRequest",
    "CoordinatorNotice",
    "CoordinatorReply",
    # of these, about leases
    "LeasePlan",
    "Lease",
    "Leased",
    "GiveBack",
    "LeaseReport",
    # of these, about collectives
    "AllReduce",
    "AllReduced",
]

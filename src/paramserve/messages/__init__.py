"""Everything that crosses a process: the header of each frame as a typed struct.

A frame is a fixed prelude, one of these structs in msgpack, and a raw payload, with a table of
where it belongs (`transport/framing.py`). Bulk values never lie in a header. Where a part of a
request has an `arena`, this names a shared arena of this client, and `offset` a place in it; a
server that does not map the arena has a mirror of it, to which the payload brings the bytes.

By who talks to whom: `opening` (the first on every connection), `requests` (client to shard) and
`answers` (shard to client), `peers` (shard to shard), `coordinator`, and of its messages `leases`
(who takes which samples) and `checkpoints` (how one is written). `blocks` says what a block is,
`wire` how a message becomes bytes.
"""

from paramserve.messages.answers import (
    Done,
    GroupPolicy,
    GroupReport,
    NotRead,
    Refused,
    ServerBeat,
    ShardReply,
    TableReport,
    Values,
    Waiting,
)
from paramserve.messages.blocks import VALUE, BlockSpec, Link, Piece, TableSpec
from paramserve.messages.checkpoints import (
    AskCheckpoint,
    BeginCheckpoint,
    Checkpointed,
    CheckpointOver,
    CheckpointReport,
    CutTaken,
    CutWritten,
    WriteCut,
)
from paramserve.messages.coordinator import (
    AllReduce,
    AllReduced,
    AskStatus,
    CoordinatorNotice,
    CoordinatorReply,
    CoordinatorRequest,
    Defined,
    Enlist,
    Enlisted,
    Failed,
    Fastest,
    Found,
    Join,
    Joined,
    Leave,
    Lookup,
    MarkDead,
    Member,
    Members,
    Missing,
    Ok,
    OpenCollective,
    OwnSpeed,
    PassBy,
    PlaceBlock,
    Placed,
    Reconnect,
    Record,
    Register,
    Scale,
    SentGradients,
    ServerEnds,
    ServerNotice,
    Status,
    TellSpeed,
    WorkerBeat,
    WorkerUsage,
)
from paramserve.messages.debugging import AskDebug, DebugReport
from paramserve.messages.leases import (
    DatasetSize,
    GiveBack,
    Lease,
    Leased,
    LeasePlan,
    LeaseReport,
    SameSize,
)
from paramserve.messages.opening import COORDINATOR_ROLES, Hello, Welcome
from paramserve.messages.peers import (
    Acknowledge,
    Commit,
    CutAsk,
    CutAt,
    CutDone,
    CutMessage,
    CutOver,
    CutTo,
    Decision,
    GroupMembership,
    LogEntry,
    Pause,
    Paused,
    PeerMessage,
    Prepare,
    Switch,
    Vote,
)
from paramserve.messages.requests import (
    NOTE_BYTES_MAX,
    Arenas,
    AskReport,
    Assign,
    Batch,
    Bye,
    Contains,
    Define,
    Delete,
    DropCut,
    Fetch,
    Gradient,
    Inquire,
    JoinGroup,
    Keys,
    NumberedRequest,
    Put,
    Read,
    ReadTarget,
    Scan,
    SetPolicy,
    ShardRequest,
    Step,
    SuspendMembership,
    TakeCut,
    TakeSnapshot,
    Undefine,
    Watch,
)
from paramserve.messages.saved import SAVED_BYTES_MAX, SAVED_NAMES_MAX, Saved, SavedAt
from paramserve.messages.wire import ALIGN, PROTOCOL_VERSION, Run, decoder, encode

Message = (
    Hello
    | Welcome
    | Arenas
    | ShardRequest
    | Batch
    | Inquire
    | AskReport
    | Bye
    | ShardReply
    | PeerMessage
    | CoordinatorRequest
    | CoordinatorNotice
    | ServerEnds
    | CoordinatorReply
    | ServerNotice
)

__all__ = [
    "Arenas",
    # how they lie in bytes
    "PROTOCOL_VERSION",
    "COORDINATOR_ROLES",
    "ALIGN",
    "Message",
    "encode",
    "decoder",
    # what a block is
    "VALUE",
    "Piece",
    "BlockSpec",
    "Link",
    "TableSpec",
    # first message on a connection
    "Hello",
    "Welcome",
    # client to shard
    "Gradient",
    "Keys",
    "NumberedRequest",
    "ReadTarget",
    "Define",
    "Undefine",
    "Step",
    "NOTE_BYTES_MAX",
    "Saved",
    "SavedAt",
    "SAVED_BYTES_MAX",
    "SAVED_NAMES_MAX",
    "JoinGroup",
    "SuspendMembership",
    "SetPolicy",
    "Assign",
    "Fetch",
    "Scan",
    "Put",
    "Read",
    "Delete",
    "Contains",
    "Watch",
    "TakeSnapshot",
    "TakeCut",
    "DropCut",
    "ShardRequest",
    "Batch",
    "Inquire",
    "AskReport",
    "Bye",
    # shard to client
    "GroupPolicy",
    "Done",
    "Refused",
    "Run",
    "Waiting",
    "TableReport",
    "Values",
    "GroupReport",
    "NotRead",
    "ServerBeat",
    "ShardReply",
    # shard to shard
    "Vote",
    "Prepare",
    "Commit",
    "GroupMembership",
    "Pause",
    "Switch",
    "Decision",
    "LogEntry",
    "Acknowledge",
    "Paused",
    "CutAsk",
    "CutAt",
    "CutTo",
    "CutDone",
    "CutOver",
    "CutMessage",
    "PeerMessage",
    # coordinator and servers, about checkpoints
    "BeginCheckpoint",
    "CutTaken",
    "WriteCut",
    "CutWritten",
    "CheckpointOver",
    "AskCheckpoint",
    "Checkpointed",
    "CheckpointReport",
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
    "WorkerUsage",
    "Member",
    "Members",
    "ServerNotice",
    "Leave",
    "MarkDead",
    "Scale",
    "SentGradients",
    "AskDebug",
    "DebugReport",
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
    "DatasetSize",
    "SameSize",
    # of these, about collectives
    "AllReduce",
    "AllReduced",
    "Missing",
    "OpenCollective",
    "PassBy",
    "ServerEnds",
    "TellSpeed",
    "Fastest",
    "OwnSpeed",
]

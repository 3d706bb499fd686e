"""Messages to and from the coordinator: members, names, how the run stands."""

from __future__ import annotations

from msgspec import Struct

from paramserve.config import CheckpointPlan, CodecSpec, ConsistencySpec, RuleSpec
from paramserve.messages.answers import ServerBeat
from paramserve.messages.blocks import BlockSpec, Link, Piece, TableSpec
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
from paramserve.messages.debugging import AskDebug, DebugReport
from paramserve.messages.leases import DatasetSize, GiveBack, Lease, Leased, LeaseReport, SameSize


class Register(Struct, frozen=True, array_like=True, tag="register"):
    """A server is up and reachable at these addresses."""

    call: int
    shard: int
    pid: int
    addresses: tuple[str, ...]


class Enlist(Struct, frozen=True, array_like=True, tag="enlist"):
    """A server that was started by itself asks which shard it is to hold."""

    call: int


class Enlisted(Struct, frozen=True, array_like=True, tag="enlisted"):
    """What such a server needs to know of the cluster; `Register` follows when it listens."""

    call: int
    shard: int
    servers: int
    workers: int
    consistency: ConsistencySpec
    cluster: bytes = b""
    """Random number of the cluster; see `Hello.cluster`."""
    heartbeat_s: float = 0.0
    """How often the cluster expects a heartbeat at least; 0: it does not say."""
    checkpoints: CheckpointPlan = CheckpointPlan()
    """Checkpoints of the cluster."""


class Join(Struct, frozen=True, array_like=True, tag="join"):
    """A client asks for its identity and the servers. `rank` -1: not a worker. `workers`: how many
    a worker takes there to be; 0: it does not say. `wait_s`: how long for all servers to be up; 0:
    as long as the coordinator waits for them."""

    call: int
    rank: int
    pid: int
    workers: int = 0
    wait_s: float = 0.0


class Joined(Struct, frozen=True, array_like=True, tag="joined"):
    call: int
    client: int
    incarnation: int
    workers: int
    epoch: int
    servers: tuple[tuple[str, ...], ...]
    """Addresses of each shard's server, in shard order."""
    consistency: ConsistencySpec
    cluster: bytes = b""
    """Random number of the cluster; see `Hello.cluster`."""
    late: bool = False
    """Whether the others may be under way: the cluster was started without this rank, or it is not
    the rank's first incarnation."""
    restarts: bool = False
    """Whether another incarnation may go on: a worker that dies is waited for, or checkpoints are
    written."""
    heartbeat_s: float = 0.0
    """Seconds between two beats; see `Enlisted.heartbeat_s`."""
    excluded: bool = False
    """Whether the others had gone on without the rank, which had ended for good."""
    first: int = 0
    """Workers that the cluster was started for."""
    before: int = 0
    """Workers of the checkpoint that the cluster has gone on from; 0: of none."""
    keeps: bool = False
    """Whether checkpoints are written: a cluster that is lost may come back."""


class Reconnect(Struct, frozen=True, array_like=True, tag="reconnect"):
    """A client or server that is known already is on another connection from now on: its first one
    broke. It has proved itself anew; this says who it is.

    `shard`: of a server, with the `pid` and `addresses` that it registered; -1: a client.
    """

    call: int
    cluster: bytes
    client: int = 0
    incarnation: int = 0
    rank: int = -1
    shard: int = -1
    pid: int = 0
    addresses: tuple[str, ...] = ()


class PlaceBlock(Struct, frozen=True, array_like=True, tag="place"):
    """Give these tensors a block, or find the one that has exactly them.

    `define` False: wait until another client defines it. `whole_tensors`: the rule or a codec needs
    each tensor whole on one shard. `table`: what is placed is a table; its name is the group's and
    the only piece's. `nth`: which one it is of the blocks that all ranks define in this group, in
    this order; -1: it is none of them. `aliases`, `links`, `dtypes`: as of `BlockSpec`, of the
    definer.
    `push`, `pull` and `half`: as of `BlockSpec`.
    """

    call: int
    group: str
    dtype: str
    rule: RuleSpec | None
    pieces: tuple[Piece, ...]
    define: bool
    wait_s: float
    whole_tensors: bool = False
    consistency: ConsistencySpec | None = None
    table: TableSpec | None = None
    nth: int = -1
    aliases: dict[str, str] = {}
    push: CodecSpec | None = None
    pull: CodecSpec | None = None
    half: str | None = None
    links: tuple[Link, ...] = ()
    dtypes: dict[str, str] = {}


class Placed(Struct, frozen=True, array_like=True, tag="placed"):
    """`attempt` 0: it is defined already; else the caller must define it on the shards."""

    call: int
    spec: BlockSpec
    attempt: int


class Defined(Struct, frozen=True, array_like=True, tag="defined"):
    """The block of this attempt has its values on all shards; an attempt below 0 says of the
    attempt with that number that the shards refused it, so that its names are free again."""

    call: int
    block: int
    attempt: int


class Lookup(Struct, frozen=True, array_like=True, tag="lookup"):
    """Which blocks hold these names (None: all blocks)? Waits up to `wait_s` for unknown ones."""

    call: int
    names: tuple[str, ...] | None
    wait_s: float


class Found(Struct, frozen=True, array_like=True, tag="found"):
    call: int
    blocks: tuple[BlockSpec, ...]


class Record(Struct, frozen=True, array_like=True):
    """One `worker.log(...)`: seconds since the epoch, the worker's clock, and its values."""

    time_s: float
    rank: int
    clock: int
    values: dict[str, float]


class SentGradients(Struct, frozen=True, array_like=True):
    """Bytes of a group's gradients and values that a client has sent or read encoded. Gradients: as
    sent and plain, and the L2 norm of what is left out of them by now. Values: as they arrived and
    plain."""

    group: str
    sent_bytes: int
    plain_bytes: int
    residual_norm: float
    read_bytes: int = 0
    read_plain_bytes: int = 0


class WorkerUsage(Struct, frozen=True, array_like=True):
    """What a client has done with its time, since it came, and its process with memory.

    `seconds`: since it came. `waited_s`: of these, for answers of servers; `encoded_s`: in codecs.
    `memory_bytes`: resident, 0: not known. `looped`: the part of its loop over batches that is
    done, from 0 to 1; 0: not known.
    """

    seconds: float = 0.0
    waited_s: float = 0.0
    encoded_s: float = 0.0
    memory_bytes: int = 0
    looped: float = 0.0


class WorkerBeat(Struct, frozen=True, array_like=True, tag="worker-beat"):
    """Heartbeat of a client, with what it logged since the last one. `sent`: of all groups, or none
    where it is as it was in the last one.

    `first_record`: how many it had logged before the first of these, or before the next one: a gap
    tells how many were dropped on the way.
    """

    clock: int
    records: tuple[Record, ...] = ()
    first_record: int = 0
    sent: tuple[SentGradients, ...] = ()
    usage: WorkerUsage | None = None


class Member(Struct, frozen=True, array_like=True):
    """One rank as the coordinator sees it. `state`: "expected", "live", "left", "dead",
    "restarting": this incarnation is dead, and the next one is waited for, or "retiring": live, and
    asked to end."""

    rank: int
    client: int
    incarnation: int
    state: str


class Members(Struct, frozen=True, array_like=True, tag="members"):
    """Coordinator to servers: the membership, whole, with a number that only grows."""

    number: int
    members: tuple[Member, ...]
    servers: tuple[tuple[str, ...], ...] = ()
    """Addresses of each shard's server, once all are up."""


class Leave(Struct, frozen=True, array_like=True, tag="leave"):
    """A client ends in order, after its last reply."""

    call: int


class MarkDead(Struct, frozen=True, array_like=True, tag="mark-dead"):
    """The driver saw the process of a worker (`kind`) end. `final`: no other one comes for it.
    `incarnation`: which one ended, later ones are not meant; 0: unknown."""

    call: int
    kind: str
    number: int
    final: bool = True
    incarnation: int = 0


class Scale(Struct, frozen=True, array_like=True, tag="scale"):
    """Request to change the number of workers: ranks below may join, no clock waits for them before
    that, and those above are to end."""

    call: int
    workers: int


class AllReduce(Struct, frozen=True, array_like=True, tag="all-reduce"):
    """A worker's value for the next collective. Waits up to `wait_s` for the other ranks; asking
    again changes nothing.

    `op`: "barrier", or "sum", "mean", "max" or "min" of values of this dtype and shape, or "rank0":
    that rank's. `seen`: the number of the last collective whose result it has. `place`: the steps
    of the first group that its program has gone through, also those that a restart has left out.
    `last`: if the others are not there after `wait_s`, the value does not count. `number`: the
    value is one number, so that its dtype may be another one on each rank. `parts`: of the loaders
    over a part of the rank's own, which one this number is for, from 1; a rank that comes later
    gets what the others got for it. 0: of none. `exact`: False with leased loaders, where the ranks
    are at other steps in the same call. `epoch`: grows with each round of its loops over
    `loader.epochs`, by 2, and with the end of such a loop. `inner`: it is made where a later
    incarnation does not come by again: in a pass over a loader, in a round of such a loop, or
    behind a look at the worker's clock. `ticks`: as `place`, of all groups that its rank steps on,
    added up; where steps are left out, at least so many are behind. `in_pass`: it is made between
    the first batch of a pass that counts for restarts and its end. `begins`: this incarnation has
    made no step yet, and is a later one.
    """

    call: int
    op: str
    dtype: str
    shape: tuple[int, ...]
    value: bytes
    seen: int
    place: int
    wait_s: float
    last: bool = False
    number: bool = False
    parts: int = 0
    exact: bool = True
    epoch: int = 0
    inner: bool = False
    ticks: int = 0
    in_pass: bool = False
    begins: bool = False


class PassBy(Struct, frozen=True, array_like=True, tag="pass-by"):
    """The program of this restarted rank has left out the collective with this number, in which
    others wait for it while it waits for them.

    With a `place` instead, and the rest as in `AllReduce`: it makes its first step there, behind
    the call with number `seen`, and all ranks make each step together. It makes none of the calls
    up to there any more.
    """

    call: int
    number: int = 0
    place: int = -1
    epoch: int = 0
    seen: int = 0
    ticks: int = 0


class Missing(Struct, frozen=True, array_like=True):
    """A rank that a collective waits for, with its state as in `Member`, and with the group that it
    has ended most steps of, as of the last heartbeats; empty: none is known."""

    rank: int
    state: str
    group: str = ""
    clock: int = 0


class OpenCollective(Struct, frozen=True, array_like=True):
    """The collective with this number, and the ranks that wait in it at this moment for those that
    are missing. `epoch`: of their calls."""

    number: int
    op: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    epoch: int = 0


class AllReduced(Struct, frozen=True, array_like=True, tag="all-reduced"):
    """The result of the collective with this number, in this dtype; or that it has not `ended`. The
    ranks that are `missing`: those that it waits for, or has ended without while they are being
    restarted."""

    call: int
    number: int = 0
    value: bytes = b""
    ended: bool = False
    missing: tuple[Missing, ...] = ()
    dtype: str = ""


class ServerEnds(Struct, frozen=True, array_like=True, tag="server-ends"):
    """A server that is not the cluster's first was told to end. It stays until the coordinator has
    ended, which writes a last checkpoint before, or for as long as such a one may take."""

    shard: int


class TellSpeed(Struct, frozen=True, array_like=True, tag="speed"):
    """A worker tells how fast it makes its own steps of a group, without what it waited for, and
    asks how fast the fastest one does. `steps`: how many it made before its last exchange."""

    call: int
    group: str
    steps_per_s: float
    steps: int


class Fastest(Struct, frozen=True, array_like=True, tag="fastest"):
    """Own steps a second of the fastest worker of the group that lives."""

    call: int
    steps_per_s: float


class OwnSpeed(Struct, frozen=True, array_like=True):
    """What a worker told last with `TellSpeed`."""

    group: str
    steps_per_s: float
    steps: int


class AskStatus(Struct, frozen=True, array_like=True, tag="status"):
    """The driver asks how the run stands; records after `after_record` are included, as many as
    one answer takes."""

    call: int
    after_record: int = 0


class Status(Struct, frozen=True, array_like=True, tag="status-is"):
    call: int
    members: tuple[Member, ...]
    servers: tuple[ServerBeat, ...]
    silent_servers: tuple[int, ...]
    """Shards whose server has ended, or has not been heard of for `stall_s`."""
    records: tuple[Record, ...]
    next_record: int
    """What to ask for next: the number of the record after these."""
    dropped_records: int = 0
    """How many of the first ones are not kept any more."""
    leases: tuple[LeaseReport, ...] = ()
    """Reports of the loaders whose samples are shared by lease."""
    end_record: int = 0
    """How many there have been; beyond `next_record`, there are more to ask for."""
    lost_records: int = 0
    """How many were dropped by their workers, or on the way here."""
    collectives: int = 0
    """Barriers and reduced values of all ranks that have ended."""
    seconds: float = 0.0
    """Seconds since the coordinator began."""
    collective: OpenCollective | None = None
    """The one that ranks wait in."""
    expected_servers: int = 0
    """How many servers the cluster is to have; more than are in `servers`: some are missing."""
    checkpoints: CheckpointReport | None = None
    """None: the cluster writes none."""
    sent: tuple[tuple[int, SentGradients], ...] = ()
    """Gradients by rank that were sent encoded since the coordinator began."""
    speeds: tuple[tuple[int, OwnSpeed], ...] = ()
    """Speeds by live rank, of groups whose workers scale their own steps by their speed."""
    usage: tuple[tuple[int, WorkerUsage], ...] = ()
    """Usage by live rank, as of its last heartbeat."""


class Ok(Struct, frozen=True, array_like=True, tag="ok"):
    call: int


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The coordinator refuses a call."""

    call: int
    kind: str
    failed: str
    applied: str
    fix: str


CoordinatorRequest = (
    Enlist
    | Register
    | Join
    | Reconnect
    | PlaceBlock
    | Defined
    | Lookup
    | Leave
    | MarkDead
    | Scale
    | Lease
    | GiveBack
    | DatasetSize
    | AllReduce
    | PassBy
    | TellSpeed
    | AskStatus
    | AskCheckpoint
    | AskDebug
)
CoordinatorNotice = WorkerBeat | ServerBeat | CutTaken | CutWritten
CoordinatorReply = (
    Enlisted
    | Joined
    | Placed
    | Found
    | Leased
    | SameSize
    | AllReduced
    | Fastest
    | Status
    | Checkpointed
    | DebugReport
    | Ok
    | Failed
)
ServerNotice = Members | BeginCheckpoint | WriteCut | CheckpointOver
"""What the coordinator tells servers, unasked."""

"""Everything that crosses a process: the header of each frame as a typed struct.

A frame is a fixed prelude (`transport/framing.py`), one of these structs in msgpack, and a raw
payload. Bulk values never lie in a header. Where a part of a request has an `arena`, number 0 means
that its bytes follow in the frame's payload (or come back in the reply's), part after part, each
padded to `ALIGN`; another number names a shared arena of this client, and `offset` a place in it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from paramserve.config import ConsistencySpec, PolicySpec

PROTOCOL_VERSION = 1
ALIGN = 64
"""Bytes: slots and parts of a payload start at multiples of this: a cache line, a vector word."""

VALUE = 0
"""`field` of a block that holds its values; 1, 2, ... are its rule's state arrays."""


class Piece(Struct, frozen=True, array_like=True):
    """One tensor of a block."""

    name: str
    shape: tuple[int, ...]


class BlockSpec(Struct, frozen=True, array_like=True):
    """Tensors defined together: same group, dtype and rule; `cuts` say which shard holds what.

    `cuts` has one entry more than there are shards: shard k holds the elements
    [cuts[k], cuts[k + 1]) of the tensors laid end to end.
    """

    block: int
    group: int
    group_name: str
    dtype: str
    rule: PolicySpec | None
    pieces: tuple[Piece, ...]
    cuts: tuple[int, ...]
    consistency: ConsistencySpec | None = None
    """Of the group, which the first block of it decides; None: the cluster's."""


# --- client to shard: numbered requests -------------------------------------------------------


class Gradient(Struct, frozen=True, array_like=True):
    """One block's gradient. `active`: its pieces (None: all); `hyper` None: as defined."""

    block: int
    arena: int
    offset: int
    active: tuple[int, ...] | None = None
    hyper: tuple[float, ...] | None = None


class Place(Struct, frozen=True, array_like=True):
    """Where a block's values are to be written."""

    block: int
    arena: int
    offset: int


class Define(Struct, frozen=True, array_like=True, tag="define"):
    """Create a block with these values. Of two attempts the higher one's values stand."""

    seq: int
    spec: BlockSpec
    attempt: int
    arena: int
    offset: int


class Step(Struct, frozen=True, array_like=True, tag="step"):
    """Push, tick and pull of one group in one message; each may be absent.

    `clock` is the client's clock before this step. `base` is the version that the gradients were
    computed from. With `tick` the step ends the clock. `skip` says that this worker has no usable
    gradient for this clock. `clip_norm` 0: no clipping. `factor` is the worker's own, from
    `worker_weight`. `mark` (lease, samples): what this worker has taken of the samples that were
    leased to it, with this step.
    """

    seq: int
    group: int
    clock: int
    tick: bool
    push: tuple[Gradient, ...]
    pull: tuple[Place, ...]
    base: int = 0
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0
    factor: float = 1.0
    mark: tuple[int, int] | None = None


class Rest(Struct, frozen=True, array_like=True, tag="rest"):
    """This worker takes no further steps of a group until its next one: nobody waits for it."""

    seq: int
    group: int


class SetPolicy(Struct, frozen=True, array_like=True, tag="set-policy"):
    """Give a group another policy, from a clock on that the shards agree on. The answer says that
    it is known; `Done.news` and `GroupReport.change` say when it is decided."""

    seq: int
    group: int
    policy: ConsistencySpec


class Assign(Struct, frozen=True, array_like=True, tag="assign"):
    """Overwrite values or state. `counts`, if given, sets the update count of each piece."""

    seq: int
    block: int
    field: int
    arena: int
    offset: int
    active: tuple[int, ...] | None = None
    counts: tuple[int, ...] | None = None


class Fetch(Struct, frozen=True, array_like=True, tag="fetch"):
    """Read one field of one block: values or rule state."""

    seq: int
    block: int
    field: int
    arena: int
    offset: int


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Keep a snapshot of a group at every `every`-th version, at most `keep`; 0 ends it."""

    seq: int
    group: int
    every: int
    keep: int


class TakeSnapshot(Struct, frozen=True, array_like=True, tag="take"):
    """Read the oldest kept snapshot of a version past `after`, if there is one."""

    seq: int
    group: int
    after: int
    pull: tuple[Place, ...]


ShardRequest = Define | Step | Rest | SetPolicy | Assign | Fetch | Watch | TakeSnapshot


class Inquire(Struct, frozen=True, array_like=True, tag="inquire"):
    """Ask why a group's steps are waiting. Not numbered: it changes nothing."""

    group: int


class AskReport(Struct, frozen=True, array_like=True, tag="ask-report"):
    """Ask what a shard has done so far; the answer is a `ServerBeat`. Not numbered."""


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The client ends by its own wish; its session is forgotten."""


# --- shard to client ---------------------------------------------------------------------------


class GroupPolicy(Struct, frozen=True, array_like=True):
    """The policy of a group for steps from `clock` on; `number` counts its changes."""

    group: int
    number: int
    clock: int
    policy: ConsistencySpec


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """A request took effect.

    `version` is the group's version on this shard after it, `clock` the smallest clock of the live
    workers. `staleness` counts for a push. `skipped`: its gradients were not applied, as the
    policy says. `counts`: update counts of the pieces (`Fetch`). `taken`: the version of the
    snapshot in the payload, or -1 (`TakeSnapshot`). `dropped`: snapshots that no one took in time.
    `at`: the clock with which the worker goes on, or -1: with its own next one. `retire`: the run
    will do without this worker. `news`: changes of the group's
    policy that this client has not been told of.
    """

    seq: int
    version: int = 0
    clock: int = 0
    staleness: int = 0
    skipped: bool = False
    counts: tuple[int, ...] = ()
    taken: int = -1
    dropped: int = 0
    at: int = -1
    retire: bool = False
    news: tuple[GroupPolicy, ...] = ()


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """A request was refused whole; its number is used up."""

    seq: int
    kind: str
    failed: str
    applied: str
    fix: str


class Waiting(Struct, frozen=True, array_like=True, tag="waiting"):
    """Answer to `Inquire`: who the group waits for (ranks with their clocks), or what."""

    group: int
    clock: int
    missing: tuple[tuple[int, int], ...]
    reason: str


class GroupReport(Struct, frozen=True, array_like=True):
    """What a shard has done for one group."""

    name: str
    version: int
    clocks: tuple[tuple[int, int], ...]
    """(rank, clock) of each worker that is live or waited for."""
    skipped: int
    staleness: tuple[tuple[int, int, int, int], ...]
    """(rank, pushes, sum of staleness, largest staleness)."""
    held: tuple[tuple[int, int], ...] = ()
    """Sync: (rank, client) of the gradients of the clock that is not decided yet."""
    clock: int = 0
    """At which a worker that comes now begins."""
    policy: str = ""
    """Name of the policy that holds for its slowest worker."""
    changes: tuple[GroupPolicy, ...] = ()
    """Of it, the oldest first; the last one's clock may be still to come."""
    collects: bool = False
    """Whether gradients wait for the decision of their clock at present."""
    dropped: tuple[tuple[int, int], ...] = ()
    """(rank, gradients) that came too late or were too stale."""
    buffered: int = 0
    """Gradients that wait for their buffer to be full."""
    kept_bytes: int = 0
    """Copies of what workers have read (`DelayCompensated`)."""
    marks: tuple[tuple[int, int, int], ...] = ()
    """(client, lease, samples): how much of its leased samples is in the values."""

    @property
    def change(self) -> GroupPolicy | None:
        """The newest change of the policy."""
        return self.changes[-1] if self.changes else None


class ServerBeat(Struct, frozen=True, array_like=True, tag="server-beat"):
    """A server's heartbeat to the coordinator, and its answer to `AskReport`."""

    shard: int
    groups: tuple[GroupReport, ...]
    clients: int = 0
    value_bytes: int = 0
    members: int = 0
    """Number of the membership that the shard goes by."""


ShardReply = Done | Refused | Waiting | ServerBeat


# --- shard to shard ----------------------------------------------------------------------------


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """Collect: this shard holds, unapplied, what `contributors` brought for `clock`.

    Contributors are clients, in the order of their ranks: two incarnations of one rank may have
    brought something to different shards.

    `refusal` (kind, failed, fix) is empty or says why the clock cannot be applied; `skip`: a
    contributor asked to skip; `weight`: their sum. With clipping, `squared_norm` is that of this
    shard's part of the sum of gradients, before `scale`; both are 0 without.
    """

    group: int
    clock: int
    shard: int
    contributors: tuple[int, ...]
    finite: bool
    skip: bool
    weight: float
    clip_norm: float = 0.0
    squared_norm: float = 0.0
    refusal: tuple[str, ...] = ()


class Propose(Struct, frozen=True, array_like=True, tag="propose"):
    """The shards hold different sets: bring `Ready` for those of these contributors that you hold.

    A shard that still waits for a live worker does not answer.
    """

    group: int
    clock: int
    contributors: tuple[int, ...]


class Commit(Struct, frozen=True, array_like=True, tag="commit"):
    """The lead's one decision about a clock: apply these contributors' gradients times `scale`.

    No contributors: apply nothing; `refusal` says why, or the clock is skipped and counted.
    """

    group: int
    clock: int
    contributors: tuple[int, ...]
    scale: float
    refusal: tuple[str, ...] = ()


class Pause(Struct, frozen=True, array_like=True, tag="pause"):
    """The lead prepares a change of policy: hold the steps that no worker has reached yet, and say
    which is the first of them."""

    group: int
    number: int


class Paused(Struct, frozen=True, array_like=True, tag="paused"):
    """This shard holds steps from `clock` on until the change is decided. `window`: requests that a
    client may have on the way."""

    group: int
    number: int
    shard: int
    clock: int
    window: int


class Switch(Struct, frozen=True, array_like=True, tag="switch"):
    """The lead has decided a change of policy, the same for all shards."""

    change: GroupPolicy


PeerMessage = Ready | Propose | Commit | Pause | Paused | Switch


# --- to and from the coordinator -----------------------------------------------------------------


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
    """As `Hello.cluster`."""


class Join(Struct, frozen=True, array_like=True, tag="join"):
    """A client asks for its identity and the servers. `rank` -1: not a worker. `workers`: how many
    a worker takes there to be; 0: it does not say."""

    call: int
    rank: int
    pid: int
    workers: int = 0


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
    """As `Hello.cluster`."""
    late: bool = False
    """Whether the others may be under way: the cluster was started without this rank, or it is not
    the rank's first incarnation."""


class PlaceBlock(Struct, frozen=True, array_like=True, tag="place"):
    """Give these tensors a block, or find the one that has exactly them.

    `define` False: wait for somebody else to define it. `whole_tensors`: the rule needs each tensor
    whole on one shard.
    """

    call: int
    group: str
    dtype: str
    rule: PolicySpec | None
    pieces: tuple[Piece, ...]
    define: bool
    wait_s: float
    whole_tensors: bool = False
    consistency: ConsistencySpec | None = None


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


class WorkerBeat(Struct, frozen=True, array_like=True, tag="worker-beat"):
    """Heartbeat of a client, with what it logged since the last one."""

    clock: int
    records: tuple[Record, ...] = ()


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
    """A client ends by its own wish, after its last reply."""

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
    """From now on the cluster has this many workers: ranks below may join and nobody waits for
    them before, and those above are to end."""

    call: int
    workers: int


class LeasePlan(Struct, frozen=True, array_like=True):
    """How a loader's samples are shared by lease: the same on all ranks.

    `size`: samples of the dataset. A turn, which is one iteration over the loader, takes `epochs`
    passes over them or, if `steps` is not 0, `steps` x `batch` x workers samples. `batch`: samples
    of a batch of one rank, in the mean, and `low` and `high` what it may be by speed.
    `batches_per_step`: of one rank. `order`: seed of the common order; -1: as they lie.
    """

    size: int
    epochs: int
    steps: int
    batch: int
    low: int
    high: int
    batches_per_step: int
    order: int


class Lease(Struct, frozen=True, array_like=True, tag="lease"):
    """A worker asks for samples, and waits up to `wait_s` while others may still give some back.

    `turn` counts the iterations over the loader. `seen`: number of the last lease that this worker
    knows of; of a later one the reply was lost. `speed`: samples per second of its own compute;
    0: unknown. `idle`: it has nothing left to do and no step outstanding; `taken` (lease, samples)
    then is the mark of its last step: all up to there is in the values.
    """

    call: int
    loader: str
    plan: LeasePlan
    turn: int
    seen: int
    wait_s: float
    speed: float = 0.0
    idle: bool = False
    taken: tuple[int, int] | None = None


class Leased(Struct, frozen=True, array_like=True, tag="leased"):
    """The positions [start, stop) of an epoch's common order, in batches of `batch` samples.

    `lease` 0: none. Then `over` says that there will be none in this turn; else ask again, and
    `holders` has (rank, samples) of those who are not finished.
    """

    call: int
    lease: int = 0
    epoch: int = 0
    start: int = 0
    stop: int = 0
    batch: int = 0
    over: bool = False
    holders: tuple[tuple[int, int], ...] = ()


class GiveBack(Struct, frozen=True, array_like=True, tag="give-back"):
    """A worker will not take what is beyond `mark` of what was leased to it in a turn."""

    call: int
    loader: str
    turn: int
    mark: tuple[int, int]


class LeaseReport(Struct, frozen=True, array_like=True):
    """How one loader's samples were shared."""

    loader: str
    ranks: tuple[tuple[int, int, int], ...]
    """(rank, samples given to it, samples of these that are in the values)."""
    repeated: int = 0
    """Samples that some shards have had from a worker that ended, and then from another one."""
    left_over: int = 0
    """Samples at the end of a turn that filled no step."""


class AskStatus(Struct, frozen=True, array_like=True, tag="status"):
    """The driver asks how the run stands; records after `after_record` are included."""

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
    dropped_records: int = 0
    leases: tuple[LeaseReport, ...] = ()
    """Of the loaders whose samples are shared by lease."""


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
    | PlaceBlock
    | Defined
    | Lookup
    | Leave
    | MarkDead
    | Scale
    | Lease
    | GiveBack
    | AskStatus
)
CoordinatorNotice = WorkerBeat | ServerBeat
CoordinatorReply = Enlisted | Joined | Placed | Found | Leased | Status | Ok | Failed


# --- first message on a connection ---------------------------------------------------------------


class Hello(Struct, frozen=True, array_like=True, tag="hello"):
    """First frame on every connection, sent after the peer proved to belong here.

    `role`, to a shard: "client", "attach" (one more arena for a client), "server" (another shard);
    to the coordinator: "join" (a client), "register" (a server), "driver". They are all distinct:
    one port may serve both. `window`: requests that the
    client leaves unanswered at most. `again`: it has been connected before. `arenas` lists
    (number, bytes) of the arenas whose descriptors came along; `nonce` lies at the start of the
    last one. `cluster`, to a shard: which cluster the peer belongs to. Addresses and tokens may be
    used again, and numbers of clients and shards are.
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


class Welcome(Struct, frozen=True, array_like=True, tag="welcome"):
    """Answer to `Hello`: `nonce` as read from the arena."""

    nonce: bytes = b""


Message = (
    Hello
    | Welcome
    | ShardRequest
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

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder that accepts only messages of this type (a struct or a union of them)."""
    return msgspec.msgpack.Decoder(kind)

"""Client to shard: numbered requests, reads, and questions.

Bytes lie at an offset of an arena of the client. A server on its host maps that; any other one has
a mirror of it. There a frame carries what lies in it of its request, or was written by its answer.
"""

from __future__ import annotations

from typing import final

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.messages.blocks import BlockSpec
from paramserve.messages.saved import Saved


class Gradient(Struct, frozen=True, array_like=True):
    """One block's gradient. `active`: its pieces (None: all); `hyper` None: as defined.

    Of a table, `rows` rows: at the place lie their keys, int64 [rows], each once, and then their
    gradients, float32 [rows, dim]; both padded to `ALIGN`. `encoded_bytes` above 0: there lie so
    many bytes, which the block's codec for pushes has made of the gradient; of a table, its codecs
    of keys and gradients, as `core.table.encoded` says.
    """

    block: int
    arena: int
    offset: int
    active: tuple[int, ...] | None = None
    hyper: tuple[float, ...] | None = None
    rows: int = 0
    encoded_bytes: int = 0


class Keys(Struct, frozen=True, array_like=True):
    """Which rows of a table are read, and to which places of the reader's array.

    At the place lie the keys, int64 [rows], and then the places, int32 [rows], each the number of
    a row of the array; both padded to `ALIGN`. `total`: rows of that array. Of rows that are read
    encoded only the keys lie there, as `core.table.encoded` says.
    """

    rows: int
    arena: int
    offset: int
    total: int


class ReadTarget(Struct, frozen=True, array_like=True):
    """Where a block's values are to be written; of a table, the rows of `keys`.

    `room`: they are written as the block's codec of pulls encodes them, to at most so many bytes;
    0: as they are. `has`: what its reader has of a block that is pulled as what has changed
    (`ps.Delta`), as `core.delta_stream` says.
    """

    block: int
    arena: int
    offset: int
    keys: Keys | None = None
    room: int = 0
    has: tuple[int, int] = (0, 0)


@final
class Read(Struct, array_like=True, tag="read"):
    """Read values of one group. It changes nothing: it goes to those shards that have some of what
    is asked, and is asked again where a link breaks, to be answered with what is there then.

    `seq` counts the client's reads of this shard. `behind`: the last numbered request before it; a
    shard answers when that has had its effect, so that a client reads what it has written. `clock`:
    the client's; the group's policy says which clocks may read.

    Not frozen, as `Step`.
    """

    seq: int
    behind: int
    group: int
    clock: int
    pull: tuple[ReadTarget, ...]


class Define(Struct, frozen=True, array_like=True, tag="define"):
    """Create a block with these values. Of two attempts the higher one's values stand."""

    seq: int
    spec: BlockSpec
    attempt: int
    arena: int
    offset: int


class Undefine(Struct, frozen=True, array_like=True, tag="undefine"):
    """Forget a block that a shard has refused in this attempt, and its group if nothing else is in
    it. A shard that does not have the block has nothing to do."""

    seq: int
    block: int
    attempt: int


class Step(Struct, array_like=True, tag="step"):
    """Push, tick and pull of one group in one message; each may be absent.

    `clock` is the client's clock before this step. `base` is the version that the gradients were
    computed from. With `tick` the step ends the clock. `skip` says that this worker has no usable
    gradient for this clock. `clip_norm` 0: no clipping. `factor` is the worker's own, from
    `Worker.factor`. `mark` (lease, samples): what this worker has taken of the samples that were
    leased to it, with this step. `note`: what the shard is to keep for the next incarnation of this
    rank and for added workers; it does not look into it, and keeps each rank's last two.
    Empty: the one before still holds. `largest`: no element of the gradients, on any shard, is
    larger in size, as the client has found when it captured them; below 0: it has not looked.
    `saved`: what the worker has saved since it said so last; the shard keeps it for the next
    incarnation of this rank, as of the last two steps that said something. `more`: the next number
    belongs to the same call, which steps several groups; with the mark of the call's last step,
    (0, 0) where that has none. `flush`: the number of `Done.flush` if this was asked for; 0: else.
    `leaves`: whether the client keeps something that is left out of its gradients for this group.

    Not frozen: a client's session numbers it in place, once, before it is sent.
    """

    seq: int
    group: int
    clock: int
    tick: bool
    push: tuple[Gradient, ...]
    pull: tuple[ReadTarget, ...]
    base: int = 0
    weight: float = 1.0
    skip: bool = False
    clip_norm: float = 0.0
    factor: float = 1.0
    mark: tuple[int, int] | None = None
    note: bytes = b""
    largest: float = -1.0
    saved: tuple[Saved, ...] = ()
    more: tuple[int, int] | None = None
    flush: int = 0
    leaves: bool = False


NOTE_BYTES_MAX = 64 * 1024
"""Most bytes of a step's note: a message to a reader has those of all ranks."""


class JoinGroup(Struct, frozen=True, array_like=True, tag="join-group"):
    """This rank is to be a member of a group, from the clock under way there on, or where it has
    followed another one.

    The lead shard decides; each shard answers when it knows the decision. `Done.at` is the
    rank's clock: where gradients are collected the same on all shards, else the largest counts. Of
    a member that has not stepped since it is where it has begun, which may be over without it.

    `others`: groups whose members may be waited for, which the rank steps after this one. Until it
    has stepped this one it is suspended in them; then shard 0 makes it a member, where those are
    that have stepped this one as often (`core.followers`). So it begins where the others are in
    their round of groups, and no group's members wait for it while it waits in another one. Before
    it steps such a group it joins it, without `others`: the answer comes when it is a member.

    `clocks`: the rank's clocks of this group and of `others`, in their order, as its client knows
    them. A restarted rank stays a member, at its own clock, where it is as far as those by them.
    """

    seq: int
    group: int
    others: tuple[int, ...] = ()
    clocks: tuple[int, ...] = ()


class SuspendMembership(Struct, frozen=True, array_like=True, tag="suspend"):
    """This rank is no member of a group until it joins again. The lead shard decides; each
    shard answers when it knows the decision."""

    seq: int
    group: int


class SetPolicy(Struct, frozen=True, array_like=True, tag="set-policy"):
    """Give a group another policy, from a clock on that the shards agree on. The answer says that
    it is known; `Done.news` and `GroupReport.change` say when it is decided. With `check` the
    answer says whether this shard can, and nothing else happens: all are asked before the lead
    begins, since a server may have been started without the policy's class."""

    seq: int
    group: int
    policy: ConsistencySpec
    check: bool = False


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
    """Read one field of one block: values or rule state; with `cut`, as they were at that cut."""

    seq: int
    block: int
    field: int
    arena: int
    offset: int
    cut: int = 0


class TakeCut(Struct, frozen=True, array_like=True, tag="take-cut"):
    """Take a cut of all shards, of some groups' values (none named: of all). Shard 0 answers when
    every shard has its part, with `Done.cut`; the cut is kept until it is dropped, or not read for
    a time."""

    seq: int
    groups: tuple[int, ...] = ()


class DropCut(Struct, frozen=True, array_like=True, tag="drop-cut"):
    """Release a cut."""

    seq: int
    cut: int


class Scan(Struct, frozen=True, array_like=True, tag="scan"):
    """Read a table's rows from `cursor` on, in the order in which they lie, at most `rows`.

    At the place, one after the other and each padded to `ALIGN`: keys, int64 [rows]; values,
    float32 [rows, dim]; unless `width` is -1 also the rule's state, float32 [rows, width], and
    update counts, uint32 [rows]; with `idle` clocks since the last use of each, int64 [rows], 0
    where the table does not know it. The answer's `counts`: rows found, where to go on or -1.
    """

    seq: int
    block: int
    cursor: int
    rows: int
    width: int
    arena: int
    offset: int
    idle: bool = False


class Put(Struct, frozen=True, array_like=True, tag="put"):
    """Overwrite rows of a table, or create them. What lies at the place is as for `Scan`; without
    state, that of rows which are there stays, and new ones begin with that of a new row. Without
    `idle` they are used now; with it, those past the table's TTL are left out."""

    seq: int
    block: int
    rows: int
    width: int
    arena: int
    offset: int
    idle: bool = False


class Delete(Struct, frozen=True, array_like=True, tag="delete"):
    """Remove the rows of some keys of a table, and what is counted of those that have none. At the
    place lie the keys, int64 [rows], padded to `ALIGN`. The answer's `counts`: rows removed."""

    seq: int
    block: int
    rows: int
    arena: int
    offset: int


class Contains(Struct, frozen=True, array_like=True, tag="contains"):
    """Ask which of some keys of a table have a row. What lies at the place is as for `Delete`;
    behind it the answer is written, uint8 [rows], padded: 1 where there is one."""

    seq: int
    block: int
    rows: int
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
    pull: tuple[ReadTarget, ...]


NumberedRequest = (
    Define
    | Undefine
    | Step
    | JoinGroup
    | SuspendMembership
    | SetPolicy
    | Assign
    | Fetch
    | Scan
    | Put
    | Delete
    | Contains
    | Watch
    | TakeSnapshot
    | TakeCut
    | DropCut
)
ShardRequest = NumberedRequest | Read


class Batch(Struct, frozen=True, array_like=True, tag="batch"):
    """Requests of one call in one frame, executed in this order; each is answered by itself. None
    of them is a `Define`, which may have to wait for kernels."""

    requests: tuple[ShardRequest, ...]


class Arenas(Struct, frozen=True, array_like=True, tag="arenas"):
    """Number and bytes of each arena that a client has by now, of which a server on another host is
    to have a mirror. Not numbered; it comes before what lies in a new one is spoken of."""

    arenas: tuple[tuple[int, int], ...]


class Inquire(Struct, frozen=True, array_like=True, tag="inquire"):
    """Ask why a group's steps are waiting. Not numbered: it changes nothing."""

    group: int


class AskReport(Struct, frozen=True, array_like=True, tag="ask-report"):
    """Ask what a shard has done so far; the answer is a `ServerBeat`. Not numbered.

    `notes`: whether the notes of the ranks are wanted as well; they are large. `saved`: (group,
    rank, clock) where it is wanted what the rank saved, as of its newest step before a clock.
    """

    notes: bool = False
    saved: tuple[str, int, int] | None = None


class Bye(Struct, frozen=True, array_like=True, tag="bye"):
    """The client ends in order; its session is forgotten.

    `answered`: whether all shards have answered all that it has sent: they have the same of it.
    """

    answered: bool = False

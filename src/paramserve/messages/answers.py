"""Shard to client: the outcome of a request, and what the shard has done so far."""

from __future__ import annotations

from msgspec import Struct

from paramserve.config import ConsistencySpec
from paramserve.messages.saved import Saved


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
    policy says. `counts`: update counts of the pieces (`Fetch`), how many of the rank's next steps
    in the group end no clock (`JoinGroup`), or as `Scan` and `Delete` say. `snapshot`: the version
    of the one that was written (`TakeSnapshot`), or -1; `cut`: the number of the one that was taken
    (`TakeCut`), or -1. `dropped`: snapshots that no one took in time. `at`: the clock with which
    the worker goes on, or -1: with its own next one. `pending`: the rank is no member of the
    group, and this step changed nothing: it has to join first. `retire`: the run will do without
    this worker.
    `news`: changes of the group's policy that this client has not been told of. `flush` (number,
    group, clock): the call that steps this group at this clock, or with the group -1 the next one,
    is to leave nothing out of its gradients; empty: none is.
    """

    seq: int
    version: int = 0
    clock: int = 0
    staleness: int = 0
    skipped: bool = False
    counts: tuple[int, ...] = ()
    snapshot: int = -1
    cut: int = -1
    dropped: int = 0
    at: int = -1
    retire: bool = False
    news: tuple[GroupPolicy, ...] = ()
    pending: bool = False
    flush: tuple[int, ...] = ()


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """A request was refused whole; its number is used up."""

    seq: int
    kind: str
    failed: str
    applied: str
    fix: str


class Values(Done, frozen=True, array_like=True, tag="values"):
    """A `Read` of this `seq` was answered; its values lie where it has said."""


class NotRead(Refused, frozen=True, array_like=True, tag="not-read"):
    """A `Read` of this `seq` was refused."""


class Waiting(Struct, frozen=True, array_like=True, tag="waiting"):
    """Answer to `Inquire`: who the group waits for (ranks with their clocks), or what. `held`: it
    goes on only when all of these have stepped, or are no members any more."""

    group: int
    clock: int
    missing: tuple[tuple[int, int], ...]
    reason: str
    held: bool = False


class TableReport(Struct, frozen=True, array_like=True):
    """What a shard has of a table. `unadmitted`: gradients of keys that had no row yet."""

    rows: int
    memory_bytes: int
    width: int
    """Elements of a row's state."""
    created: int = 0
    evicted: int = 0
    unadmitted: int = 0
    deleted: int = 0


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
    """Clock at which a worker that joins now begins."""
    policy: str = ""
    """Name of the policy that holds for its slowest worker."""
    changes: tuple[GroupPolicy, ...] = ()
    """Policy changes of the group, the oldest first; the last one's clock may be still to come."""
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
    table: TableReport | None = None
    notes: tuple[tuple[int, int, bytes], ...] = ()
    """(rank, clock, note) of each rank's last two steps that had one; only in answers to an
    `AskReport` that asks for them."""
    left: tuple[tuple[int, int], ...] = ()
    """(rank, clock) of each rank that is not waited for any more: where it was."""
    saved: tuple[Saved, ...] = ()
    """What one rank has saved; only in answers to an `AskReport` that asks for it."""
    passed: tuple[tuple[int, int], ...] = ()
    """(rank, clocks) that a rank made no steps in, because it began, or came back, later."""

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
    refused: int = 0
    """Peers that its listeners have closed before they were known."""
    written: int = 0
    """Bytes that it has written of the checkpoint under way."""
    memory_bytes: int = 0
    """Resident, of its process; 0: not known."""
    waiting: int = 0
    """Requests that it holds until something has come, and those behind them."""


ShardReply = Done | Values | Refused | NotRead | Waiting | ServerBeat

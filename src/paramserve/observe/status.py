"""What a run has done so far, put together from what its servers report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from paramserve.messages import (
    GroupPolicy,
    GroupReport,
    LeaseReport,
    OwnSpeed,
    SentGradients,
    ServerBeat,
    Status,
    TableReport,
    WorkerUsage,
)
from paramserve.observe.amounts import trained_only
from paramserve.observe.checkpoints import CheckpointStatus, Rollback

T = TypeVar("T")

RETIRED = ("retiring", "retired")
"""States of workers that `Job.scale` has removed."""
OF_MEMBERS = {
    "expected": "starting",
    "live": "running",
    "left": "returned",
    "dead": "dead",
    "restarting": "dead",
    "retiring": "retiring",
}
"""What `RunStatus.workers` calls each state that the coordinator knows."""


@dataclass(frozen=True)
class Staleness:
    """How old the values were from which gradients were computed, in versions."""

    pushes: int
    mean: float
    max: int


@dataclass(frozen=True)
class TableStatus:
    """A keyed table on all servers together.

    Attributes:
        rows: that are there.
        memory_bytes: of rows, rule state and index.
        created: rows since the servers' start, those that were loaded from files included.
        evicted: rows that went again, by TTL, LRU or for want of room.
        unadmitted: gradients that were dropped because their key had no row yet (`ps.MinCount`).
        deleted: rows that `Table.delete` has removed.
    """

    rows: int
    memory_bytes: int
    created: int
    evicted: int
    unadmitted: int
    deleted: int = 0


@dataclass(frozen=True)
class SentStatus:
    """Gradients that a worker has sent encoded, and values that it has read encoded, as of its last
    heartbeat.

    Attributes:
        sent_bytes: of the gradients, as a codec made them, by all incarnations of the worker.
        plain_bytes: of the same gradients, as they were.
        residual_norm: L2 norm of what the codec has left out and the worker adds to its next one.
        read_bytes: of the values, as they came over links, by all incarnations. What is read in
            shared memory is not counted, with `even_local` of the codec neither.
        read_plain_bytes: of the same values, as they are.
    """

    sent_bytes: int
    plain_bytes: int
    residual_norm: float
    read_bytes: int = 0
    read_plain_bytes: int = 0


@dataclass(frozen=True)
class SpeedStatus:
    """How fast a worker makes its own steps, as of its last exchange.

    Attributes:
        steps_per_s: without what the worker waits for.
        steps: before the last exchange: `every`, or as many as its speed is a part of the fastest
            one's.
    """

    steps_per_s: float
    steps: int


@dataclass(frozen=True)
class GroupStatus:
    """One group over all its shards.

    Attributes:
        version: updates applied.
        clock: steps that every live worker has finished, or had when the last one left; 0 where
            gradients are pushed by hand, without `tick`.
        steps: steps of all workers together, also of workers that have left.
        skipped: clocks or gradients that were not applied because they held NaN or Inf.
        staleness: of all workers' pushes that were applied or buffered.
        policy: name of the consistency policy that holds for the slowest worker; empty: not told.
        coming: the next policy and the clock from which on it holds, as "Sync from clock 40"; empty
            if none has been decided, or if it holds already.
        staleness_by_rank: of each worker's pushes; a push's is the mean over the shards.
        dropped_by_rank: gradients of each worker that came too late or were too stale, or under
            `ps.LocalSteps` held NaN or Inf, on the shard that dropped most of them.
        buffered: gradients that wait until their buffer is full.
        kept_bytes: copies of what workers have read, on all shards together.
        table: what the group's table holds; None: it is a group of tensors.
        sent_by_rank: of each worker that has sent gradients of the group or read its values
            encoded, since the servers began: again from 0 where the run has gone back to a
            checkpoint.
        speed_by_rank: of each worker that lives, under `ps.AsyncLocalSteps(scale_steps=True)`.
        steps_by_rank: of each worker, also of those that have left.
    """

    version: int
    clock: int
    steps: int
    skipped: int
    staleness: Staleness
    policy: str = ""
    coming: str = ""
    staleness_by_rank: Mapping[int, Staleness] = field(default_factory=dict)
    dropped_by_rank: Mapping[int, int] = field(default_factory=dict)
    buffered: int = 0
    kept_bytes: int = 0
    table: TableStatus | None = None
    sent_by_rank: Mapping[int, SentStatus] = field(default_factory=dict)
    speed_by_rank: Mapping[int, SpeedStatus] = field(default_factory=dict)
    steps_by_rank: Mapping[int, int] = field(default_factory=dict)

    @property
    def sent_bytes(self) -> int:
        """Bytes, as sent, of all workers' gradients that a codec has encoded."""
        return sum(each.sent_bytes for each in self.sent_by_rank.values())

    @property
    def plain_bytes(self) -> int:
        """Bytes of all workers' encoded gradients before they were encoded."""
        return sum(each.plain_bytes for each in self.sent_by_rank.values())

    @property
    def read_bytes(self) -> int:
        """Bytes, as they arrived, of the values that all workers have read encoded."""
        return sum(each.read_bytes for each in self.sent_by_rank.values())

    @property
    def read_plain_bytes(self) -> int:
        """Bytes of the values that all workers have read encoded, once decoded."""
        return sum(each.read_plain_bytes for each in self.sent_by_rank.values())

    @property
    def dropped(self) -> int:
        """Gradients of all workers that came too late or were too stale."""
        return sum(self.dropped_by_rank.values())


@dataclass(frozen=True)
class WorkerLoad:
    """What a worker that lives has done with its time, as of its last heartbeat.

    Attributes:
        seconds: since it came.
        waited_s: of these, for answers of servers.
        encoded_s: of these, in codecs of gradients.
        memory_bytes: of its process, in RAM; 0: not known.
        looped: the part of its loop over a loader's batches, or over `loader.epochs`, that is done,
            from 0 to 1; 0: not known.
    """

    seconds: float
    waited_s: float
    encoded_s: float
    memory_bytes: int
    looped: float


@dataclass(frozen=True)
class ServerLoad:
    """What a server has to do, as of its last heartbeat.

    Attributes:
        value_bytes: of the parameters that it holds, tables' rows not included.
        table_bytes: memory of rows, rule state and index.
        pushes: gradients of workers that it has applied or buffered.
        waiting: requests that it holds until something has come, and those behind them.
        clients: that it knows.
        memory_bytes: of its process, in RAM; 0: not known.
    """

    value_bytes: int
    table_bytes: int
    pushes: int
    waiting: int
    clients: int
    memory_bytes: int


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        state: "starting", "running", "resuming" (going on from a checkpoint), "finishing",
            "finished", "stopped" or "failed".
        seconds: since the start; no longer counted once the run has ended.
        workers: "starting", "running", "returned", "dead", "stopped" (ended because the run was,
            before it was done), "retiring" (asked to end, because the run goes on with fewer) or
            "retired", by rank.
        groups: by name, as of the servers' last heartbeat where nothing else is said.
        metrics: the last value of each name that a worker logged.
        checkpoints: how its checkpoints stand; None: it writes none.
        rollbacks: of each time that it went back to a checkpoint.
        loads: of each worker that lives, by rank.
        servers: by number.
        logged: by rank, the last value of each name that it logged.
    """

    state: str
    seconds: float
    workers: Mapping[int, str]
    groups: Mapping[str, GroupStatus]
    metrics: Mapping[str, float]
    checkpoints: CheckpointStatus | None = None
    rollbacks: Sequence[Rollback] = ()
    loads: Mapping[int, WorkerLoad] = field(default_factory=dict)
    servers: Mapping[int, ServerLoad] = field(default_factory=dict)
    logged: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def progress(self) -> str:
        """How far the run has got, in one line, in steps of all workers together."""
        done = [
            f"{name}: {group.steps:,} steps (version {group.version:,})"
            if group.steps
            else f"{name} at version {group.version:,}"
            for name, group in self.trained.items()
        ]
        live, expected = self.staffing
        workers = f", {live} of {expected} workers" if expected else ""
        return (
            f"after {self.seconds:.1f} s: {', '.join(done) if done else 'no step was finished'}"
            f"{workers}"
        )

    @property
    def trained(self) -> dict[str, GroupStatus]:
        """The groups that steps train: without buffers, frozen parameters and labels of tables."""
        return trained_only(self.groups)

    @property
    def looped(self) -> float:
        """The part of the loop over batches that the slowest worker that lives has done, from 0 to
        1; 0: not known."""
        return min((each.looped for each in self.loads.values()), default=0.0)

    @property
    def staffing(self) -> tuple[int, int]:
        """How many workers work or have returned, of how many that the run wants to have."""
        states = [state for state in self.workers.values() if state not in RETIRED]
        return sum(state in ("running", "returned") for state in states), len(states)


def of_cluster(
    status: Status,
    metrics: Mapping[str, float],
    checkpoints: CheckpointStatus | None = None,
    logged: Mapping[int, Mapping[str, float]] | None = None,
) -> RunStatus:
    """How a cluster stands that no driver runs: "running" as long as a worker may step or is to be
    started again, "finished" when all that were expected have come and gone."""
    workers = {member.rank: OF_MEMBERS[member.state] for member in status.members}
    states = set(workers.values())
    state = "starting" if states == {"starting"} else "running"
    if states and all(member.state in ("left", "dead") for member in status.members):
        state = "finished"
    groups = by_group(status.servers, status.sent, status.speeds)
    return RunStatus(
        state,
        status.seconds,
        workers,
        groups,
        dict(metrics),
        checkpoints,
        loads=worker_loads(status.usage),
        servers=server_loads(status.servers),
        logged={rank: dict(each) for rank, each in (logged or {}).items()},
    )


def worker_loads(usage: Iterable[tuple[int, WorkerUsage]]) -> dict[int, WorkerLoad]:
    """What each rank told of its time and memory."""
    return {
        rank: WorkerLoad(
            each.seconds, each.waited_s, each.encoded_s, each.memory_bytes, each.looped
        )
        for rank, each in usage
    }


def server_loads(beats: Iterable[ServerBeat]) -> dict[int, ServerLoad]:
    """What each server told of what it has to do."""
    return {
        beat.shard: ServerLoad(
            beat.value_bytes,
            sum(each.table.memory_bytes for each in beat.groups if each.table is not None),
            sum(pushes for each in beat.groups for _, pushes, _, _ in each.staleness),
            beat.waiting,
            beat.clients,
            beat.memory_bytes,
        )
        for beat in beats
    }


def by_group(
    beats: Iterable[ServerBeat],
    sent: Iterable[tuple[int, SentGradients]] = (),
    speeds: Iterable[tuple[int, OwnSpeed]] = (),
) -> dict[str, GroupStatus]:
    """The groups of all shards by name; a group's shards are joined.

    What counts for a whole group (version, clock) is that of the shard that is furthest behind.

    Args:
        sent: what each rank told of gradients that it sent encoded.
        speeds: what each rank told of its own steps.
    """
    reports: dict[str, list[GroupReport]] = {}
    for beat in beats:
        for report in beat.groups:
            reports.setdefault(report.name, []).append(report)
    by_rank: dict[str, dict[int, SentStatus]] = {}
    for rank, gradients in sent:
        status = SentStatus(
            gradients.sent_bytes,
            gradients.plain_bytes,
            gradients.residual_norm,
            gradients.read_bytes,
            gradients.read_plain_bytes,
        )
        by_rank.setdefault(gradients.group, {})[rank] = status
    paces: dict[str, dict[int, SpeedStatus]] = {}
    for rank, speed in speeds:
        paces.setdefault(speed.group, {})[rank] = SpeedStatus(speed.steps_per_s, speed.steps)
    return {
        name: replace(
            _join(shards),
            sent_by_rank=by_rank.get(name, {}),
            speed_by_rank=paces.get(name, {}),
        )
        for name, shards in reports.items()
    }


def by_rank(beats: Iterable[ServerBeat]) -> dict[int, Staleness]:
    """The staleness of each rank's pushes, over all groups. A push reaches every shard and counts
    once; its staleness is the mean over the shards."""
    shares: dict[int, list[Staleness]] = {}
    for group in by_group(beats).values():
        for rank, each in group.staleness_by_rank.items():
            shares.setdefault(rank, []).append(each)
    return {rank: _total(parts) for rank, parts in sorted(shares.items())}


def drops_by_rank(beats: Iterable[ServerBeat]) -> dict[int, int]:
    """Each rank's gradients that came too late or were too stale, over all groups; a rank without
    any is left out."""
    drops: dict[int, int] = {}
    for group in by_group(beats).values():
        for rank, count in group.dropped_by_rank.items():
            drops[rank] = drops.get(rank, 0) + count
    return dict(sorted(drops.items()))


def samples_by_rank(leases: Iterable[LeaseReport]) -> dict[int, int]:
    """Each rank's samples that are in the values, over all loaders that share them by lease."""
    samples: dict[int, int] = {}
    for loader in leases:
        for rank, _, finished in loader.ranks:
            samples[rank] = samples.get(rank, 0) + finished
    return dict(sorted(samples.items()))


def _join(shards: list[GroupReport]) -> GroupStatus:
    behind = min(shards, key=lambda report: report.version)
    clocks, passed = dict(behind.clocks), dict(behind.passed)
    dropped = dict(behind.dropped)
    # Workers whose clocks are not known any more are in it.
    steps = {rank: pushes + dropped.get(rank, 0) for rank, pushes, _, _ in behind.staleness}
    for rank, clock in (dict(behind.left) | clocks).items():
        steps[rank] = max(clock - passed.get(rank, 0), steps.get(rank, 0))
    slowest = min(clocks.values(), default=behind.clock)
    return GroupStatus(
        version=behind.version,
        clock=slowest,
        steps=sum(steps.values()),
        skipped=max(report.skipped for report in shards),
        staleness=_total([_mean(*counts) for _, *counts in behind.staleness]),
        policy=behind.policy,
        coming=_coming(behind.change, slowest),
        staleness_by_rank=_staleness(shards),
        dropped_by_rank=_dropped(shards),
        buffered=max(report.buffered for report in shards),
        kept_bytes=sum(report.kept_bytes for report in shards),
        steps_by_rank=dict(sorted(steps.items())),
        table=_table([report.table for report in shards if report.table is not None]),
    )


def _table(shards: list[TableReport]) -> TableStatus | None:
    if not shards:
        return None
    return TableStatus(
        rows=sum(report.rows for report in shards),
        memory_bytes=sum(report.memory_bytes for report in shards),
        created=sum(report.created for report in shards),
        evicted=sum(report.evicted for report in shards),
        unadmitted=sum(report.unadmitted for report in shards),
        deleted=sum(report.deleted for report in shards),
    )


def _coming(change: GroupPolicy | None, clock: int) -> str:
    if change is None or change.clock <= clock:
        return ""
    return f"{change.policy.name} from clock {change.clock}"


def _staleness(shards: list[GroupReport]) -> dict[int, Staleness]:
    parts: dict[int, list[Staleness]] = {}
    for report in shards:
        for rank, *counts in report.staleness:
            parts.setdefault(rank, []).append(_mean(*counts))
    return {
        rank: Staleness(max(part.pushes for part in each), _total(each).mean, _total(each).max)
        for rank, each in sorted(parts.items())
    }


def _dropped(shards: list[GroupReport]) -> dict[int, int]:
    drops: dict[int, int] = {}
    for report in shards:
        for rank, count in report.dropped:
            drops[rank] = max(count, drops.get(rank, 0))
    return dict(sorted(drops.items()))


def _mean(pushes: int, total: int, largest: int) -> Staleness:
    return Staleness(pushes, total / max(pushes, 1), largest)


def _total(parts: list[Staleness]) -> Staleness:
    pushes = sum(part.pushes for part in parts)
    weighted = sum(part.mean * part.pushes for part in parts)
    return Staleness(pushes, weighted / max(pushes, 1), max((p.max for p in parts), default=0))

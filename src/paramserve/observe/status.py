"""What a run has done so far, put together from what its servers report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paramserve.messages import GroupReport, ServerBeat


@dataclass(frozen=True)
class Staleness:
    """How old the values were from which gradients were computed, in versions."""

    pushes: int
    mean: float
    max: int


@dataclass(frozen=True)
class GroupStatus:
    """One group over all its shards.

    Attributes:
        version: updates applied.
        clock: steps that every live worker has finished.
        steps: steps of all workers together, also of those who have left.
        skipped: clocks or gradients that were not applied because they held NaN or Inf.
    """

    version: int
    clock: int
    steps: int
    skipped: int
    staleness: Staleness


@dataclass(frozen=True)
class RunStatus:
    """How a run stands.

    Attributes:
        state: "starting", "running", "finishing", "finished", "stopped" or "failed".
        seconds: since the start; no longer counted once the run has ended.
        workers: "starting", "running", "returned" or "dead", by rank.
        groups: by name, as of the servers' last heartbeat.
        metrics: the last value of each name that a worker logged.
    """

    state: str
    seconds: float
    workers: Mapping[int, str]
    groups: Mapping[str, GroupStatus]
    metrics: Mapping[str, float]

    def progress(self) -> str:
        """How far the run has got, in one line."""
        done = [
            f"{name} at clock {group.clock} (version {group.version})"
            for name, group in self.groups.items()
        ]
        live = sum(state in ("running", "returned") for state in self.workers.values())
        return (
            f"after {self.seconds:.1f} s: {', '.join(done) if done else 'no step was finished'}, "
            f"{live} of {len(self.workers)} workers"
        )


def by_group(beats: Iterable[ServerBeat]) -> dict[str, GroupStatus]:
    """The groups of all shards by name; a group's shards are joined.

    What counts for a whole group (version, clock) is that of the shard that is furthest behind.
    """
    reports: dict[str, list[GroupReport]] = {}
    for beat in beats:
        for report in beat.groups:
            reports.setdefault(report.name, []).append(report)
    return {name: _join(shards) for name, shards in reports.items()}


def by_rank(beats: Iterable[ServerBeat]) -> dict[int, Staleness]:
    """The staleness of each rank's pushes, over all groups. A push reaches every shard and counts
    once; its staleness is the mean over the shards."""
    shards: dict[tuple[str, int], list[Staleness]] = {}
    for beat in beats:
        for report in beat.groups:
            for rank, pushes, total, largest in report.staleness:
                each = Staleness(pushes, total / max(pushes, 1), largest)
                shards.setdefault((report.name, rank), []).append(each)
    found: dict[int, list[Staleness]] = {}
    for (_, rank), parts in shards.items():
        joined = _total(parts)
        pushes = max(part.pushes for part in parts)
        found.setdefault(rank, []).append(Staleness(pushes, joined.mean, joined.max))
    return {rank: _total(parts) for rank, parts in sorted(found.items())}


def _join(shards: list[GroupReport]) -> GroupStatus:
    behind = min(shards, key=lambda report: report.version)
    clocks = dict(behind.clocks)
    steps = {rank: pushes for rank, pushes, _, _ in behind.staleness}  # those who left are in it
    for rank, clock in clocks.items():
        steps[rank] = max(clock, steps.get(rank, 0))
    stale = [
        Staleness(pushes, total / max(pushes, 1), largest)
        for _, pushes, total, largest in behind.staleness
    ]
    return GroupStatus(
        version=behind.version,
        clock=min(clocks.values(), default=behind.version),
        steps=sum(steps.values()),
        skipped=max(report.skipped for report in shards),
        staleness=_total(stale),
    )


def _total(parts: list[Staleness]) -> Staleness:
    pushes = sum(part.pushes for part in parts)
    weighted = sum(part.mean * part.pushes for part in parts)
    return Staleness(pushes, weighted / max(pushes, 1), max((p.max for p in parts), default=0))

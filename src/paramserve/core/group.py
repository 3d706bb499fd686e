"""One group on one shard: what steps together, its clocks, its versions and its snapshots."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.block import ShardBlock
from paramserve.core.consistency import Consistency, Decision
from paramserve.core.two_stroke import Collect, Lead
from paramserve.messages import GroupReport

Array = npt.NDArray[Any]


@dataclass
class Staleness:
    """Of one rank's pushes."""

    pushes: int = 0
    total: int = 0
    largest: int = 0

    def add(self, staleness: int) -> None:
        self.pushes += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)


@dataclass
class Watching:
    """Snapshots kept for one reader: (version, values by block), oldest first."""

    every: int
    keep: int
    kept: deque[tuple[int, dict[int, Array]]] = field(default_factory=deque)
    dropped: int = 0


class Group:
    """A group's whole state on one shard.

    `version` counts the updates that the group has had here. `clocks` has the steps that each rank
    has finished, of those that are live or waited for. `committed` is the first clock that is not
    committed yet (Sync).
    """

    def __init__(self, number: int, name: str, policy: Consistency, lead: Lead | None) -> None:
        self.id = number
        self.name = name
        self.policy = policy
        self.lead = lead
        """Set on the group's lead shard only."""
        self.version = 0
        self.committed = 0
        self.clocks: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """Clocks of ranks that have ended: another worker may take them over."""
        self.brought: dict[int, int] = {}
        """Sync: the client that brought the last step of each rank."""
        self.blocks: dict[int, ShardBlock] = {}
        self.collect = Collect()
        self.staleness: dict[int, Staleness] = {}
        self.skipped = 0
        self.watching: dict[int, Watching] = {}
        """By client."""

    @property
    def collects(self) -> bool:
        """Whether gradients wait here for the lead's commit."""
        return self.policy.on_push(self.committed) is Decision.COLLECT

    def belong(self, ranks: Sequence[int]) -> None:
        """These ranks count from now on. One that comes back goes on at its own clock, but not
        behind the slowest of the others."""
        start = self.committed if self.collects else self.slowest()
        self._ended.update(self.clocks)
        self.clocks = {
            rank: self.clocks.get(rank, max(start, self._ended.get(rank, 0))) for rank in ranks
        }

    def ticked(self, rank: int, clock: int) -> None:
        """A rank has ended a step. Its clock stays where it is if the step repeats one that an
        older incarnation has brought here before."""
        self.clocks[rank] = max(clock + 1, self.clocks[rank])

    def slowest(self) -> int:
        """The smallest clock of the live workers; 0 before any has stepped."""
        return min(self.clocks.values(), default=0)

    def advance(self) -> None:
        """Count an update, and keep a snapshot for those who asked for one at this version."""
        self.version += 1
        for watching in self.watching.values():
            if self.version % watching.every == 0:
                self._keep(watching)

    def _keep(self, watching: Watching) -> None:
        if len(watching.kept) >= watching.keep:
            watching.kept.popleft()
            watching.dropped += 1
        values = {number: np.copy(block.value) for number, block in self.blocks.items()}
        watching.kept.append((self.version, values))

    def report(self) -> GroupReport:
        """What this shard has done for the group."""
        return GroupReport(
            self.name,
            self.version,
            tuple(sorted(self.clocks.items())),
            self.skipped,
            tuple((r, s.pushes, s.total, s.largest) for r, s in sorted(self.staleness.items())),
            tuple((rank, each.client) for rank, each in sorted(self.collect.held.items())),
        )


class Resumption(NamedTuple):
    """Where a worker that was started again goes on in one group."""

    clock: int
    repeated: int
    """Steps from there on that some shard has had from an older incarnation."""


def resume(
    reports: Sequence[Sequence[GroupReport]], rank: int, *, collects: bool
) -> dict[str, Resumption]:
    """Clocks that a new incarnation takes over, by group.

    In Sync the last step of the older one is in its clock if every shard has it, decided or not:
    nothing more of an older incarnation is taken once a newer one has connected. Else it is in no
    clock yet, and is brought again to all. In Async a step that only some shards had is repeated.

    Args:
        reports: of every shard, after the new incarnation has connected to all of them.
        rank: of the worker.
        collects: whether gradients wait for their clock's decision (Sync).
    """
    by_name: dict[str, list[GroupReport]] = {}
    for shard in reports:
        for report in shard:
            by_name.setdefault(report.name, []).append(report)
    found = {}
    for name, parts in by_name.items():
        clocks = [dict(part.clocks).get(rank, 0) for part in parts]
        clocks += [0] * (len(reports) - len(parts))  # its define is on the way to these
        if not collects:
            found[name] = Resumption(min(clocks), max(clocks) - min(clocks))
            continue
        held = {dict(part.held).get(rank) for part in parts}
        everywhere = min(clocks) == max(clocks) and len(held) == 1 and None not in held
        found[name] = Resumption(max(clocks) + (everywhere and len(parts) == len(reports)), 0)
    return found

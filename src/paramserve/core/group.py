"""One group on one shard: what steps together, its clocks, its versions and its snapshots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

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

    `version` counts the updates that the group has had here. `clocks` has the steps that each live
    rank has finished. `committed` is the first clock that is not committed yet (Sync).
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
        )

"""What each worker told last of its time and memory, by rank."""

from __future__ import annotations

import math
from collections.abc import Iterable

from paramserve.messages import WorkerUsage

BYTES_MAX = (1 << 63) - 1
"""Told of a process's memory at most: more could not be encoded in a status."""


class UsageByRank:
    """A rank's next incarnation replaces what the one before told."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[int, WorkerUsage]] = {}

    def on_report(self, rank: int, client: int, usage: WorkerUsage) -> None:
        """A client of a rank tells. What cannot be is left out: it comes from a peer."""
        times = usage.seconds, usage.waited_s, usage.encoded_s
        if not all(0.0 <= each < math.inf for each in times):
            return
        if not (0.0 <= usage.looped <= 1.0 and 0 <= usage.memory_bytes <= BYTES_MAX):
            return
        before = self._reports.get(rank)
        if before is None or client >= before[0]:
            self._reports[rank] = client, usage

    def report(self, living: Iterable[int]) -> tuple[tuple[int, WorkerUsage], ...]:
        """Usage by rank, of the clients that live."""
        clients = frozenset(living)
        return tuple(
            (rank, usage)
            for rank, (client, usage) in sorted(self._reports.items())
            if client in clients
        )

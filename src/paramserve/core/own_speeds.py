"""How fast the workers make their own steps, by group and rank: what scales the number of steps."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable
from typing import NamedTuple

from paramserve.errors import ParamServeError
from paramserve.messages import OwnSpeed, TellSpeed


class _Report(NamedTuple):
    client: int
    speed: OwnSpeed


class OwnSpeeds:
    """What each worker told last. A rank's next incarnation replaces what the one before told."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, int], _Report] = {}

    def on_report(self, rank: int, client: int, report: TellSpeed) -> None:
        """A live worker tells its speed.

        Raises:
            ParamServeError: that is no speed; it comes from a peer. Nothing was changed.
        """
        if not 0.0 < report.steps_per_s < math.inf or report.steps < 1:
            raise ParamServeError(
                f"rank {rank} told of {report.steps} own steps of group {report.group!r} at "
                f"{report.steps_per_s} a second: both must be above 0 and finite",
                fix="correct the clock of that worker's host",
            )
        speed = OwnSpeed(report.group, report.steps_per_s, report.steps)
        self._reports[report.group, rank] = _Report(client, speed)

    def fastest(self, group: str, living: Container[int]) -> float:
        """Steps a second of the fastest worker of a group, 0 if none has told.

        Args:
            living: the clients that count; those of the ranks that have died or left do not.
        """
        speeds = (
            each.speed.steps_per_s
            for (name, _), each in self._reports.items()
            if name == group and each.client in living
        )
        return max(speeds, default=0.0)

    def report(self, living: Iterable[int]) -> tuple[tuple[int, OwnSpeed], ...]:
        """Speeds by rank and group, of the clients that live."""
        clients = frozenset(living)
        return tuple(
            (rank, each.speed)
            for (_, rank), each in sorted(self._reports.items())
            if each.client in clients
        )

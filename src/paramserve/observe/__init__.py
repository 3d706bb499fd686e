"""Showing what happens in a run: its numbers in one place, and lines for people."""

from __future__ import annotations

from paramserve.observe.checkpoints import CheckpointStatus
from paramserve.observe.progress import Progress, watch
from paramserve.observe.status import (
    GroupStatus,
    RunStatus,
    SentStatus,
    SpeedStatus,
    Staleness,
    TableStatus,
)

__all__ = [
    "watch",
    "Progress",
    "RunStatus",
    "GroupStatus",
    "Staleness",
    "TableStatus",
    "SentStatus",
    "SpeedStatus",
    "CheckpointStatus",
]

"""Showing what happens in a run: its numbers in one place, and lines for people."""

from __future__ import annotations

from paramserve.observe.checkpoints import CheckpointStatus, Rollback
from paramserve.observe.history import StepRecord
from paramserve.observe.progress import Progress
from paramserve.observe.status import (
    GroupStatus,
    RunStatus,
    SentStatus,
    ServerLoad,
    SpeedStatus,
    Staleness,
    TableStatus,
    WorkerLoad,
)
from paramserve.observe.view import watch

__all__ = [
    "watch",
    "Progress",
    "RunStatus",
    "GroupStatus",
    "Staleness",
    "TableStatus",
    "SentStatus",
    "SpeedStatus",
    "WorkerLoad",
    "ServerLoad",
    "CheckpointStatus",
    "Rollback",
    "StepRecord",
]

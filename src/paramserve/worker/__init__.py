"""Worker processes, and what a training function sees of one."""

from paramserve.worker.process import Resumed, WorkerConfig, main, prepare_process
from paramserve.worker.worker import ExtraState, Worker

__all__ = [
    "ExtraState",
    "Resumed",
    "Worker",
    "WorkerConfig",
    "main",
    "prepare_process",
]

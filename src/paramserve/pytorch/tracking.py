"""Schedulers that a training function names so that they come back: `schedulers=`, `worker.track`.

They go with the steps of their optimizer, so that added workers have them, too; where its steps
send no dense layers, they are this rank's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserve.errors import warn_user
from paramserve.pytorch.adopted import Adopted


def track_scheduler(name: str, thing: Any) -> bool:
    """Restore a scheduler with its optimizer's steps; False: the object is none.

    Raises:
        ValueError: no worker has adopted its optimizer.
    """
    if not isinstance(thing, LRScheduler):
        return False
    optimizer = getattr(thing, "optimizer", None)
    adopted = getattr(optimizer, "_adopted", None)
    if not isinstance(adopted, Adopted):
        raise ValueError(
            f"worker.track({name!r}) got a {type(thing).__name__} of an optimizer that the worker "
            "does not step yet. Applied: no. To fix: give it to the line that does, "
            "worker.optimizer(model, optimizer, schedulers=[scheduler]), or track it behind that "
            "line; of an optimizer of your own worker.save keeps its state_dict"
        )
    adopted.name_scheduler(name, thing)
    return True


def name_schedulers(adopted: Adopted[Any], schedulers: Sequence[LRScheduler]) -> None:
    """Restore the schedulers that an optimizer was given with."""
    for index, each in enumerate(schedulers):
        adopted.name_scheduler(f"schedulers[{index}]", each)


def look_for_unnamed(adopted: Adopted[Any], optimizer: Optimizer) -> None:
    """Warn before the first step where the optimizer has a scheduler and none was named, and
    another incarnation may follow, which would begin it anew."""
    adopted.unnamed = False
    stepped = vars(optimizer).get("step")
    if getattr(stepped, "_wrapped_by_lr_sched", False) and adopted.may_come_again:
        warn_user(
            "a learning rate scheduler is attached to this optimizer and was not named: in a "
            "worker that is started again, or a run that is resumed, it would begin anew. To fix: "
            "optimizer = worker.optimizer(model, optimizer, schedulers=[scheduler]), or "
            'worker.track("scheduler", scheduler) behind the line that makes it'
        )

"""What a training function names so that it comes back: `worker.track`, `schedulers=`.

A scheduler of an adopted optimizer goes with the steps of that one, so that added workers have it,
too; anything else is this rank's own, and is saved with its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paramserve.errors import warn_user
from paramserve.pytorch.adopted import Adopted

if TYPE_CHECKING:
    from paramserve.training.host import Host


def track(worker: Host, name: str, thing: Any) -> None:
    """See `Worker.track`."""
    optimizer = getattr(thing, "optimizer", None) if isinstance(thing, LRScheduler) else None
    adopted = getattr(optimizer, "_adopted", None)
    if isinstance(adopted, Adopted):
        adopted.unnamed = False
        if adopted.sends_notes:
            adopted.schedules.name(name, thing)
            return
    for method in ("state_dict", "load_state_dict"):
        if not callable(getattr(thing, method, None)):
            raise TypeError(
                f"worker.track({name!r}) got a {type(thing).__qualname__}, which has no {method}. "
                "Applied: no. To fix: worker.save and worker.saved keep numbers, text, arrays and "
                "tensors; an object needs both methods, as torch's have them"
            )
    worker.client.saving.track(name, thing.state_dict, thing.load_state_dict)


def name_schedulers(worker: Host, adopted: Adopted[Any], schedulers: Sequence[LRScheduler]) -> None:
    """Bring back the schedulers that an optimizer was given with."""
    adopted.unnamed = not schedulers
    for index, each in enumerate(schedulers):
        if adopted.sends_notes:
            adopted.schedules.name(f"{index}", each)
        else:
            name = f"schedulers[{index}] of {adopted.group}"
            worker.client.saving.track(name, each.state_dict, each.load_state_dict)


def look_for_unnamed(adopted: Adopted[Any], optimizer: Optimizer) -> None:
    """Before the first step: warn where the optimizer has a scheduler that was not named, and
    another incarnation may follow, which would begin that one anew."""
    adopted.unnamed = False
    stepped = vars(optimizer).get("step")
    if getattr(stepped, "_wrapped_by_lr_sched", False) and adopted.may_come_again:
        warn_user(
            "a learning rate scheduler is attached to this optimizer and was not named: in a "
            "worker that is started again, or a run that is resumed, it would begin anew. To fix: "
            "optimizer = worker.optimizer(model, optimizer, schedulers=[scheduler]), or "
            'worker.track("scheduler", scheduler) behind the line that makes it'
        )

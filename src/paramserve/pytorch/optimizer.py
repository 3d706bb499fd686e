"""`worker.optimizer`: a torch optimizer whose step is a push and a pull.

The optimizer object stays the same; its class becomes a subclass of its own class. Schedulers,
`GradScaler`, hooks and `zero_grad` work on it as before. What it sends is decided in `served.py`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from paramserve.pytorch.hyper import check_options, kind_of
from paramserve.pytorch.served import Served, Settings, Worker


class ServedOptimizer(Optimizer):
    """What adoption adds to a torch optimizer's class. Never built, only swapped in."""

    _served: Served
    _step_supports_amp_scaling = True
    """Tells `GradScaler` to hand over its scale and what it found, instead of not calling step."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients, pull the values; as `torch.optim.Optimizer.step` otherwise.

        In Sync it returns when all workers' gradients of this clock are applied. With
        `overlap=True` it returns after the push, with the values of the step before installed.

        Args:
            closure: computes the loss and the gradients again, and returns the loss.
        Returns:
            What `closure` returned.
        Raises:
            NonFinite: a gradient holds NaN or Inf. Nothing was applied.
            PushTimeout: no answer in time; the text names who is missing.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._served.step(
                self.param_groups,
                getattr(self, "grad_scale", None),
                getattr(self, "found_inf", None),
            )
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters from now on: all ranks call this at the same point.

        Rank 0's values define them, the other ranks wait for that.
        """
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            self._served.add_group(index, self.param_groups[index])
        except BaseException:
            del self.param_groups[index]
            raise

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the state fetched from the servers."""
        try:
            self.state.update(self._served.fetch_state(self.param_groups))
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's: each rank takes the hyper-parameters, rank 0 also writes the state.

        The other ranks do not wait for rank 0's write. In Sync no update comes before it.

        Raises:
            ValueError, TypeError: the state does not fit this optimizer. Nothing was stored.
        """
        for group in state_dict["param_groups"]:
            check_options(group)
        super().load_state_dict(state_dict)
        try:
            self._served.store_state(self.param_groups, self.state)
        finally:
            self.state.clear()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer from worker.optimizer is bound to its worker: it can be neither copied "
            "nor pickled. Use state_dict(), which a plain torch optimizer loads"
        )


def _served_class(kind: type[Optimizer]) -> type[ServedOptimizer]:
    return type(f"Served{kind.__name__}", (ServedOptimizer, kind), {"__module__": __name__})


def adopt(
    worker: Worker,
    model: torch.nn.Module,
    optimizer: Optimizer,
    *,
    name: str = "model",
    overlap: bool = False,
    weight: float | Callable[[], float] | None = None,
    clip_norm: float | None = None,
    buffers: str = "rank0",
) -> Optimizer:
    """Let `optimizer` step on the servers; rank 0's model defines the values on all ranks.

    All ranks call this at the same point. When it returns, the model has rank 0's values. State
    that the optimizer has already (from `load_state_dict`) goes to the servers, from rank 0.

    Args:
        model: its parameters and buffers make up the result, under their names in it.
        optimizer: of any torch.optim class but LBFGS and SparseAdam, of parameters in float32 or
            float64. SGD, Adam and AdamW are compiled; the others run as themselves on the servers.
        name: of the group on the servers; another one for each optimizer of a worker.
        overlap: return after the push, so that communication and the next gradient overlap. The
            gradients of step k then come from the values after step k - 2.
        weight: number of samples behind each gradient, or a function that tells it at each step;
            None: 1. It counts for `Sync(reduce="mean")`.
        clip_norm: clip to this global norm, in Sync the reduced gradient, in Async this worker's;
            None: no clipping.
        buffers: "rank0": rank 0's buffers (BatchNorm) are kept on the servers, assigned every few
            steps and at the end; "local": they are not sent.
    Returns:
        The same object.
    Raises:
        TypeError, ValueError: an argument is not supported. Nothing was defined.
        DefineTimeout: rank 0 did not define the model in time.
    """
    if isinstance(optimizer, ServedOptimizer):
        raise TypeError("this optimizer came from worker.optimizer already: keep using it")
    kind = kind_of(optimizer)
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    watched = _patched_by_scheduler(optimizer)
    settings = Settings(name, overlap, weight, clip_norm, buffers)
    served = Served(worker, model, kind, settings)
    served.start(optimizer.param_groups, optimizer.state)
    optimizer.state.clear()
    optimizer.__class__ = _served_class(type(optimizer))
    assert isinstance(optimizer, ServedOptimizer)
    optimizer._served = served
    optimizer._patch_step_function()
    if watched:
        _patch_for_scheduler(optimizer)
    return optimizer


def _patched_by_scheduler(optimizer: Optimizer) -> bool:
    """Whether a learning rate scheduler has put its own `step` on the instance.

    Raises:
        TypeError: somebody else has; adoption would silently go past it.
    """
    patched = vars(optimizer).get("step")
    if patched is None:
        return False
    # functools.wraps copies the mark of the scheduler's wrapper to wrappers around it.
    direct = getattr(patched, "__wrapped__", None) is type(optimizer).step
    if direct and getattr(patched, "_wrapped_by_lr_sched", False):
        return True
    raise TypeError(
        "optimizer.step was replaced on this instance by something else than a learning rate "
        "scheduler. Replace it after worker.optimizer, or use register_step_pre_hook"
    )


def _patch_for_scheduler(optimizer: ServedOptimizer) -> None:
    """Do again, for the new class, what torch's `LRScheduler` did to `step` for the old one.

    The scheduler's wrapper calls the old class's step. Source: torch 2.13,
    lr_scheduler.py, patch_track_step_called.
    """
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        target = reference()
        assert target is not None, "called through the optimizer"
        target._opt_called = True  # type: ignore[attr-defined]  # the scheduler's own mark
        return function(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # the scheduler's own mark
    optimizer.step = step  # type: ignore[method-assign]  # as torch does

"""`worker.optimizer`: a torch optimizer whose step is a push and a pull.

The optimizer object stays the same; its class becomes a subclass of its own class. Schedulers,
`GradScaler`, hooks and `zero_grad` work on it as before. What it sends is decided in `served.py`
where the servers make the steps, and in `local.py` where the worker makes them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import OWN_STEPS, ElasticAverage
from paramserve.errors import warn_user
from paramserve.pytorch.adopted import Adopted
from paramserve.pytorch.block import HALVES
from paramserve.pytorch.embedding import Rows
from paramserve.pytorch.hybrid import Hybrid
from paramserve.pytorch.hyper import check_optimizer, check_options
from paramserve.pytorch.loading import load_given
from paramserve.pytorch.local import Elastic, LocalStepping, local
from paramserve.pytorch.registry import Registry
from paramserve.pytorch.rule_optimizer import RuleOptimizer
from paramserve.pytorch.schedulers import check_schedulers
from paramserve.pytorch.served import Served
from paramserve.pytorch.settings import Settings
from paramserve.pytorch.tracking import look_for_unnamed, name_schedulers
from paramserve.rules.base import Rule
from paramserve.rules.torch_kinds import kind_of

if TYPE_CHECKING:
    from paramserve.consistency.base import Policy
    from paramserve.observe.history import StepRecord
    from paramserve.pytorch.codecs import Codecs
    from paramserve.training.host import Host


class AdoptedOptimizer(Optimizer):
    """What adoption adds to a torch optimizer's class. Never built, only swapped in."""

    _adopted: Adopted[Any]
    _step_supports_amp_scaling = True
    """Tells `GradScaler` to hand over its scale and what it found, instead of not calling step."""

    @property
    def last_step(self) -> StepRecord | None:
        """Outcome of this worker's last step: version, staleness, seconds waited, and whether
        its gradient was dropped. Asks no server. With `overlap=True` of the last one that was
        answered, with own steps of the last exchange; None: there was none yet."""
        return self._adopted.history.last

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train more parameters from now on: all ranks call this at the same point.

        Rank 0's values define them, the other ranks wait for that.
        """
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        try:
            self._adopted.add_group(index, self.param_groups[index])
        except BaseException:
            del self.param_groups[index]
            raise

    def state_dict(self) -> dict[str, Any]:
        """State as torch has it, without rows of tables that this optimizer was not given."""
        with self._adopted.tables.hidden():
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as torch's `load_state_dict`; see `state_dict`."""
        with self._adopted.tables.hidden(self._adopted.tables.left_out_of(state_dict)):
            super().load_state_dict(state_dict)

    def _forget_scale(self) -> None:
        """Forget the scale after an error. `GradScaler` takes its scale back only from a step that
        did not raise, and multiplies by what it finds at the next one."""
        for name in _SCALER:
            vars(self).pop(name, None)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "an optimizer from worker.optimizer is bound to its worker: it can be neither copied "
            "nor pickled. Use state_dict(), which a plain torch optimizer loads"
        )


def _copied(value: Any) -> Any:
    """A copy of a value of a state: of its tensors, and of what holds them."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value


def _is_same(value: Any, before: Any) -> bool:
    """Whether a value of a state is what it was, to the bit: NaN is NaN. A tensor's version does
    not tell: `.data` and numpy write without one."""
    if isinstance(value, Tensor) and isinstance(before, Tensor):
        alike = (value.shape, value.dtype) == (before.shape, before.dtype)
        return alike and torch.equal(_bits(value), _bits(before))
    if isinstance(value, dict) and isinstance(before, dict):
        return value.keys() == before.keys() and all(
            _is_same(each, before[key]) for key, each in value.items()
        )
    if isinstance(value, list) and isinstance(before, list):
        return len(value) == len(before) and all(map(_is_same, value, before))
    return value is before or (isinstance(value, int | float | str) and value == before)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().flatten().view(torch.uint8)


class FetchedState(MutableMapping[Tensor, dict[str, Any]]):
    """The `state` of an optimizer whose state is on the servers: a copy that is fetched when it is
    first looked at, and kept until the next step. A change of it is an error of that step."""

    def __init__(self, optimizer: ServedOptimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._copy: dict[Tensor, dict[str, Any]] = {}
        self._as_fetched: dict[Tensor, dict[str, Any]] = {}
        self.has_copy = False
        """Whether there is a copy."""

    def show(self, state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Be this state until the next step."""
        self.has_copy = True
        self._as_fetched = {param: dict(entry) for param, entry in state.items() if entry}
        self._copy = {param: _copied(entry) for param, entry in self._as_fetched.items()}

    def shown_state(self) -> dict[Tensor, dict[str, Any]]:
        """The copy; empty: there is none."""
        return self._copy

    def forget(self, state: object) -> None:
        """Give the copy up.

        Args:
            state: what the optimizer has as its `state`.
        Raises:
            RuntimeError: this was replaced, or the copy changed.
        """
        changed = state is not self or not self._is_as_fetched()
        self._copy, self._as_fetched, self.has_copy = {}, {}, False
        if changed:
            raise RuntimeError(
                "optimizer.state was changed, and it is a copy: the state lives on the servers. "
                "Applied: no. To fix: on all ranks at the same point take "
                "state = optimizer.state_dict(), change state['state'] (without a parameter's "
                "number its state begins anew), and call optimizer.load_state_dict(state)"
            )

    def _is_as_fetched(self) -> bool:
        present = {param: entry for param, entry in self._copy.items() if entry}
        return _is_same(present, self._as_fetched)

    def _fetched(self) -> dict[Tensor, dict[str, Any]]:
        optimizer = self._optimizer()
        if not self.has_copy and optimizer is not None:
            self.show(optimizer._adopted.fetch_state(optimizer.param_groups))
        return self._copy

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        return self._fetched().setdefault(param, {})  # as torch's, a defaultdict

    def __setitem__(self, param: Tensor, entry: dict[str, Any]) -> None:
        self._fetched()[param] = entry

    def __delitem__(self, param: Tensor) -> None:
        del self._fetched()[param]

    def __contains__(self, param: object) -> bool:
        return param in self._fetched()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._fetched())

    def __len__(self) -> int:
        return len(self._fetched())


class ServedOptimizer(AdoptedOptimizer):
    """The servers make the steps."""

    _adopted: Served
    _fetched: Any
    """The `FetchedState` that is `state`, but while torch saves or loads; torch's types know
    another class."""

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
        if _is_for_a_checkpoint(self.param_groups):
            self._fetched.show(self._adopted.first_state(self.param_groups))
            return loss
        if self._adopted.unnamed:
            look_for_unnamed(self._adopted, self)
        try:
            if self._fetched.has_copy or self.state is not self._fetched:
                self._forget_state()
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
                self._forget_state()  # it may have looked at it
            with torch.no_grad():
                self._adopted.step(
                    self.param_groups,
                    getattr(self, "grad_scale", None),
                    getattr(self, "found_inf", None),
                )
        except BaseException:
            self._forget_scale()
            raise
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State as torch's `state_dict`, with the arrays fetched from the servers.

        Raises:
            RuntimeError: `state` was changed since the last step. The servers' is as it was.
        """
        first = self._fetched.shown_state()  # as `step` has shown it for a checkpoint
        self._forget_state()
        try:
            fetched = self._adopted.fetch_state(self.param_groups) or first
            self.state = fetched  # type: ignore[assignment]  # of the same form
            return super().state_dict()
        finally:
            self.state = self._fetched

    def _forget_state(self) -> None:
        """Give up the copy of the state that was looked at. Raises as `state_dict`."""
        state, self.state = self.state, self._fetched
        self._fetched.forget(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: each rank takes the hyper-parameters, rank 0 also writes the state.

        The other ranks do not wait for rank 0's write. In Sync no update comes before it. Under
        other policies call `worker.barrier()` before and after this, or load the state before
        `worker.optimizer`, where no rank steps before rank 0 has stored it.

        Raises:
            ValueError, TypeError, KeyError: the state does not fit this optimizer. Nothing was
                stored, and the hyper-parameters are as they were.
        """
        self._forget_state()
        before = self.param_groups
        try:
            super().load_state_dict(state_dict)
            for group in self.param_groups:
                check_options(group)
            self._adopted.store_state(self.param_groups, self.state)
        except BaseException:
            self.param_groups = before
            raise
        finally:
            self.state = self._fetched


class LocalOptimizer(AdoptedOptimizer):
    """The worker makes the steps, and exchanges after some of them. Its state is torch's own."""

    _adopted: LocalStepping | Elastic | Hybrid

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients as torch does, and drop rows that an interrupted step has left aside."""
        self._adopted.tables.bring_back()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's own step; after each `every` of them the exchange with the servers.

        A step that `GradScaler` leaves out counts as one.

        Returns:
            What the own step returned.
        Raises:
            NonFinite: at an exchange, this worker's values hold NaN or Inf. The own step was made,
                nothing was sent.
            ValueError: ElasticAverage: lr * rho is not below 1. As above.
            PushTimeout: no answer in time; the text names who is missing.
        """
        own: Any = super().step
        function = own.__func__
        if getattr(function, "hooked", False):
            # The step hooks have this class's step around them: they would be called twice.
            function = function.__wrapped__
        grad_scale, found_inf = (getattr(self, name, None) for name in _SCALER)

        def own_step(evaluate: Callable[[], Any] | None) -> Any:
            # A fused step would divide by the scale again, others refuse to see it.
            scaler = {name: vars(self).pop(name) for name in _SCALER if name in vars(self)}
            try:
                return function(self) if evaluate is None else function(self, evaluate)
            finally:
                vars(self).update(scaler)

        if _is_for_a_checkpoint(self.param_groups):
            return own_step(closure)  # it makes the state, and is no step of the training
        if self._adopted.unnamed:
            look_for_unnamed(self._adopted, self)
        try:
            return self._adopted.run(own_step, closure, self.param_groups, grad_scale, found_inf)
        except BaseException:
            self._forget_scale()
            raise


_SCALER = ("grad_scale", "found_inf")
"""What `GradScaler` puts on the optimizer for the time of a step."""


_CHECKPOINTING = ("torch.distributed.checkpoint.state_dict", "_init_optim_state")
"""Module and name of the function of torch's that makes a step so that there is a state."""
_FRAMES_MAX = 8
"""Calls between it and our step: torch's wrapper for hooks, a scheduler's, and a user's own."""


def _is_for_a_checkpoint(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether this step only makes a state, for `torch.distributed.checkpoint`.

    Its functions call `step()`, with all gradients zero and all learning rates set to zero, of an
    optimizer that has no `state` here: sent, that would be a step of the training.
    Source: torch 2.13, distributed/checkpoint/state_dict.py, _init_optim_state.
    """
    if not groups or groups[0].get("lr") or _CHECKPOINTING[0] not in sys.modules:
        return False
    frame: Any = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        frame = frame.f_back
        if frame is None:
            return False
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == _CHECKPOINTING:
            return True
    return False


def import_all() -> None:
    """Have torch import what it imports for the first optimizer of a process: its compiler, which
    takes a second of processor time."""
    torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.1)


def _adopted_class(kind: type[Optimizer], base: type[AdoptedOptimizer]) -> type[AdoptedOptimizer]:
    prefix = base.__name__.removesuffix("Optimizer")
    return type(f"{prefix}{kind.__name__}", (base, kind), {"__module__": __name__})


def adopt(
    worker: Host,
    model: torch.nn.Module,
    optimizer_or_rule: Optimizer | Rule,
    *,
    name: str = "model",
    overlap: bool = False,
    weight: float | Callable[[], float] | None = None,
    clip_norm: float | None = None,
    buffers: str = "rank0",
    consistency: Policy | None = None,
    dense: str = "servers",
    push: Codecs | None = None,
    pull: Codecs | None = None,
    schedulers: Sequence[Any] = (),
) -> Optimizer:
    """See `Worker.optimizer`."""
    optimizer = _as_optimizer(model, optimizer_or_rule)
    model = _checked(model, optimizer, dense)
    check_schedulers(optimizer, schedulers)
    settings = Settings(name, overlap, weight, clip_norm, buffers, consistency, push, pull)
    load_given(worker, name, model)
    with Registry.of(worker).adopting():
        adopted = _started(worker, model, optimizer, settings, dense)
    _become(optimizer, adopted)
    name_schedulers(adopted, schedulers)
    if adopted.late:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler's mark: it was
    worker.go_on_drawing(first=True)
    return optimizer


def _as_optimizer(model: torch.nn.Module, optimizer_or_rule: Optimizer | Rule) -> Optimizer:
    """The optimizer itself, or one of all parameters of the model with this rule.

    Raises:
        TypeError, ValueError: it can be neither.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    rule: object = optimizer_or_rule
    if isinstance(rule, Rule) and not isinstance(rule, type):
        params = list(model.parameters())
        dense = [param for param in params if not isinstance(param, Rows)]
        return RuleOptimizer(dense or params, rule)
    return check_optimizer(optimizer_or_rule)


def _checked(model: torch.nn.Module, optimizer: Optimizer, dense: str) -> torch.nn.Module:
    """The model without a wrapper of torch's.

    Raises:
        TypeError, ValueError: it cannot be adopted.
    """
    if isinstance(optimizer, AdoptedOptimizer):
        raise TypeError("this optimizer came from worker.optimizer already: keep using it")
    _patched_by_scheduler(optimizer)
    if dense not in ("servers", "local"):
        raise ValueError(f'dense must be "servers" or "local", not {dense!r}')
    if not isinstance(model, DistributedDataParallel):
        return model
    if dense == "servers":
        raise ValueError(
            "the model is wrapped in DistributedDataParallel, which averages the gradients, and "
            'the servers would do so again: give the model itself, or dense="local"'
        )
    inner: torch.nn.Module = model.module
    return inner


def _started(
    worker: Host, model: torch.nn.Module, optimizer: Optimizer, settings: Settings, dense: str
) -> Served | LocalStepping | Elastic | Hybrid:
    """What steps from now on: it has defined the model, and taken over the optimizer's state."""
    policy = settings.consistency
    if policy is None:
        policy = worker.client.steps.terms(settings.name).policy
    steps_itself = dense == "local" or isinstance(policy, OWN_STEPS)
    coded = settings.push is not None or settings.pull is not None
    if coded and (dense == "local" or isinstance(policy, ElasticAverage)):
        who = 'dense="local"' if dense == "local" else type(policy).__name__
        raise ValueError(
            f"push and pull encode gradients, or what own steps have changed, and the values that "
            f"come back; with {who} no such thing is sent: leave them out"
        )
    if steps_itself and isinstance(optimizer, RuleOptimizer):
        who = 'dense="local"' if dense == "local" else type(policy).__name__
        raise TypeError(
            f"with {who} the worker makes the steps, and {optimizer.rule.name} is a rule that runs "
            "on the servers: give a torch optimizer"
        )
    if dense == "local":
        hybrid = Hybrid(worker, model, settings)
        hybrid.start(optimizer.param_groups, optimizer.state)
        return hybrid
    if isinstance(policy, OWN_STEPS):
        _check_halves(optimizer, policy, worker.rank)
        own = local(worker, model, settings, policy)
        own.start(optimizer.param_groups, optimizer.state)
        return own
    _check_dense(model, optimizer)
    kind = optimizer.kind() if isinstance(optimizer, RuleOptimizer) else kind_of(optimizer)
    served = Served(worker, model, kind, settings)
    served.start(optimizer.param_groups, optimizer.state)
    return served


def _check_dense(model: torch.nn.Module, optimizer: Optimizer) -> None:
    """Refuse embeddings whose gradients are sparse, which the servers' rules do not take.

    Raises:
        TypeError: the optimizer has one. Nothing was defined.
    """
    stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
    for name, module in model.named_modules():
        kinds = torch.nn.Embedding | torch.nn.EmbeddingBag
        if isinstance(module, kinds) and module.sparse and id(module.weight) in stepped:
            raise TypeError(
                f"module {name!r} is a {type(module).__name__} with sparse=True, and the servers "
                "take dense gradients. Applied: no. To fix: build it with sparse=False; one too "
                "large for that becomes a table: "
                "paramserve.pytorch.from_embedding(worker.client, name, module, rule=...)"
            )


def _check_halves(optimizer: Optimizer, policy: Policy, rank: int) -> None:
    """Refuse or warn of 16-bit parameters that the worker steps by itself, without masters.

    Raises:
        TypeError: the policy moves values by small parts of a distance. Nothing was defined.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    halves = [each.dtype for each in params if each.requires_grad and each.dtype in HALVES]
    if not halves:
        return
    if isinstance(policy, ElasticAverage):
        raise TypeError(
            f"with ElasticAverage the values move by lr * rho of their distance from the servers', "
            f"and in {halves[0]} most of these moves are below half a step of 16 bits and would be "
            "lost. Keep what is trained in float32 (model.float()), and use torch.autocast"
        )
    if rank == 0:
        warn_user(
            f"with {type(policy).__name__} the worker's own optimizer makes the steps in "
            f"{halves[0]}, as with torch alone: updates below half a step of 16 bits are lost. "
            "What the steps have changed adds up in float32 on the servers. Where the loss stops "
            "falling, keep what is trained in float32 (model.float()), and use torch.autocast"
        )


def _become(optimizer: Optimizer, adopted: Served | LocalStepping | Elastic | Hybrid) -> None:
    """Swap the class of `optimizer` for one that steps with `adopted`."""
    watched = _patched_by_scheduler(optimizer)
    base = ServedOptimizer if isinstance(adopted, Served) else LocalOptimizer
    optimizer.__class__ = _adopted_class(type(optimizer), base)
    assert isinstance(optimizer, AdoptedOptimizer)
    optimizer._adopted = adopted
    if isinstance(optimizer, ServedOptimizer):
        optimizer._fetched = FetchedState(optimizer)
        optimizer.state = optimizer._fetched
    if isinstance(adopted, LocalStepping | Elastic):
        adopted.optimizer = weakref.ref(optimizer)
    optimizer._patch_step_function()
    if watched:
        _patch_for_scheduler(optimizer)


def _patched_by_scheduler(optimizer: Optimizer) -> bool:
    """Whether a learning rate scheduler has put its own `step` on the instance.

    Raises:
        TypeError: other code has; adoption would silently bypass it.
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


def _patch_for_scheduler(optimizer: AdoptedOptimizer) -> None:
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

"""An optimizer's state in torch's layout, fetched from the servers and stored on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from paramserve.messages import VALUE
from paramserve.pytorch.block import Layout, kept_dtype
from paramserve.rules.nadam import NAdam
from paramserve.rules.sgd import SGD
from paramserve.rules.torch_rule import StateTensor, TorchRule

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block
    from paramserve.rules.base import Rule

State = dict[Tensor, dict[str, Any]]
STEP = "step"
"""Torch's word for a parameter's update count; its SGD keeps none."""
PRODUCT = "mu_product"
"""Torch's NAdam keeps it beside the count, from which it follows."""


def _state_forms(rule: Rule, param: Tensor) -> dict[str, StateTensor]:
    """What torch keeps of a parameter with this rule, by name, in its order."""
    shape = tuple(param.shape)
    if isinstance(rule, TorchRule):
        return dict(rule.state_of(shape))
    tensors = {name: StateTensor(shape, None) for _, name in _fields(rule)}
    if isinstance(rule, SGD):
        return tensors
    number = StateTensor((), _step_dtype())
    counted = {STEP: number, PRODUCT: number} if isinstance(rule, NAdam) else {STEP: number}
    return counted | tensors


def _number(rule: Rule, name: str, count: int) -> float:
    """What follows from a parameter's update count, though torch keeps it beside that."""
    return rule.product(count) if name == PRODUCT and isinstance(rule, NAdam) else float(count)


def _scalar(number: float, form: StateTensor) -> Tensor:
    return torch.tensor(number, dtype=form.dtype, device="cpu")


def _fields(rule: Rule) -> Iterable[tuple[int, str]]:
    """Number and name of each state array that the rule has with its hyper-parameters."""
    return enumerate(rule.states(rule.hyper()), VALUE + 1)


def _step_dtype() -> torch.dtype:
    """Dtype of step counts as torch.optim chooses it: float64 only where that is the default."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


Fetch = Callable[[int], tuple[npt.NDArray[Any], tuple[int, ...]]]
"""Gives a state array of a block by its number, and the update counts of its parameters."""


def fetch(read: Fetch, layout: Layout, rule: Rule) -> State:
    """State of each parameter that has had an update, as torch would hold it."""
    arrays, counts = {}, (0,) * len(layout.params)
    for number, name in _fields(rule):
        arrays[name], counts = read(number)
    views = {name: layout.views(torch.from_numpy(array)) for name, array in arrays.items()}
    state: State = {}
    for index, (param, count) in enumerate(zip(layout.params, counts, strict=True)):
        entry: dict[str, Any] = {}
        if count:
            for name, form in _state_forms(rule, param).items():
                if name in (STEP, PRODUCT) and not isinstance(rule, TorchRule):
                    entry[name] = _scalar(_number(rule, name, count), form)
                elif name == STEP:
                    entry[name] = _scalar(float(count), form)
                else:
                    value = _as_torch_keeps(views[name][index], form, param)
                    if isinstance(rule, SGD) and value is not None and _unused(rule, value):
                        continue
                    entry[name] = value if value is not None else first(rule, param)[name]
        elif isinstance(rule, TorchRule):
            entry = rule.first(param.to(layout.kept_dtype))
        if entry:
            state[param] = entry
    return state


def _unused(rule: SGD, buffer: Tensor) -> bool:
    """Whether torch may have no buffer, as before the first step with a momentum. Where zeros and
    no buffer go on alike they are left out; with dampening they do not."""
    return not (rule.dampening and rule.momentum) and not buffer.any()


def first(rule: Rule, param: Tensor) -> dict[str, Any]:
    """A state of a parameter that has had no update, in the form that torch keeps it.

    Of a class that runs as itself it is the one after a step without a gradient, as torch makes
    it: some of its numbers do not begin at zero.
    """
    if isinstance(rule, TorchRule):
        value = torch.zeros_like(param, dtype=kept_dtype(param.dtype))
        value.grad = torch.zeros_like(value)
        optimizer = rule.optimizer([value], rule.hyper())
        with torch.device("cpu"):
            optimizer.step()
        return dict(optimizer.state[value])
    zeros = torch.zeros_like(param, dtype=kept_dtype(param.dtype))
    return {
        name: _scalar(_number(rule, name, 0), form) if name in (STEP, PRODUCT) else zeros.clone()
        for name, form in _state_forms(rule, param).items()
    }


def _as_torch_keeps(view: Tensor, form: StateTensor, param: Tensor) -> Tensor | None:
    """A state of a parameter from the elements that lie beside it on the servers, if any do."""
    dtype = form.dtype if form.dtype is not None else kept_dtype(param.dtype)
    if form.shape == tuple(param.shape):
        return torch.empty_like(param, dtype=dtype).copy_(view)
    if not view.numel():
        return None  # a number, and there is no element that it could lie beside
    leading = view.reshape(-1)[: prod(form.shape)].view(form.shape)
    return leading.to(dtype, copy=True)


class Field(NamedTuple):
    """One state array of a block, ready to be stored."""

    number: int
    values: Tensor
    counts: tuple[int, ...]

    def store(self, client: Client, block: Block) -> None:
        """Overwrite the array and the update counts on the servers."""
        client.dense.store(block, self.number, self.values.numpy(), counts=self.counts)


def prepare(layout: Layout, rule: Rule, state: Mapping[Tensor, Any]) -> list[Field]:
    """The state arrays of a block from torch's state; a parameter without state starts anew, with
    the first values of its rule.

    Raises:
        ValueError: the state belongs to another kind of optimizer, or has another shape.
    """
    entries = [state.get(param) or {} for param in layout.params]
    fields = []
    size = sum(param.numel() for param in layout.params)
    first_values = rule.init_state(size, layout.array_dtype)
    for (number, field), values in zip(_fields(rule), first_values, strict=True):
        flat = torch.from_numpy(values)
        views = layout.views(flat)
        for name, param, view, entry in zip(
            layout.names, layout.params, views, entries, strict=True
        ):
            form = _state_forms(rule, param).get(field)
            value = None if form is None else _checked(name, entry, field, form)
            if value is None or form is None:
                continue
            if form.shape == ():
                view.fill_(float(value))  # as `TorchRule` keeps it
            else:
                view.reshape(-1)[: value.numel()].copy_(value.reshape(-1))
        fields.append(Field(number, flat, tuple(_count(entry) for entry in entries)))
    return fields


def _checked(name: str, entry: dict[str, Any], field: str, form: StateTensor) -> Tensor | None:
    if not entry:
        return None
    if field not in entry:
        raise ValueError(
            f"the loaded state of {name!r} has {', '.join(entry)} but no {field}: it belongs to "
            "another kind of optimizer"
        )
    value: Tensor | None = entry[field]
    if value is not None and tuple(value.shape) != form.shape:
        raise ValueError(
            f"the loaded {field} of {name!r} has shape {tuple(value.shape)}, it should have "
            f"{form.shape}"
        )
    return value


def _count(entry: dict[str, Any]) -> int:
    """Updates behind a state: SGD's and Muon's tell only whether there was one."""
    if STEP in entry:
        return int(entry[STEP])
    return int(any(value is not None for value in entry.values()))

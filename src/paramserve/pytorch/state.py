"""An optimizer's state in torch's layout, fetched from the servers and stored on them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from paramserve.messages import VALUE
from paramserve.pytorch.layout import Layout

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block
    from paramserve.rules.base import Rule

State = dict[Tensor, dict[str, Any]]
STEP = "step"
"""Torch's word for a parameter's update count; its SGD keeps none."""


def _fields(rule: Rule) -> Iterable[tuple[int, str]]:
    """Number and name of each state array that the rule has with its hyper-parameters."""
    return enumerate(rule.states(rule.hyper()), VALUE + 1)


def _step_dtype() -> torch.dtype:
    """As torch.optim chooses it: float64 only where that is the default."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def fetch(client: Client, block: Block, layout: Layout, rule: Rule) -> State:
    """State of each parameter that has had an update, as torch would hold it."""
    state: State = {}
    for number, name in _fields(rule):
        array, counts = client.fetch(block, number)
        views = layout.views(torch.from_numpy(array))
        for param, view, count in zip(layout.params, views, counts, strict=True):
            if count:
                entry = state.setdefault(param, {})
                if name != "momentum_buffer":
                    entry.setdefault(STEP, torch.tensor(float(count), dtype=_step_dtype()))
                entry[name] = torch.empty_like(param).copy_(view)
    return state


class Field(NamedTuple):
    """One state array of a block, ready to be stored."""

    number: int
    values: Tensor
    counts: tuple[int, ...]

    def store(self, client: Client, block: Block) -> None:
        """Overwrite the array and the update counts on the servers."""
        client.store(block, self.number, self.values.numpy(), counts=self.counts)


def prepare(layout: Layout, rule: Rule, state: Mapping[Tensor, Any]) -> list[Field]:
    """The state arrays of a block from torch's state; a parameter without state starts anew.

    Raises:
        ValueError: the state belongs to another kind of optimizer, or has another shape.
    """
    entries = [state.get(param) or {} for param in layout.params]
    fields = []
    for number, field in _fields(rule):
        flat = torch.zeros(sum(param.numel() for param in layout.params), dtype=layout.dtype)
        views = layout.views(flat)
        for name, view, entry in zip(layout.names, views, entries, strict=True):
            value = _checked(name, entry, field, view)
            if value is not None:
                view.copy_(value)
        fields.append(Field(number, flat, tuple(_count(entry, field) for entry in entries)))
    return fields


def _checked(name: str, entry: dict[str, Any], field: str, view: Tensor) -> Tensor | None:
    if not entry:
        return None
    if field not in entry:
        raise ValueError(
            f"the loaded state of {name!r} has {', '.join(entry)} but no {field}: it belongs to "
            "another kind of optimizer"
        )
    value: Tensor | None = entry[field]
    if value is not None and value.shape != view.shape:
        raise ValueError(
            f"the loaded {field} of {name!r} has shape {tuple(value.shape)}, the parameter has "
            f"{tuple(view.shape)}"
        )
    return value


def _count(entry: dict[str, Any], field: str) -> int:
    """Updates behind a state: SGD's tells only whether there was one."""
    if STEP in entry:
        return int(entry[STEP])
    return int(entry.get(field) is not None)

"""Which tensors of a model go into which block, and under which name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserve.pytorch.rows import Rows

Array = npt.NDArray[Any]

TRAINED = (torch.float32, torch.float64)
"""What the rules update."""
_SHARES_WORK_MAX = 100_000
"""Candidates that numpy tries before views that are hard to tell apart count as overlapping."""


class Layout(NamedTuple):
    """One block to be: tensors of one parameter group and dtype, end to end in this order."""

    group: int
    """Index of the parameter group."""
    dtype: torch.dtype
    names: tuple[str, ...]
    params: tuple[Tensor, ...]

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """The dtype in numpy's words."""
        return torch.empty(0, dtype=self.dtype).numpy().dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name, in order."""
        return {
            name: tuple(param.shape) for name, param in zip(self.names, self.params, strict=True)
        }

    def values(self) -> dict[str, Array]:
        """Present value of each tensor by name, in order, on the CPU."""
        return {
            name: param.detach().cpu().contiguous().numpy()
            for name, param in zip(self.names, self.params, strict=True)
        }

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor [size of the block] as one tensor of each parameter's shape."""
        return split(flat, [tuple(param.shape) for param in self.params])


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """View a flat tensor as tensors of these shapes, laid end to end."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _members(model: torch.nn.Module) -> Iterable[tuple[str, Tensor]]:
    for name, param in model.named_parameters(remove_duplicate=False):
        if not isinstance(param, Rows):
            yield name, param
    yield from model.named_buffers(remove_duplicate=False)


def alias_map(model: torch.nn.Module) -> dict[str, str]:
    """For tied tensors: each further name with the first one, which is the name on the servers."""
    first: dict[int, str] = {}
    aliases = {}
    for name, tensor in _members(model):
        canonical = first.setdefault(id(tensor), name)
        if canonical != name:
            aliases[name] = canonical
    return aliases


def names_of(model: torch.nn.Module) -> dict[int, str]:
    """The name of each parameter by its `id`; a tied one has its first name."""
    return {id(param): name for name, param in model.named_parameters()}


def lay_out(names: dict[int, str], index: int, params: Sequence[Tensor]) -> list[Layout]:
    """Split a parameter group into blocks, one for each dtype.

    A parameter that the model does not have is called `extra.<group>.<place in the group>`.

    Args:
        names: from `names_of`.
        index: of the parameter group.
    Raises:
        TypeError: a parameter's dtype or kind is not supported.
    """
    named = [(names.get(id(p), f"extra.{index}.{i}"), p) for i, p in enumerate(params)]
    for name, param in named:
        _check(name, param)
    layouts = []
    for dtype in TRAINED:
        chosen = [(name, param) for name, param in named if param.dtype == dtype]
        if chosen:
            block_names, block_params = zip(*chosen, strict=True)
            layouts.append(Layout(index, dtype, block_names, block_params))
    return layouts


def sharing(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors that have memory in common, by their places in `named`, the first first."""
    spans = sorted(
        (str(param.device), *_span(param), place)
        for place, (_, param) in enumerate(named)
        if param.numel()
    )
    before: list[tuple[str, int, int]] = []
    for device, start, stop, place in spans:
        before = [each for each in before if each[0] == device and each[1] > start]
        for _, _, other in before:
            if _meet(named[other][1], named[place][1]):
                yield min(place, other), max(place, other)
        before.append((device, stop, place))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def _meet(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors whose spans overlap have an element in common."""
    if first.device.type != "cpu":
        return True
    try:
        arrays = first.detach().numpy(), second.detach().numpy()
        limit: Any = _SHARES_WORK_MAX  # numpy's types know of two special ones only
        return bool(np.shares_memory(*arrays, max_work=limit))
    except np.exceptions.TooHardError:
        return True


def _check(name: str, param: Tensor) -> None:
    if torch.nn.parameter.is_lazy(param):
        raise TypeError(
            f"parameter {name!r} has no shape yet: run the lazy model on one batch before "
            "worker.optimizer"
        )
    if param.is_meta or param.layout is not torch.strided:
        raise TypeError(
            f"parameter {name!r} is on the meta device or sparse: only dense parameters with "
            "values can be defined"
        )
    if param.dtype not in TRAINED:
        raise TypeError(
            f"parameter {name!r} is {param.dtype}; the servers update float32 and float64. "
            "Keep the parameters in float32 (model.float()) and use torch.autocast for lower "
            "precision"
        )


class Views:
    """A block's tensors within flat arrays, made once for each place in memory.

    Slots circulate between a client and its servers, each with one array: a step sees one of a
    few, so the views of the last ones are kept, and the arrays with them.
    """

    _KEPT_MAX = 16

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: dict[int, tuple[Array, Tensor, list[Tensor]]] = {}
        """By the array's identity; it is kept too, so that no other can have the same."""

    def of(self, array: Array) -> tuple[Tensor, list[Tensor]]:
        """The array [size of the block] as one tensor, and as one tensor of each shape."""
        found = self._kept.get(id(array))
        if found is None:
            if len(self._kept) >= self._KEPT_MAX:
                self._kept.clear()
            flat = torch.from_numpy(array)
            found = self._kept[id(array)] = (array, flat, self._layout.views(flat))
        return found[1], found[2]

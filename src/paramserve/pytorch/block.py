"""One block of an adopted optimizer: its parameters here, and what goes to and from the servers.

A `Layout` says how the parameters of one dtype lie one after the other in a flat array.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paramserve.client import BlockPush
from paramserve.pytorch.hyper import HyperReader
from paramserve.rules.torch_kinds import ParamGroup

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.codecs.base import Codec
    from paramserve.core.partition import Block
    from paramserve.pytorch.naming import Names


Array = npt.NDArray[Any]

HALVES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
"""Dtypes of parameters for which the servers keep float32, in their words (`BlockSpec.half`)."""
TRAINED = (torch.float32, torch.float64, *HALVES)
"""What the servers train."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by the bytes of an element."""
_SHARES_WORK_MAX = 100_000
"""Candidates that numpy tries before views that are hard to tell apart count as overlapping."""


class Layout(NamedTuple):
    """One block to be: tensors of one parameter group and dtype, and with the same codecs, end to
    end in this order."""

    group: int
    """Index of the parameter group."""
    dtype: torch.dtype
    names: tuple[str, ...]
    params: tuple[Tensor, ...]
    push: Codec | None = None
    """How its gradients are encoded between hosts."""
    pull: Codec | None = None
    """Codec of the layout's values."""

    @property
    def half(self) -> str | None:
        """Dtype of 16-bit values; see `BlockSpec.half`."""
        return HALVES.get(self.dtype)

    @property
    def kept_dtype(self) -> torch.dtype:
        """Dtype in which the servers keep values and state."""
        return kept_dtype(self.dtype)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype in numpy's words."""
        return torch.empty(0, dtype=self.kept_dtype, device="cpu").numpy().dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor by name, in order."""
        return {
            name: tuple(param.shape) for name, param in zip(self.names, self.params, strict=True)
        }

    def values(self) -> dict[str, Any]:
        """Present value of each tensor by name, in order, on the CPU."""
        values = {
            name: param.detach().cpu().contiguous()
            for name, param in zip(self.names, self.params, strict=True)
        }
        if self.half is not None:
            return values  # numpy has no bfloat16
        return {name: value.numpy() for name, value in values.items()}

    def only(self, names: Sequence[str]) -> Layout:
        """Layout of some of its tensors, in this order."""
        by_name = dict(zip(self.names, self.params, strict=True))
        return self._replace(names=tuple(names), params=tuple(by_name[each] for each in names))

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor [size of the block] as one tensor of each parameter's shape."""
        return split(flat, [tuple(param.shape) for param in self.params])


def kept_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which the servers keep what a model has in this dtype."""
    return torch.float32 if dtype in HALVES else dtype


def as_tensor(array: Array, dtype: torch.dtype) -> Tensor:
    """An array of this dtype as a tensor in its memory; of 16 bits, one of the bits."""
    if dtype in HALVES:
        return torch.from_numpy(array.view(np.int16)).view(dtype)
    return torch.from_numpy(array)


def split(flat: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """View a flat tensor as tensors of these shapes, laid end to end."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def lay_out(
    names: Names, index: int, params: Sequence[Tensor], left_out: Collection[int] = ()
) -> list[Layout]:
    """Split a parameter group into blocks, one for each dtype.

    Args:
        names: of the model.
        index: of the parameter group.
        left_out: ids of parameters that are in none of them.
    Raises:
        TypeError: a parameter's dtype or kind is not supported.
    """
    named = [
        (names.of_optimizer(index, i, p), p) for i, p in enumerate(params) if id(p) not in left_out
    ]
    for name, param in named:
        _check(name, param)
    layouts = []
    for dtype in TRAINED:
        same_dtype = [(name, param) for name, param in named if param.dtype == dtype]
        if same_dtype:
            block_names, block_params = zip(*same_dtype, strict=True)
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
        arrays = _bits(first).numpy(), _bits(second).numpy()
        limit: Any = _SHARES_WORK_MAX  # numpy's types know of two special ones only
        return bool(np.shares_memory(*arrays, max_work=limit))
    except np.exceptions.TooHardError:
        return True


def _bits(tensor: Tensor) -> Tensor:
    """The tensor, of 16 bits as integers, which numpy has."""
    tensor = tensor.detach()
    return tensor.view(torch.int16) if tensor.dtype in HALVES else tensor


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
            f"parameter {name!r} is {param.dtype}; the servers train float32 and float64, and "
            "bfloat16 and float16 with float32 masters. Keep what is trained in one of these; what "
            "is frozen (requires_grad=False) may be of any dtype"
        )


def check_unscalable(layout: Layout) -> None:
    """Refuse to unscale gradients of a block.

    Raises:
        TypeError: they are float16.
    """
    if layout.dtype == torch.float16:
        raise TypeError(
            f"parameter {layout.names[0]!r} is float16, and GradScaler does not unscale gradients "
            "of float16: small ones would be lost, and torch refuses it too. Train in bfloat16, "
            "which needs no scaling, or in float32 with torch.autocast"
        )


class Views:
    """A block's tensors within flat arrays, made once for each place in memory.

    Slots circulate between a client and its servers, each with one array: a step sees one of a
    few, so the views of the last ones are kept, and the arrays with them.
    """

    _KEPT_MAX = 16

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._views: dict[int, tuple[Array, Tensor, list[Tensor]]] = {}
        """Views by the array's identity; it is kept too, so that no other can have the same."""

    def of(self, array: Array) -> tuple[Tensor, list[Tensor]]:
        """The array [size of the block] as one tensor, and as one tensor of each shape."""
        entry = self._views.get(id(array))
        if entry is None:
            if len(self._views) >= self._KEPT_MAX:
                self._views.clear()
            flat = as_tensor(array, self._layout.dtype)
            entry = self._views[id(array)] = (array, flat, self._layout.views(flat))
        return entry[1], entry[2]


class AdoptedBlock:
    """The parameters of one block on this worker, and the block on the servers.

    Called under `torch.no_grad()`. Values are copied into the parameters with torch, in place, so
    any device and stride works and autograd notices.
    """

    def __init__(self, block: Block, layout: Layout) -> None:
        self.block = block
        self.layout = layout
        self.group: int | None = layout.group
        """Index of the parameter group that these parameters are in now; None: in none."""
        self.present: tuple[bool, ...] | None = None
        """Presence of each parameter; None: all are in it."""
        self._params = list(layout.params)
        self._views = Views(layout)

    def values(self) -> Array:
        """The parameters' present values [size], as the servers keep them."""
        dtype = self.layout.kept_dtype
        flat = [param.detach().to("cpu", dtype).flatten() for param in self._params]
        return torch.cat(flat).numpy()

    def scatter(self, values: npt.NDArray[Any]) -> None:
        """Copy the block's values [size] into the parameters."""
        torch._foreach_copy_(self._params, self._views.of(values)[1])

    def is_finite(self) -> bool:
        """Whether no parameter holds NaN or Inf."""
        return all(bool(torch.isfinite(param).all()) for param in self._params)


class Sample:
    """Elements of some parameters of one dtype, for comparing them with what they were.

    All elements, or of many every k-th: looking must stay cheap beside a step.
    """

    LOOKED_AT_MAX = 16_384

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._every = sum(param.numel() for param in params) // self.LOOKED_AT_MAX + 1
        self._every |= 1  # odd, so that it goes through all columns of most matrices
        self._places: list[int] = []
        self._forms: list[tuple[torch.dtype, tuple[int, ...]]] = []
        self._views: list[Tensor] = []
        self._apart = False
        """Whether they are on several devices."""
        self.snapshot: Tensor | None = None
        """The elements when `take` was called; None: there is nothing to compare with."""

    def take(self) -> None:
        """Remember the elements as they are."""
        self.snapshot = self._bits()

    def changed(self) -> list[int]:
        """The places of parameters that have other values than when `take` was called."""
        if self.snapshot is None:
            return []
        forms = self._forms
        bits = self._bits()
        if forms != self._forms:
            return []  # another dtype or memory format: other bits, or in another order
        before = self.snapshot.to(bits.device)
        if torch.equal(bits, before):
            return []
        sizes = [view.numel() for view in self._views]
        pairs = zip(torch.split(bits, sizes), torch.split(before, sizes), strict=True)
        return [i for i, (now, then) in enumerate(pairs) if not torch.equal(now, then)]

    def _bits(self) -> Tensor:
        """The elements in one tensor of integers: equal for equal NaN, other for -0.0 and 0.0."""
        places = [param.data_ptr() for param in self._params]
        if places != self._places:
            self._places = places
            self._forms = [(param.dtype, param.stride()) for param in self._params]
            self._views = [
                _in_memory_order(param).view(INTEGERS[param.itemsize])[:: self._every]
                for param in self._params
            ]
            self._apart = len({view.device for view in self._views}) > 1
        views = [view.cpu() for view in self._views] if self._apart else self._views
        return torch.cat(views)


def _in_memory_order(param: Tensor) -> Tensor:
    """A view [n] of a parameter's elements, for `Sample`; of one with gaps between them only its
    first row: a sample need not have all."""
    strides = param.stride()
    order = sorted(range(param.ndim), key=lambda axis: -strides[axis])
    ordered = param.detach().permute(order)
    if ordered.is_contiguous():
        return ordered.view(-1)
    return ordered[(0,) * (param.ndim - 1)]


class ServedBlock(AdoptedBlock):
    """A block whose gradients are pushed, and whose values only the servers change.

    Attributes:
        watches: `changed_outside` will be asked. It compares a `Sample` of the values: what torch
            counts misses writes through `.data`, and counts values that were put back, as SAM does.
    """

    def __init__(self, block: Block, layout: Layout, hyper: HyperReader) -> None:
        super().__init__(block, layout)
        self.hyper = hyper
        self.watches = True
        self._sample = Sample(self._params)

    def gather(
        self, client: Client, groups: Sequence[ParamGroup], unscale: float | None
    ) -> BlockPush:
        """Copy the gradients into a slot; parameters without one are left out of the push.

        Args:
            groups: the optimizer's parameter groups.
            unscale: what each gradient is multiplied by; None: they are copied as they are.
        Raises:
            TypeError: a gradient is not dense, or is float16 and to be unscaled. Nothing was sent.
            ValueError: a hyper-parameter is out of its range. Nothing was sent.
        """
        hyper = self.hyper.read(groups[self.group] if self.group is not None else None)
        if unscale is not None:
            check_unscalable(self.layout)
        slot = client.dense.gradient_slot(self.block)
        flat, views = self._views.of(slot)
        gradients = [param.grad for param in self._params]
        if self.present is not None:
            here = zip(gradients, self.present, strict=True)
            gradients = [gradient if present else None for gradient, present in here]
        present = [gradient for gradient in gradients if gradient is not None]
        active = None
        if len(present) < len(gradients):
            active = tuple(i for i, gradient in enumerate(gradients) if gradient is not None)
            views = [views[i] for i in active]
        if present:
            self._copy(views, present)
        if unscale is not None:
            flat.mul_(unscale)
        return BlockPush(self.block, slot, active, hyper)

    def _copy(self, views: list[Tensor], gradients: list[Tensor]) -> None:
        try:
            torch._foreach_copy_(views, gradients)
        except RuntimeError:
            for name, param in zip(self.layout.names, self._params, strict=True):
                if param.grad is not None and param.grad.layout is not torch.strided:
                    raise TypeError(
                        f"the gradient of {name!r} is sparse; build the embedding with "
                        "sparse=False, the servers take dense gradients"
                    ) from None
            raise

    def scatter(self, values: npt.NDArray[Any]) -> None:
        self._sample.snapshot = None  # an interrupt leaves it so
        super().scatter(values)
        if self.watches:
            self._sample.take()

    def changed_outside(self) -> str | None:
        """The name of a parameter that has other values than after the last `scatter`."""
        places = self._sample.changed()
        return self.layout.names[places[0]] if places else None

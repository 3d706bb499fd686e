"""One block of an adopted optimizer: its parameters here, and what goes to and from the servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

from paramserve.client import BlockPush
from paramserve.pytorch.hyper import HyperReader, ParamGroup
from paramserve.pytorch.layout import Layout, Views

if TYPE_CHECKING:
    from paramserve.client import Client
    from paramserve.core.partition import Block


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
        """Which of the parameters are in it; None: all."""
        self._params = list(layout.params)
        self._views = Views(layout)

    def scatter(self, values: npt.NDArray[Any]) -> None:
        """Copy the block's values [size] into the parameters."""
        torch._foreach_copy_(self._params, self._views.of(values)[1])


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
        self._strides: list[tuple[int, ...]] = []
        self._views: list[Tensor] = []
        self._taken: Tensor | None = None

    def take(self) -> None:
        """Remember the elements as they are."""
        self._taken = self._bits()

    def changed(self) -> int | None:
        """The place of the first parameter that has another value than when `take` was called."""
        if self._taken is None:
            return None
        strides = self._strides
        bits = self._bits()
        if strides != self._strides:
            return None  # another memory format: the same elements come in another order
        if torch.equal(bits, self._taken.to(bits.device)):
            return None
        sizes = [view.numel() for view in self._views]
        taken = self._taken.to(bits.device)
        pairs = zip(torch.split(bits, sizes), torch.split(taken, sizes), strict=True)
        return next(i for i, (now, then) in enumerate(pairs) if not torch.equal(now, then))

    def _bits(self) -> Tensor:
        """The elements in one tensor of integers: equal for equal NaN, other for -0.0 and 0.0."""
        places = [param.data_ptr() for param in self._params]
        if places != self._places:
            self._places = places
            self._strides = [param.stride() for param in self._params]
            self._views = [_in_memory_order(param)[:: self._every] for param in self._params]
        views = self._views
        if len({view.device for view in views}) > 1:
            views = [view.cpu() for view in views]
        found = torch.cat(views)
        return found.view(torch.int64 if found.dtype == torch.float64 else torch.int32)


def _in_memory_order(param: Tensor) -> Tensor:
    """A view [n] of a parameter's elements; of one with gaps between them, of its first row."""
    strides = param.stride()
    order = sorted(range(param.ndim), key=lambda axis: -strides[axis])
    ordered = param.detach().permute(order)
    if ordered.is_contiguous():
        return ordered.view(-1)
    return ordered[(0,) * (param.ndim - 1)]


class ServedBlock(AdoptedBlock):
    """A block whose gradients are pushed, and whose values are nobody's but the servers'.

    Attributes:
        watches: `changed_outside` will be asked. It looks at what torch counts, and, since writes
            through `.data` are not counted, at a `Sample` of the values.
    """

    def __init__(self, block: Block, layout: Layout, hyper: HyperReader) -> None:
        super().__init__(block, layout)
        self.hyper = hyper
        self.watches = True
        self._versions: list[int] = []
        self._sample = Sample(self._params)

    def gather(
        self, client: Client, groups: Sequence[ParamGroup], unscale: float | None
    ) -> BlockPush:
        """Copy the gradients into a slot; parameters without one are left out of the push.

        Args:
            groups: the optimizer's parameter groups.
            unscale: what each gradient is multiplied by; None: they are copied as they are.
        Raises:
            TypeError: a gradient is not dense. Nothing was sent.
            ValueError: a hyper-parameter is out of its range. Nothing was sent.
        """
        hyper = self.hyper.read(groups[self.group] if self.group is not None else None)
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
        """Copy the block's values [size] into the parameters."""
        super().scatter(values)
        if self.watches:
            self._versions = [param._version for param in self._params]
            self._sample.take()

    def changed_outside(self) -> str | None:
        """The name of a parameter that was written to since the last `scatter`."""
        versions = [param._version for param in self._params]
        if versions == self._versions:
            place = self._sample.changed()
            return self.layout.names[place] if place is not None else None
        pairs = zip(versions, self._versions, strict=True)
        return next(name for name, (a, b) in zip(self.layout.names, pairs, strict=True) if a != b)

"""The parameter that stands for a table's rows in a model, and collects their gradients.

torch's tools see each table as one `nn.Parameter`, `rows`, without elements: between two
steps its `grad` has the gradients of the keys that were used, so that `GradScaler.unscale_`,
`clip_grad_norm_` and `zero_grad` do to them what they do to any other gradient.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from paramserve.client.table import Table


class Gradients(NamedTuple):
    """Gradients of some keys of a table: int64 [m] on the CPU, distinct; [m, dim]."""

    keys: Tensor
    values: Tensor


class Rows(torch.nn.Parameter):
    """A table's rows as torch sees them: [0, dim], with a `grad` [m, dim] of the collected keys.

    The two shapes differ, which no other parameter's do: what goes over the values of parameters
    finds none here, and what goes over gradients finds these.

    It says that it requires no gradient, so that `DistributedDataParallel` leaves it alone. To
    freeze the table set `requires_grad = False`, as for any parameter: then `trained` is False.

    Attributes:
        trained: whether a forward pass collects gradients.
        apart: dense layers are averaged over the workers, and rows are not: what is not finite in
            a row must not make this worker skip a step that the others make.
        stepped: an optimizer of `worker.optimizer` sends what is collected.
    """

    trained: bool
    apart: bool
    stepped: bool
    _collected: Tensor | None
    _keys: Tensor | None
    _bad: Tensor | None
    _left: int

    @classmethod
    def empty(cls, dim: int) -> Rows:
        """Rows of a table of this width, without anything collected."""
        rows = cls(torch.empty(0, dim), requires_grad=False)
        rows.trained, rows.apart, rows.stepped = True, False, False
        rows._collected, rows._keys, rows._bad, rows._left = None, None, None, 0
        return rows

    @property
    def grad(self) -> Tensor | None:
        """The gradients of the keys that were collected."""
        return self._collected

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._collected = value

    @property
    def requires_grad(self) -> bool:
        """False, whatever it was set to: no gradient ever comes here by itself."""
        return False

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.trained = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> Rows:
        """Train the rows from now on, or freeze them."""
        self.trained = requires_grad
        return self

    def collect(self, keys: Tensor, leaf: Tensor) -> None:
        """Add the gradient that a backward pass has left on a leaf.

        Args:
            keys: int64 [m] on the CPU, distinct.
            leaf: its first m rows are those of the keys.
        """
        gradient = leaf.grad
        assert gradient is not None, "called when it is there"
        leaf.grad = None  # a second backward through the same graph brings its own part only
        new = Gradients(keys, gradient.detach()[: len(keys)])
        if self.apart:
            new = self._finite(new)
        held = self._held()
        self._hold(new if held is None else _sum(held, new))

    def collected(self) -> Gradients:
        """What was collected since the last call, in float32 on the CPU; yours, and gone from here.

        Raises:
            RuntimeError: somebody has put a gradient of another shape here.
        """
        held = self._held()
        self.drop()
        if held is None:
            return Gradients(torch.empty(0, dtype=torch.int64), torch.empty(0, self.shape[1]))
        return Gradients(held.keys, held.values.to("cpu", torch.float32).contiguous())

    def take_bad(self) -> Tensor:
        """Keys whose gradients were left out for NaN or Inf since the last call; `apart` only."""
        bad, self._bad = self._bad, None
        return bad if bad is not None else torch.empty(0, dtype=torch.int64)

    def drop(self) -> None:
        """Forget what was collected."""
        self._keys = None
        self.grad = None

    def _hold(self, gradients: Gradients) -> None:
        keys, values = gradients
        self.grad = values
        self._keys, self._left = keys, values._version

    def _held(self) -> Gradients | None:
        """What is collected and was not dropped by a `zero_grad` of torch's."""
        keys, values = self._keys, self.grad
        if keys is None or values is None:
            return None
        if values.shape != (len(keys), self.shape[1]):
            raise RuntimeError(
                f"the gradient of a table's rows is {list(values.shape)} now, and {len(keys)} rows "
                f"of {self.shape[1]} were collected: change it in place, or set it to None"
            )
        if values._version != self._left and not bool(values.any()):
            return None  # zeroed in place, by zero_grad(set_to_none=False)
        return Gradients(keys, values)

    def _finite(self, gradients: Gradients) -> Gradients:
        """The rows without NaN and Inf; the others' keys are remembered."""
        good = gradients.values.isfinite().all(dim=1)
        if bool(good.all()):
            return gradients
        chosen = good.cpu()
        bad = gradients.keys[~chosen]
        self._bad = bad if self._bad is None else torch.unique(torch.cat([self._bad, bad]))
        return Gradients(gradients.keys[chosen], gradients.values[good])


def _sum(first: Gradients, second: Gradients) -> Gradients:
    """The sum by key."""
    both = torch.cat([first.keys, second.keys])
    keys, places = torch.unique(both, return_inverse=True)
    total = first.values.new_zeros(len(keys), first.values.shape[1])
    places = places.to(total.device)
    total.index_add_(0, places[: len(first.keys)], first.values)
    total.index_add_(0, places[len(first.keys) :], second.values.to(total))
    return Gradients(keys, total)


_known: weakref.WeakKeyDictionary[Table, Rows] = weakref.WeakKeyDictionary()


def rows_of(table: Table) -> Rows:
    """The one parameter for a table: modules on the same table share it, as tied layers do."""
    rows = _known.get(table)
    if rows is None:
        rows = _known[table] = Rows.empty(table.dim)
    return rows

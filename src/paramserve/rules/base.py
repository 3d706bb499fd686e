"""What a rule is: how a gradient changes a value. Pure maths over explicit state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from paramserve.rules.layout import RowView

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

Array = npt.NDArray[Any]
Hyper = tuple[float, ...]


NO_ROWS = (
    "{} looks at whole rows, which only tables have: use it in client.table(...), and another rule "
    "for dense parameters"
)


class Run(NamedTuple):
    """Elements [start, stop) of a block that are updated alike: neighbours with one count."""

    start: int
    stop: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no run needs
    """Updates that these elements have had before this one."""
    shape: tuple[int, ...] | None = None
    """Shape of the tensor that this run is, for a rule with `whole_tensors`; None: neighbours may
    be in one run, and a tensor may be cut."""


new_run: Callable[[tuple[int, int, int, tuple[int, ...] | None]], Run]
new_run = cast(Any, partial(tuple.__new__, Run))
"""A `Run` of these four, made without a Python function."""


class PushInfo(NamedTuple):
    """Who pushed, and how old the values were from which the gradient was computed."""

    worker: int
    clock: int
    version: int
    staleness: int
    weight: float
    scale: float
    """The gradient is multiplied by this, in the block's dtype, before the rule sees it."""


new_push_info: Callable[[tuple[int, int, int, int, float, float]], PushInfo]
new_push_info = cast(Any, partial(tuple.__new__, PushInfo))
"""A `PushInfo` of these six, made without a Python function."""


@runtime_checkable
class Rule(Protocol):
    """A stateless update rule. An instance carries default hyper-parameters and nothing else.

    The shard calls `prepare` once for a dtype before the first `apply` (it may take seconds: it
    compiles), `init_state` when a block is defined, `apply` for each update, serially. A rule
    must not keep references to the arrays, resize them, read a clock or draw random numbers.

    Further attributes may be there. `whole_tensors = True`: each run is one whole tensor, with
    its shape. `separate_tensors = True`: no run holds elements of two tensors. `whole_rows = True`:
    for tables only, see `RowRule` and `rules.custom`.

    On rows of a table, a rule is given the rows' elements one row after the other, those with the
    same count as one run; its states are as wide as a row, and start as `init_state` says.
    """

    name: ClassVar[str]
    hyper_names: ClassVar[tuple[str, ...]]
    """Order of the values in a hyper tuple."""
    state_names: ClassVar[tuple[str, ...]]
    """All state arrays that the rule can have, in torch's words where torch has the rule."""

    def hyper(self) -> Hyper:
        """This instance's hyper-parameters, in the order of `hyper_names`."""
        ...

    def check(self, hyper: Hyper) -> None:
        """Raise `ValueError` if a hyper tuple has the wrong length or a value out of its range."""
        ...

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        """Names of the state arrays that these hyper-parameters need, a prefix of `state_names`."""
        ...

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """One array of shape [size] for each of `states(self.hyper())`."""
        ...

    def prepare(self, dtype: np.dtype[Any]) -> None:
        """Compile or load every kernel that `apply` can need for this dtype."""
        ...

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Update `value` [size] and `state` in place from `gradient` [size], only within `runs`.

        With `out` [size], the updated values of the runs are written there as well in the same
        pass (what lies outside the runs is not the rule's business). `gradient` is not changed.
        """
        ...


@runtime_checkable
class RowRule(Rule, Protocol):
    """A rule that updates rows in a table's memory: the built-in ones, with kernels.

    All others are given copies of rows, see `rules.rows`. `row_states` and `initial_row` are called
    where a rule has them; they need not be there.

        def row_states(self, dim: int) -> tuple[int, ...]
            Widths of its states in float32 for a row of `dim` values; else each is `dim`.
        def initial_row(self, dim: int) -> Array
            The states of a fresh row, one after the other; else what `init_state` gives.
    """

    def counted(self, hyper: Hyper) -> bool:
        """Whether these hyper-parameters need the count of each row's updates."""
        ...

    def row_kernels(self) -> Kernels:
        """Every kernel that `apply_rows` can need."""
        ...

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        """Update rows in place from their gradients [n, dim], and their counts if they are kept."""
        ...

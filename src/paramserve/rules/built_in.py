"""The base of the rules with kernels: a rule says its maths once, for dense blocks and for rows."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from paramserve.errors import NonFinite
from paramserve.rules.base import NO_ROWS, Array, Hyper, PushInfo, Run
from paramserve.rules.compiled import compiled, compiled_rows
from paramserve.rules.layout import RowView

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

Numbers = tuple[float, ...]
State = tuple[Array, ...]


class Allowed(NamedTuple):
    """The values that one hyper-parameter may have."""

    words: str
    test: Callable[[float], bool]


FINITE = Allowed("a finite number", math.isfinite)
NOT_NEGATIVE = Allowed("a finite number of at least 0", lambda x: 0.0 <= x < math.inf)
FRACTION = Allowed("at least 0 and below 1", lambda x: 0.0 <= x < 1.0)
FLAG = Allowed("True or False", lambda x: x in (0.0, 1.0))


def check_hyper(rule: str, allowed: Mapping[str, Allowed], hyper: Hyper) -> None:
    """Check a hyper tuple against what each of its values may be, in order.

    Raises:
        ValueError: a value is out of its range, or there are too many or too few.
    """
    if len(hyper) != len(allowed):
        names = ", ".join(allowed) if allowed else "none"
        raise ValueError(f"{rule} takes {len(allowed)} hyper-parameters ({names}), not {hyper}")
    for (name, (words, test)), value in zip(allowed.items(), hyper, strict=True):
        if not test(value):
            raise ValueError(f"{name} of {rule} must be {words}, not {value}")


def check_plain_number(rule: str, name: str, value: object) -> None:
    """Raise `TypeError` for a field, or an element of one, that only becomes a number by being
    read as one."""
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, str | bytes) or not hasattr(each, "__float__"):
            raise TypeError(f"{name} of {rule} must be a number, not {value!r}")


class BuiltIn(ABC):
    """Base of the built-in rules, frozen dataclasses: fields, what they may be, and two functions.

    `coefficients` and `update` are the whole maths. Numba compiles them, into the kernel for blocks
    and into that for rows, so they use numbers, tuples, loops and numpy's functions of numbers, and
    no global but numpy and constants. There is no fastmath.

    An element's update depends on that element alone: a shard's range may begin in the middle of a
    tensor. A rule with `whole_rows` is for tables only; its `update` is given one row at a time.

    A rule with `whole_tensors` is for dense parameters only, and its step goes by the norm of each
    tensor: `update` changes states only, `direction` (Numba compiles it, too) says where to, and
    the last of its coefficients is the rate. See `kernels.layerwise`.
    """

    name: ClassVar[str]
    allowed: ClassVar[Mapping[str, Allowed]] = {}
    """What each hyper-parameter may be, in the order of the hyper tuple."""
    hyper_names: ClassVar[tuple[str, ...]] = ()
    state_names: ClassVar[tuple[str, ...]] = ()
    state_if: ClassVar[str] = ""
    """The hyper-parameter without which (0) no state is kept; "": it always is."""
    state_start: ClassVar[str] = ""
    """The field that states start at; "": at 0."""
    whole_rows: ClassVar[bool] = False
    whole_tensors: ClassVar[bool] = False
    _needs_state: ClassVar[int] = -1
    _states: ClassVar[int] = 0
    """How many states there are where they are kept."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._states = len(cls.state_names)
        if "allowed" in cls.__dict__:
            cls.hyper_names = tuple(cls.allowed)
            if cls.state_if:
                cls._needs_state = cls.hyper_names.index(cls.state_if)

    # --- what a rule defines ---------------------------------------------------------------------

    @staticmethod
    @abstractmethod
    def coefficients(hyper: Hyper, scale: float, count: int) -> Numbers:
        """The numbers that `update` computes with, in float64.

        Args:
            scale: what the gradient is to be multiplied by.
            count: updates so far, of a block's elements or of a row; 1 in a table that does not
                count (`counted`).
        """

    @staticmethod
    @abstractmethod
    def update(value: Array, gradient: Array, state: State, coefficients: Numbers) -> None:
        """Change `value` [n] and each state [n] in place, in one pass.

        Round the coefficients to the dtype before the loop (`value.dtype.type`), so that float32 is
        computed in float32, as torch does. With `whole_rows` they are one row, states are as wide
        as `row_states` says (all alike), and behind them comes float32 [LANES] to be overwritten.
        """

    @staticmethod
    def direction(value: Array, state: State, coefficients: Numbers, out: Array) -> None:
        """Write to `out` [n] what each element of `value` is to be lessened by, before the rate.

        With `whole_tensors` only.
        """
        raise NotImplementedError

    def counted(self, hyper: Hyper) -> bool:
        """Whether `coefficients` looks at the count of a row's updates."""
        return False

    # --- what follows from that; `rules.base` says what each method does --------------------------

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # rules are dataclasses
            check_plain_number(self.name, each.name, getattr(self, each.name))
        self.check(self.hyper())
        if self.state_start:
            start = float(getattr(self, self.state_start))
            check_hyper(self.name, {self.state_start: NOT_NEGATIVE}, (start,))

    def hyper(self) -> Hyper:
        """Fields that are hyper-parameters; see `Rule.hyper`."""
        return tuple(float(getattr(self, name)) for name in self.hyper_names)

    def check(self, hyper: Hyper) -> None:
        check_hyper(self.name, self.allowed, hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        at = self._needs_state
        return self.state_names if at < 0 or hyper[at] != 0.0 else ()

    def init_state(self, size: int, dtype: np.dtype[Any]) -> State:
        if self.whole_rows:
            raise ValueError(NO_ROWS.format(self.name))
        states = self.states(self.hyper())
        if self.state_start:
            return tuple(np.full(size, getattr(self, self.state_start), dtype) for _ in states)
        return tuple(np.zeros(size, dtype) for _ in states)

    def block_kernels(self, dtype: np.dtype[Any], pushed: np.dtype[Any] | None = None) -> Kernels:
        """Every kernel that `apply` can need for a block of this dtype.

        Args:
            pushed: the dtype of gradients and `out`; None: the same.
        """
        kernels, numbers = compiled(), len(self.hyper_names)
        return {
            kernels.block_kernel(type(self), states): kernels.block_types(
                dtype, states, numbers, pushed
            )
            for states in (self._numbers_of_states() if not self.whole_rows else ())
        }

    def _numbers_of_states(self) -> set[int]:
        """How many states a kernel may be given: all, or none where a push may turn them off."""
        most = len(self.states(self.hyper()))
        return {0, most} if self.state_if else {most}

    def prepare(self, dtype: np.dtype[Any]) -> None:
        from paramserve.kernel_cache import load

        load(self.block_kernels(dtype))

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: State,
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        """Apply a gradient; see `Rule.apply`.

        Raises:
            ValueError: `hyper` needs state and the block was defined without; or the rule is for
                tables only. Nothing was applied.
            NonFinite: the gradient holds NaN or Inf. What comes before it was applied; neither is
                in the values.
        """
        if self.whole_rows:
            raise ValueError(NO_ROWS.format(self.name))
        needs = self._needs_state
        if needs >= 0 and hyper[needs] == 0.0:
            state, states = (), 0  # what is there stays as it is
        elif (states := len(state)) != self._states:
            raise ValueError(self._missing(hyper))
        kernel = compiled().block_kernel(type(self), states)
        target = out if out is not None else gradient[:0]
        scale = push.scale
        for start, stop, count, _ in runs:
            end = kernel(value, gradient, state, target, start, stop, scale, hyper, count)
            if end < stop:
                raise NonFinite(
                    f"the gradient for {self.name} holds NaN or Inf from element {end} on: those "
                    "before it were updated",
                    applied="unknown",
                    fix="look for NaN and Inf before the update",
                )

    def _missing(self, hyper: Hyper) -> str:
        names, option = ", ".join(self.state_names), self.state_if
        if not option:
            return f"{self.name} needs the state {names}, and this block has none. Applied: no"
        return (
            f"{self.name} with {option} {hyper[self._needs_state]} needs a {names}, and this block "
            f"was defined without {option}. Applied: no. To fix: define it with "
            f"{self.name}({option}=...) above 0"
        )

    def row_kernels(self) -> Kernels:
        rows, types = compiled_rows(), compiled_rows().row_types(len(self.hyper_names))
        return {rows.row_kernel(type(self), states): types for states in self._numbers_of_states()}

    def apply_rows(self, view: RowView, gradients: Array, hyper: Hyper, push: PushInfo) -> None:
        rows, states, needs = compiled_rows(), len(view.layout.widths), self._needs_state
        if needs >= 0 and hyper[needs] == 0.0:
            states = 0
        kernel = rows.row_kernel(type(self), states)
        kernel(rows.rows_of(view, gradients), push.scale, tuple(map(float, hyper)))

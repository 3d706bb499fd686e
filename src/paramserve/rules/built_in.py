"""What the rules with kernels share: numbers that are checked, state of zeros, kernels by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paramserve.rules.allowed import Allowed, check_hyper
from paramserve.rules.base import Array, Hyper
from paramserve.rules.compiled import compiled, compiled_rows

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels


class BuiltIn:
    """Base of the built-in rules, frozen dataclasses; `rules.base` says what each method does."""

    name: ClassVar[str]
    allowed: ClassVar[Mapping[str, Allowed]] = {}
    """What each hyper-parameter may be, in the order of the hyper tuple."""
    hyper_names: ClassVar[tuple[str, ...]] = ()
    state_names: ClassVar[tuple[str, ...]] = ()
    kernel: ClassVar[str]
    """What its kernel is called in `rules.kernels` and in `rules.row_kernels`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "allowed" in cls.__dict__:
            cls.hyper_names = tuple(cls.allowed)

    def __post_init__(self) -> None:
        self.check(self.hyper())

    def kernels(self) -> tuple[str, ...]:
        """All that it can need, by name."""
        return (self.kernel,)

    def hyper(self) -> Hyper:
        """As `Rule.hyper`: the fields that have these names."""
        return tuple(float(getattr(self, name)) for name in self.hyper_names)

    def check(self, hyper: Hyper) -> None:
        """As `Rule.check`."""
        check_hyper(self.name, self.allowed, hyper)

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        """As `Rule.states`: all."""
        return self.state_names

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        """As `Rule.init_state`: zeros."""
        return tuple(np.zeros(size, dtype) for _ in self.states(self.hyper()))

    def block_kernels(self, dtype: np.dtype[Any]) -> Kernels:
        """The kernels that `apply` can need for a block of this dtype."""
        dense = compiled()
        found: Kernels = dense.typed(dtype, *(getattr(dense, name) for name in self.kernels()))
        return found

    def row_kernels(self) -> Kernels:
        """As `RowRule.row_kernels`."""
        rows = compiled_rows()
        found: Kernels = rows.typed(*(getattr(rows, name) for name in self.kernels()))
        return found

    def prepare(self, dtype: np.dtype[Any]) -> None:
        """As `Rule.prepare`."""
        from paramserve.kernel_cache import load

        load(self.block_kernels(dtype))

    def counted(self, hyper: Hyper) -> bool:
        """As `RowRule.counted`: no."""
        return False

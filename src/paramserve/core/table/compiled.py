"""The kernels of keyed tables, imported at their first use: Numba takes 0.2 s to import."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def index_kernels() -> ModuleType:
    """The module `paramserve.core.table.kernels`."""
    from paramserve.core.table import kernels

    return kernels


@cache
def row_kernels() -> ModuleType:
    """The module `paramserve.core.table.row_kernels`."""
    from paramserve.core.table import row_kernels

    return row_kernels


@cache
def use_kernels() -> ModuleType:
    """The module `paramserve.core.table.use_kernels`."""
    from paramserve.core.table import use_kernels

    return use_kernels


def kernel_modules() -> list[ModuleType]:
    """All modules with kernels of the store."""
    return [index_kernels(), row_kernels(), use_kernels()]


def prepare() -> None:
    """Compile or load every kernel of the store. Repeating costs nothing."""
    for each in kernel_modules():
        each.prepare()

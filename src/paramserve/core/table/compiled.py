"""The kernels of keyed tables, imported at their first use: Numba takes 0.2 s to import."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels


@cache
def index_kernels() -> ModuleType:
    from paramserve.core.table import kernels

    return kernels


@cache
def row_kernels() -> ModuleType:
    from paramserve.core.table import row_kernels

    return row_kernels


@cache
def use_kernels() -> ModuleType:
    from paramserve.core.table import use_kernels

    return use_kernels


@cache
def text_kernels() -> ModuleType:
    """Module of kernels for strings, which no store has: `compiling.load_text` compiles them."""
    from paramserve.core.table import text_kernels

    return text_kernels


def kernels() -> Kernels:
    """Every kernel of the store."""
    return {**index_kernels().KERNELS, **row_kernels().KERNELS, **use_kernels().KERNELS}


def prepare() -> None:
    """Compile or load every kernel of the store. Repeating costs nothing."""
    from paramserve.kernel_cache import load

    load(kernels())

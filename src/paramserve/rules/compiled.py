"""The kernels, imported at their first use: Numba takes 0.2 s, and a client may never need it."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def compiled() -> ModuleType:
    from paramserve.rules import kernels

    return kernels


@cache
def compiled_rows() -> ModuleType:
    from paramserve.rules import row_kernels

    return row_kernels

"""The kernels of the codecs, imported at their first use: Numba takes 0.2 s to import."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def codec_kernels() -> ModuleType:
    """As modules: `compiling.load_codecs` compiles them."""
    from paramserve.codecs import kernels

    return kernels

"""Arrays that a kernel uses without counting references. Imports Numba: import this lazily."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def _borrowed(typing_context: Any, array: Any) -> Any:
    if not isinstance(array, types.Array):
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        parts: Any = cgutils
        bare = parts.create_struct_proxy(array)(context, builder, value=arguments[0])
        for name in ("meminfo", "parent"):
            setattr(bare, name, parts.get_null_value(getattr(bare, name).type))
        return bare._getvalue()

    return array(array), generate


borrowed: Any = intrinsic(_borrowed)
"""Called in a kernel with an array: the same, kept alive by nobody. Who called the kernel holds it.

Numba counts references for each slice of an array with locked instructions, which wait until all
earlier writes have reached the cache. That undoes what rows far apart were asked for ahead.
"""

"""The kernels of the codecs, imported at their first use: Numba takes 0.2 s to import."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paramserve.kernel_cache import Kernels

ON_TENSORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "BFloat16": ("to_bfloat16", "from_bfloat16"),
        "Float16": (),
        "Int8": ("to_int8", "from_int8"),
        "Int4": ("to_int4", "from_int4"),
        "Int2": ("to_int2", "from_int2"),
        "Sign": ("to_signs", "from_signs"),
        "TopK": ("choose_largest", "to_gaps", "from_gaps"),
        "RandomK": ("draw_places",),
        "PowerSGD": (),
        "Chain": (),
        "Delta": (),
    }
)
"""What each built-in codec calls for a tensor, besides what the codecs that it is made of call."""
ON_ROWS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "Int8": ("rows_to_int8", "rows_from_int8"),
        "Int4": ("rows_to_int4", "rows_from_int4"),
        "Int2": ("rows_to_int2", "rows_from_int2"),
        "Sign": ("rows_to_signs", "rows_from_signs"),
    }
)
"""What encodes, and what decodes rows, of those that do so otherwise than tensors."""
ON_KEYS = ("key_gaps_bytes", "to_key_gaps", "from_key_gaps")


@cache
def codec_kernels() -> ModuleType:
    """Module of codec kernels, not compiled; `compiling.load_codecs` compiles them."""
    from paramserve.codecs import kernels

    return kernels


def kernels_of(codecs: Collection[str], *, rows: bool) -> Kernels:
    """All kernels that codecs call; of each codec's if one is not built in, since its methods may
    call those of any other.

    Args:
        codecs: their names, with those of the codecs that they are made of.
        rows: whether they encode rows of a table, and its keys.
    """
    if not codecs:
        return {}
    tensor_codecs = ON_TENSORS.keys()
    codecs = codecs if tensor_codecs >= {*codecs} else tensor_codecs
    names = {each for codec in codecs for each in ON_TENSORS[codec]}
    if rows:
        names |= {*ON_KEYS} | {each for codec in codecs for each in ON_ROWS.get(codec, ())}
    every: Kernels = codec_kernels().KERNELS
    return {each: types for each, types in every.items() if each.__name__ in names}

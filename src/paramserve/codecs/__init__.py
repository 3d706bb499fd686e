"""Codecs: how gradients and values are encoded on the wire between hosts."""

from paramserve.codecs.base import Codec
from paramserve.codecs.built_in import BFloat16, Float16, Int4, Int8, Sign, TopK

__all__ = ["BFloat16", "Codec", "Float16", "Int4", "Int8", "Sign", "TopK"]

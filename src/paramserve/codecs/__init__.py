"""Codecs: how gradients and values are encoded on the wire between hosts."""

from paramserve.codecs.base import Codec, Feedback
from paramserve.codecs.built_in import BFloat16, Float16, Int2, Int4, Int8, Sign
from paramserve.codecs.custom import CustomCodec
from paramserve.codecs.delta import Delta
from paramserve.codecs.low_rank import PowerSGD
from paramserve.codecs.sparse import RandomK, TopK

__all__ = [
    "BFloat16",
    "Codec",
    "CustomCodec",
    "Delta",
    "Feedback",
    "Float16",
    "Int2",
    "Int4",
    "Int8",
    "PowerSGD",
    "RandomK",
    "Sign",
    "TopK",
]

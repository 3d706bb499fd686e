"""How messages lie in bytes: the version of the protocol, its alignment, encoder and decoders."""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 8
ALIGN = 64
"""Bytes: slots, and what lies in them, start at multiples of this: a cache line, a vector word."""
Run = tuple[int, int, int]
"""Bytes of a client's memory: the number of an arena, where they begin there, how many they are."""

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder that accepts only messages of this type (a struct or a union of them)."""
    return msgspec.msgpack.Decoder(kind)

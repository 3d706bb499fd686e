"""How messages lie in bytes: the version of the protocol, its alignment, encoder and decoders."""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 7
ALIGN = 64
"""Bytes: slots and parts of a payload start at multiples of this: a cache line, a vector word."""

_ENCODER = msgspec.msgpack.Encoder()
encode = _ENCODER.encode


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder that accepts only messages of this type (a struct or a union of them)."""
    return msgspec.msgpack.Decoder(kind)

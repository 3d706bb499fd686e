"""Codecs by name: what a codec is on the wire, and which codecs are built from that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from paramserve.codecs.base import Codec
from paramserve.codecs.built_in import BFloat16, Float16, Int4, Int8, Sign, TopK
from paramserve.config import CodecSpec
from paramserve.errors import UnknownCodec

BUILT_IN: Mapping[str, type[Codec]] = MappingProxyType(
    {kind.__name__: kind for kind in (BFloat16, Float16, Int8, Int4, Sign, TopK)}
)


def as_codec(given: object, what: str) -> Codec:
    """A codec as a user gave it.

    Args:
        what: the argument's name.
    Raises:
        TypeError: it is none.
    """
    if isinstance(given, Codec):
        return given
    if isinstance(given, type) and issubclass(given, Codec):
        raise TypeError(f"{what} takes an object: write {what}=ps.{given.__name__}()")
    known = ", ".join(f"ps.{name}()" for name in BUILT_IN)
    raise TypeError(f"{what} takes a codec, one of {known}, not {given!r}")


def spec(codec: Codec) -> CodecSpec:
    """Describe a codec: its name, and its fields as options."""
    return CodecSpec(codec.name, {each.name: getattr(codec, each.name) for each in fields(codec)})


def build(described: CodecSpec) -> Codec:
    """Make the codec that `spec` described.

    Args:
        described: may come from a peer: only known classes are called, with their own options.
    Raises:
        UnknownCodec: no codec has this name.
        ValueError: the codec does not take these options.
    """
    kind: Any = BUILT_IN.get(described.name)
    if kind is None:
        raise UnknownCodec(
            f"no codec is called {described.name!r} here, known are {', '.join(BUILT_IN)}",
            fix="run the same version of paramserve everywhere",
        )
    try:
        made: Codec = kind(**described.options)
    except Exception as wrong:
        raise ValueError(f"{described.name} does not take {described.options}: {wrong}") from wrong
    return made

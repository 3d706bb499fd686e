"""Codecs as blocks use them: one that is not ours is guarded, so that its failure is a refusal."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paramserve.codecs.base import Bytes, Codec, Floats
from paramserve.codecs.delta import Delta
from paramserve.codecs.registry import NONE, build, is_built_in
from paramserve.config import CodecSpec
from paramserve.core.user_rules import where
from paramserve.errors import CodecFailed
from paramserve.rules.compiled import compiled


def codec_of(
    described: CodecSpec | None, registered: Mapping[str, type[Codec]] = NONE
) -> Codec | None:
    """The codec of a block; None: it has none. Raises as `registry.build`."""
    if described is None:
        return None
    codec = build(described, registered)
    if is_built_in(codec):
        return codec
    return Guarded(codec, feedback=codec.feedback, even_local=codec.even_local)


def why_not_pulled(codec: Codec) -> str | None:
    """Why values cannot come encoded so; None: they can."""
    if isinstance(codec, Delta):
        return None
    if codec.pushes_only:
        return f"{codec.called} leaves values out: it is for pushes, and not for pulls"
    if codec.whole_tensors:
        return f"{codec.called} looks at whole tensors: it is for pushes, and not for pulls"
    if not codec.fixed:
        return f"{codec.called} takes more or fewer bytes by what it encodes: it is for pushes only"
    return None


def why_not_pushed(codec: Codec) -> str | None:
    """Why gradients cannot come encoded so; None: they can."""
    if codec.pulls_only:
        return (
            f"{codec.called} encodes what has changed since a pull: it is for pulls, and not for "
            "pushes, of which error feedback sends what was left out"
        )
    return None


@dataclass(frozen=True)
class Guarded(Codec):
    """A user's codec, or a chain with one: what it raises becomes `CodecFailed`, as does what no
    codec may return, encode or decode.

    It is given views, which cannot be resized, and cannot change what it reads.
    """

    codec: Codec

    def __post_init__(self) -> None:
        for name in ("fixed", "pushes_only", "whole_tensors"):
            object.__setattr__(self, name, bool(getattr(self.codec, name)))

    @property
    def name(self) -> str:
        return self.codec.name

    @property
    def called(self) -> str:
        return self.codec.called

    def __repr__(self) -> str:
        return repr(self.codec)

    def bound(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        with self._guarded("bound"):
            codec: Any = self.codec.bound(shapes)
            if not isinstance(codec, Codec):
                raise TypeError(f"bound returned {type(codec).__name__}, and no codec")
        return replace(self, codec=codec)

    def size(self, count: int) -> int:
        with self._guarded("size"):
            answer: Any = self.codec.size(count)
            if not _counts(answer) or answer < min(count, 1):
                raise ValueError(f"size({count}) returned {answer!r}, and not how many bytes")
            return int(answer)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        with self._guarded("encode"):
            values_view, into = values[:], out[:]
            values_view.flags.writeable = False
            wrote: Any = self.codec.encode(values_view, into, seed)
            least = out.size if self.fixed else min(values.size, 1)
            if not (_counts(wrote) and least <= wrote <= out.size):
                raise ValueError(f"encode returned {wrote!r}, and not {least} to {out.size} bytes")
            return int(wrote)

    def decode(self, data: Bytes, out: Floats) -> None:
        with self._guarded("decode"):
            data_view, into = data[:], out[:]
            data_view.flags.writeable = False
            into.fill(0.0)  # what the memory held before is decoded by none
            decode: Any = self.codec.decode  # what users write need not be typed
            returned = decode(data_view, into)
            if returned is not None:
                raise TypeError(f"decode returned {type(returned).__name__}, not None")
            largest: Callable[[Floats], float] = compiled().largest
            if out.size and largest(out) == math.inf:
                raise ValueError("decode left NaN or Inf")

    @contextlib.contextmanager
    def _guarded(self, method: str) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as error:
            text = f"{type(error).__name__}: {error}"
            raise CodecFailed(
                f"codec {self.codec.called} failed in {method}: {text}{where(error)}",
                fix="correct the codec, and start servers and workers with the corrected one",
            ) from None


def _counts(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)

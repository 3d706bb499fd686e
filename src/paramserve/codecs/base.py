"""What a codec is: how float32 values are encoded on the wire."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Feedback:
    """Error feedback with a bounded residual: what a codec has left out of gradients is added to
    the next one, but less of it.

    Attributes:
        decay: what is left out is multiplied by this before it is added: above 0 and at most 1.
            At 1 nothing of it is discarded.
        clip_norm: and then scaled so that its L2 norm is at most this, over all tensors of one of
            the optimizer's parameter groups. None: it is not.

    Source: Wu et al., Error Compensated Quantized SGD, 2018, for `decay`. `clip_norm` has none: it
        is the clipping of gradients (Pascanu et al., 2013) for what is left out of them.
    """

    decay: float = 1.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not (_is_number(self.decay) and 0.0 < self.decay <= 1.0):
            raise ValueError(
                f"decay of ps.Feedback must be above 0 and at most 1, not {self.decay!r}"
            )
        clip = self.clip_norm
        if clip is not None and not (_is_number(clip) and 0.0 < clip < math.inf):
            raise ValueError(
                f"clip_norm of ps.Feedback must be > 0 and finite, or None, not {clip!r}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes float32 values, and decodes what it has encoded. Pure: equal values and seeds give
    equal bytes on every machine.

    Attributes:
        feedback: of gradients, whether what was left out of one is added to the next (error
            feedback: Karimireddy et al., 2019); a `Feedback` says how much of it.
        even_local: whether values are encoded for servers on the same host, too, where it saves
            nothing: to see what it does to training.
    """

    feedback: bool | Feedback = field(default=True, kw_only=True)
    even_local: bool = field(default=False, kw_only=True)

    fixed: ClassVar[bool] = True
    """Whether as many values always take `size` bytes; else they take no more."""
    pushes_only: ClassVar[bool] = False
    """Whether so much is left out that only gradients bear it, and no values."""
    pulls_only: ClassVar[bool] = False
    """Whether it encodes what has changed since a reader's last pull, which gradients have not."""
    whole_tensors: ClassVar[bool] = False
    """Whether it looks at whole tensors: then none is cut over two servers, and `bound` tells their
    shapes. Such a codec is for pushes."""

    @property
    def name(self) -> str:
        """Name of the class, as on the wire."""
        return type(self).__name__

    @property
    def called(self) -> str:
        """Codec as users write it, in messages."""
        return f"ps.{self.name}"

    @abstractmethod
    def size(self, count: int) -> int:
        """Bytes for so many values; at most, where it is not `fixed`."""

    @abstractmethod
    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        """Encode values.

        Args:
            values: [count], finite.
            out: [size(count)], 8-byte aligned; gets the bytes.
            seed: of what is drawn, if the codec draws something.
        Returns:
            How many bytes were written.
        """

    @abstractmethod
    def decode(self, data: Bytes, out: Floats) -> None:
        """Decode into [count].

        Args:
            data: 8-byte aligned; may come from a peer.
        Raises:
            ValueError: it does not stand for so many finite values. `out` has any content.
        """

    def bound(self, shapes: Sequence[tuple[int, ...]]) -> Codec:
        """The codec of a server's part of the values, which is tensors of these shapes, end to end.
        Only asked of a codec with `whole_tensors`."""
        return self

    def __or__(self, second: object) -> Codec:
        """A chain, which only a codec that chooses values can begin: see `sparse.Sparse`.

        Raises:
            TypeError: always, with the order that works.
        """
        if not isinstance(second, Codec):
            return NotImplemented
        encodes = "ps.Int8" if self.pushes_only or self.pulls_only else self.called
        raise TypeError(
            f"{self.called} cannot begin a chain: the first codec chooses values, and the second "
            f"encodes these, as in ps.TopK(0.01) | {encodes}()"
        )

    def _check_flag(self, name: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} of {self.called} is True or False, not {value!r}")

    def __post_init__(self) -> None:
        if not isinstance(self.feedback, bool | Feedback):
            raise TypeError(
                f"feedback of {self.called} is True, False or ps.Feedback(...), not "
                f"{self.feedback!r}"
            )
        self._check_flag("even_local")


def check_length(data: Bytes, size: int) -> None:
    """Raise `ValueError` unless as many bytes came."""
    if data.size != size:
        raise ValueError(f"{data.size} bytes came where {size} are needed")

"""What a codec is: how float32 values are encoded on the wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes float32 values, and decodes what it has encoded. Pure: equal values and seeds give
    equal bytes on every machine.

    Attributes:
        feedback: of gradients, whether what was left out of one is added to the next (error
            feedback: Karimireddy et al., 2019).
        even_local: whether values are encoded for servers on the same host, too, where it saves
            nothing: to see what it does to training.
    """

    feedback: bool = field(default=True, kw_only=True)
    even_local: bool = field(default=False, kw_only=True)

    fixed: ClassVar[bool] = True
    """Whether as many values always take `size` bytes; else they take no more."""
    pushes_only: ClassVar[bool] = False
    """Whether so much is left out that only gradients bear it, and no values."""
    whole_tensors: ClassVar[bool] = False
    """Whether it looks at whole tensors: then none is cut over two servers, and `bound` tells their
    shapes. Such a codec is for pushes."""

    @property
    def name(self) -> str:
        """On the wire: the class's."""
        return type(self).__name__

    @property
    def called(self) -> str:
        """As users write it, in messages."""
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
        encodes = "ps.Int8" if self.pushes_only else self.called
        raise TypeError(
            f"{self.called} cannot begin a chain: the first codec chooses values, and the second "
            f"encodes these, as in ps.TopK(0.01) | {encodes}()"
        )

    def _check_flag(self, name: str) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, bool):
            raise TypeError(f"{name} of {self.called} is True or False, not {value!r}")

    def __post_init__(self) -> None:
        self._check_flag("feedback")
        self._check_flag("even_local")


def check_length(data: Bytes, size: int) -> None:
    """Raise `ValueError` unless as many bytes came."""
    if data.size != size:
        raise ValueError(f"{data.size} bytes came where {size} are needed")

"""Codecs that choose some of the values, and chains: what is chosen, encoded by another codec."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from paramserve.codecs.base import Bytes, Codec, Floats, check_length
from paramserve.codecs.compiled import codec_kernels

Places = npt.NDArray[np.uint32]

FLOAT_BYTES = 4
SEED_BYTES = 4
MAX = np.finfo(np.float32).max
SECOND_SEED = 0x5BD1E995
"""What the second codec of a chain draws is no part of what the first one draws."""


@dataclass(frozen=True)
class Sparse(Codec):
    """Chooses some of the values, and sends them with what tells their places; all others are 0.

    The values come first, then the places. In a chain another codec encodes the values.

    Attributes:
        ratio: how many of the values, above 0 and at most 1; at least one of each server's part.
    """

    ratio: float = 0.01

    pushes_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        good = isinstance(self.ratio, int | float) and not isinstance(self.ratio, bool)
        if not (good and 0.0 < self.ratio <= 1.0):
            raise ValueError(
                f"ratio of ps.{self.name} must be above 0 and at most 1, not {self.ratio!r}"
            )

    def __or__(self, second: object) -> Codec:
        """A chain: `second` encodes the values that this codec chooses. This one's `feedback` is
        the chain's.

        Raises:
            TypeError: it encodes no values, or chooses some itself.
        """
        if isinstance(second, type) and issubclass(second, Codec):
            raise TypeError(
                f"a chain is of objects: write {self.called}(...) | {second.__name__}()"
            )
        if not isinstance(second, Codec):
            return NotImplemented
        even_local = self.even_local or second.even_local
        return Chain(self, second, feedback=self.feedback, even_local=even_local)

    def chosen_count(self, count: int) -> int:
        """How many of so many values are chosen."""
        return min(count, max(1, math.ceil(self.ratio * count))) if count else 0

    @abstractmethod
    def places_size(self, count: int) -> int:
        """Bytes for the places of what is chosen of so many values; at most, unless `fixed`."""

    @abstractmethod
    def choose(self, values: Floats, places: Places, out: Bytes, seed: int) -> int:
        """Choose values.

        Args:
            values: [count], finite.
            places: [chosen_count(count)], gets their places, rising.
            out: [places_size(count)] of any alignment, gets the bytes that tell the places.
            seed: of what is drawn.
        Returns:
            How many bytes were written.
        """

    @abstractmethod
    def read_places(self, data: Bytes, count: int) -> Places:
        """The places [chosen_count(count)] that bytes tell, rising and below `count`.

        Args:
            data: of any alignment; may come from a peer.
        Raises:
            ValueError: they tell none.
        """

    def factor(self, count: int) -> float:
        """What the chosen ones of so many values are multiplied by where they are decoded."""
        return 1.0

    def scatter(self, values: Floats, places: Places, out: Floats) -> None:
        """Put the chosen values at their places, and 0 everywhere else."""
        factor = self.factor(out.size)
        if factor != 1.0:
            with np.errstate(over="ignore"):
                values = np.clip(values * np.float32(factor), -MAX, MAX)
        out[...] = 0.0
        out[places] = values

    def size(self, count: int) -> int:
        return FLOAT_BYTES * self.chosen_count(count) + self.places_size(count)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        number = self.chosen_count(values.size)
        places, end = np.empty(number, np.uint32), FLOAT_BYTES * number
        written = self.choose(values, places, out[end:], seed)
        np.take(values, places, out=out[:end].view(np.float32))
        return end + written

    def decode(self, data: Bytes, out: Floats) -> None:
        number = self.chosen_count(out.size)
        end = FLOAT_BYTES * number
        if data.size < end:
            raise ValueError(f"{data.size} bytes came where {number} values and their places lie")
        values = data[:end].view(np.float32)
        if not np.isfinite(values).all():
            raise ValueError(f"a value of ps.{self.name} is NaN or Inf")
        self.scatter(values, self.read_places(data[end:], out.size), out)


@dataclass(frozen=True)
class TopK(Sparse):
    """The largest values by size, exactly, with their places; all others are 0.

    Source: Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017.

    Attributes:
        ratio: how many of the values, above 0 and at most 1; at least one of each server's part.
        index: "delta": a place takes one byte where the one before is less than 129 away, two below
            16,513; "plain": four.
    """

    index: Literal["delta", "plain"] = "delta"

    fixed: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.index not in ("delta", "plain"):
            raise ValueError(f'index of ps.TopK is "delta" or "plain", not {self.index!r}')

    def places_size(self, count: int) -> int:
        return self.chosen_count(count) * (5 if self.index == "delta" else 4)

    def choose(self, values: Floats, places: Places, out: Bytes, seed: int) -> int:
        if not values.size:
            return 0
        kernels = codec_kernels()
        counts = np.empty(kernels.BINS, np.uint32)
        kernels.choose_largest(values.view(np.uint32), places.size, counts, places)
        if self.index == "plain":
            out[: places.nbytes] = places.view(np.uint8)
            return places.nbytes
        written: int = kernels.to_gaps(places, out)
        return written

    def read_places(self, data: Bytes, count: int) -> Places:
        places = np.empty(self.chosen_count(count), np.uint32)
        if self.index == "plain":
            check_length(data, places.nbytes)
            places.view(np.uint8)[...] = data
            rising = bool((places[1:] > places[:-1]).all())
            good = rising and (not places.size or int(places[-1]) < count)
        else:
            good = codec_kernels().from_gaps(data, places, count) == data.size
        if not good:
            raise ValueError(
                f"the places of ps.TopK are not {places.size} rising ones below {count}"
            )
        return places


@dataclass(frozen=True)
class RandomK(Sparse):
    """Some of the values, drawn at random, exactly; all others are 0.

    Every choice of as many values is equally likely. Both sides draw the places from one seed,
    which travels instead of them. What is left out is added to the next gradient; with
    `feedback=False` nothing is, and what is decoded is divided by the share that is kept, so that
    the mean is right.

    Source: Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018.

    Attributes:
        ratio: how many of the values, above 0 and at most 1; at least one of each server's part.
    """

    def places_size(self, count: int) -> int:
        return SEED_BYTES if count else 0

    def choose(self, values: Floats, places: Places, out: Bytes, seed: int) -> int:
        size = self.places_size(values.size)
        own = seed & 0xFFFFFFFF
        codec_kernels().draw_places(values.size, own, places)
        out[:size] = np.array([own], "<u4").view(np.uint8)[:size]
        return size

    def read_places(self, data: Bytes, count: int) -> Places:
        check_length(data, self.places_size(count))
        places = np.empty(self.chosen_count(count), np.uint32)
        codec_kernels().draw_places(count, int.from_bytes(data.tobytes(), "little"), places)
        return places

    def factor(self, count: int) -> float:
        return 1.0 if self.feedback else count / max(self.chosen_count(count), 1)


@dataclass(frozen=True, repr=False)
class Chain(Codec):
    """What `first` chooses, encoded by `second`: its bytes come first, then the places.

    Attributes:
        first: chooses values.
        second: encodes them, always in as many bytes.
    """

    first: Sparse
    second: Codec

    pushes_only: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        first: Any = self.first
        second = self.second
        if not isinstance(first, Sparse):
            Codec.__or__(first, second)
        if second.pushes_only:
            raise TypeError(
                f"{second.called} leaves values out, as {first.called} before it does: a chain is "
                "one codec that chooses values and one that encodes all that it gets, as in "
                f"{first.called}(0.01) | ps.Int4()"
            )
        if second.pulls_only:
            raise TypeError(
                f"{second.called} ends no chain: give it the chain, as in "
                f"ps.Delta({first.called}(0.01) | ps.Int4())"
            )
        if not second.fixed:
            raise TypeError(
                f"{second.called} takes more or fewer bytes by what it encodes, so that a server "
                "could not tell where the places begin: end the chain with a codec that is `fixed`"
            )
        object.__setattr__(self, "fixed", first.fixed)

    @property
    def called(self) -> str:
        return f"{self.first.called} | {self.second.called}"

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"

    def __or__(self, second: object) -> Codec:
        if not isinstance(second, Codec):
            return NotImplemented
        raise TypeError(
            f"{self.called} is a chain, which has two parts: leave out {second.called}, or the one "
            "before it"
        )

    def size(self, count: int) -> int:
        return self.second.size(self.first.chosen_count(count)) + self.first.places_size(count)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        number = self.first.chosen_count(values.size)
        places, end = np.empty(number, np.uint32), self.second.size(number)
        written = self.first.choose(values, places, out[end:], seed)
        filled = self.second.encode(values[places], out[:end], seed ^ SECOND_SEED)
        if filled != end:
            raise ValueError(f"{self.second.name} wrote {filled} bytes, its size says {end}")
        return end + written

    def decode(self, data: Bytes, out: Floats) -> None:
        number = self.first.chosen_count(out.size)
        end = self.second.size(number)
        if data.size < end:
            raise ValueError(f"{data.size} bytes came where {number} values and their places lie")
        places = self.first.read_places(data[end:], out.size)
        values = np.empty(number, np.float32)
        self.second.decode(data[:end], values)
        self.first.scatter(values, places, out)

"""Matrices as products of two thin ones: a codec that looks at whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import numpy as np

from paramserve.codecs.base import Bytes, Codec, Floats, check_length

FLOAT_BYTES = 4
ITERATIONS_MAX = 8
MAX = np.finfo(np.float32).max

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PowerSGD(Codec):
    """A matrix [n, m] as the product of [n, rank] and [rank, m], which power iteration finds.

    Of a tensor with more dimensions the first one is n. What has one dimension or none, or would
    not become smaller, is sent as it is. Each push starts from a matrix that is drawn anew, where
    the paper starts from the last one: a codec keeps nothing. What is decoded is equal on all
    machines to within rounding errors of float32.

    No tensor is cut over two servers.

    Source: Vogels, Karimireddy and Jaggi, PowerSGD, 2019 (arXiv 1905.13727), algorithm 1.

    Attributes:
        rank: columns of the thin matrices, at least 1.
        iterations: of the power iteration, 1 to 8; 2 come closer to the best matrix of this rank.
    """

    rank: int = 1
    iterations: int = 1

    pushes_only: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, most in (("rank", None), ("iterations", ITERATIONS_MAX)):
            value: Any = getattr(self, name)
            good = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            if not good or (most is not None and value > most):
                limits = "at least 1" if most is None else f"from 1 to {most}"
                raise ValueError(f"{name} of ps.PowerSGD is an int {limits}, not {value!r}")

    def bound(self, shapes: Sequence[Shape]) -> Codec:
        """The codec of values that are tensors of these shapes, end to end."""
        return LowRank(self, tuple(shapes), feedback=self.feedback, even_local=self.even_local)

    def size(self, count: int) -> int:
        return FLOAT_BYTES * count

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        """Encode values without a shape as they are: they are no matrix."""
        return self.bound(((values.size,),)).encode(values, out, seed)

    def decode(self, data: Bytes, out: Floats) -> None:
        self.bound(((out.size,),)).decode(data, out)


@dataclass(frozen=True)
class LowRank(Codec):
    """`PowerSGD` of tensors of these shapes.

    For each tensor come the two thin matrices, of which the first has orthonormal columns; or the
    values as they are.
    """

    codec: PowerSGD
    shapes: tuple[Shape, ...]

    pushes_only: ClassVar[bool] = True
    whole_tensors: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return self.codec.name

    def _matrices(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield n, m and the rank of each tensor; rank 0: it is sent as it is.

        Raises:
            ValueError: they do not have so many values.
        """
        if sum(map(prod, self.shapes)) != count:
            raise ValueError(f"{count} values are not tensors of the shapes {self.shapes[:3]}")
        for shape in self.shapes:
            n, m = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
            rank = min(self.codec.rank, n, m)
            yield n, m, rank if (n + m) * rank < n * m else 0

    def size(self, count: int) -> int:
        each = (((n + m) * rank if rank else n * m) for n, m, rank in self._matrices(count))
        return FLOAT_BYTES * sum(each)

    def encode(self, values: Floats, out: Bytes, seed: int) -> int:
        floats, low, at = out.view(np.float32), 0, 0
        for number, (n, m, rank) in enumerate(self._matrices(values.size)):
            part = values[low : low + n * m]
            low += n * m
            if not rank:
                floats[at : at + n * m] = part
                at += n * m
                continue
            p, q = self._thin(part.reshape(n, m), rank, (seed & 0xFFFFFFFF, number))
            floats[at : at + n * rank] = p.reshape(-1)
            floats[at + n * rank : at + (n + m) * rank] = q.reshape(-1)
            at += (n + m) * rank
        return FLOAT_BYTES * at

    def _thin(self, matrix: Any, rank: int, seed: tuple[int, int]) -> tuple[Any, Any]:
        """[n, rank] with orthonormal columns and [m, rank], whose product is close to the matrix.

        It works on the matrix divided by its largest value, so that nothing overflows on the way.
        """
        largest = max(abs(float(matrix.max())), abs(float(matrix.min())))
        scaled = matrix / np.float32(largest) if largest else matrix
        q = np.random.default_rng(seed).standard_normal((matrix.shape[1], rank), np.float32)
        for _ in range(self.codec.iterations):
            p = np.linalg.qr(scaled @ q)[0]
            q = scaled.T @ p
        with np.errstate(over="ignore", under="ignore"):
            q = q * np.float32(largest)
        return p, np.clip(q, -MAX, MAX)

    def decode(self, data: Bytes, out: Floats) -> None:
        check_length(data, self.size(out.size))
        floats, low, at = data.view(np.float32), 0, 0
        if not np.isfinite(floats).all():
            raise ValueError("a value of ps.PowerSGD is NaN or Inf")
        for n, m, rank in self._matrices(out.size):
            part = out[low : low + n * m]
            low += n * m
            if not rank:
                part[...] = floats[at : at + n * m]
                at += n * m
                continue
            p = floats[at : at + n * rank].reshape(n, rank)
            q = floats[at + n * rank : at + (n + m) * rank].reshape(m, rank)
            at += (n + m) * rank
            _multiply(p, q, part.reshape(n, m))


def _multiply(p: Any, q: Any, out: Any) -> None:
    """The product of thin matrices, limited to what float32 has.

    Raises:
        ValueError: the columns of `p` cannot be orthonormal, so that the product overflows.
    """
    if np.abs(p).max() > 1.0 + 1e-3:
        raise ValueError("the columns of a matrix of ps.PowerSGD have no length of 1")
    largest = np.abs(q).max()
    with np.errstate(over="ignore", under="ignore"):
        np.matmul(p, (q / largest if largest else q).T, out=out)
        np.multiply(out, largest, out=out)
    np.clip(out, -MAX, MAX, out=out)

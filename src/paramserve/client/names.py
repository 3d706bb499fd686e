"""Tensors by name: which block and piece a name is, and what may be written to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.core.partition import PLAIN_DTYPES, Block
from paramserve.errors import DtypeMismatch, ShapeMismatch, UnknownName

Array = npt.NDArray[Any]


class Tensor(NamedTuple):
    """A name and what the caller gave for it, as an array."""

    name: str
    array: Array


def as_tensors(
    name: str | Mapping[str, npt.ArrayLike],
    value: npt.ArrayLike | None,
    *,
    parameters: bool = False,
) -> list[Tensor]:
    """The two ways of naming tensors as one: `("w", array)` or `({"w": array, ...})`.

    Args:
        parameters: the names exist already and bring their dtype; else all must have one dtype
            that a block can hold.
    Raises:
        TypeError, ValueError: anything else.
    """
    if isinstance(name, str):
        if value is None:
            raise TypeError(f"no value was given for {name!r}")
        pairs: Mapping[str, npt.ArrayLike] = {name: value}
    elif isinstance(name, Mapping):
        if value is not None:
            raise TypeError("give either one name and its value, or a mapping")
        pairs = name
    else:
        raise TypeError(f"a name is a str, or a mapping from names to values; got {name!r}")
    if not pairs:
        raise ValueError("an empty mapping names nothing")
    tensors = [Tensor(_name(each), np.asarray(pairs[each])) for each in pairs]
    if not parameters:
        _check_dtypes(tensors)
    return tensors


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a name is a str that is not empty, got {name!r}")
    return name


def _check_dtypes(tensors: Sequence[Tensor]) -> None:
    dtypes = {tensor.array.dtype.name for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"tensors of one define have one dtype, got {', '.join(sorted(dtypes))}")
    if not dtypes <= set(PLAIN_DTYPES):
        raise TypeError(f"values are {' or '.join(PLAIN_DTYPES)}, got {dtypes.pop()}")


class NamedPiece:
    """One tensor of a block: a name with its place in the block's flat array."""

    def __init__(self, block: Block, index: int) -> None:
        piece = block.pieces[index]
        self.name = piece.name
        self.shape = tuple(piece.shape)
        self.start = block.starts[index]
        self.stop = block.starts[index + 1]
        self.dtype = block.dtype
        self.size = prod(piece.shape)

    def view(self, flat: Array) -> Array:
        """This tensor within a block's flat array, [*shape]."""
        return flat[self.start : self.stop].reshape(self.shape)

    def fill(self, flat: Array, gradient: Array, known: bool) -> bool:
        """Write a gradient [*shape] to its place; whether it is finite throughout.

        Args:
            known: the caller may have been given that place: then a gradient that lies there
                already is only checked.
        """
        from paramserve.rules import kernels

        target = flat[self.start : self.stop]
        if known and gradient.ctypes.data == target.ctypes.data:
            return bool(kernels.finite(target))
        if (
            gradient.dtype == self.dtype
            and gradient.flags.c_contiguous
            and gradient.flags.writeable
        ):
            return bool(kernels.copy_finite(target, gradient.reshape(-1)))
        np.copyto(target.reshape(self.shape), gradient, casting="same_kind")
        return bool(kernels.finite(target))

    def read(self, flat: Array, target: Array | None, copy: bool) -> Array:
        """This tensor's values out of a block's flat array."""
        view = self.view(flat)
        if target is not None:
            if target.shape != self.shape or target.dtype != self.dtype:
                raise ShapeMismatch(
                    f"out for {self.name!r} is {target.dtype}{list(target.shape)}, "
                    f"the value is {self.dtype}{list(self.shape)}",
                    fix="give an array of the same shape and dtype",
                )
            np.copyto(target, view)
            return target
        if copy:
            return view.copy()
        view.flags.writeable = False
        return view


class Names:
    """What a client knows of the cluster's names."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Block, NamedPiece]]] = {}
        self._pieces: dict[int, list[NamedPiece]] = {}

    def add(self, block: Block) -> None:
        """Learn a block; repeating changes nothing."""
        if block.id in self._pieces:
            return
        pieces = [NamedPiece(block, index) for index in range(len(block.pieces))]
        self._pieces[block.id] = pieces
        for piece in pieces:
            self._found.setdefault(piece.name, []).append((block, piece))

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def pieces(self, block: Block) -> list[NamedPiece]:
        """The block's tensors, in order."""
        return self._pieces[block.id]

    def _only(self, name: str) -> tuple[Block, NamedPiece]:
        found = self._found.get(name)
        if found is None:
            raise UnknownName(f"no parameter is named {name!r}", fix="define it first")
        if len(found) > 1:
            groups = sorted(block.group_name for block, _ in found)
            raise UnknownName(
                f"{name!r} is in several groups: {', '.join(groups)}",
                fix="give parameters names of their own, or work with blocks",
            )
        return found[0]

    def blocks(self, names: Sequence[str]) -> list[Block]:
        """Blocks that hold these names, each once, in the order of the names."""
        found = {}
        for name in names:
            block, _ = self._only(name)
            found[block.id] = block
        return list(found.values())

    def piece_of(self, block: Block, name: str) -> NamedPiece:
        """The tensor of this name in a block."""
        return next(piece for piece in self._pieces[block.id] if piece.name == name)

    def checked(self, tensor: Tensor) -> Array:
        """The array, if it can be written to the parameter of that name.

        Raises:
            ShapeMismatch, DtypeMismatch: nothing was sent.
        """
        _, piece = self._only(tensor.name)
        array = tensor.array
        if array.shape != piece.shape:
            raise ShapeMismatch(
                f"{tensor.name!r} has shape {list(piece.shape)}, got {list(array.shape)}",
                fix="send a gradient or value of the parameter's shape",
            )
        if array.dtype != piece.dtype and not (
            np.can_cast(array.dtype, piece.dtype, "same_kind")
            and array.dtype.kind == piece.dtype.kind
        ):
            raise DtypeMismatch(
                f"{tensor.name!r} is {piece.dtype}, got {array.dtype}",
                fix=f"convert it with .astype({piece.dtype.name!r})",
            )
        return array

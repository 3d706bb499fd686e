"""Names and keys as users give them: a name's block and piece, what may be written to it, and the
keys and rows of tables as the kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from paramserve.client.string_keys import TEXT, hashed, is_text
from paramserve.core.partition import DTYPES, PLAIN_DTYPES, Block
from paramserve.errors import DtypeMismatch, ShapeMismatch, UnknownName
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]


RESOLVED_MAX = 1024
"""Combinations of names whose blocks are remembered."""


class Tensor(NamedTuple):
    """A name and what the caller gave for it, as an array."""

    name: str
    array: Array


def as_pairs(
    name: str | Mapping[str, npt.ArrayLike], value: npt.ArrayLike | None
) -> Mapping[str, npt.ArrayLike]:
    """The two ways of naming tensors as one: `("w", array)` or `({"w": array, ...})`.

    Raises:
        TypeError, ValueError: anything else.
    """
    if isinstance(name, str):
        if value is None:
            raise TypeError(f"no value was given for {name!r}")
        return {_name(name): value}
    if not isinstance(name, dict | Mapping):
        raise TypeError(f"a name is a str, or a mapping from names to values; got {name!r}")
    if value is not None:
        raise TypeError("give either one name and its value, or a mapping")
    if not name:
        raise ValueError("an empty mapping names nothing")
    for each in name:
        _name(each)
    return name


def as_tensors(
    name: str | Mapping[str, npt.ArrayLike], value: npt.ArrayLike | None
) -> list[Tensor]:
    """Tensors that a block can hold together.

    Raises:
        TypeError: several dtypes, or one that a block cannot hold.
        ValueError: nothing is named.
    """
    pairs = as_pairs(name, value)
    tensors = [Tensor(each, as_array(pairs[each])) for each in pairs]
    dtypes = {tensor.array.dtype.name for tensor in tensors}
    if len(dtypes) > 1:
        raise TypeError(f"tensors of one define have one dtype, got {', '.join(sorted(dtypes))}")
    if not dtypes <= set(PLAIN_DTYPES):
        raise TypeError(f"values are {' or '.join(PLAIN_DTYPES)}, got {dtypes.pop()}")
    return tensors


def check_ruled(dtype: np.dtype[Any]) -> None:
    """Raise `TypeError` unless rules can update values of this dtype."""
    if dtype.name not in DTYPES:
        raise TypeError(
            f"values with a rule are {' or '.join(DTYPES)}, got {dtype.name}: convert them with "
            ".astype('float32'), or leave the rule out and assign them"
        )


def as_array(value: npt.ArrayLike) -> Array:
    """What a caller gave for a tensor, as numpy sees it: of a tensor of torch its present values,
    wherever they are and whether or not they are trained."""
    detach = getattr(value, "detach", None)
    return np.asarray(value if detach is None else detach().cpu())


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a name is a str that is not empty, got {name!r}")
    return name


class NamedPiece:
    """One tensor of a block: a name with its place in the block's flat array."""

    def __init__(self, block: Block, index: int) -> None:
        piece = block.pieces[index]
        self.index = index
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
        kernels = compiled()
        target = flat[self.start : self.stop]
        if gradient.dtype == self.dtype and gradient.flags.c_contiguous:
            # A transposed view of that place begins there too, and has to be copied.
            if known and gradient.ctypes.data == target.ctypes.data:
                return bool(kernels.finite(target))
            if gradient.flags.writeable:
                return bool(kernels.copy_finite(target, gradient.reshape(-1)))
        with np.errstate(over="ignore"):  # what overflows is found right after
            np.copyto(target.reshape(self.shape), gradient, casting="same_kind")
        return bool(kernels.finite(target))

    def read(self, flat: Array, target: Array | None, copy: bool) -> Array:
        """This tensor's values out of a block's flat array."""
        view = self.view(flat)
        if target is not None:
            np.copyto(target, view)
            return target
        if copy:
            return view.copy()
        view.flags.writeable = False
        return view

    def check_target(self, target: object) -> None:
        """Refuse an array that the values cannot be read into.

        Raises:
            TypeError, ShapeMismatch: nothing was read.
        """
        if not isinstance(target, np.ndarray) or not target.flags.writeable:
            kind = "read-only" if isinstance(target, np.ndarray) else type(target).__name__
            raise TypeError(f"out for {self.name!r} must be an array to write to, it is {kind}")
        if target.shape != self.shape or target.dtype != self.dtype:
            raise ShapeMismatch(
                f"out for {self.name!r} is {target.dtype}{list(target.shape)}, "
                f"the value is {self.dtype}{list(self.shape)}",
                fix="give an array of the same shape and dtype",
            )


class Names:
    """What a client knows of the cluster's names."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[Block, NamedPiece]]] = {}
        self._pieces: dict[int, list[NamedPiece]] = {}
        self._resolved: dict[tuple[str, ...], list[Block]] = {}

    def add(self, block: Block) -> None:
        """Learn a block; repeating changes nothing."""
        if block.id in self._pieces:
            return
        self._resolved.clear()  # A name may be in two groups now.
        pieces = [NamedPiece(block, index) for index in range(len(block.pieces))]
        self._pieces[block.id] = pieces
        for piece in pieces:
            self._found.setdefault(piece.name, []).append((block, piece))

    def remove(self, block: Block) -> None:
        """Forget a block that was not defined after all."""
        self._resolved.clear()
        for piece in self._pieces.pop(block.id, ()):
            left = [each for each in self._found[piece.name] if each[0].id != block.id]
            if left:
                self._found[piece.name] = left
            else:
                del self._found[piece.name]

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def pieces(self, block: Block) -> list[NamedPiece]:
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

    def piece(self, name: str) -> NamedPiece:
        """The tensor of this name.

        Raises:
            UnknownName: there is none, or several groups have one.
        """
        return self._only(name)[1]

    def known(self, names: tuple[str, ...]) -> list[Block] | None:
        """The blocks that hold exactly these names, if they were asked for before."""
        return self._resolved.get(names)

    def remember(self, names: tuple[str, ...], blocks: list[Block]) -> None:
        """Keep the answer for `known`, until the next block is learned."""
        if len(self._resolved) < RESOLVED_MAX:
            self._resolved[names] = blocks

    def checked(self, name: str, value: npt.ArrayLike) -> Array:
        """The value as an array, if it can be written to the parameter of that name.

        Raises:
            ShapeMismatch, DtypeMismatch: nothing was sent.
        """
        _, piece = self._only(name)
        array = value if type(value) is np.ndarray else as_array(value)
        if array.shape != piece.shape:
            raise ShapeMismatch(
                f"{name!r} has shape {list(piece.shape)}, got {list(array.shape)}",
                fix="send a gradient or value of the parameter's shape",
            )
        if array.dtype != piece.dtype and not (
            array.dtype.kind == piece.dtype.kind
            and np.can_cast(array.dtype, piece.dtype, "same_kind")
        ):
            raise DtypeMismatch(
                f"{name!r} is {piece.dtype}, got {array.dtype}",
                fix=f"convert it with .astype({piece.dtype.name!r})",
            )
        return array


def as_keys(
    keys: npt.ArrayLike, table: str, keys_of: Callable[[Any], Array] | None = None
) -> tuple[Array, tuple[int, ...]]:
    """Keys as int64 [n], and their shape.

    Args:
        keys_of: makes keys of strings; None: as `ps.keys_of`.
    Raises:
        TypeError: they are neither integers nor strings. ValueError: one does not fit into 64 bits
            with a sign, or has no UTF-8.
    """
    what = f"keys of table {table!r}"
    array = None if type(keys) is not np.ndarray and is_text(keys) else np.asarray(keys)
    if array is None or array.dtype.kind in TEXT:
        array = hashed(keys, what) if keys_of is None else keys_of(keys)
    if array.dtype.kind not in "iu" and not (array.size == 0 and array.dtype == np.float64):
        raise TypeError(
            f"{what} have to be integers or strings, not {array.dtype}. Applied: no. To fix: "
            "convert them with .astype(np.int64), where no value is missing, or make keys of "
            "strings with ps.keys_of(...)"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise ValueError(
            f"{what}: {int(array.max())} is above 2**63 - 1, the largest one. Applied: no. To fix: "
            "where they are hashes of 64 bits, as pandas.util.hash_array gives, take the same bits "
            "with a sign: keys.view(np.int64)"
        )
    flat = np.ascontiguousarray(array, np.int64).reshape(-1)
    return _writable(flat), array.shape


def as_rows(
    keys: npt.ArrayLike,
    rows: npt.ArrayLike,
    dim: int,
    table: str,
    keys_of: Callable[[Any], Array] | None = None,
) -> tuple[Array, Array]:
    """Keys as int64 [n], and a row for each, float32 [n, dim].

    Raises:
        As `as_keys`. ShapeMismatch, DtypeMismatch: the rows are others than the keys' and floats.
    """
    flat, shape = as_keys(keys, table, keys_of)
    values = rows if type(rows) is np.ndarray else as_array(rows)
    if values.shape != (*shape, dim):
        raise ShapeMismatch(
            f"{len(flat)} keys of table {table!r}, {list(shape)}, came with rows of shape "
            f"{list(values.shape)}, expected {[*shape, dim]}",
            fix="give one row of the table's dim for each key",
        )
    if values.dtype.kind != "f":
        raise DtypeMismatch(
            f"rows for table {table!r} are {values.dtype}, not floating point",
            fix="convert them with .astype('float32')",
        )
    with np.errstate(over="ignore"):  # what overflows is found where it is summed
        values = np.ascontiguousarray(values, np.float32)
    return flat, _writable(values).reshape(-1, dim)


def _writable(array: Array) -> Array:
    """The array, or a copy where it is read-only: kernels are compiled for arrays to write to."""
    return array if array.flags.writeable else array.copy()

"""Names and keys as users give them: a name's block and piece, what may be written to it, and the
keys and rows of tables as the kernels take them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from paramserve.client.string_keys import TEXT, hashed, is_text
from paramserve.core.partition import DTYPES, HALVES, PLAIN_DTYPES, Block
from paramserve.errors import DtypeMismatch, ShapeMismatch, UnknownName
from paramserve.rules.compiled import compiled

Array = npt.NDArray[Any]


INT64, FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
NAMES_KEPT_MAX = 1 << 16
"""Most names in all selections together that are kept for the next call."""
SELECTION_NAMES = 8
"""A selection counts for so many names more than it has: a small one takes as much memory."""
SMALL_BYTES = 32 << 10
"""Tensors of up to so many bytes are copied one by one and checked together: a call of the kernel
that does both in one pass costs as much as the copy of this."""


class Tensor(NamedTuple):
    """A name and what the caller gave for it, as an array; of 16 bits widened to float32."""

    name: str
    array: Array
    half: str | None = None
    """Dtype of 16-bit values; see `BlockSpec.half`."""


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
    name: str | Mapping[str, npt.ArrayLike],
    value: npt.ArrayLike | None,
    dtype: str | None = None,
) -> list[Tensor]:
    """Tensors that a block can hold together.

    Args:
        dtype: as `Client.define` takes it.
    Raises:
        TypeError: several dtypes, or one that a block cannot hold.
        ValueError: nothing is named, or the dtype is not of 16 bits.
    """
    if dtype is not None and dtype not in HALVES:
        raise ValueError(
            f"dtype of define is {' or '.join(map(repr, HALVES))}, not {dtype!r}; others are those "
            "of the values"
        )
    pairs = as_pairs(name, value)
    tensors = [(each, as_array(pairs[each])) for each in pairs]
    halves = [_half_of(pairs[each]) for each in pairs]
    dtypes = {h or array.dtype.name for h, (_, array) in zip(halves, tensors, strict=True)}
    if dtype is not None:
        wrong = dtypes - {"float32", dtype, "uint16" if dtype == "bfloat16" else dtype}
        if wrong:
            raise TypeError(f"values of a {dtype} block are float32 or {dtype}, got {wrong.pop()}")
    elif len(dtypes) > 1:
        raise TypeError(f"tensors of one define have one dtype, got {', '.join(sorted(dtypes))}")
    elif not dtypes <= {*PLAIN_DTYPES, *HALVES}:
        raise TypeError(f"values are {' or '.join((*PLAIN_DTYPES, *HALVES))}, got {dtypes.pop()}")
    half = dtype if dtype is not None else halves[0]
    if half is None:
        return [Tensor(*each) for each in tensors]
    return [Tensor(each, _floats(array), half) for each, array in tensors]


def _half_of(value: object) -> str | None:
    """Which of 16 bits a caller gave, if either."""
    name = str(getattr(value, "dtype", "")).removeprefix("torch.")
    return name if name in HALVES else None


def _floats(array: Array) -> Array:
    """Values as float32, exactly; of uint16, the bits of bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32, copy=False)


def _bits_of(value: object) -> Array | None:
    """The bits of bfloat16 values; None: the caller gave others."""
    if _half_of(value) != "bfloat16":
        return None
    source: Any = value
    if not hasattr(source, "detach"):  # an array of a package that adds the dtype to numpy
        return np.asarray(source).view(np.uint16)
    tensor = source.detach().cpu().contiguous()
    bits: Array = tensor.view(import_module("torch").int16).numpy().view(np.uint16)
    return bits


def check_ruled(dtype: np.dtype[Any]) -> None:
    """Raise `TypeError` unless rules can update values of this dtype."""
    if dtype.name not in DTYPES:
        dtypes = " or ".join((*DTYPES, *HALVES))
        raise TypeError(
            f"values with a rule are {dtypes}, got {dtype.name}: convert them with "
            ".astype('float32'), or leave the rule out and assign them"
        )


def as_array(value: npt.ArrayLike) -> Array:
    """What a caller gave for a tensor, as numpy sees it: of a tensor of torch its present values,
    wherever they are and whether or not they are trained."""
    detach = getattr(value, "detach", None)
    if detach is None:
        return np.asarray(value)
    tensor = detach().cpu()
    try:
        return np.asarray(tensor)
    except TypeError:  # numpy has no bfloat16
        return np.asarray(tensor.float())


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
        self.dtype = block.shown
        self.half = block.spec.half
        self.size = prod(piece.shape)

    def view(self, flat: Array) -> Array:
        """This tensor within a block's flat array, [*shape]."""
        return flat[self.start : self.stop].reshape(self.shape)

    def is_finite(self, gradient: Array) -> bool:
        """Whether a gradient, as `checked` gives it, has neither NaN nor Inf."""
        if self.half is None:
            return bool(np.isfinite(gradient).all())
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(gradient, self.dtype)
        bits = _writable(values).reshape(-1).view(HALVES[self.half])
        return float(compiled().largest(bits)) < math.inf

    def add(self, flat: Array, gradient: Array) -> None:
        """Add a gradient to what lies at its place."""
        target = self.view(flat)
        if self.half == "bfloat16":
            target[...] = self._rounded(_floats(target) + _floats(gradient))
        else:
            target = target.view(self.dtype)
            target += gradient

    def fill(self, flat: Array, gradient: Array, in_place: bool) -> float:
        """Write a gradient [*shape] to its place; the largest size of an element there, and inf if
        one is NaN or Inf.

        Args:
            in_place: it lies there already, and is only looked at.
        """
        kernels = compiled()
        target, flags = flat[self.start : self.stop], gradient.flags
        if not in_place:
            if gradient.dtype == self.dtype and flags.c_contiguous and flags.writeable:
                source = gradient.reshape(-1)
                if self.half is not None:
                    source = source.view(target.dtype)
                return float(kernels.copy_largest(target, source))
            into = target.reshape(self.shape)
            if self.half is not None:
                into = into.view(self.dtype)
            with np.errstate(over="ignore"):  # what overflows is found right after
                np.copyto(into, gradient, casting="same_kind")
        return float(kernels.largest(target))

    def checked(self, value: npt.ArrayLike) -> Array:
        """The value as an array, if it can be written to this parameter.

        Raises:
            ShapeMismatch, DtypeMismatch: nothing was sent.
        """
        array = value if type(value) is np.ndarray else None
        if self.half == "bfloat16":
            array = _bits_of(value)
        if array is None:
            array = as_array(value)
        if array.shape != self.shape:
            raise ShapeMismatch(
                f"{self.name!r} has shape {list(self.shape)}, got {list(array.shape)}",
                fix="send a gradient or value of the parameter's shape",
            )
        if self.half == "bfloat16" and array.dtype.kind == "f":
            return self._rounded(array)
        if array.dtype != self.dtype and not (
            array.dtype.kind == self.dtype.kind
            and np.can_cast(array.dtype, self.dtype, "same_kind")
        ):
            raise DtypeMismatch(
                f"{self.name!r} is {self.half or self.dtype}, got {array.dtype}",
                fix=f"convert it with .astype({self.half or self.dtype.name!r})",
            )
        return array

    def checked_to_keep(self, value: npt.ArrayLike) -> Array:
        """The value as the servers keep it; of a 16-bit parameter, float32 values stay whole.

        Raises:
            As `checked`.
        """
        if self.half is not None and type(value) is np.ndarray and value.dtype == np.float32:
            return value if value.shape == self.shape else self.checked(value)
        array = self.checked(value)
        return array if self.half is None else _floats(array)

    def _rounded(self, floats: Array) -> Array:
        """The bits of bfloat16 of floating point values."""
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(floats, np.float32)
        bits = np.empty(values.shape, np.uint16)
        compiled().round_into(bits.reshape(-1), _writable(values).reshape(-1))
        return bits

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


class Part(Struct, frozen=True, eq=False):
    """What a call names of one block."""

    block: Block
    pieces: tuple[NamedPiece, ...]
    """Pieces in the block's order."""
    places: tuple[int, ...]
    """Positions of the block's tensors among the call's names."""
    span: slice | None
    """The same, if they lie side by side in this order."""
    active: tuple[int, ...] | None
    """Indices of the pieces; None: all of the block's."""
    indices: tuple[int, ...]
    small: bool
    """Whether each has at most `SMALL_BYTES`."""

    @classmethod
    def of(cls, block: Block, named: Sequence[tuple[int, NamedPiece]]) -> Self:
        """What is named of a block: its tensors, with their places among the call's names."""
        named = sorted(named, key=lambda each: each[1].index)
        places, pieces = tuple(place for place, _ in named), tuple(piece for _, piece in named)
        indices = tuple(piece.index for piece in pieces)
        first, last = places[0], places[0] + len(places)
        return cls(
            block,
            pieces,
            places,
            slice(first, last) if places == tuple(range(first, last)) else None,
            None if indices == tuple(range(len(block.pieces))) else indices,
            indices,
            max(piece.size for piece in pieces) * block.dtype.itemsize <= SMALL_BYTES,
        )

    def pick(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Arrays of this block among those for a call's names."""
        if self.span is not None:
            return arrays[self.span]
        return [arrays[place] for place in self.places]


class Selection:
    """The names of a call, resolved.

    Attributes:
        places: of each name, the number of its block and of its tensor there.
        blocks: those that hold the names, each once.
        groups: the same by group.
        pushable: whether it was found that gradients of them can be pushed in one call.
    """

    def __init__(self, names: Sequence[str], pairs: Sequence[tuple[Block, NamedPiece]]) -> None:
        blocks = {block.id: block for block, _ in pairs}
        by_block: dict[int, dict[int, tuple[int, NamedPiece]]] = {number: {} for number in blocks}
        groups: dict[int, list[Block]] = {}
        for place, (block, piece) in enumerate(pairs):
            by_block[block.id].setdefault(piece.index, (place, piece))
        for block in blocks.values():
            groups.setdefault(block.group, []).append(block)
        self.names = tuple(names)
        self.pieces = [piece for _, piece in pairs]
        self.places = [
            (name, block.id, piece.index) for name, (block, piece) in zip(names, pairs, strict=True)
        ]
        self.blocks = list(blocks.values())
        self.groups = list(groups.values())
        self.parts = [Part.of(block, list(by_block[block.id].values())) for block in self.blocks]
        self.pushable = False

    def checked_gradients(self, values: Mapping[str, npt.ArrayLike]) -> list[Array]:
        """The gradients given for these names, checked.

        Args:
            values: in the order of `names`.
        Raises:
            ShapeMismatch, DtypeMismatch: nothing was sent.
        """
        arrays: list[Any] = list(values.values())
        for place, (piece, array) in enumerate(zip(self.pieces, arrays, strict=True)):
            if (
                type(array) is not np.ndarray
                or array.dtype is not piece.dtype
                or array.shape != piece.shape
            ):
                arrays[place] = piece.checked(array)
        return arrays


class Names:
    """What a client knows of the cluster's names.

    Attributes:
        selections: by names, those of calls that are kept for the next ones, until a block is
            learned or forgotten.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, list[tuple[Block, NamedPiece]]] = {}
        self._pieces: dict[int, list[NamedPiece]] = {}
        self.selections: dict[tuple[str, ...], Selection] = {}
        self._names_cached = 0
        """Names that they count for."""

    def add(self, block: Block) -> None:
        """Learn a block; repeating changes nothing."""
        if block.id in self._pieces:
            return
        self._forget_selections()  # A name may be in two groups now.
        pieces = [NamedPiece(block, index) for index in range(len(block.pieces))]
        self._pieces[block.id] = pieces
        for piece in pieces:
            self._by_name.setdefault(piece.name, []).append((block, piece))

    def remove(self, block: Block) -> None:
        """Forget a block that was not defined after all."""
        self._forget_selections()
        for piece in self._pieces.pop(block.id, ()):
            others = [each for each in self._by_name[piece.name] if each[0].id != block.id]
            if others:
                self._by_name[piece.name] = others
            else:
                del self._by_name[piece.name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def pieces(self, block: Block) -> list[NamedPiece]:
        return self._pieces[block.id]

    def only(self, name: str) -> tuple[Block, NamedPiece]:
        """The block and the tensor of this name.

        Raises:
            UnknownName: there is none, or several groups have one.
        """
        holders = self._by_name.get(name)
        if holders is None:
            raise UnknownName(f"no parameter is named {name!r}", fix="define it first")
        if len(holders) > 1:
            groups = sorted(block.group_name for block, _ in holders)
            raise UnknownName(
                f"{name!r} is in several groups: {', '.join(groups)}",
                fix="give parameters names of their own, or work with blocks",
            )
        return holders[0]

    def blocks(self, names: Sequence[str]) -> list[Block]:
        """Blocks that hold these names, each once, in the order of the names."""
        by_id = {}
        for name in names:
            block, _ = self.only(name)
            by_id[block.id] = block
        return list(by_id.values())

    def piece(self, name: str) -> NamedPiece:
        """The tensor of this name; raises as `only`."""
        return self.only(name)[1]

    def select(self, names: Sequence[str]) -> Selection:
        """Resolve names, each of which is known, and keep that for the next call.

        Raises:
            As `only`.
        """
        selection = Selection(names, [self.only(name) for name in names])
        if self._names_cached > NAMES_KEPT_MAX:
            self._forget_selections()
        self._names_cached += len(names) + SELECTION_NAMES
        self.selections[selection.names] = selection
        return selection

    def _forget_selections(self) -> None:
        self.selections.clear()
        self._names_cached = 0


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
    if type(keys) is np.ndarray and keys.dtype is INT64 and keys.ndim == 1:
        flags = keys.flags
        if flags.c_contiguous and flags.writeable:
            return keys, keys.shape
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
    wide: np.dtype[Any] | None = None,
) -> tuple[Array, Array]:
    """Keys as int64 [n], and a row for each, float32 [n, dim].

    Args:
        wide: what the table's numbers are, if they are of 64 bits: the rows are their words then.
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
    if wide is not None:
        return flat, _as_numbers(values, wide, table).reshape(-1, dim).view(np.float32)
    if values.dtype.kind != "f":
        raise DtypeMismatch(
            f"rows for table {table!r} are {values.dtype}, not floating point",
            fix="convert them with .astype('float32')",
        )
    if values.dtype is FLOAT32 and values.ndim == 2:
        flags = values.flags
        if flags.c_contiguous and flags.writeable:
            return flat, values
    with np.errstate(over="ignore"):  # what overflows is found where it is summed
        values = np.ascontiguousarray(values, np.float32)
    return flat, _writable(values).reshape(-1, dim)


def _as_numbers(values: Array, kind: np.dtype[Any], table: str) -> Array:
    """A copy of values as numbers of 64 bits, if they can be that exactly.

    Raises:
        DtypeMismatch: they cannot.
    """
    if not np.can_cast(values.dtype, kind, "same_kind"):
        raise DtypeMismatch(
            f"rows for table {table!r} are {values.dtype}, and the table counts in {kind}",
            fix=f"convert them with .astype({kind.name!r})",
        )
    return np.array(values, kind, order="C")


def _writable(array: Array) -> Array:
    """The array, or a copy where it is read-only: kernels are compiled for arrays to write to."""
    return array if array.flags.writeable else array.copy()

"""Keys of strings: a stable 64-bit hash of their UTF-8 bytes, so that no vocabulary is needed.

It takes strings as numpy, pandas, Arrow and lists keep them, and refuses what is none. pandas and
pyarrow are never imported here: a column of theirs comes from a caller that has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from paramserve.compiling import load_text
from paramserve.core.table.compiled import text_kernels

Array = npt.NDArray[Any]

TEXT = "USTO"
"""Kinds of numpy's dtypes whose elements may be strings."""
ENCODED_ROWS = 65_536
"""Strings that are encoded at once: their bytes are copied."""

READ_AS_STRINGS = (
    'read the file again with pd.read_csv(..., dtype={"user": str, "item": str}), naming its id '
    "columns (of ids that pandas has made integers, .astype(str) gives no leading zeros back)"
)


def keys_of(strings: Any, *, field: str = "") -> Array:
    """Keys of strings for a table: a 64-bit hash, equal in all processes and on all machines.

    It is XXH64 of the UTF-8 bytes, the same function as in other languages and databases. A
    `bytes` has the key of the string that it encodes. Of n different strings two share a key with a
    chance of about n**2 / 2**65: 3 in 100 million for a million strings, 3% for a billion. Two that
    do share a row. Strings can be chosen so that they collide: do not use keys where that would let
    one user act as another.

    Example:
        rows = users.pull(ps.keys_of(frame["user_id"]))
        users.pull(frame["user_id"])  # the same: tables take strings and hash them so

    Args:
        strings: a str, a list, a numpy array of dtype str, bytes, object or StringDType, a pandas
            Series or Index, a polars Series, an Arrow array or chunked array; of any shape.
        field: what the strings name, where several fields share one table: "7" of the field "user"
            and "7" of the field "film" get different keys. It seeds the hash.
    Returns:
        int64 [*shape].
    Raises:
        TypeError: an element is neither str nor bytes: None, NaN, a number. The text says at which
            position. Integers are refused since they are keys already, and a column that a reader
            took for numbers once and for strings another time would have two keys for each id.
        ValueError: a string has no UTF-8 (a lone surrogate).
    Source: Y. Collet, xxHash specification 0.1.1, 2018.
    """
    if not isinstance(field, str):
        raise TypeError(f"field must be a str, not {field!r}")
    return hashed(strings, "keys_of", seed=int(hashed(field, "field")) if field else 0)


def is_text(keys: Any) -> bool:
    """Whether these are strings, where that is told at once: by the first element of a list, by
    the type of an Arrow column."""
    while isinstance(keys, list | tuple) and keys:
        keys = keys[0]
    return isinstance(keys, str | bytes) or _arrow(keys) is not None


def hashed(strings: Any, what: str, *, seed: int = 0) -> Array:
    """Hash strings to keys; see `keys_of`.

    Args:
        what: the strings are, for errors.
        seed: of the hash.
    """
    load_text()
    column = _arrow(strings)
    if column is not None:
        return _of_column(column, what, seed)
    array = _array(strings)
    kind = array.dtype.kind
    if kind not in TEXT:
        raise _no_text(what, f"are {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    keys = np.zeros(flat.size, np.int64)
    bad = -1
    if kind in "OT":
        bad = _hash_objects(flat, what, seed, keys, array.shape)
    elif not array.dtype.itemsize:
        text_kernels().hash_padded(_read(np.empty(0, np.uint8)), 0, seed, keys)
    elif kind == "S":
        text_kernels().hash_padded(_read(flat.view(np.uint8)), array.dtype.itemsize, seed, keys)
    else:
        width = array.dtype.itemsize // 4
        codes = flat.astype(array.dtype.newbyteorder("="), copy=False).view(np.uint32)
        room = np.empty(4 * width, np.uint8)
        bad = text_kernels().hash_code_points(_read(codes), width, room, seed, keys)
    if bad >= 0:
        raise _not_utf8(what, str(flat[bad]), bad, array.shape)
    return keys.reshape(array.shape)


def strings_at(strings: Any, places: Array) -> list[str]:
    """Some of the strings that `hashed` has taken, by their numbers in the flat column."""
    column = _arrow(strings)
    if column is not None:
        texts = column.take(sys.modules["pyarrow"].array(places)).to_pylist()
    else:
        texts = _array(strings).reshape(-1)[places].tolist()
    return [each.decode(errors="replace") if isinstance(each, bytes) else each for each in texts]


def _array(strings: Any) -> Array:
    if isinstance(strings, str | bytes | list | tuple):
        return np.array(strings, dtype=object)  # else numpy would make strings of what is beside
    return np.asarray(strings)


def _read(array: Array) -> Array:
    """Read-only view of an array, as the kernels are compiled for."""
    view = array.view()
    view.flags.writeable = False
    return view


def _hash_objects(flat: Array, what: str, seed: int, keys: Array, shape: tuple[int, ...]) -> int:
    """Hash Python's strings; the number of the first one without UTF-8, or -1."""
    for start in range(0, flat.size, ENCODED_ROWS):
        part = flat[start : start + ENCODED_ROWS].tolist()
        try:
            encoded = [*map(str.encode, part)]
        except (TypeError, UnicodeEncodeError):  # bytes among them, or what is to be refused
            encoded = []
            for number, each in enumerate(part, start):
                if isinstance(each, bytes):
                    encoded.append(each)
                elif not isinstance(each, str):
                    _refuse(what, each, number, shape)
                else:
                    try:
                        encoded.append(each.encode())
                    except UnicodeEncodeError:
                        return number
        bounds = np.zeros(len(part) + 1, np.int64)
        np.cumsum([*map(len, encoded)], out=bounds[1:])
        data = np.frombuffer(b"".join([*encoded, b"\0"]), np.uint8)  # no empty buffer
        text_kernels().hash_bytes(data, _read(bounds), seed, keys[start : start + len(part)])
    return -1


# --- Arrow ---------------------------------------------------------------------------------------


def _arrow(column: Any) -> Any:
    """Strings as an Arrow array or chunked array; None: they are something else.

    Columns of pandas and polars that are kept as Arrow data are read where they lie.
    """
    pa = sys.modules.get("pyarrow")
    if pa is None:  # then no column is one
        return None
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        dtype = getattr(column, "dtype", None)
        if (
            dtype is None
            or isinstance(dtype, np.dtype)
            or not hasattr(column, "__arrow_c_stream__")
        ):
            return None
        column = pa.chunked_array(column)
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    text = any(getattr(pa.types, f"is_{name}")(kind) for name in _ARROW_TEXT)
    return column if text else None


_ARROW_TEXT = (
    *("string", "large_string", "string_view"),
    *("binary", "large_binary", "binary_view", "fixed_size_binary"),
)


def _of_column(column: Any, what: str, seed: int) -> Array:
    pa = sys.modules["pyarrow"]
    keys = np.zeros(len(column), np.int64)
    start = 0
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        if pa.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        if chunk.null_count:
            missing = int(chunk.is_null().to_numpy(zero_copy_only=False).argmax())
            _refuse(what, None, start + missing, keys.shape)
        wide = chunk.cast(pa.large_binary())
        _, bounds, data = wide.buffers()
        if len(wide):
            text_kernels().hash_bytes(
                np.frombuffer(data, np.uint8) if data is not None and data.size else _NOTHING,
                _read(np.frombuffer(bounds, np.int64)[wide.offset : wide.offset + len(wide) + 1]),
                seed,
                keys[start : start + len(wide)],
            )
        start += len(wide)
    return keys


_NOTHING = np.frombuffer(b"\0", np.uint8)


# --- what is refused -----------------------------------------------------------------------------


def _place(number: int, shape: tuple[int, ...]) -> str:
    if not shape:
        return "it"
    place = [int(each) for each in np.unravel_index(number, shape)]
    return f"position {place[0] if len(place) == 1 else place}"


def _refuse(what: str, element: Any, number: int, shape: tuple[int, ...]) -> NoReturn:
    place, kind = _place(number, shape), type(element).__name__
    nan = isinstance(element, float) and element != element
    if element is None or nan or kind == "NAType":
        raise TypeError(
            f"{what}: {place} is {element!r}, and a missing id has no key. Applied: no. To fix: "
            "drop such rows, or fill them with a string of your own"
        )
    if isinstance(element, int) and not -(1 << 63) <= element < 1 << 63:
        raise TypeError(
            f"{what}: {place} is {element}, more than 64 bits with a sign hold. Applied: no. "
            "To fix: make a string of it, or a hash of 64 bits"
        )
    if not shape and isinstance(element, Iterable):
        raise TypeError(
            f"{what} came as {kind}, and neither numpy nor a table takes its elements one by one. "
            "Applied: no. To fix: give a list or an array, as in list(keys)"
        )
    integers = number == 0 and isinstance(element, int | np.integer) and kind != "bool"
    raise _no_text(what, f"are no strings: {place} has the type {kind}", integers=integers)


def _no_text(what: str, fact: str, *, integers: bool = False) -> TypeError:
    """The error for a column that is not of strings. What to do with integers comes first where it
    begins with one."""
    keys = (
        "Integers that are integers everywhere are keys already: give them to the table as an "
        "integer array (.astype(np.int64))"
    )
    strings = (
        "Ids that are strings elsewhere, as in an earlier run, have to be strings here: "
        f"{READ_AS_STRINGS}"
    )
    fixes = [keys, strings] if integers else ["ps.keys_of takes str and bytes", strings, keys]
    return TypeError(f"{what}: these {fact}. Applied: no. To fix: {'. '.join(fixes)}")


def _not_utf8(what: str, text: str, number: int, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"{what}: {_place(number, shape)} is {text[:40]!r}, which has no UTF-8 (a lone surrogate). "
        "Applied: no. To fix: read the file with its own encoding, or give bytes"
    )

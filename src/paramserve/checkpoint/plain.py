"""What a worker saves: plain data with arrays, as msgpack and safetensors. Nothing is pickled.

Allowed are None, bool, int, float, str, bytes, list, tuple, dict with such keys, Counter,
OrderedDict, numpy arrays and scalars, and torch tensors, which come back as what they were. Other
subclasses of these are refused, since they would come back without what makes them one. Torch is
not imported: who gives a tensor has it, and who reads one without it gets an array.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paramserve.checkpoint.tensors import KINDS, Tensor

Array = npt.NDArray[Any]
Plain = Any
"""A tree of the types above."""
Arrays = dict[str, tuple[str, Array]]
"""Dtype (a key of `tensors.KINDS`) and elements of each array, by name."""

TENSORS = ".safetensors"
DEPTH_MAX = 64
"""Most containers in one another; a container that holds itself goes on for ever."""
_TUPLE, _BIG, _ARRAY, _TENSOR, _SCALAR, _NAMED, _SURROGATES = range(1, 8)
"""Types of msgpack extensions."""
KEYS = (str, int, float, bool, type(None))
PLAIN: Mapping[type, Callable[[Any], Any]] = MappingProxyType(
    {Counter: dict, OrderedDict: dict, np.str_: str, np.bytes_: bytes}
)
"""Types that are stored by name, and what is stored of one."""
BUILDERS: Mapping[str, Callable[[Any], Any]] = MappingProxyType(
    {each.__qualname__: each for each in PLAIN} | {"Size": tuple}
)
"""Builders by class name. torch.Size is a tuple where there is no torch."""
FIX = (
    "save numbers, text, arrays, tensors, and lists and dicts of them: of an object, what its "
    "state_dict() or its fields hold"
)


def pack(state: Plain, what: str = "state") -> tuple[bytes, Arrays]:
    """Plain data as msgpack, and its arrays.

    Args:
        what: how errors call it.
    Raises:
        TypeError: a part cannot be stored without pickling; its place and type are named.
        ValueError: containers lie too deep in one another.
    """
    packing = _Packing()
    return msgspec.msgpack.encode(packing.packed(state, what, 0)), packing.arrays


def dump(state: Plain, what: str = "state") -> bytes:
    """Plain data with its arrays in one piece; arguments and errors as of `pack`."""
    tree, arrays = pack(state, what)
    parts = {
        name: (dtype, each.shape, each.reshape(-1).view(np.uint8).data)
        for name, (dtype, each) in arrays.items()
    }
    return msgspec.msgpack.encode((tree, parts))


def load(data: bytes) -> Plain:
    """Plain data from the bytes that `dump` made of it; arrays are copies.

    Raises:
        ValueError: the bytes are none that `dump` made.
    """

    def array(name: str) -> tuple[str, Array]:
        dtype, shape, bits = parts[name]
        return dtype, np.frombuffer(bits, Tensor(name, dtype, shape).carrier).reshape(shape).copy()

    try:
        tree, parts = msgspec.msgpack.decode(data, type=_Dumped)
    except msgspec.MsgspecError as error:
        raise ValueError(f"no data that a worker saved: {error}") from None
    return unpack(tree, array)


_Dumped = tuple[bytes, dict[str, tuple[str, tuple[int, ...], bytes]]]


class _Packing:
    """Makes msgpack of plain data that a worker or a scheduler saves.

    `at`: the place, for errors; `depth`: containers around it.
    """

    def __init__(self) -> None:
        self.arrays: Arrays = {}

    def packed(self, value: Any, at: str, depth: int) -> Any:
        """A value as msgpack has it."""
        if depth > DEPTH_MAX:
            raise ValueError(f"{at} lies more than {DEPTH_MAX} containers deep: save less")
        kind = type(value)
        if kind in (type(None), bool, float, bytes):
            return value
        if kind is str:
            return _text(value)
        if kind is int:
            return _whole(value)
        if kind is tuple:
            return msgspec.msgpack.Ext(
                _TUPLE, msgspec.msgpack.encode(self._packed_list(value, at, depth))
            )
        if kind is list:
            return self._packed_list(value, at, depth)
        if kind is dict:
            return self._packed_dict(value, at, depth)
        if kind in PLAIN or _is_size(value):
            inner = self.packed(PLAIN.get(kind, tuple)(value), at, depth)
            return msgspec.msgpack.Ext(_NAMED, msgspec.msgpack.encode((kind.__qualname__, inner)))
        if isinstance(value, np.generic):
            return self._packed_scalar(value, at)
        return self._packed_array(value, at)

    def _packed_list(self, value: Sequence[Any], at: str, depth: int) -> list[Any]:
        return [self.packed(each, f"{at}[{i}]", depth + 1) for i, each in enumerate(value)]

    def _packed_dict(self, value: Mapping[Any, Any], at: str, depth: int) -> dict[Any, Any]:
        for key in value:
            if type(key) not in KEYS or isinstance(_key(key), msgspec.msgpack.Ext):
                what = "of over 64 bits" if type(key) is int else "that is no Unicode"
                more = f" {what}" if type(key) in KEYS else ""
                raise TypeError(
                    f"{at} has a key of type {type(key).__name__}{more}, which cannot be stored. "
                    "Applied: no. To fix: use text or numbers as keys"
                )
        return {key: self.packed(each, f"{at}[{key!r}]", depth + 1) for key, each in value.items()}

    def _packed_scalar(self, value: np.generic, at: str) -> Any:
        if value.dtype.name not in KINDS:
            raise _refused(value, at)
        packed = msgspec.msgpack.encode((value.dtype.name, value.tobytes()))
        return msgspec.msgpack.Ext(_SCALAR, packed)

    def _packed_array(self, value: Any, at: str) -> Any:
        if type(value) in (np.ndarray, np.memmap) and value.dtype.name in KINDS:
            kind, dtype, elements = _ARRAY, value.dtype.name, value
        else:
            kind, (dtype, elements) = _TENSOR, _elements(value, at)
        name = str(len(self.arrays))
        native = elements.astype(elements.dtype.newbyteorder("="), copy=True)
        self.arrays[name] = (dtype, np.ascontiguousarray(native).reshape(elements.shape))
        return msgspec.msgpack.Ext(kind, name.encode())


def _text(value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:  # what os.fsdecode makes of a file's name
        return msgspec.msgpack.Ext(_SURROGATES, value.encode("utf-8", "surrogatepass"))
    return value


def _whole(value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    size = value.bit_length() // 8 + 1
    return msgspec.msgpack.Ext(_BIG, value.to_bytes(size, "little", signed=True))


def _key(key: Any) -> Any:
    return _text(key) if type(key) is str else _whole(key) if type(key) is int else key


def _is_size(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and type(value) is torch.Size


def _elements(value: Any, at: str) -> tuple[str, Array]:
    """The dtype and the elements, or their bits, of a tensor.

    Raises:
        TypeError: it is none, or one whose elements cannot be had.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        raise _refused(value, at)
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in KINDS or value.layout is not torch.strided:
        raise _refused(value, at)
    try:
        here = value.detach().cpu().resolve_neg().contiguous()
        bits = here.view(torch.int16) if dtype == "bfloat16" else here
        elements: Array = bits.numpy()
    except (RuntimeError, TypeError) as error:  # it has no elements, or not here
        raise _refused(value, at) from error
    return dtype, elements.view(np.uint16) if dtype == "bfloat16" else elements


def _refused(value: Any, at: str) -> TypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    more = f" of dtype {value.dtype}" if hasattr(value, "dtype") else ""
    why, fix = "cannot be stored without pickling", FIX
    if isinstance(value, Enum):
        fix = "save its .value"
    elif isinstance(value, np.ma.MaskedArray):
        why, fix = "would come back without its mask", "save its .data and its .mask"
    elif isinstance(value, np.ndarray) and value.dtype.name in KINDS:
        why, fix = "would come back as a plain array", "save np.asarray(...) of it"
    elif (plain := _plain_of(value)) is not None:
        why = f"would come back as a plain {plain.__name__}"
        fix = f"save {plain.__name__}(...) of it"
        if hasattr(value, "_asdict"):
            fix += ", or its _asdict()"
    return TypeError(f"{at} is a {kind}{more}, which {why}. Applied: no. To fix: {fix}")


def _plain_of(value: Any) -> type | None:
    """The type that is stored, of which this one is a kind."""
    for each in (str, bytes, int, float, tuple, list):
        if isinstance(value, each):
            return each
    return dict if isinstance(value, Mapping) else None


def unpack(data: bytes, arrays: Callable[[str], tuple[str, Array]]) -> Plain:
    """What was packed.

    Args:
        arrays: gives the dtype and the elements of a name.
    Raises:
        ValueError: it is no msgpack of this kind.
    """

    def extension(code: int, inner: memoryview) -> Any:
        if code == _TUPLE:
            return tuple(msgspec.msgpack.decode(inner, ext_hook=extension))
        if code == _BIG:
            return int.from_bytes(inner, "little", signed=True)
        if code == _SURROGATES:
            return bytes(inner).decode("utf-8", "surrogatepass")
        if code == _NAMED:
            return _named(*msgspec.msgpack.decode(inner, type=tuple[str, Any], ext_hook=extension))
        if code == _SCALAR:
            dtype, bits = msgspec.msgpack.decode(inner, type=tuple[str, bytes])
            return np.frombuffer(bits, dtype)[0]
        if code in (_ARRAY, _TENSOR):
            return _typed(*arrays(bytes(inner).decode()), code)
        raise ValueError(f"an extension of type {code}")

    try:
        return msgspec.msgpack.decode(data, ext_hook=extension)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        raise ValueError(f"no data that a worker saved: {error}") from None


def _named(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    if name == "Size" and torch is not None:
        return torch.Size(value)
    if name not in BUILDERS:
        raise ValueError(f"the type {name!r}")
    return BUILDERS[name](value)


def _typed(dtype: str, elements: Array, code: int) -> Any:
    if code == _ARRAY or sys.modules.get("torch") is None:
        return elements
    return as_tensor(elements, dtype)


def as_tensor(elements: Array, dtype: str) -> Any:
    """An array as a tensor in its memory; of bfloat16 it has the bits. torch is imported."""
    torch: Any = sys.modules["torch"]
    if dtype == "bfloat16":
        return torch.from_numpy(elements.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(elements)

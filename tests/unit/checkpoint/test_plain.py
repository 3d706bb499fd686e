"""What a worker saves comes back as it was, and nothing is pickled."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from tests.needs import needs
from tests.suites import each_case

from paramserve.checkpoint.plain import DEPTH_MAX, dump, load, pack, unpack

GENERATOR = np.random.default_rng(5)


def there_and_back(state: Any) -> Any:
    text, arrays = pack(state)
    return unpack(text, arrays.__getitem__)


@each_case(
    "state",
    [
        None,
        {"a": [1, 2.5, "three", b"four", True, None], 5: (6, (7, [8])), 0.5: {}},
        {"inf": float("inf"), "big": (-(1 << 200), 1 << 63, -(1 << 63), (1 << 64) - 1)},
        random.Random(3).getstate(),
        GENERATOR.bit_generator.state,
        OrderedDict(b=1, a=(2,)),
        {"milestones": Counter({30: 1, 60: 2})},
        [np.str_("a"), np.bytes_(b"b"), {"x": np.str_("\udcff")}],
        ["\udcff.txt", "\ud800", "ü"],
    ],
    ids=["none", "nested", "large", "random", "numpy", "ordered", "counter", "texts", "surrogates"],
)
def test_plain_data_comes_back(state: Any) -> None:
    assert repr(there_and_back(state)) == repr(state)


def test_a_huge_number_comes_back() -> None:
    for number in (1 << 64, -(1 << 63) - 1, 7**9_000, -(7**9_000)):
        assert there_and_back([number]) == [number]


def test_a_shape_comes_back() -> None:
    torch = needs("torch")
    found = there_and_back({"shape": torch.ones(2, 3).shape})["shape"]
    assert found == (2, 3)
    assert type(found) is torch.Size


@each_case("dtype", ["bool", "int8", "uint16", "float16", "int64", ">f4", "uint64"])
def test_arrays_come_back(dtype: str) -> None:
    given = np.arange(12).reshape(3, 4).astype(dtype)[:, ::2]
    found = there_and_back({"a": given, "zero": np.array(1.5), "none": np.empty((0, 3))})
    assert found["a"].dtype == given.dtype.newbyteorder("=")
    assert (found["a"] == given).all()
    assert found["zero"].shape == ()
    assert found["none"].shape == (0, 3)
    scalar = there_and_back([given[1, 1], np.float32(0.1)])
    assert scalar == [given[1, 1], np.float32(0.1)]
    assert type(scalar[1]) is np.float32


def test_tensors_come_back() -> None:
    torch = needs("torch")
    given = {
        "half": torch.arange(5, dtype=torch.bfloat16),
        "grad": torch.nn.Parameter(torch.ones(2, 3)),
        "turned": torch.arange(6).reshape(2, 3).T,
        "rng": torch.get_rng_state(),
    }
    found = there_and_back(given)
    for name, each in given.items():
        assert found[name].dtype == each.dtype
        assert torch.equal(found[name], each)
        assert not found[name].requires_grad


def test_saved_arrays_are_copies() -> None:
    given = np.zeros(3)
    text, arrays = pack({"a": given})
    given[:] = 1
    assert (unpack(text, arrays.__getitem__)["a"] == 0).all()


class Sampler:
    pass


class Stage(IntEnum):
    WARM = 1


Point = namedtuple("Point", "x y")


@each_case(
    ("state", "told"),
    [
        ({"sampler": Sampler()}, r"state\['sampler'\] is a .*Sampler, which cannot be stored"),
        ([1, {"x": {2, 3}}], r"state\[1\]\['x'\] is a builtins\.set"),
        ({"f": print}, r"state\['f'\] is a builtins\.builtin_function"),
        ({"d": Decimal(1)}, r"decimal\.Decimal"),
        ({"o": np.array([object()])}, "of dtype object"),
        ({"c": np.complex64(1)}, "of dtype complex64"),
        ({("a", "b"): 1}, "a key of type tuple"),
        ({"a": [lambda: 1]}, r"state\['a'\]\[0\] is a builtins\.function"),
        ({"n": {1 << 70: 1}}, r"state\['n'\] has a key of type int of over 64 bits"),
        ([{"\ud800": 1}], r"state\[0\] has a key of type str that is no Unicode"),
        (
            [defaultdict(int)],
            r"state\[0\] is a .*defaultdict, .* plain dict.*save dict\(\.\.\.\) of",
        ),
        (
            [Point(1, 2)],
            r"state\[0\] is a .*Point, which would come back as a plain tuple.*_asdict",
        ),
        ({"s": Stage.WARM}, r"state\['s'\] is a .*Stage, .*save its \.value"),
        ([np.ma.array([1.0], mask=[True])], r"state\[0\] is a .*MaskedArray .*without its mask"),
        ([np.arange(2).view(type("Unit", (np.ndarray,), {}))], r"save np\.asarray\(\.\.\.\) of it"),
    ],
)
def test_what_needs_pickling_is_refused_by_place_and_type(state: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        pack(state)


def test_a_tensor_without_elements_is_refused() -> None:
    torch = needs("torch")
    with pytest.raises(TypeError, match=r"state\['m'\] is a torch\.Tensor of dtype torch.float32"):
        pack({"m": torch.ones(2, device="meta")})


def test_what_holds_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(ValueError, match=f"more than {DEPTH_MAX} containers deep"):
        pack(state)


@each_case("data", [b"", b"\x80\x04\x95", b"\xc1", b"\xc7\x01\x63x", b"\x92\x01"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no data that a worker saved"):
        unpack(data, {}.__getitem__)


def test_what_is_dumped_in_one_piece_comes_back() -> None:
    torch = needs("torch")
    given = {
        "list": [1, (2.5, None), "three"],
        "turned": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "zero": np.array(1.5),
        "none": np.empty((0, 3)),
        "half": torch.arange(5, dtype=torch.bfloat16),
    }
    found = load(dump(given))
    assert found["list"] == given["list"]
    for name in ("turned", "zero", "none"):
        assert found[name].dtype == given[name].dtype
        assert np.array_equal(found[name], given[name])
        assert found[name].flags.writeable
    assert torch.equal(found["half"], given["half"])
    with pytest.raises(TypeError, match=r"^worker's\['list'\] is a builtins\.set"):
        dump({"list": set()}, "worker's")


@each_case("data", [b"", b"\x80\x04\x95", b"\x92\xc4\x01\x90\x91", b"\x90"])
def test_other_bytes_than_dumped_ones_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no data that a worker saved"):
        load(data)

"""Which parameter has which codec, by patterns of names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paramserve.codecs import BFloat16, Int4, Int8, TopK
from paramserve.pytorch.block import Layout
from paramserve.pytorch.codecs import CodecsByName, split_by_codec

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias", "head"]


def found(given: Any) -> list[Any]:
    codecs = CodecsByName.of(given, "push")
    codecs.check(NAMES)
    return [codecs.find(name) for name in NAMES]


def test_first_pattern_that_matches_counts() -> None:
    many = {"0.*": None, "*.weight": Int4(), "[01].bias": Int8()}
    assert found(many) == [None, None, Int4(), Int8(), None]
    assert found({"*.weight": Int4(), "*": Int8()}) == [Int4(), Int8(), Int4(), Int8(), Int8()]
    assert found(Int8()) == [Int8()] * 5
    assert found(None) == found({}) == [None] * 5


def test_what_was_given_may_be_changed_afterwards() -> None:
    given: dict[str, Any] = {"*": Int4()}
    codecs = CodecsByName.of(given, "push")
    given["*"] = None
    assert codecs.find("head") == Int4()


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        (
            {"*.wieght": Int4()},
            ValueError,
            r"'\*.wieght': ...\} matches no parameter of the",
        ),
        ({"*.wieght": Int4()}, ValueError, "it has '0.weight', '0.bias', '1.weight', '1.bias', 'h"),
        ({"*": Int8(), "head": None}, ValueError, "one before it does for 'head'. Put it before"),
        ({"HEAD": Int8()}, ValueError, "matches no parameter"),
        ({"*": Int8}, TypeError, r"push\['\*'\] takes an object"),
        ({"*": "int8"}, TypeError, "takes a codec"),
        ({3: Int8()}, TypeError, r"push has codecs by names' patterns, as '\*.weight': 3"),
        ("*", TypeError, "push takes a codec"),
    ],
)
def test_patterns_that_are_none_are_refused(given: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        found(given)


def test_few_of_many_names_are_told() -> None:
    names = [f"{number}.weight" for number in range(100)]
    with pytest.raises(ValueError, match=r"'4.weight' and 95 more$"):
        CodecsByName.of({"x": Int4()}, "pull").check(names)


def test_optimizer_of_tables_only_needs_no_pattern() -> None:
    CodecsByName.of(Int8(), "push").check([])


def test_blocks_have_one_pair_of_codecs_each() -> None:
    params = tuple(torch.zeros(number + 1) for number in range(5))
    layout = Layout(2, torch.float32, tuple(NAMES), params)
    push = CodecsByName.of({"*.weight": TopK(0.1) | Int4(), "1.*": Int8()}, "push")
    pull = CodecsByName.of({"head": BFloat16()}, "pull")
    parts = split_by_codec([layout], push, pull)
    assert [each.names for each in parts] == [
        ("0.weight", "1.weight"),
        ("0.bias",),
        ("1.bias",),
        ("head",),
    ]
    assert [each.push for each in parts] == [TopK(0.1) | Int4(), None, Int8(), None]
    assert [each.pull for each in parts] == [None, None, None, BFloat16()]
    assert all(each.group == 2 for each in parts)
    assert [each.params[-1].numel() for each in parts] == [3, 2, 4, 5]
    alone = split_by_codec([layout], CodecsByName.of(Int8(), "push"), CodecsByName.of(None, "pull"))
    assert alone == [layout._replace(push=Int8())]

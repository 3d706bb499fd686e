"""Values that are drawn at random, and chains: what is kept, and which chains there are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.codecs import reference
from tests.unit.codecs.test_built_in import encode, normal, there_and_back

from paramserve.codecs import BFloat16, Codec, Int4, Int8, RandomK, TopK
from paramserve.codecs.registry import build, spec
from paramserve.compiling import load_codecs
from paramserve.config import CodecSpec
from paramserve.errors import UnknownCodec


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_codecs()


def test_random_share_is_kept_whole_and_the_rest_is_zero() -> None:
    ratios = (1e-9, 0.01, 0.37, 0.999, 1.0)
    for ratio, count in itertools.product(ratios, (1, 2, 100, 4097)):
        values = normal(count)
        kept = max(1, math.ceil(ratio * count))
        data = encode(RandomK(ratio), values, 77)
        assert data.size == 4 * kept + 4 == RandomK(ratio).size(count)
        found = there_and_back(RandomK(ratio), values, 77)
        places = reference.drawn(count, kept, 77)
        assert len(places) == kept
        np.testing.assert_array_equal(found[places], values[places])
        assert np.count_nonzero(found) == np.count_nonzero(values[places])


def test_each_value_and_each_pair_is_drawn_equally_often() -> None:
    """As many draws of 3 of 8: each value has 3/8 of them, each pair 3/28."""
    draws, ones = 20_000, np.ones(8, np.float32)
    found = np.array([there_and_back(RandomK(3 / 8), ones, seed * 7919) for seed in range(draws)])
    for expected, counted in (
        (3 / 8, found.sum(0)),
        (3 / 28, (found.T @ found)[~np.eye(8, dtype=bool)]),
    ):
        error = math.sqrt(expected * (1 - expected) / draws)
        assert np.abs(counted / draws - expected).max() < 4 * error


def test_chain_encodes_what_is_chosen() -> None:
    values = normal(1000)
    for first in (TopK(0.05), RandomK(0.05)):
        alone = there_and_back(first, values, 5)
        found = there_and_back(first | Int8(8), values, 5)
        np.testing.assert_array_equal(found != 0, alone != 0)
        np.testing.assert_allclose(found, alone, atol=float(np.abs(alone).max()) / 200)
        assert (first | Int8(8)).size(1000) == 50 + 4 * 7 + first.places_size(1000)
        assert not (first | Int8(8)).fixed or first.fixed


def test_chain_has_the_flags_of_its_first_codec() -> None:
    assert (TopK(0.01) | BFloat16()).feedback
    assert not (TopK(0.01, feedback=False) | Int8()).feedback
    assert (TopK(0.01) | Int8(even_local=True)).even_local
    unbiased = RandomK(0.5, feedback=False) | BFloat16()
    assert there_and_back(unbiased, np.ones(10, np.float32)).tolist().count(2.0) == 5


@each_case(
    ("make", "told"),
    [
        (
            lambda: Int8() | TopK(),
            r"ps.Int8 cannot begin a chain: .* ps.TopK\(0.01\) \| ps.Int8\(\)",
        ),
        (lambda: Int8() | Int4(), "ps.Int8 cannot begin a chain"),
        (lambda: Int8() | (TopK() | Int4()), "ps.Int8 cannot begin a chain"),
        (lambda: TopK() | RandomK(), r"ps.RandomK leaves values out.* ps.TopK\(0.01\) \| ps.Int4"),
        (lambda: TopK() | (TopK() | Int4()), r"ps.TopK \| ps.Int4 leaves values out"),
        (lambda: (TopK() | Int4()) | Int8(), r"ps.TopK \| ps.Int4 is a chain, which has two parts"),
        (lambda: TopK() | Int4, "a chain is of objects"),
        (lambda: TopK() | 4, "unsupported operand"),
    ],
)
def test_chain_in_another_order_is_refused_with_the_one_that_works(make: Any, told: str) -> None:
    with pytest.raises(TypeError, match=told):
        make()


CHAIN = spec(TopK(0.01) | Int4())


@each_case(
    ("options", "error", "told"),
    [
        ({"first": "Chain"}, ValueError, "a chain's first is the name of a codec, and not 'Chain'"),
        ({"second": "Chain"}, ValueError, "a chain's second is"),
        ({"first": 3}, ValueError, "a chain's first is the name of a codec, and not 3"),
        ({"first": "Huffman"}, UnknownCodec, "no codec is called 'Huffman'"),
        ({"first": "Int8"}, ValueError, "Int8 does not take"),
        ({"second": "TopK"}, ValueError, "TopK does not take"),
        ({"first.ratio": 0.0}, ValueError, "ratio of ps.TopK must be above 0"),
        ({"first.first.ratio": 0.5}, ValueError, "TopK does not take"),
        ({"second.block": 100}, ValueError, "block of ps.Int4"),
        ({"third": "Int4"}, ValueError, "Chain does not take"),
        ({"feedback": "yes"}, ValueError, r"feedback of ps.TopK \| ps.Int4 is True, False or"),
    ],
)
def test_chain_of_a_peer_is_checked(
    options: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        build(CodecSpec("Chain", {**CHAIN.options, **options}))


def test_chain_without_a_part_is_refused() -> None:
    for part in ("first", "second"):
        left = {name: each for name, each in CHAIN.options.items() if name != part}
        with pytest.raises(ValueError, match=f"a chain's {part} is the name of a codec, and not N"):
            build(CodecSpec("Chain", left))


def test_chain_of_codecs_that_both_choose_is_no_chain_from_a_peer() -> None:
    options: Any = {"first": "TopK", "second": "RandomK"}
    with pytest.raises(ValueError, match=r"ps.RandomK leaves values out"):
        build(CodecSpec("Chain", options))
    codec: Codec = build(CodecSpec("Chain", {"first": "RandomK", "second": "Sign"}))
    assert codec.called == "ps.RandomK | ps.Sign"

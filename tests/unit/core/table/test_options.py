from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.suites import each_case

from paramserve.config import RuleSpec
from paramserve.core.table.options import (
    LRU,
    TTL,
    Constant,
    Evict,
    MinCount,
    Normal,
    TableOptions,
    Uniform,
    Zeros,
)

ALL = [
    TableOptions(Normal()),
    TableOptions(Uniform(-1, 2), MinCount(3), TTL(7), 1 << 40),
    TableOptions(Constant(0.1), evict=LRU(10**8)),
    TableOptions(Zeros(), evict=LRU(), max_bytes=1),
    TableOptions(Normal(1.5, 0), MinCount(1), LRU(5) | TTL(2**53)),
]


@each_case("options", ALL)
def test_options_survive_a_message(options: TableOptions) -> None:
    data = msgspec.msgpack.encode(options.to_spec())
    assert TableOptions.from_spec(msgspec.msgpack.decode(data, type=RuleSpec)) == options


def test_ttl_and_lru_compose_in_either_order() -> None:
    assert TTL(3) | LRU(4) == LRU(4) | TTL(3) == Evict(TTL(3), LRU(4))
    options = TableOptions(Zeros(), evict=TTL(3) | LRU(4))
    assert (options.ttl, options.lru) == (TTL(3), LRU(4))
    alone = TableOptions(Zeros(), evict=TTL(3))
    assert (alone.ttl, alone.lru) == (TTL(3), None)


def test_of_shard_divides_the_rows_and_nothing_else() -> None:
    options = TableOptions(Zeros(), MinCount(2), TTL(3) | LRU(10), 100)
    assert options.of_shard(4) == TableOptions(Zeros(), MinCount(2), TTL(3) | LRU(3), 100)
    assert TableOptions(Zeros(), evict=LRU(10)).of_shard(1).lru == LRU(10)
    for same in (TableOptions(Zeros(), evict=LRU(), max_bytes=9), TableOptions(Zeros())):
        assert same.of_shard(4) is same


@each_case(
    "make",
    [
        lambda: Uniform(1.0, 0.0),
        lambda: Uniform(-3e38, 3e38),
        lambda: Uniform(float("nan"), 1.0),
        lambda: Normal(0.0, -0.1),
        lambda: Normal(0.0, 1e38),
        lambda: Normal(float("inf")),
        lambda: Constant(1e39),
        lambda: MinCount(0),
        lambda: MinCount(2**32),
        lambda: TTL(0),
        lambda: LRU(0),
        lambda: TableOptions(Zeros(), max_bytes=-1),
        lambda: TableOptions(Zeros(), evict=LRU()),
        lambda: TableOptions(Zeros(), evict=TTL(3) | LRU()),
    ],
)
def test_number_out_of_range_is_a_value_error(make: Any) -> None:
    with pytest.raises(ValueError):
        make()


@each_case(
    "make",
    [
        lambda: Uniform("0", 1.0),
        lambda: Constant(True),
        lambda: Normal(None),
        lambda: MinCount(2.5),
        lambda: MinCount(True),
        lambda: TTL("3"),
        lambda: TTL(3) | TTL(4),
        lambda: LRU(3) | MinCount(4),
        lambda: TableOptions(0.0),
        lambda: TableOptions(Zeros),
        lambda: TableOptions(Zeros(), TTL(3)),
        lambda: TableOptions(Zeros(), None, MinCount(3)),
        lambda: TableOptions(Zeros(), max_bytes="1 GB"),
    ],
)
def test_option_of_another_kind_is_a_type_error(make: Any) -> None:
    with pytest.raises(TypeError):
        make()


@each_case(
    "options",
    [
        {},
        {"init": "os.system"},
        {"init": "Zeros", "evil": 1.0},
        {"init": "Zeros", "admit.count": 3.0},
        {"init": "Normal", "init.std": -1.0},
        {"init": 1.0},
    ],
)
def test_spec_from_a_stranger_that_makes_no_sense_is_a_value_error(options: Any) -> None:
    with pytest.raises(ValueError):
        TableOptions.from_spec(RuleSpec("TableOptions", options))


@each_case(
    "options",
    [
        {"init": "MinCount", "init.count": 3.0},
        {"init": "Normal", "init.sigma": 1.0},
        {"init": "Normal", "init.std": "1"},
        {"init": "Constant"},
    ],
)
def test_spec_from_a_stranger_with_other_arguments_is_a_type_error(options: Any) -> None:
    with pytest.raises(TypeError):
        TableOptions.from_spec(RuleSpec("TableOptions", options))


@each_case("init", [Constant(65520.0), Uniform(-7e4, 0), Normal(0.0, 1e4)])
def test_float16_does_not_take_what_it_cannot_hold(init: Any) -> None:
    options = TableOptions(init)
    options.check_dtype("float32")
    options.check_dtype("bfloat16")
    with pytest.raises(ValueError, match="float16"):
        options.check_dtype("float16")


def test_16_bits_take_what_rounds_to_their_largest_and_bfloat16_has_one_too() -> None:
    TableOptions(Constant(65519.0)).check_dtype("float16")
    TableOptions(Constant(-3.396e38)).check_dtype("bfloat16")
    with pytest.raises(ValueError, match="bfloat16"):
        TableOptions(Constant(3.397e38)).check_dtype("bfloat16")

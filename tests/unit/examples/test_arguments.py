"""examples/arguments.py and examples/engines.py: what a command line may say."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
from tests.suites import each_case

import paramserve as ps
from arguments import count, counts
from engines import engine_of


def test_counts_list_gives_its_numbers() -> None:
    assert counts("1,2,40") == [1, 2, 40]


@each_case("text", ["0", "-1"])
def test_count_below_one_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"at least 1, not {text}"):
        count(text)


@each_case("text", ["", "1,", "1.5", "two"])
def test_counts_no_whole_numbers_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        counts(text)


def test_engine_of_local_is_local() -> None:
    assert isinstance(engine_of("local"), ps.Local)


def test_engine_of_unknown_name_tells_the_known_ones() -> None:
    with pytest.raises(ValueError, match="there is no engine 'spark'; there are local, ray"):
        engine_of("spark")

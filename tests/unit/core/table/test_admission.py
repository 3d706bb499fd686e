"""How often keys were pushed, in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.core.table.rig import keys_of

from paramserve.core.table import admission
from paramserve.core.table.admission import BYTES_MAX, Candidates


def push(candidates: Candidates, keys: list[int]) -> list[bool]:
    asked = keys_of(keys)
    admitted = candidates.admitted(asked)
    candidates.count(asked, admitted)
    return admitted.tolist()


def test_key_is_admitted_at_its_nth_push_and_begins_again() -> None:
    candidates = Candidates(3)
    got = [push(candidates, [7, 2**63 - 1, -5 - i]) for i in range(7)]
    assert [each[0] for each in got] == [False, False, True, False, False, True, False]
    assert [each[1] for each in got] == [each[0] for each in got]
    assert not any(each[2] for each in got)


def test_asking_counts_nothing() -> None:
    candidates = Candidates(2)
    for _ in range(3):
        assert candidates.admitted(keys_of([1, 2])).tolist() == [False, False]


def test_key_of_the_old_generation_that_comes_again_counts_once() -> None:
    candidates = Candidates(4, 2)
    for key in (1, 2, 3, 1):  # 3 finds two keys there, and makes them old
        push(candidates, [key])
    assert push(candidates, [1]) == [False]
    assert push(candidates, [1]) == [True]


def test_key_that_is_forgotten_begins_again() -> None:
    candidates = Candidates(3, 3)
    for key in (1, 1, 2, 4, 3):  # 3 makes the others old
        push(candidates, [key])
    candidates.forget(keys_of([1, 3, 3, 9]))
    assert push(candidates, [1, 2]) == [False, False]
    assert push(candidates, [3, 2]) == [False, True]
    assert push(candidates, [1, 3]) == [False, False]


class Generations:
    """The same with two dicts."""

    def __init__(self, needed: int, limit: int) -> None:
        self.needed, self.limit = needed, limit
        self.young: dict[int, int] = {}
        self.old: dict[int, int] = {}

    def push(self, keys: list[int]) -> list[bool]:
        got = [self.young.get(k, self.old.get(k, 0)) + 1 >= self.needed for k in keys]
        for start in range(0, len(keys), self.limit):
            part = keys[start : start + self.limit]
            if len(self.young.keys() | set(part)) > self.limit:
                self.young, self.old = {}, self.young
            for key, admitted in zip(part, got[start:], strict=False):
                count = self.young.get(key, self.old.get(key, 0)) + 1
                self.young[key] = 0 if admitted else count
        return got


@settings(max_examples=12)
@given(st.lists(st.lists(st.integers(-9, 9), max_size=12, unique=True), max_size=25))
def test_counting_takes_no_memory_once_it_is_reserved(pushes: list[list[int]]) -> None:
    candidates, model = Candidates(3, 5), Generations(3, 5)
    for keys in pushes:
        candidates.reserve(keys_of(keys))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admission, "_Generation", None)
            assert push(candidates, keys) == model.push(keys)
        assert not candidates._next


PUSHES = st.lists(st.lists(st.integers(-9, 9), max_size=12, unique=True), max_size=25)


@settings(max_examples=12)
@given(PUSHES, st.integers(2, 4), st.sampled_from([1, 5, 10]))
def test_candidates_are_two_generations(pushes: list[list[int]], needed: int, limit: int) -> None:
    candidates, model = Candidates(needed, limit), Generations(needed, limit)
    for keys in pushes:
        assert push(candidates, keys) == model.push(keys)


def test_memory_of_ever_new_keys_is_bounded() -> None:
    limit = 2000
    candidates, peak = Candidates(3, limit), 0
    empty = candidates.nbytes
    for start in range(0, 20_000, 250):
        candidates.count(np.arange(start, start + 250), np.zeros(250, np.bool_))
        peak = max(peak, candidates.nbytes)
    assert peak <= empty + BYTES_MAX * limit

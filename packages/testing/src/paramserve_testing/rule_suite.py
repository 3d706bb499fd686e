"""The conformance suite of update rules: what the servers rely on, for built-in rules and yours.

    class TestMyRule(RuleSuite):
        rule = MyRule(lr=0.1)

pytest then runs every test below on `MyRule`. Whether the rule's maths is right is not tested here.
"""

from __future__ import annotations

import copy
import math
import pickle
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from paramserve.rules import Array, Rule, Run
from paramserve.rules.registry import build, spec
from paramserve_testing.row_suite import PUSH, RowSuite, equal_bits, raises_value_error

SIZE = 5000
"""More than one tile of a kernel, and no multiple of a vector's width."""
RUNS = (Run(0, 3, 0), Run(5, 6, 4), Run(77, 2600, 1), Run(2600, 4001, 0), Run(4900, 4990, 9))
"""Different counts, gaps, neighbours, one element, a run over tiles, nothing at the end."""
UNWRITTEN = 12345.0


class Block(NamedTuple):
    """What a rule is given for one block."""

    value: Array
    gradient: Array
    state: tuple[Array, ...]

    def cut(self, start: int, stop: int) -> Block:
        """Copies of elements [start, stop)."""
        return Block(
            self.value[start:stop].copy(),
            self.gradient[start:stop].copy(),
            tuple(each[start:stop].copy() for each in self.state),
        )


class RuleSuite(RowSuite):
    """Tests that every rule passes, those on rows too. Set `rule` in a subclass."""

    dtypes: Sequence[Any] = (np.float32, np.float64)

    @property
    def elementwise(self) -> bool:
        """Whether an element's update depends on that element alone, so that a tensor can be cut:
        as the rule's `whole_tensors` says. A rule that is neither sets `elementwise = False`."""
        return not getattr(self.rule, "whole_tensors", False)

    def block(self, dtype: Any, *, size: int = SIZE, seed: int = 0) -> Block:
        """A block in the midst of training: its state has seen two updates."""
        rng = np.random.default_rng(seed)
        value = rng.standard_normal(size).astype(dtype)
        state = self.rule.init_state(size, np.dtype(dtype))
        self.rule.prepare(np.dtype(dtype))
        for count in range(2):
            gradient = rng.standard_normal(size).astype(dtype)
            self.update(Block(value, gradient, state), [Run(0, size, count)])
        return Block(value, rng.standard_normal(size).astype(dtype), state)

    def update(
        self, block: Block, runs: Sequence[Run], out: Array | None = None, scale: float = 1.0
    ) -> Block:
        """Apply the rule to a block in place, and give the block back."""
        push = PUSH._replace(scale=scale)
        value, gradient, state = block
        self.rule.apply(value, gradient, state, self.rule.hyper(), runs, push, out)
        return block

    # What a rule says about itself.

    def test_names_fit_the_hyper_tuple(self) -> None:
        hyper = self.rule.hyper()
        assert isinstance(self.rule, Rule)
        assert type(self.rule).name.isidentifier()
        assert len(hyper) == len(self.rule.hyper_names) == len(set(self.rule.hyper_names))
        assert all(type(each) is float for each in hyper), hyper

    def test_check_own_hyper_is_accepted(self) -> None:
        self.rule.check(self.rule.hyper())

    def test_check_wrong_length_is_refused(self) -> None:
        hyper = self.rule.hyper()
        raises_value_error(lambda: self.rule.check((*hyper, 0.0)))
        if hyper:
            raises_value_error(lambda: self.rule.check(hyper[:-1]))

    def test_check_nan_is_refused(self) -> None:
        hyper = self.rule.hyper()
        for i in range(len(hyper)):
            wrong = (*hyper[:i], math.nan, *hyper[i + 1 :])
            raises_value_error(partial(self.rule.check, wrong))

    def test_spec_builds_an_equal_rule(self) -> None:
        kind = type(self.rule)
        again = build(spec(self.rule), {kind.name: kind})
        assert again == self.rule
        assert spec(again) == spec(self.rule)

    def test_instance_is_a_frozen_value(self) -> None:
        assert hash(self.rule) == hash(replace(self.rule))  # type: ignore[type-var]  # a dataclass
        assert pickle.loads(pickle.dumps(self.rule)) == self.rule

    def test_init_state_is_one_array_for_each_name(self) -> None:
        names = self.rule.states(self.rule.hyper())
        assert names == self.rule.state_names[: len(names)]
        for dtype in self.dtypes:
            for size in (0, 1, SIZE):
                state = self.rule.init_state(size, np.dtype(dtype))
                assert len(state) == len(names)
                assert all(each.shape == (size,) and each.dtype == dtype for each in state)
                assert not any(
                    np.shares_memory(a, b) for i, a in enumerate(state) for b in state[:i]
                )

    # What an update may touch.

    def test_gradient_is_not_changed(self) -> None:
        for dtype in self.dtypes:
            block = self.block(dtype)
            before = block.gradient.copy()
            self.update(block, RUNS, out=np.empty(SIZE, dtype), scale=0.5)
            equal_bits(block.gradient, before)

    def test_outside_of_runs_nothing_is_touched(self) -> None:
        for dtype in self.dtypes:
            block, out = self.block(dtype), np.full(SIZE, UNWRITTEN, dtype)
            before = copy.deepcopy(block)
            self.update(block, RUNS, out)
            gap = outside(RUNS)
            equal_bits(block.value[gap], before.value[gap])
            equal_bits(out[gap], np.full(SIZE, UNWRITTEN, dtype)[gap])
            for present, earlier in zip(block.state, before.state, strict=True):
                equal_bits(present[gap], earlier[gap])

    def test_within_runs_values_change(self) -> None:
        for dtype in self.dtypes:
            block = self.block(dtype)
            before = block.value.copy()
            self.update(block, RUNS)
            assert all(
                (block.value[r.start : r.stop] != before[r.start : r.stop]).any() for r in RUNS
            )

    def test_no_runs_nothing_is_touched(self) -> None:
        for dtype in self.dtypes:
            block, out = self.block(dtype), np.full(SIZE, UNWRITTEN, dtype)
            before = copy.deepcopy(block)
            self.update(block, [], out)
            same(block, before)
            assert (out == UNWRITTEN).all()

    def test_empty_block_is_accepted(self) -> None:
        for dtype in self.dtypes:
            self.update(self.block(dtype, size=0), [Run(0, 0, 0)], out=np.empty(0, dtype))

    def test_missing_state_is_refused_whole(self) -> None:
        if not self.rule.states(self.rule.hyper()):
            return
        for dtype in self.dtypes:
            full = self.block(dtype)
            block, out = full._replace(state=()), np.full(SIZE, UNWRITTEN, dtype)
            before = copy.deepcopy(block)
            raises_value_error(partial(self.update, block, RUNS, out))
            same(block, before)
            assert (out == UNWRITTEN).all()

    def test_arrays_are_not_kept(self) -> None:
        for dtype in self.dtypes:
            block, out = self.block(dtype), np.empty(SIZE, dtype)
            arrays = [block.value, block.gradient, *block.state, out]
            before = [sys.getrefcount(each) for each in arrays]
            self.update(block, RUNS, out)
            assert [sys.getrefcount(each) for each in arrays] == before

    # What an update computes.

    def test_out_equals_the_value_and_changes_nothing_else(self) -> None:
        for dtype in self.dtypes:
            block, out = self.block(dtype), np.empty(SIZE, dtype)
            without = self.update(copy.deepcopy(block), RUNS)
            self.update(block, RUNS, out)
            same(block, without)
            for run in RUNS:
                equal_bits(out[run.start : run.stop], block.value[run.start : run.stop])

    def test_scale_multiplies_the_gradient_in_its_dtype(self) -> None:
        for dtype in self.dtypes:
            block = self.block(dtype)
            ready = copy.deepcopy(block)
            np.multiply(ready.gradient, np.dtype(dtype).type(0.3), out=ready.gradient)
            self.update(ready, RUNS)
            self.update(block, RUNS, scale=0.3)
            same(block._replace(gradient=ready.gradient), ready)

    def test_repetition_gives_the_same_bits(self) -> None:
        for dtype in self.dtypes:
            block = self.block(dtype)
            first, second = copy.deepcopy(block), copy.deepcopy(block)
            same(self.update(first, RUNS), self.update(second, RUNS))

    def test_each_run_is_updated_by_its_own_count(self) -> None:
        for dtype in self.dtypes:
            block = self.block(dtype)
            alone = [block.cut(r.start, r.stop) for r in RUNS]
            self.update(block, RUNS)
            for run, part in zip(RUNS, alone, strict=True):
                self.update(part, [Run(0, run.stop - run.start, run.count)])
                same(block.cut(run.start, run.stop), part)

    def test_cuts_do_not_change_the_bits(self) -> None:
        if not self.elementwise:
            return
        edges = (0, 1, 2, 1023, 1025, 3000, SIZE)
        cuts = [Run(a, b, 2) for a, b in pairwise(edges)]
        for dtype in self.dtypes:
            block = self.block(dtype)
            cut = self.update(copy.deepcopy(block), cuts)
            same(self.update(block, [Run(0, SIZE, 2)]), cut)


def outside(runs: Sequence[Run]) -> Array:
    """The mask of the elements that are in no run: bool [SIZE]."""
    mask = np.ones(SIZE, bool)
    for run in runs:
        mask[run.start : run.stop] = False
    return mask


def same(actual: Block, expected: Block) -> None:
    """Require the same bits in all arrays of two blocks."""
    equal_bits(actual.value, expected.value)
    equal_bits(actual.gradient, expected.gradient)
    for mine, theirs in zip(actual.state, expected.state, strict=True):
        equal_bits(mine, theirs)

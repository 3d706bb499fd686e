from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import ADD, block_spec

from paramserve.codecs import BFloat16
from paramserve.compiling import load_codecs
from paramserve.core.block import ShardBlock, check_spec
from paramserve.errors import DtypeMismatch, ParamServeError, RuleFailed, ShapeMismatch
from paramserve.messages import VALUE, BlockSpec
from paramserve.rules import SGD, Add, PushInfo, Rule, Run
from paramserve.rules.custom import CustomRule

PUSH = PushInfo(0, 0, 0, 0, 1.0, 1.0)


class Recorder(Add):
    """Notes the runs that it is asked to update."""

    def __init__(self) -> None:
        object.__setattr__(self, "runs", [])

    def apply(
        self, value: Any, gradient: Any, state: Any, hyper: Any, runs: Any, *rest: Any
    ) -> None:
        self.runs.append([tuple(run) for run in runs])
        super().apply(value, gradient, state, hyper, runs, *rest)


def make(
    *shapes: tuple[int, ...],
    shard: int = 0,
    cuts: tuple[int, ...] | None = None,
    rule: Rule | None = ADD,
) -> ShardBlock:
    return ShardBlock(block_spec(*shapes, cuts=cuts, rule=rule), shard, rule, attempt=1)


def ones(block: ShardBlock) -> Any:
    return np.ones(block.size)


def test_bounds_are_cut_to_the_shard() -> None:
    spec = [(2,), (3,), (), (4,)]
    left = make(*spec, cuts=(0, 4, 10))
    right = make(*spec, cuts=(0, 4, 10), shard=1)
    assert [left.bounds(i) for i in range(4)] == [(0, 2), (2, 4), (4, 4), (4, 4)]
    assert [right.bounds(i) for i in range(4)] == [(0, 0), (0, 1), (1, 2), (2, 6)]


def test_apply_all_pieces_is_one_run_while_counts_are_equal() -> None:
    rule = Recorder()
    block = make((2,), (3,), rule=rule)
    for _ in range(2):
        block.apply(ones(block), None, None, PUSH)
    assert rule.runs == [[Run(0, 5, 0)], [Run(0, 5, 1)]]
    assert block.counts == [2, 2]


def test_apply_some_pieces_counts_them_apart() -> None:
    rule = Recorder()
    block = make((2,), (3,), (1,), (0,), rule=rule)
    block.apply(ones(block), (2, 0), None, PUSH)
    block.apply(ones(block), None, None, PUSH)
    assert rule.runs == [
        [Run(0, 2, 0), Run(5, 6, 0)],
        [Run(0, 2, 1), Run(2, 5, 0), Run(5, 6, 1)],
    ]
    assert block.counts == [2, 1, 2, 1]
    assert block.value.tolist() == [2, 2, 1, 1, 1, 2]


def test_apply_counts_that_meet_again_are_one_run_again() -> None:
    rule = Recorder()
    block = make((2,), (3,), rule=rule)
    block.apply(ones(block), (0,), None, PUSH)
    block.apply(ones(block), (1,), None, PUSH)
    block.apply(ones(block), None, None, PUSH)
    assert rule.runs[-1] == [Run(0, 5, 1)]


def test_apply_counts_pieces_of_other_shards_too() -> None:
    block = make((2,), (3,), shard=1, cuts=(0, 5, 5))
    assert block.size == 0
    block.apply(ones(block), (1,), None, PUSH)
    assert block.counts == [0, 1]


@each_case("active", [None, (1,)])
def test_apply_out_has_all_values_afterwards(active: tuple[int, ...] | None) -> None:
    block = make((2,), (3,))
    block.value[:] = 5.0
    out = np.full(5, -1.0)
    block.apply(ones(block), active, None, PUSH, out)
    assert out.tolist() == block.value.tolist()
    assert out.tolist() == ([6.0] * 5 if active is None else [5.0, 5.0, 6.0, 6.0, 6.0])


def test_apply_out_after_uneven_counts_has_all_values() -> None:
    block = make((2,), (3,))
    block.apply(ones(block), (0,), None, PUSH)
    out = np.full(5, -1.0)
    block.apply(ones(block), None, None, PUSH, out)
    assert out.tolist() == [2.0, 2.0, 1.0, 1.0, 1.0]


def test_apply_uses_the_pushed_hyper_parameters() -> None:
    block = make((2,), rule=SGD(lr=1.0))
    hyper = SGD(lr=0.5).hyper()
    block.check(None, hyper)
    block.apply(ones(block), None, hyper, PUSH)
    block.apply(ones(block), None, None, PUSH)
    assert block.value.tolist() == [-1.5, -1.5]


def test_field_finds_values_and_state() -> None:
    block = make((2,), rule=SGD(lr=1.0, momentum=0.9))
    assert block.field(0) is block.value
    assert block.field(1) is block.state[0]
    for number in (2, -1):
        with pytest.raises(ParamServeError, match="1 state arrays"):
            block.field(number)


def test_check_block_without_a_rule_is_refused() -> None:
    with pytest.raises(ParamServeError, match="has no rule"):
        make((2,), rule=None).check(None, None)


@each_case("active", [(2,), (-1,), (0, 0)])
def test_check_pieces_that_are_not_there_or_twice_are_refused(active: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch, match="pieces 0 to 1"):
        make((2,), (3,)).check(active, None)


def test_check_wrong_hyper_parameters_are_refused_each_time() -> None:
    block = make((2,), rule=SGD(lr=1.0))
    good = SGD(lr=0.5).hyper()
    bad = (-1.0, *good[1:])
    for _ in range(2):
        with pytest.raises(ValueError, match="lr"):
            block.check(None, bad)
        block.check((0,), good)


def test_check_hyper_parameters_that_need_missing_state_are_refused() -> None:
    block = make((1,), (1,), (1,), (1,), rule=SGD(lr=1.0))
    with pytest.raises(ParamServeError, match=r"momentum.*and 1 more"):
        block.check(None, SGD(lr=1.0, momentum=0.9).hyper())


def test_assign_whole_part_and_counts() -> None:
    block = make((2,), (3,), rule=SGD(lr=1.0, momentum=0.9))
    block.assign(0, np.arange(5.0), None, None)
    block.assign(1, np.arange(5.0) + 10, (1,), (3, 4))
    assert block.value.tolist() == [0, 1, 2, 3, 4]
    assert block.state[0].tolist() == [0, 0, 12, 13, 14]
    assert block.counts == [3, 4]


@each_case(("active", "counts"), [(None, (1,)), ((2,), None), ((0, 0), None)])
def test_assign_wrong_pieces_or_counts_change_nothing(
    active: tuple[int, ...] | None, counts: tuple[int, ...] | None
) -> None:
    block = make((2,), (3,))
    with pytest.raises(ShapeMismatch):
        block.assign(0, ones(block), active, counts)
    assert block.value.tolist() == [0.0] * 5
    assert block.counts == [0, 0]


@each_case(
    "wrong",
    [
        block_spec((4,), cuts=(0, 4)),
        block_spec((4,), cuts=()),
        block_spec((4,), cuts=(0, 5, 4)),
        block_spec((4,), cuts=(0, 2, 5)),
        block_spec((4,), cuts=(1, 2, 4)),
        block_spec((-4,), cuts=(0, 0, -4)),
        BlockSpec(0, 0, "", "float64", None, (), (0, 0, 0)),
    ],
)
def test_check_spec_wrong_cuts_are_refused(wrong: BlockSpec) -> None:
    with pytest.raises(ShapeMismatch):
        check_spec(wrong, shards=2)


@each_case(("dtype", "rule"), [("int64", Add()), ("O", None), ("float16", None)])
def test_check_spec_wrong_dtype_is_refused(dtype: str, rule: Rule | None) -> None:
    with pytest.raises(DtypeMismatch):
        check_spec(block_spec((4,), cuts=(0, 4), dtype=dtype, rule=rule), shards=1)


@dataclass(frozen=True)
class Shy(CustomRule):
    """Adds the gradient; fails at 13, after it has changed everything."""

    whole_tensors: ClassVar[bool] = False
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    shapes: ClassVar[list[Any]] = []

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        self.shapes.append(value.shape)
        value += gradient
        state["sum"] += gradient
        if (gradient == 13).any():
            raise ValueError("thirteen")


@dataclass(frozen=True)
class ShyWhole(Shy):
    whole_tensors: ClassVar[bool] = True


def test_guarded_rule_that_fails_in_its_second_run_changes_nothing() -> None:
    block = make((2,), (3,), rule=Shy())
    block.apply(ones(block), (0,), None, PUSH)
    gradient, out = np.array([1.0, 1.0, 1.0, 1.0, 13.0]), np.full(5, -1.0)
    with pytest.raises(RuleFailed, match=r"'Shy' failed on.*ValueError: thirteen \(.*in update"):
        block.apply(gradient, None, None, PUSH, out)
    assert block.value.tolist() == block.state[0].tolist() == [1, 1, 0, 0, 0]
    assert block.counts == [1, 0]
    assert out.tolist() == [-1.0] * 5
    block.apply(ones(block), None, None, PUSH, out)
    assert out.tolist() == block.value.tolist() == [2, 2, 1, 1, 1]
    assert block.counts == [2, 1]


def test_guarded_rule_may_go_on_with_what_was_not_finite_before() -> None:
    block = make((2,), rule=Shy())
    block.value[0] = np.inf
    block.apply(ones(block), None, None, PUSH)
    assert block.value.tolist() == [np.inf, 1.0]


def test_whole_tensors_are_one_run_each_in_their_shape() -> None:
    Shy.shapes.clear()
    block = make((2, 3), (), (0,), (4,), rule=ShyWhole())
    block.apply(ones(block), None, None, PUSH)
    assert Shy.shapes == [(2, 3), (), (4,)]


def test_whole_tensors_that_are_cut_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="whole tensors"):
        make((2,), (3,), cuts=(0, 3, 5), rule=ShyWhole())
    make((2,), (3,), cuts=(0, 2, 5), rule=ShyWhole())


def test_prepared_update_changes_nothing_before_it_is_kept() -> None:
    block, out = make((2,), rule=Shy()), np.empty(2)
    keep = block.prepare(ones(block), None, None, PUSH)
    assert (block.value.tolist(), block.counts) == ([0.0, 0.0], [0])
    keep(out)
    assert (block.value.tolist(), out.tolist(), block.counts) == ([1.0, 1.0], [1.0, 1.0], [1])


@each_case("counts", [None, (5, 7)])
def test_prepared_update_leaves_out_what_is_overwritten_before_it_is_kept(counts: Any) -> None:
    block = make((2,), (1,), rule=Shy())
    keep = block.prepare(ones(block), None, None, PUSH)
    block.assign(0, np.full(3, 9.0), (0,), counts)
    keep.leave_out(0, (0,), counts=counts is not None)
    block.assign(1, np.full(3, 4.0), None, None)
    keep.leave_out(1, None, counts=False)
    keep()
    assert (block.value.tolist(), block.state[0].tolist()) == ([9.0, 9.0, 1.0], [4.0] * 3)
    assert tuple(block.counts) == (counts if counts else (1, 1))
    block.apply(ones(block), None, None, PUSH)
    assert (block.value.tolist(), block.state[0].tolist()) == ([10.0, 10.0, 2.0], [5.0] * 3)


@each_case("state", [(), (np.zeros(3),), (np.zeros(2, "f4"),), ([0.0, 0.0],)])
def test_rule_whose_state_does_not_fit_cannot_start(state: Any) -> None:
    class Odd(Recorder):
        def states(self, hyper: Any) -> tuple[str, ...]:
            return ("m",)

        def init_state(self, size: int, dtype: Any) -> Any:
            return state

    with pytest.raises(RuleFailed, match=r"cannot start.*init_state"):
        make((2,), rule=Odd())


@dataclass(frozen=True)
class CountsEncodes(BFloat16):
    """Counts in a list that all of its objects share."""

    calls: ClassVar[list[int]] = []

    def encode(self, values: Any, out: Any, seed: int) -> int:
        self.calls.append(values.size)
        return super().encode(values, out, seed)


@each_case("rule", [ADD, Shy()], ids=["ours", "custom"])
def test_values_are_encoded_once_until_they_change(rule: Rule) -> None:
    load_codecs()
    block = ShardBlock(block_spec((3,), dtype="float32"), 0, rule, attempt=1)
    block.pull_codec, CountsEncodes.calls[:] = CountsEncodes(), []
    one = np.ones(3, np.float32)
    for number in range(1, 4):
        assert block._encoded_values() is block._encoded_values()
        assert len(CountsEncodes.calls) == 2 * number - 1
        block.apply(one, None, None, PUSH)
        assert (
            block._encoded_values().view(np.uint16).tolist()
            == [0x3F80 if number == 1 else 0x4000] * 3
        )
        block.assign(VALUE, one, None, None)

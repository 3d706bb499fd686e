"""A client that has looked at its gradients says how large they are, and no shard looks again."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import Rig, block_spec, done, refused

from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Buffered, Sync
from paramserve.core.block import ShardBlock
from paramserve.errors import NonFinite
from paramserve.rules import Add, PushInfo
from paramserve.rules.custom import CustomRule
from paramserve.rules.kernels import TILE

SIZE = 3 * TILE
BAD_AT = TILE + 5
"""Of the gradient that was written to after it was looked at."""
WORKER, OTHER = 1, 2
ADD = Add()


@dataclass(frozen=True)
class Plus(CustomRule):
    """A user's rule, which is computed on copies."""

    state_names = ("sum",)

    def update(self, value: Any, gradient: Any, state: Any, push: PushInfo) -> None:
        value += push.scale * gradient
        state["sum"] += gradient


def rig(policy: Policy, workers: int = 1, rule: Add | Plus = ADD, blocks: int = 1) -> Rig:
    one = Rig(policy, workers=workers, rules={Plus.name: Plus})
    for rank in range(workers):
        one.join(rank + 1, rank)
    for number in range(blocks):
        one.define(WORKER, block_spec((SIZE,), number=number, rule=rule))
    return one


def changed() -> Any:
    gradient = np.ones(SIZE)
    gradient[BAD_AT] = math.nan
    return gradient


@each_case("policy", [Async(), Buffered(size=2), Sync()])
def test_gradient_that_was_looked_at_is_not_looked_at_again(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(*_: object) -> float:
        raise AssertionError("the shard looked at a gradient")

    one = rig(policy)
    monkeypatch.setattr(ShardBlock, "largest", looks)
    for clock in range(2):
        done(one.step(WORKER, {0: np.ones(SIZE)}, clock=clock, largest=1.0))
    assert one.value()[:2] == ([1.0] * 2 if isinstance(policy, Buffered) else [2.0] * 2)


@each_case("largest", [-1.0, math.nan])
@each_case("policy", [Async(), Sync()])
def test_gradient_that_was_not_looked_at_is_refused_whole(policy: Policy, largest: float) -> None:
    one = rig(policy)
    error = refused(one.step(WORKER, {0: changed()}, largest=largest))
    assert (type(error).__name__, error.applied) == ("NonFinite", "no")
    assert one.value() == [0.0] * SIZE


def test_gradient_changed_since_leaves_no_nan_in_the_values() -> None:
    one = rig(Async())
    error = refused(one.step(WORKER, {0: changed()}, largest=1.0))
    assert (type(error).__name__, error.applied) == ("NonFinite", "unknown")
    assert "rank 0" in str(error)
    assert "do not write to a gradient after it was pushed" in str(error)
    assert one.value() == [1.0] * TILE + [0.0] * 2 * TILE  # from the tile on, nothing
    state = one.shards[0].groups[0].state
    assert state.version == 1, "a reader of what has changed sees it"
    done(one.step(WORKER, {0: np.ones(SIZE)}, clock=1, largest=1.0))
    assert one.value() == [2.0] * TILE + [1.0] * 2 * TILE


def test_gradient_changed_since_refuses_the_clock_to_all_and_the_next_one_goes_on() -> None:
    one = rig(Sync(reduce="sum"), workers=2)
    one.step(WORKER, {0: np.ones(SIZE)}, largest=1.0)
    effects = one.step(OTHER, {0: changed()}, largest=1.0)
    kinds = [type(answer.message).__name__ for _, answer in effects.replies]
    assert kinds == ["Refused", "Refused"]
    assert all(math.isfinite(value) for value in one.value())
    for client in (WORKER, OTHER):
        effects = one.step(client, {0: np.ones(SIZE)}, clock=1, largest=1.0)
    assert [type(answer.message).__name__ for _, answer in effects.replies] == ["Done", "Done"]


def test_large_gradients_that_were_looked_at_have_their_sum_looked_at() -> None:
    one = rig(Sync(reduce="sum"), workers=2)
    huge = np.full(SIZE, 1e308)
    one.step(WORKER, {0: huge}, largest=1e308)
    effects = one.step(OTHER, {0: huge}, largest=1e308)
    failed = [answer.message for _, answer in effects.replies]
    assert [(m.kind, m.applied) for m in failed] == [("NonFinite", "no")] * 2  # type: ignore[union-attr]
    assert one.value() == [0.0] * SIZE


@each_case("blocks", [1, 2])
@each_case("policy", [Async(), Sync()])
def test_users_rule_is_not_computed_with_a_gradient_changed_since(
    policy: Policy, blocks: int
) -> None:
    one = rig(policy, rule=Plus(), blocks=blocks)
    ones = {number: np.ones(SIZE) for number in range(blocks)}
    bad = {**ones, blocks - 1: changed()}
    error = refused(one.step(WORKER, bad, largest=1.0))
    assert (type(error).__name__, error.applied) == ("NonFinite", "no")
    assert "do not write to a gradient after it was pushed" in str(error)
    done(one.step(WORKER, ones, clock=1, largest=1.0))
    for number in range(blocks):
        block = one.shards[0].blocks[number]
        assert (block.value.tolist(), block.field(1).tolist()) == ([1.0] * SIZE, [1.0] * SIZE)
        assert block.counts == [1]


@each_case("policy", [Async(on_nonfinite="skip"), Sync(on_nonfinite="skip")])
def test_users_rule_skips_a_gradient_changed_since_where_the_policy_says_so(policy: Policy) -> None:
    one = rig(policy, rule=Plus())
    assert done(one.step(WORKER, {0: changed()}, largest=1.0)).skipped
    assert one.value() == [0.0] * SIZE
    assert one.shards[0].report()[0].skipped == 1


def test_gradient_that_changes_while_a_users_rule_reads_it_is_the_clients_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = rig(Async(), rule=Plus())
    block = one.shards[0].blocks[0]
    gradient = np.ones(SIZE)

    def update(self: Plus, value: Any, pushed: Any, state: Any, push: PushInfo) -> None:
        gradient[BAD_AT] = math.nan
        value += pushed

    monkeypatch.setattr(Plus, "update", update)
    push = PushInfo(0, 0, 0, 0, 1.0, 1.0)
    with pytest.raises(NonFinite, match=r"gradient of rank 0 .* although its client found none"):
        block.prepare(gradient, None, None, push)


def buffered(*gradients: Any, rule: Add | Plus) -> tuple[Rig, str]:
    """After pushes to a buffer of two: D for each that is done, R for each that is refused."""
    one, told = rig(Buffered(size=2), rule=rule), ""
    for clock, gradient in enumerate(gradients):
        base, most = one.shards[0].groups[0].state.version, float(np.nanmax(gradient))
        step = one.step(WORKER, {0: gradient}, clock=clock, base=base, largest=most)
        told += type(step.replies[0][1].message).__name__[0]
    return one, told


@each_case("rule", [Add(), Plus()])
def test_buffer_with_a_gradient_changed_since_is_lost_and_the_next_is_applied(
    rule: Add | Plus,
) -> None:
    ones = np.ones(SIZE)
    one, told = buffered(changed(), ones, ones, ones, rule=rule)
    assert told == "DRDD"
    assert np.isfinite(one.value()).all()
    assert one.value()[-1] == 1.0
    report = one.shards[0].report()[0]
    assert (report.buffered, sum(one.shards[0].groups[0].state.dropped.values())) == (0, 1)


def test_buffer_keeps_its_gradients_when_the_last_one_has_changed_since() -> None:
    ones = np.ones(SIZE)
    one, told = buffered(ones, changed(), 3 * ones, rule=Plus())
    assert told == "DRD"
    assert one.value() == [2.0] * SIZE


def test_buffer_of_large_gradients_goes_on_after_one_that_has_changed_since() -> None:
    huge = np.full(SIZE, 1e305)
    one, told = buffered(changed(), huge, huge, huge, rule=Add())
    assert told == "DRDD"
    assert one.value() == [1e305] * SIZE


def test_buffer_applied_in_part_is_a_version() -> None:
    ones = np.ones(SIZE)
    one, told = buffered(ones, changed(), rule=Add())
    assert told == "DR"
    assert one.value()[0] == 1.0
    assert one.shards[0].groups[0].state.version == 1

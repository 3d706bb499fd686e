"""A table's part on a shard: updates that are made sure of, and then kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.table.rig import contents, keys_of

from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.options import LRU, MinCount, TableOptions, Zeros
from paramserve.core.table.parts import RowGradient
from paramserve.errors import RuleFailed
from paramserve.messages import BlockSpec, TableSpec
from paramserve.rules import Add, Rule
from paramserve.rules.base import PushInfo
from paramserve.rules.custom import CustomRule
from paramserve.rules.registry import spec as rule_spec
from paramserve.rules.rows import prepare_rows

PUSH = PushInfo(worker=-1, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)


@dataclass(frozen=True)
class Careful(CustomRule):
    """value -= gradient; but no gradient above 100."""

    name: ClassVar[str] = "Careful"

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value -= gradient
        if float(np.abs(gradient).max(initial=0.0)) > 100.0:
            raise ArithmeticError("too steep")


def block_of(options: TableOptions, rule: Rule | None = None) -> KeyedBlock:
    rule = rule or Add()
    table = TableSpec(2, "float32", 0, options.to_spec())
    described = rule_spec(Add())
    spec = BlockSpec(1, 1, "users", "float32", described, (), (0, 0), table=table)
    block = KeyedBlock(spec, 1, rule, 1)
    prepare_rows(rule)
    return block


def gradient(*keys: int) -> RowGradient:
    return RowGradient(keys_of(keys), np.ones((len(keys), 2), np.float32))


@each_case("times", [1, 3])
def test_keys_are_counted_when_an_update_is_kept_however_often_it_was_prepared(times: int) -> None:
    block = block_of(TableOptions(Zeros(), admit=MinCount(3)))
    found = []
    for _ in range(4):
        *_, keep = [block.prepare(gradient(5, 7), None, None, PUSH) for _ in range(times)]
        keep()
        found.append((len(block.store), block.unadmitted))
    assert found == [(0, 2), (0, 4), (2, 4), (2, 4)]
    block.prepare(gradient(9), None, None, PUSH)
    assert block.unadmitted == 4


def filled(rule: Rule) -> KeyedBlock:
    """Three rows, as many as an LRU leaves."""
    block = block_of(TableOptions(Zeros(), evict=LRU(3)), rule)
    block.apply(gradient(1, 2, 3), None, None, PUSH)
    return block


@each_case("rule", [Add(), Careful()])
def test_update_that_is_prepared_changes_nothing_before_it_is_kept(rule: Rule) -> None:
    block, other = filled(rule), filled(rule)
    before = contents(block.store), block.report()
    block.prepare(gradient(7, 8, 9), None, None, PUSH)  # another one, which is never kept
    keep = block.prepare(gradient(2, 5), None, None, PUSH)
    block.find_room(gradient(4))
    assert (contents(block.store), block.report()) == before
    keep()
    other.apply(gradient(2, 5), None, None, PUSH)
    assert set(contents(block.store)) == {2, 3, 5}
    assert (contents(block.store), block.report()) == (contents(other.store), other.report())


def test_update_that_a_rule_fails_at_lets_no_row_go_and_makes_none() -> None:
    block = filled(Careful())
    before = contents(block.store), block.report()
    steep = RowGradient(keys_of([3, 7]), np.array([[1.0, 1.0], [1000.0, 0.0]], np.float32))
    with pytest.raises(RuleFailed, match="too steep"):
        block.apply(steep, None, None, PUSH)
    assert (contents(block.store), block.report()) == before


def test_room_that_is_held_for_no_keys_is_none() -> None:
    block = filled(Add())
    block.find_room(gradient(7, 8))
    block.find_room(gradient())
    block.hold()
    assert block.store.reserved_rows == 0
    block.find_room(gradient(7, 8))
    block.hold()
    assert block.store.reserved_rows == 2
    block.release()
    assert block.store.reserved_rows == 0

"""What a table on a shard makes of numbers that its rows cannot hold, and of rules that fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case
from tests.unit.core.rig import done, refused
from tests.unit.core.test_table_requests import DIM, ME, push, pushed, rig, rows_of, table_spec

from paramserve.compiling import load_table
from paramserve.core.table import memory as table_memory
from paramserve.core.table.block import KeyedBlock
from paramserve.core.table.parts import Records, RowGradient, records_at
from paramserve.core.table.store import Purpose
from paramserve.errors import NonFinite, RuleFailed
from paramserve.messages import Put
from paramserve.rules import SGD, Adam, PushInfo, Rule
from paramserve.rules.custom import CustomRule
from paramserve.rules.rows import row_layout

NAN, INF = np.nan, np.inf


@dataclass(frozen=True)
class Lowest(CustomRule):
    """value -= gradient; keeps the lowest value so far. No gradient may be above 50."""

    state_names = ("lowest",)

    def init(self, name: str, size: int, dtype: np.dtype[Any]) -> Any:
        return np.full(size, np.inf, dtype)

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        if float(gradient.max()) > 50.0:
            raise ArithmeticError("too steep")
        value -= gradient
        np.minimum(state["lowest"], value, out=state["lowest"])


load_table(Lowest(), row_layout(Lowest(), DIM, "float32"))


@each_case(
    ("dtype", "value", "told"),
    [
        ("float32", NAN, "nan: float32 has no NaN or Inf"),
        ("float32", -INF, "-inf: float32"),
        ("float16", 1e6, "1000000.0: float16 has no NaN, Inf or 65520"),
        ("float16", -65520.0, "-65520.0: float16"),
        ("bfloat16", 3.4e38, "e+38: bfloat16 has no NaN, Inf or 3.3"),
    ],
)
def test_put_of_values_that_the_rows_cannot_hold_is_refused(
    dtype: str, value: float, told: str
) -> None:
    one = rig(table_spec(dtype=dtype))
    memory = pushed([6, 7, 8], 2.0)
    records_at(memory[0], 0, 3, DIM, None).values[1, 2] = value
    error = refused(one.send(ME, Put(0, 0, 3, -1, 0, 0), 0, memory))
    assert isinstance(error, NonFinite)
    assert "the values for key 7 of table 'users' hold" in error.failed
    assert told in error.failed
    assert error.applied == "no"
    assert len(one.shards[0].blocks[0].store) == 0


def put_state(rule: Rule, value: float) -> tuple[KeyedBlock, Records]:
    """A table, and rows for it with one element of state that is this."""
    block = KeyedBlock(table_spec(rule), 1, rule, 1)
    records = Records(
        np.array([6, 7]),
        np.ones((2, DIM), np.float32),
        np.ones((2, block.layout.state_words), np.float32),
        np.ones(2, np.uint32),
    )
    assert records.state is not None
    records.state[1, -1] = value
    return block, records


@each_case(("rule", "value"), [(Adam(), NAN), (Adam(), INF), (Lowest(), NAN)], ids=str)
def test_put_of_state_that_no_rule_makes_is_refused(rule: Rule, value: float) -> None:
    block, records = put_state(rule, value)
    with pytest.raises(NonFinite, match=f"the state for key 7 of table 'users' holds {value}"):
        block.put(records)
    assert len(block.store) == 0


def test_put_takes_the_infinite_state_that_a_rule_of_the_users_begins_with() -> None:
    block, records = put_state(Lowest(), INF)
    block.put(records)
    assert len(block.store) == 2
    assert block.store.read_state(np.array([1]))[0][0, -1] == INF


def test_put_of_the_last_value_that_rounds_to_the_largest_is_taken() -> None:
    one = rig(table_spec(dtype="float16"))
    done(one.send(ME, Put(0, 0, 1, -1, 0, 0), 0, pushed([1], 65519.0)))
    assert rows_of(one, [1]) == [65504.0]


def test_pushed_row_of_16_bits_stays_finite_whatever_the_gradient() -> None:
    one = rig(table_spec(SGD(1.0), dtype="float16"))
    for gradient, value in ((-1e6, 65504.0), (3e38, -65504.0), (-65000.0, -504.0)):
        done(push(one, [1], gradient))
        assert rows_of(one, [1]) == [value]


@each_case("rule", [SGD(1.0), Lowest()], ids=["built in", "custom"])
@each_case("dtype", ["float32", "bfloat16"])
def test_key_that_is_pushed_twice_in_one_request_harms_no_other_row(rule: Rule, dtype: str) -> None:
    """No client of ours sends it; one that does has the rule run twice, or the later one hold."""
    block, alone = (KeyedBlock(table_spec(rule, dtype=dtype), 1, rule, 1) for _ in range(2))
    push_info = PushInfo(0, 0, 0, 0, 1.0, 1.0)
    for each, keys in ((block, [1, 2, 1, 3]), (alone, [2, 3])):
        each.apply(RowGradient(np.array(keys), np.ones((len(keys), DIM), np.float32)), None, None,
                   push_info)  # fmt: skip
    for key, expected in ((1, {0.0, -1.0}), (2, {0.0}), (3, {0.0}), (4, {1.0})):
        rows = np.empty((1, DIM), np.float32)
        store, asked = block.store, np.array([key])
        store.read(store.take(asked, 0, Purpose.READ).rows, asked, rows)
        assert rows[0, 0] in expected
    assert (len(block.store), len(alone.store)) == (3, 2)


def test_failure_of_a_rule_that_is_kept_leaves_the_rows_free_to_grow_in_place() -> None:
    block = KeyedBlock(table_spec(Lowest()), 1, Lowest(), 1)
    push_info, kept = PushInfo(0, 0, 0, 0, 1.0, 1.0), []
    steep = RowGradient(np.array([1]), np.full((1, DIM), 99.0, np.float32))
    for use in (block.apply, block.prepare):
        with pytest.raises(RuleFailed, match="too steep") as failed:
            use(steep, None, None, push_info)
        kept.append(failed.value)
    assert len(block.store) == 0, "a rule that fails makes no row"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            table_memory, "_map", None
        )  # where it cannot grow in place, this gets new memory
        block.store.take(np.arange(20_000), 0, Purpose.PUSH)
    assert len(kept) == 2

"""The part of the conformance suite of rules that runs them on rows of tables.

Every `RuleSuite` has it. A rule for tables only, with `whole_rows`, has this part alone:

    class TestMyRowRule(RowSuite):
        rule = MyRowRule(lr=0.1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paramserve.rules import Array, PushInfo, Rule, Run
from paramserve.rules.registry import build, spec
from paramserve.rules.rows import (
    RowLayout,
    RowView,
    apply_rows,
    initial_state,
    prepare_rows,
    row_layout,
)

PUSH = PushInfo(worker=0, clock=3, version=7, staleness=1, weight=1.0, scale=1.0)
STREAM = 2**64 - 12345
CAPACITY = 40
DIMS = (1, 5, 33)
"""One value, an odd number of halves, and more than two vectors of float32 with a rest."""
PUSHED = ((7, 3, 39, 0), (3, 12, 7, 5, 39), (3, 31), (0, 12, 3))
"""Rows of some pushes, in an order of their own; in the end they have 0 to 4 updates."""
HALVES = ("bfloat16", "float16")
FRACTION_BITS = {"bfloat16": 7, "float16": 10}


class Table(NamedTuple):
    """Rows in memory, as a server has them."""

    layout: RowLayout
    floats: Array

    @property
    def words(self) -> Array:
        """View of the memory as uint32."""
        return self.floats.view(np.uint32)

    @property
    def values(self) -> Array:
        """Copies of all values: float32 [capacity, dim]."""
        dim = self.layout.dim
        if self.layout.dtype == "float32":
            return self.floats[:, :dim].copy()
        halves = np.ascontiguousarray(self.floats.view(np.uint16)[:, :dim])
        if self.layout.dtype == "float16":
            return halves.view(np.float16).astype(np.float32)
        return (halves.astype(np.uint32) << 16).view(np.float32)

    def put(self, values: Array) -> None:
        """Write values that the table's dtype holds exactly."""
        dim = self.layout.dim
        if self.layout.dtype == "float32":
            self.floats[:, :dim] = values
        elif self.layout.dtype == "float16":
            self.floats.view(np.uint16)[:, :dim] = values.astype(np.float16).view(np.uint16)
        else:
            bits = np.ascontiguousarray(values).view(np.uint32)
            self.floats.view(np.uint16)[:, :dim] = bits >> 16
        np.testing.assert_array_equal(self.values, values)

    @property
    def states(self) -> tuple[Array, ...]:
        """Views of all states: [capacity, width] each."""
        places = zip(self.layout.state_at, self.layout.widths, strict=True)
        return tuple(self.floats[:, at : at + width] for at, width in places)

    @property
    def counts(self) -> Array:
        """View of the counts: [capacity]."""
        return self.words[:, self.layout.count_at]


class RowSuite:
    """Tests that every rule passes on rows, or it is refused there. Set `rule` in a subclass."""

    rule: Rule

    def takes_rows(self) -> bool:
        """Whether the rule can run on rows; if not, the tests here have nothing to test."""
        try:
            row_layout(self.rule, 4, "float32")
        except ValueError:
            return False
        return True

    def table(self, dim: int, dtype: str = "float32", capacity: int = CAPACITY) -> Table:
        """Fresh rows with values of a few bits."""
        layout = row_layout(self.rule, dim, dtype)
        prepare_rows(self.rule)
        made = Table(layout, np.zeros((capacity, layout.words), np.float32))
        made.put((numbers((capacity, dim), seed=1) * 64).round().clip(-127, 127) / 64)
        at = layout.value_words
        made.floats[:, at : at + layout.state_words] = initial_state(self.rule, layout)
        return made

    def push(
        self,
        table: Table,
        slots: Sequence[int],
        gradients: Array,
        *,
        scale: float = 1.0,
        stream: int = STREAM,
    ) -> None:
        """Apply the rule to some rows. Keys are other numbers than slots."""
        at = np.array(slots, np.int64)
        view = RowView(table.floats, table.words, table.layout, at, at * 1001 - 7, stream)
        push = PUSH._replace(scale=scale)
        apply_rows(self.rule, view, gradients, self.rule.hyper(), push)

    def trained(self, dim: int, dtype: str = "float32") -> Table:
        """Rows after the pushes of `PUSHED`."""
        table = self.table(dim, dtype)
        for i, slots in enumerate(PUSHED):
            self.push(table, slots, numbers((len(slots), dim), seed=10 + i))
        return table

    # What a row holds.

    def test_rows_are_taken_or_refused_by_name(self) -> None:
        text = ""
        try:
            row_layout(self.rule, 4, "float32")
        except ValueError as refused:
            text = str(refused)
        if text or getattr(self.rule, "whole_tensors", False):
            assert getattr(self.rule, "kind", self.rule.name) in text

    def test_row_has_room_for_each_state_and_for_a_count(self) -> None:
        if not self.takes_rows():
            return
        names = self.rule.states(self.rule.hyper())
        for dim in DIMS:
            for dtype in ("float32", *HALVES):
                layout = row_layout(self.rule, dim, dtype)
                assert len(layout.widths) == len(names)
                assert layout.words == layout.value_words + sum(layout.widths) + layout.counted
                assert layout.counted or dtype == "float32", "rounding draws from the count"
                state = initial_state(self.rule, layout)
                assert state.dtype == np.float32
                assert state.shape == (sum(layout.widths),)

    def test_row_layout_of_the_rule_after_the_wire_is_the_same(self) -> None:
        if not self.takes_rows():
            return
        again = build(spec(self.rule), {self.rule.name: type(self.rule)})
        assert row_layout(again, 5, "float16") == row_layout(self.rule, 5, "float16")

    # What an update may touch.

    def test_rows_not_named_are_untouched(self) -> None:
        if not self.takes_rows():
            return
        for dtype in ("float32", *HALVES):
            table = self.table(5, dtype)
            before = table.words.copy()
            slots = PUSHED[0]
            self.push(table, slots, numbers((len(slots), 5)))
            others = np.delete(np.arange(CAPACITY), slots)
            np.testing.assert_array_equal(table.words[others], before[others])
            assert (table.words[list(slots)] != before[list(slots)]).any(axis=1).all()

    def test_rows_none_named_nothing_is_touched(self) -> None:
        if not self.takes_rows():
            return
        table = self.table(5)
        before = table.words.copy()
        self.push(table, (), np.empty((0, 5), np.float32))
        np.testing.assert_array_equal(table.words, before)

    def test_row_gradients_are_not_changed(self) -> None:
        if not self.takes_rows():
            return
        table, gradients = self.table(5), numbers((4, 5))
        before = gradients.copy()
        self.push(table, PUSHED[0], gradients, scale=0.5)
        equal_bits(gradients, before)

    def test_row_counts_are_the_updates_of_each_row(self) -> None:
        if not self.takes_rows():
            return
        for dtype in ("float32", *HALVES):
            table = self.trained(5, dtype)
            if table.layout.counted:
                named = [slot for slots in PUSHED for slot in slots]
                expected = np.bincount(named, minlength=CAPACITY)
                np.testing.assert_array_equal(table.counts, expected)

    # What an update computes.

    def test_rows_equal_dense_blocks_to_the_bit(self) -> None:
        if not self.takes_rows() or getattr(self.rule, "whole_rows", False):
            return
        kind = np.dtype(np.float32)
        for dim in DIMS:
            fresh = self.table(dim)
            blocks = [(value.copy(), self.rule.init_state(dim, kind)) for value in fresh.values]
            counts = [0] * CAPACITY
            for i, slots in enumerate(PUSHED):
                for slot, gradient in zip(
                    slots, numbers((len(slots), dim), seed=10 + i), strict=True
                ):
                    value, state = blocks[slot]
                    runs = [Run(0, dim, counts[slot])]
                    self.rule.apply(value, gradient, state, self.rule.hyper(), runs, PUSH)
                    counts[slot] += 1
            table = self.trained(dim)
            equal_bits(table.values, np.stack([value for value, _ in blocks]))
            for k, rows in enumerate(table.states):
                equal_bits(np.ascontiguousarray(rows), np.stack([s[k] for _, s in blocks]))

    def test_each_row_is_updated_as_if_alone(self) -> None:
        if not self.takes_rows():
            return
        for dim in DIMS:
            for dtype in ("float32", *HALVES):
                together, alone = self.trained(dim, dtype), self.table(dim, dtype)
                for i, slots in enumerate(PUSHED):
                    gradients = numbers((len(slots), dim), seed=10 + i)
                    for k, slot in enumerate(slots):
                        self.push(alone, (slot,), gradients[k : k + 1])
                np.testing.assert_array_equal(together.words, alone.words)

    def test_rows_in_another_order_have_the_same_bits(self) -> None:
        if not self.takes_rows():
            return
        for dtype in ("float32", *HALVES):
            forwards, backwards = self.trained(5, dtype), self.trained(5, dtype)
            slots = list(range(0, CAPACITY, 3))
            gradients = numbers((len(slots), 5), seed=3)
            self.push(forwards, slots, gradients)
            self.push(backwards, slots[::-1], np.ascontiguousarray(gradients[::-1]))
            np.testing.assert_array_equal(forwards.words, backwards.words)

    def test_row_scale_multiplies_the_gradients(self) -> None:
        if not self.takes_rows():
            return
        scaled, ready = self.trained(5), self.trained(5)
        gradients = numbers((4, 5), seed=4)
        self.push(scaled, PUSHED[0], gradients, scale=0.3)
        self.push(ready, PUSHED[0], np.float32(0.3) * gradients)
        np.testing.assert_array_equal(scaled.words, ready.words)

    # Values of 16 bits.

    def test_half_rows_are_the_neighbours_of_float32_and_right_on_average(self) -> None:
        if not self.takes_rows():
            return
        many, dim = 3000, 3
        slots = range(many)
        for dtype in HALVES:
            halves, exact = self.table(dim, dtype, many), self.table(dim, "float32", many)
            start = np.tile(np.array([1.5, -0.75, 0.125], np.float32), (many, 1))
            gradients = np.tile(numbers((1, dim), seed=6), (many, 1))
            for table in (halves, exact):
                table.put(start)
                self.push(table, slots, gradients)
            away = halves.values.astype(np.float64) - exact.values
            step = 2.0 ** (np.floor(np.log2(np.abs(exact.values))) - FRACTION_BITS[dtype])
            assert (np.abs(away) < step).all()
            spread = away.std(axis=0) / np.sqrt(many)
            assert (np.abs(away.mean(axis=0)) <= 5 * spread + 1e-12).all()

    def test_half_rows_repeated_have_the_same_bits(self) -> None:
        if not self.takes_rows():
            return
        for dtype in HALVES:
            first, second = self.trained(33, dtype), self.trained(33, dtype)
            np.testing.assert_array_equal(first.words, second.words)

    def test_half_rows_of_another_table_are_rounded_otherwise(self) -> None:
        if not self.takes_rows():
            return
        first, second = self.table(33, "bfloat16"), self.table(33, "bfloat16")
        slots = range(CAPACITY)
        gradients = numbers((CAPACITY, 33), seed=8)
        self.push(first, slots, gradients)
        self.push(second, slots, gradients, stream=STREAM + 1)
        assert (first.values != second.values).any()


def numbers(shape: tuple[int, ...], seed: int = 0) -> Array:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def equal_bits(actual: Array, expected: Array) -> None:
    """Require the same dtype and the same bits."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


def raises_value_error(call: Callable[[], object]) -> None:
    """Require that a call raises `ValueError`."""
    try:
        call()
    except ValueError:
        return
    raise AssertionError("no ValueError was raised")

"""Rules of users on rows: on copies, so that a failure in the middle changes nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import each_case, passes
from tests.unit.rules.rows_in_memory import DIM, PUSH, Rows, numbers

import paramserve as ps
from paramserve.rules import Adam, Array, PushInfo, Rule, Run, row_kernels
from paramserve.rules.custom import CustomRule
from paramserve.rules.rows import initial_state, row_layout
from paramserve.rules.torch_rule import TorchRule
from paramserve_testing.row_suite import RowSuite


@dataclass(frozen=True)
class PerRow(CustomRule):
    """One number for a row, as a user writes it."""

    lr: float = 0.1

    whole_rows: ClassVar[bool] = True
    state_names: ClassVar[tuple[str, ...]] = ("sum", "last")

    def row_states(self, dim: int) -> tuple[int, ...]:
        return (1, dim)

    def init(self, name: str, size: int, dtype: np.dtype[Any]) -> Array:
        return np.full(size, 0.5 if name == "sum" else 0.0, dtype)

    def update(
        self, value: Array, gradient: Array, state: MutableMapping[str, Array], push: PushInfo
    ) -> None:
        state["sum"] += np.square(gradient).mean(axis=1, keepdims=True)
        state["last"] = gradient
        value -= self.lr * gradient / np.sqrt(state["sum"])


@dataclass(frozen=True)
class Faulty(CustomRule):
    """Changes everything, and then does what a test wants."""

    lr: float = 0.1

    state_names: ClassVar[tuple[str, ...]] = ("m",)
    fault: ClassVar[Callable[[Array, MutableMapping[str, Array]], object]]

    def update(
        self, value: Array, gradient: Array, state: MutableMapping[str, Array], push: PushInfo
    ) -> None:
        value += 1
        state["m"] += 1
        return type(self).fault(value, state)


def test_rules_pass_the_suite_of_rows() -> None:
    """One of this file, and the one that the documentation shows."""
    text = (Path(__file__).parents[3] / "docs" / "rules.md").read_text()
    parts = re.findall(r"```python\n(.*?)```", text, re.S)
    (code,) = (part for part in parts if "whole_rows" in part)
    scope: dict[str, Any] = {"ps": ps, "np": np, "dataclass": dataclass}
    exec(code, scope)
    for rule in (PerRow(), scope["RowNormed"]()):
        suite = RowSuite()
        suite.rule = rule
        assert suite.takes_rows()
        passes(suite)


@dataclass(frozen=True)
class Recording(Adam):
    """Adam as a rule of a user, who keeps the runs that it was given."""

    name: ClassVar[str] = "Recording"
    runs: ClassVar[list[Run]] = []

    def apply(self, value: Array, *rest: Any) -> None:
        self.runs.extend(rest[3])
        super().apply(value, *rest)


def test_rows_with_one_count_are_one_run_and_equal_the_kernel() -> None:
    user, built_in = Rows(Recording()), Rows(Adam())
    pushes = ([0, 3, 5], [5, 4, 3, 2, 1, 0], [1, 5, 2])
    for i, slots in enumerate(pushes):
        for rows in (user, built_in):
            rows.push(slots, numbers(len(slots), DIM, seed=i))
    expected = [(0, 3, 0), (0, 3, 0), (3, 6, 1), (0, 2, 1), (2, 3, 2)]
    assert [(r.start / DIM, r.stop / DIM, r.count) for r in Recording.runs] == expected
    np.testing.assert_array_equal(user.floats.view(np.uint32), built_in.floats.view(np.uint32))


# --- refused -------------------------------------------------------------------------------------


def made(**members: Any) -> Any:
    """A custom rule with these members."""
    members = {"update": lambda self, value, gradient, state, push: None, **members}
    return dataclass(frozen=True)(type("Made", (CustomRule,), members))()


@each_case(
    ("rule", "text"),
    [
        (made(whole_tensors=True), "Made looks at whole tensors"),
        (TorchRule.of("Adafactor"), r"torch\.optim\.Adafactor looks at whole tensors"),
        (made(state_names=("m",), row_states=lambda self, dim: (1,)), "set whole_rows = True"),
        (made(state_names=("m",), row_states=lambda self, dim: (1, 1)), r"row_states\(7\)"),
        (made(state_names=("m",), row_states=lambda self, dim: [1]), r"row_states\(7\)"),
        (made(state_names=("m",), row_states=lambda self, dim: (0,)), r"row_states\(7\)"),
        (made(state_names=("m",), row_states=lambda self, dim: (1.0,)), r"row_states\(7\)"),
    ],
    ids=str,
)
def test_rule_that_cannot_run_on_rows_is_refused(rule: Rule, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        row_layout(rule, DIM, "float32")


def test_fresh_state_of_another_size_is_refused() -> None:
    rule = made(state_names=("m",), initial_row=lambda self, dim: np.zeros(2))
    with pytest.raises(ValueError, match=r"Made have shape \[2\], a row has room for \[7\]"):
        initial_state(rule, row_layout(rule, DIM, "float32"))


# --- rules of users ------------------------------------------------------------------------------


def test_whole_rows_sees_rows_and_states_of_its_own_width() -> None:
    rows = Rows(PerRow())
    assert rows.layout.widths == (1, DIM)
    first, second = numbers(2, DIM, seed=1), numbers(3, DIM, seed=2)
    rows.push([4, 1], first)
    rows.push([1, 0, 5], second, PUSH._replace(scale=0.5))
    total = 0.5 + np.square(first[1]).mean()
    value = -np.float32(0.1) * first[1] / np.sqrt(total)
    total += np.square(second[0] / 2).mean()
    value -= np.float32(0.1) * second[0] / 2 / np.sqrt(total)
    np.testing.assert_allclose(rows.values[1], value, rtol=1e-5)
    assert rows.floats[1, DIM] == pytest.approx(total, rel=1e-6)
    np.testing.assert_array_equal(rows.floats[1, DIM + 1 :], second[0] / 2)
    np.testing.assert_array_equal(rows.floats[3], [0] * DIM + [0.5] + [0] * DIM)


def raises(value: Array, state: MutableMapping[str, Array]) -> None:
    raise LookupError("a user's bug")


def makes_nan(value: Array, state: MutableMapping[str, Array]) -> None:
    value[3] = math.nan


def makes_inf_in_state(value: Array, state: MutableMapping[str, Array]) -> None:
    state["m"][-1] = math.inf


def returns(value: Array, state: MutableMapping[str, Array]) -> Array:
    return value


def reshapes(value: Array, state: MutableMapping[str, Array]) -> None:
    value.shape = (2, -1)


@each_case("dtype", ["float32", "float16"])
@each_case(
    ("fault", "error", "text"),
    [
        (raises, LookupError, "a user's bug"),
        (makes_nan, ValueError, "value holds NaN or Inf"),
        (makes_inf_in_state, ValueError, "m holds NaN or Inf"),
        (returns, TypeError, "returned ndarray"),
        (reshapes, ValueError, "keeps shape and dtype"),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting the shape:DeprecationWarning")
def test_custom_rule_that_fails_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, fault: Any, error: Any, text: str, dtype: str
) -> None:
    monkeypatch.setattr(Faulty, "fault", staticmethod(fault), raising=False)
    rows = Rows(Faulty(), dtype)
    before = rows.floats.view(np.uint32).copy()
    with pytest.raises(error, match=text):
        rows.push([1, 2], numbers(2, DIM))
    np.testing.assert_array_equal(rows.floats.view(np.uint32), before)


def test_custom_rule_nan_that_was_pushed_is_not_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Faulty, "fault", staticmethod(makes_nan), raising=False)
    rows = Rows(Faulty())
    rows.push([1, 2], np.full((2, DIM), math.nan, np.float32))
    assert np.isnan(rows.values[1, 3])


def test_custom_rule_with_whole_rows_on_a_dense_block_is_refused() -> None:
    rule, value = PerRow(), np.zeros(4)
    with pytest.raises(ValueError, match="PerRow looks at whole rows"):
        rule.init_state(4, value.dtype)


def test_custom_rule_never_compiles_when_applied() -> None:
    loaded = (row_kernels.gather, row_kernels.scatter)
    tables = [Rows(PerRow(), dtype) for dtype in ("float32", "bfloat16", "float16")]
    before = [len(each.signatures) for each in loaded]
    for rows in tables:
        rows.push([0, 3], numbers(2, 2 * DIM)[:, ::2])
    assert [len(each.signatures) for each in loaded] == before

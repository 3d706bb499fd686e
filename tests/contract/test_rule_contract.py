"""Every built-in rule, and one as a user would write it, passes the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.suites import passes

from paramserve.rules import (
    FTRL,
    LAMB,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    Add,
    Array,
    DelayedNesterov,
    Hyper,
    Lion,
    NAdam,
    PushInfo,
    RMSprop,
    RowAdagrad,
    Rule,
    Run,
)
from paramserve.rules.custom import CustomRule
from paramserve.rules.registry import BUILT_IN
from paramserve.rules.torch_rule import TorchRule
from paramserve_testing.rule_suite import RuleSuite

RULES: list[Rule] = [
    Add(),
    SGD(lr=0.1),
    SGD(lr=0.1, weight_decay=0.01, maximize=True),
    SGD(lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.01),
    SGD(lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    Adam(lr=0.1),
    Adam(lr=0.1, betas=(0.5, 0.9), weight_decay=0.1, maximize=True),
    Adam(lr=0.1, weight_decay=0.1, decoupled=True),
    Adagrad(lr=0.1),
    Adagrad(lr=0.1, lr_decay=0.1, weight_decay=0.01, initial_accumulator_value=0.5, maximize=True),
    FTRL(alpha=0.1, l1=0.01, l2=0.1),
    DelayedNesterov(lr=0.1, pushes=3, activation=0.2),
    RMSprop(),
    RMSprop(lr=0.1, alpha=0.4, weight_decay=0.01, momentum=0.9, centered=True, maximize=True),
    Adadelta(weight_decay=0.01),
    Adamax(weight_decay=0.01, maximize=True),
    NAdam(),
    NAdam(weight_decay=0.1, decoupled=True, maximize=True),
    Lion(lr=0.01, weight_decay=0.1, maximize=True),
    LAMB(lr=0.1, weight_decay=0.1, maximize=True),
]


@dataclass(frozen=True)
class SignDescent:
    """value -= lr * sign(gradient), in plain numpy and with a count of its own as state."""

    lr: float

    name: ClassVar[str] = "SignDescent"
    hyper_names: ClassVar[tuple[str, ...]] = ("lr",)
    state_names: ClassVar[tuple[str, ...]] = ("updates",)

    def hyper(self) -> Hyper:
        return (float(self.lr),)

    def check(self, hyper: Hyper) -> None:
        if len(hyper) != 1 or not hyper[0] >= 0:
            raise ValueError(f"lr must be at least 0, not {hyper}")

    def states(self, hyper: Hyper) -> tuple[str, ...]:
        return self.state_names

    def init_state(self, size: int, dtype: np.dtype[Any]) -> tuple[Array, ...]:
        return (np.zeros(size, dtype),)

    def prepare(self, dtype: np.dtype[Any]) -> None:
        pass

    def apply(
        self,
        value: Array,
        gradient: Array,
        state: tuple[Array, ...],
        hyper: Hyper,
        runs: Sequence[Run],
        push: PushInfo,
        out: Array | None = None,
    ) -> None:
        (updates,) = state
        for start, stop, *_ in runs:
            at = slice(start, stop)
            updates[at] += 1
            value[at] -= value.dtype.type(hyper[0]) * np.sign(
                gradient[at] * value.dtype.type(push.scale)
            )
            if out is not None:
                out[at] = value[at]


@dataclass(frozen=True)
class Heavy(CustomRule):
    """Momentum, in as few lines as a user writes."""

    lr: float = 0.1
    keep: float = 0.9

    state_names: ClassVar[tuple[str, ...]] = ("speed",)

    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        speed = state["speed"]
        speed *= self.keep
        speed += gradient
        value -= self.lr * speed


@dataclass(frozen=True)
class Normed(CustomRule):
    """Steps of one length for each tensor, whatever its gradient's."""

    lr: float = 0.1

    whole_tensors: ClassVar[bool] = True

    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        value -= self.lr * gradient / (np.linalg.norm(gradient) + 1e-6)


OTHERS: list[Rule] = [SignDescent(lr=0.1), Heavy(), Normed()]
OTHERS += [TorchRule.of(kind) for kind in ("Adagrad", "RMSprop", "Adamax")]


@pytest.mark.parametrize("rule", [*RULES, *OTHERS], ids=str)
def test_rule_passes_the_suite(rule: Rule) -> None:
    suite = RuleSuite()
    suite.rule = rule
    passes(suite)


def test_every_built_in_rule_is_in_the_suite() -> None:
    assert {type(rule) for rule in RULES} == set(BUILT_IN.values()) - {RowAdagrad}

"""What rules refuse, when they are made and with each push."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.suites import each_case

from paramserve.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Add,
    DelayedNesterov,
    PushInfo,
    RowAdagrad,
    Run,
)
from paramserve.rules.registry import described_by

PUSH = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)


REFUSED: list[tuple[Any, list[tuple[dict[str, Any], str]]]] = [
    (
        SGD,
        [
            ({"lr": -0.1}, "^lr of SGD"),
            ({"lr": math.nan}, "^lr of SGD"),
            ({"lr": math.inf}, "^lr of SGD"),
            ({"lr": 0.1, "momentum": -0.5}, "^momentum of SGD"),
            ({"lr": 0.1, "dampening": math.nan}, "^dampening of SGD"),
            ({"lr": 0.1, "weight_decay": -1e-4}, "^weight_decay of SGD"),
            ({"lr": 0.1, "maximize": 2}, "^maximize of SGD"),
            ({"lr": 0.1, "nesterov": True}, "^nesterov of SGD"),
            ({"lr": 0.1, "nesterov": True, "momentum": 0.9, "dampening": 0.1}, "^nesterov of SGD"),
        ],
    ),
    (
        Adam,
        [
            ({"lr": -1}, "^lr of Adam"),
            ({"betas": (1.0, 0.9)}, "^beta1 of Adam"),
            ({"betas": (0.9, -0.1)}, "^beta2 of Adam"),
            ({"betas": (0.9,)}, "^betas of Adam must be two numbers"),
            ({"eps": -1e-8}, "^eps of Adam"),
            ({"weight_decay": math.nan}, "^weight_decay of Adam"),
            ({"decoupled": 0.5}, "^decoupled of Adam"),
        ],
    ),
    *(
        (kind, [({named: wrong}, f"^{named} of {kind.name}") for named, wrong in wrongs])
        for kind in (Adagrad, RowAdagrad)
        for wrongs in [
            itertools.product(
                ("lr", "weight_decay", "initial_accumulator_value", "eps"),
                (-0.1, math.nan, math.inf),
            )
        ]
    ),
    (
        FTRL,
        [
            ({"alpha": 0.0}, "^alpha of FTRL"),
            ({"alpha": math.inf}, "^alpha of FTRL"),
            ({"beta": -1}, "^beta of FTRL"),
            ({"l1": math.nan}, "^l1 of FTRL"),
            ({"l2": -1e-9}, "^l2 of FTRL"),
        ],
    ),
    (
        DelayedNesterov,
        [
            ({"pushes": 0}, "pushes of DelayedNesterov must be a whole number"),
            ({"pushes": 2.5}, "whole number of at least 1, not 2.5"),
            ({"pushes": 4, "activation": 0.3}, "at most 1 / pushes = 0.25, not 0.3"),
            ({"momentum": 1.0}, "momentum of DelayedNesterov"),
        ],
    ),
]


@each_case(("kind", "wrongs"), REFUSED, ids=lambda each: getattr(each, "name", ""))
def test_option_out_of_range_is_refused_by_name(
    kind: Any, wrongs: list[tuple[dict[str, Any], str]]
) -> None:
    for options, words in wrongs:
        with pytest.raises(ValueError, match=words):
            kind(**options)


@each_case("activation", [0.0, 0.1, 0.25])
def test_delayed_nesterov_is_algorithm_3_of_its_paper(activation: float) -> None:
    """Written once more as the paper has it: theta, m, Delta, beta, epsilon, c and N."""
    epsilon, beta, c, n = 0.7, 0.9, activation, 4
    random = np.random.default_rng(0)
    theta = random.standard_normal(7)
    rule = DelayedNesterov(lr=epsilon, momentum=beta, pushes=n, activation=c)
    rule.prepare(theta.dtype)
    value, state = theta.copy(), rule.init_state(7, theta.dtype)
    m, delta = np.zeros(7), np.zeros(7)
    for t in range(10):
        g = random.standard_normal(7)
        delta = delta + g
        if (t + 1) % n == 0:
            m = beta * m + delta / n
            theta = theta - epsilon * ((1 - c * n + c) * beta * m + g / n)
            delta = np.zeros(7)
        else:
            theta = theta - epsilon * (c * beta * m + g / n)
        rule.apply(value, g, state, rule.hyper(), [Run(0, 7, t)], PUSH)
        np.testing.assert_allclose(value, theta, rtol=1e-12)


def test_delayed_nesterov_of_one_worker_is_nesterovs_momentum() -> None:
    values = []
    for rule in (DelayedNesterov(0.7, 0.9), SGD(0.7, 0.9, nesterov=True)):
        value = np.ones(5)
        rule.prepare(value.dtype)
        state = rule.init_state(5, value.dtype)
        random = np.random.default_rng(0)
        for t in range(6):
            run = [Run(0, 5, t)]
            rule.apply(value, random.standard_normal(5), state, rule.hyper(), run, PUSH)
        values.append(value)
    np.testing.assert_allclose(*values, rtol=1e-12)


def test_row_adagrad_for_a_dense_parameter_is_refused() -> None:
    rule, value = RowAdagrad(), np.ones(4)
    with pytest.raises(ValueError, match=r"RowAdagrad looks at whole rows.*client\.table"):
        described_by(rule)
    with pytest.raises(ValueError, match="only tables"):
        rule.init_state(4, value.dtype)
    with pytest.raises(ValueError, match="only tables"):
        rule.apply(value, np.ones(4), (np.ones(4),), rule.hyper(), [Run(0, 4, 0)], PUSH)
    assert (value == 1.0).all()
    assert described_by(rule, rows=True).name == "RowAdagrad"


def test_adam_betas_as_a_list_are_a_tuple() -> None:
    assert Adam(betas=[0.9, 0.99]) == Adam(betas=(0.9, 0.99))


def test_add_takes_no_hyper_parameter() -> None:
    with pytest.raises(ValueError, match="Add takes 0 hyper-parameters"):
        Add().check((1.0,))


def test_hyper_flags_are_floats() -> None:
    assert SGD(lr=1, momentum=0.9, nesterov=True).hyper() == (1.0, 0.9, 0.0, 0.0, 1.0, 0.0)
    assert Adam(decoupled=True).hyper() == (1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 0.0)


def test_sgd_needs_a_buffer_only_with_momentum() -> None:
    rule = SGD(lr=0.1)
    assert rule.states(rule.hyper()) == ()
    assert rule.states(SGD(lr=0.1, momentum=0.9).hyper()) == ("momentum_buffer",)


def test_sgd_momentum_on_a_block_without_buffer_is_refused_before_writing() -> None:
    rule, value, out = SGD(lr=0.1), np.ones(4), np.zeros(4)
    rule.prepare(value.dtype)
    hyper = SGD(lr=0.1, momentum=0.9).hyper()
    with pytest.raises(ValueError, match=r"momentum_buffer.*Applied: no\. To fix:"):
        rule.apply(value, np.ones(4), (), hyper, [Run(0, 4, 0)], PUSH, out)
    np.testing.assert_array_equal(value, 1.0)
    np.testing.assert_array_equal(out, 0.0)


def test_sgd_momentum_zero_on_a_block_with_buffer_leaves_it_alone() -> None:
    rule, value = SGD(lr=0.1, momentum=0.9), np.ones(4)
    rule.prepare(value.dtype)
    buffer = np.full(4, 7.0)
    rule.apply(value, np.ones(4), (buffer,), SGD(lr=0.1).hyper(), [Run(0, 4, 3)], PUSH)
    np.testing.assert_array_equal(value, 0.9)
    np.testing.assert_array_equal(buffer, 7.0)


@each_case(
    ("make", "words"),
    [
        (lambda: SGD(lr="0.1"), "lr of SGD must be a number, not '0.1'"),
        (lambda: SGD(lr=None), "lr of SGD must be a number, not None"),
        (lambda: Adam(betas=0.9), "betas of Adam must be two numbers, not 0.9"),
        (lambda: Adam(betas=("a", "b")), "betas of Adam must be a number"),
        (lambda: Adagrad(initial_accumulator_value="1"), "initial_accumulator_value of Adagrad"),
    ],
)
def test_option_that_is_no_number_is_refused_when_the_rule_is_made(
    make: Callable[[], object], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        make()

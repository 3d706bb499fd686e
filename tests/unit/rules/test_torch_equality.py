"""The rules that torch has go where torch's go: 100 updates of several tensors, some left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case

from paramserve.rules import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    NAdam,
    PushInfo,
    RMSprop,
    Rule,
    Run,
)

UPDATES = 100
SIZES = (7, 33, 1)
STARTS = (0, 7, 40)
TOLERANCE = {np.float64: 1e-10, np.float32: 2e-5}
"""Relative, for each element: in float32 some pass near zero, where 100 roundings of 6e-8 of what
was added weigh more than the promise."""
NORM_TOLERANCE = 1e-6
"""The promise, of the norm of all values. In float32 the worst setting, SGD with momentum 0.9 and
dampening 0.3, measured 1.7e-7."""
Reference = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    for rule in (SGD(lr=0.1), SGD(lr=0.1, momentum=0.9), Adam(), Adagrad()):
        for dtype in TOLERANCE:
            rule.prepare(np.dtype(dtype))


def gradients(dtype: type[Any]) -> list[list[np.ndarray[Any, Any] | None]]:
    """For each update, one gradient or None for each tensor; the scheme leaves no tensor out
    always, and the second one out first."""
    rng = np.random.default_rng(5)
    return [
        [
            None if (update + 2 * i) % 5 == 2 else rng.standard_normal(size).astype(dtype)
            for i, size in enumerate(SIZES)
        ]
        for update in range(UPDATES)
    ]


def by_torch(reference: Reference, start: np.ndarray[Any, Any], steps: Any) -> Sequence[Any]:
    """The tensors after all updates, and the optimizer's state of each."""
    cut = np.split(start, STARTS[1:])
    parameters = [torch.tensor(each, requires_grad=True) for each in cut]
    optimizer = reference(parameters)
    for step in steps:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()
    values = np.concatenate([each.detach().numpy() for each in parameters])
    return values, [optimizer.state[each] for each in parameters]


def by_rule(rule: Rule, start: np.ndarray[Any, Any], steps: Any) -> Sequence[Any]:
    """The same as one block of three pieces."""
    value, counts = start.copy(), [0] * len(SIZES)
    state = rule.init_state(value.size, value.dtype)
    push = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)
    for step in steps:
        gradient, runs = np.full_like(value, np.nan), []
        for i, (at, size, piece) in enumerate(zip(STARTS, SIZES, step, strict=True)):
            if piece is not None:
                gradient[at : at + size] = piece
                runs.append(Run(at, at + size, counts[i]))
                counts[i] += 1
        rule.apply(value, gradient, state, rule.hyper(), runs, push)
    return value, state


def assert_same_way(rule: Rule, reference: Reference, dtype: type[Any]) -> None:
    start = np.random.default_rng(1).standard_normal(sum(SIZES)).astype(dtype)
    steps = gradients(dtype)
    theirs, their_state = by_torch(reference, start, steps)
    ours, our_state = by_rule(rule, start, steps)
    away = np.linalg.norm(np.subtract(ours, theirs, dtype=np.float64))
    assert away <= NORM_TOLERANCE * np.linalg.norm(theirs.astype(np.float64)), rule
    rtol, said = TOLERANCE[dtype], str(rule)
    atol = rtol * np.abs(theirs).max() / 10
    np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=said)
    for name, array in zip(rule.states(rule.hyper()), our_state, strict=True):
        expected = np.concatenate([each[name].numpy() for each in their_state])
        wrong = f"{name} of {said}"
        np.testing.assert_allclose(array, expected, rtol=rtol, atol=rtol / 10, err_msg=wrong)


SGD_OPTIONS = [
    {
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    for momentum, dampening, weight_decay, nesterov, maximize in itertools.product(
        (0.0, 0.9), (0.0, 0.3), (0.0, 0.05), (False, True), (False, True)
    )
    if not nesterov or (momentum and not dampening)
]
ADAM_OPTIONS = [
    {"betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    for betas, eps, weight_decay, maximize in itertools.product(
        ((0.9, 0.999), (0.4, 0.8)), (1e-8, 1e-3), (0.0, 0.05), (False, True)
    )
]
ADAGRAD_OPTIONS = [
    {
        "lr_decay": lr_decay,
        "weight_decay": weight_decay,
        "initial_accumulator_value": initial,
        "eps": eps,
        "maximize": maximize,
    }
    for lr_decay, weight_decay, initial, eps, maximize in itertools.product(
        (0.0, 0.1), (0.0, 0.05), (0.0, 0.3), (1e-10, 1e-2), (False, True)
    )
]


OTHERS: list[tuple[type[Any], dict[str, Any]]] = [
    *[
        (RMSprop, {"momentum": momentum, "centered": centered, "weight_decay": decay})
        for momentum, centered, decay in itertools.product((0.0, 0.9), (False, True), (0.0, 0.05))
    ],
    (RMSprop, {"alpha": 0.4, "centered": True, "eps": 1e-3, "maximize": True}),
    (Adadelta, {}),
    (Adadelta, {"rho": 0.6, "eps": 1e-3, "weight_decay": 0.05, "maximize": True}),
    (Adamax, {}),
    (Adamax, {"betas": (0.4, 0.8), "eps": 1e-3, "weight_decay": 0.05, "maximize": True}),
    (NAdam, {}),
    (NAdam, {"betas": (0.4, 0.8), "eps": 1e-3, "weight_decay": 0.05, "maximize": True}),
    (NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.05, "momentum_decay": 0.1}),
]


def plain(kind: str, options: dict[str, Any]) -> Reference:
    return lambda given: getattr(torch.optim, kind)(given, foreach=False, **options)


@each_case("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
def test_sgd_equals_torch(dtype: type[Any]) -> None:
    for options in SGD_OPTIONS:
        assert_same_way(SGD(lr=0.05, **options), plain("SGD", {"lr": 0.05, **options}), dtype)


@each_case("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
@each_case("decoupled", [False, True], ids=["Adam", "AdamW"])
def test_adam_equals_torch(decoupled: bool, dtype: type[Any]) -> None:
    kind = "AdamW" if decoupled else "Adam"
    for options in ADAM_OPTIONS:
        rule = Adam(lr=0.01, decoupled=decoupled, **options)
        assert_same_way(rule, plain(kind, {"lr": 0.01, **options}), dtype)


@each_case("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
def test_adagrad_equals_torch(dtype: type[Any]) -> None:
    for options in ADAGRAD_OPTIONS:
        reference = plain("Adagrad", {"lr": 0.05, **options})
        assert_same_way(Adagrad(lr=0.05, **options), reference, dtype)


@pytest.fixture
def _float64_numbers() -> Iterator[None]:
    """Torch's NAdam keeps its product of momenta in the default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("_float64_numbers")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
def test_others_equal_torch(dtype: type[Any]) -> None:
    for kind, options in OTHERS:
        renamed = {name.removesuffix("_weight_decay"): value for name, value in options.items()}
        rule = kind(lr=0.01, **(renamed if "decoupled" in renamed else options))
        rule.prepare(np.dtype(dtype))
        assert_same_way(rule, plain(kind.__name__, {"lr": 0.01, **options}), dtype)


@each_case("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
def test_hyper_that_changes_with_each_push_equals_a_torch_schedule(dtype: type[Any]) -> None:
    rng = np.random.default_rng(2)
    start, steps = rng.standard_normal(9).astype(dtype), rng.standard_normal((20, 9)).astype(dtype)
    parameter = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.9, foreach=False)
    value, rule = start.copy(), SGD(lr=1.0, momentum=0.9)
    state = rule.init_state(9, value.dtype)
    push = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)
    for count, step in enumerate(steps):
        lr, momentum = 0.1 / (count + 1), 0.9 - 0.02 * count
        optimizer.param_groups[0] |= {"lr": lr, "momentum": momentum}
        parameter.grad = torch.tensor(step)
        optimizer.step()
        hyper = SGD(lr=lr, momentum=momentum).hyper()
        rule.apply(value, step, state, hyper, [Run(0, 9, count)], push)
    expected = parameter.detach().numpy()
    np.testing.assert_allclose(value, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 10)

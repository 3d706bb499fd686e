"""Each `torch.optim` class on a block's shards goes where torch's own goes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.suites import each_case
from tests.unit.core.rig import block_spec

from paramserve.core.block import ShardBlock
from paramserve.core.partition import borders
from paramserve.messages import Piece
from paramserve.rules import PushInfo, Rule
from paramserve.rules import kernels as shared
from paramserve.rules.registry import build, spec
from paramserve.rules.torch_rule import ELEMENTWISE, REFUSED, TorchRule, defaults_of

PUSH = PushInfo(0, 0, 0, 0, 1.0, 1.0)
SHAPES = ((), (3,), (4, 5), (2, 3, 4))
STEPS = 6
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ASGD", {"t0": 2.0, "weight_decay": 0.1}),
    ("Adadelta", {"rho": 0.8}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adam", {"amsgrad": True, "maximize": True}),
    ("AdamW", {"amsgrad": True, "weight_decay": 0.2}),
    ("Adamax", {"weight_decay": 0.1}),
    ("Muon", {"momentum": 0.9}),
    ("NAdam", {"lr": 0.05, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.05}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("RMSprop", {}),
    ("Rprop", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
]


@pytest.fixture(scope="module", autouse=True)
def _ready() -> None:
    for dtype in (np.float32, np.float64):
        shared.prepare(np.dtype(dtype))
    for kind, options in CASES:
        TorchRule.of(kind, **options).prepare(np.dtype("float32"))


def cuts_of(rule: TorchRule, shapes: tuple[tuple[int, ...], ...], shards: int) -> tuple[int, ...]:
    edges = borders([Piece(str(i), shape) for i, shape in enumerate(shapes)])
    if shards == 1:
        return (0, edges[-1])
    if rule.whole_tensors:
        return (0, edges[1], edges[2], edges[-1])
    return (0, 2, edges[-1] - 7, edges[-1])


@each_case(("kind", "options"), CASES, ids=lambda each: str(each)[:30])
def test_torch_rule_equals_torch(kind: str, options: dict[str, Any]) -> None:
    for shards, dtype in itertools.product((1, 3), ("float32", "float64")):
        assert_goes_with_torch(kind, options, shards, dtype)


def assert_goes_with_torch(kind: str, options: dict[str, Any], shards: int, dtype: str) -> None:
    shapes = SHAPES if kind != "Muon" else ((4, 5), (3, 2), (6, 6))
    rule = TorchRule.of(kind, **options)
    wire: Any = build(spec(rule))
    spec_ = block_spec(*shapes, cuts=cuts_of(rule, shapes, shards), rule=wire, dtype=dtype)
    blocks = [ShardBlock(spec_, shard, wire, 1) for shard in range(shards)]
    rng = np.random.default_rng(3)
    start = rng.standard_normal(spec_.cuts[-1]).astype(dtype)
    edges = borders(spec_.pieces)
    tensors = [
        torch.tensor(start[a:b].reshape(shape), requires_grad=True)
        for a, b, shape in zip(edges, edges[1:], shapes, strict=False)
    ]
    plain = getattr(torch.optim, kind)(tensors, **options)
    for block in blocks:
        block.value[:] = start[block.low : block.high]
    for step in range(STEPS):
        gradient = rng.standard_normal(start.size).astype(dtype)
        active = None if step % 3 != 1 else (0, 2)
        plain.param_groups[0]["lr"] *= 0.9
        for i, tensor in enumerate(tensors):
            piece = gradient[edges[i] : edges[i + 1]].reshape(shapes[i])
            tensor.grad = None if active is not None and i not in active else torch.tensor(piece)
        plain.step()
        now = TorchRule.of(kind, **(options | {"lr": plain.param_groups[0]["lr"]}))
        for block in blocks:
            block.check(active, now.hyper())
            part = gradient[block.low : block.high].copy()
            block.apply(part, active, now.hyper(), PUSH)
    ours = np.concatenate([block.value for block in blocks])
    theirs = np.concatenate([each.detach().numpy().ravel() for each in tensors])
    atol, said = 1e-6 if dtype == "float32" else 1e-12, f"{shards} shards, {dtype}"
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=atol, err_msg=said)
    assert not np.array_equal(ours, start)


def test_every_class_of_torch_is_run_or_refused() -> None:
    theirs = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert theirs == {kind for kind, _ in CASES} | set(REFUSED)
    assert theirs - set(REFUSED) - ELEMENTWISE == {"Adafactor", "Muon"}


@each_case("kind", [*REFUSED, "Optimizer", "lr_scheduler", "_functional", "Adamm"])
def test_what_servers_cannot_run_is_a_type_error(kind: str) -> None:
    with pytest.raises(TypeError, match=r"cannot run|no optimizer"):
        TorchRule(kind, ("lr:float",), (0.1,))


@each_case("options", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.5)}], ids=str)
def test_option_out_of_range_is_a_value_error(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        TorchRule.of("NAdam", **options)


def test_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="speed"):
        TorchRule.of("Adagrad", speed=1.0)
    with pytest.raises(TypeError, match=r"no option wieght_decay: did you mean weight_decay\?"):
        TorchRule.of("Adagrad", wieght_decay=0.1)
    with pytest.raises(ValueError, match="speed"):
        TorchRule("Adagrad", ("lr:float", "speed:float"), (0.1, 1.0))


def test_check_option_that_needs_more_state_is_refused() -> None:
    rule = TorchRule.of("RMSprop")
    rule.check(TorchRule.of("RMSprop", alpha=0.5).hyper())
    with pytest.raises(ValueError, match="momentum_buffer"):
        rule.check(TorchRule.of("RMSprop", momentum=0.5).hyper())


def test_whole_number_options_stay_whole_and_zeros_do_not() -> None:
    assert "ns_steps:int" in TorchRule.of("Muon").options
    assert "weight_decay:float" in TorchRule.of("Adam", weight_decay=1).options
    assert set(defaults_of("Muon")) >= {"ns_steps", "lr"}


def test_numbers_of_a_tensor_are_kept_apart_where_counts_are_equal() -> None:
    """NAdam's mu_product depends on the betas of a tensor's own steps, not on their number."""
    rule: Any = TorchRule.of("NAdam")
    assert rule.separate_tensors
    assert not TorchRule.of("Adam").separate_tensors
    one: Rule = rule
    block = ShardBlock(block_spec((2,), (3,), rule=one), 0, one, 1)
    other = TorchRule.of("NAdam", betas=(0.2, 0.999)).hyper()
    block.apply(np.ones(5), (0,), None, PUSH)
    block.apply(np.ones(5), (1,), other, PUSH)
    block.apply(np.ones(5), None, None, PUSH)
    product = block.state[rule.state_names.index("mu_product")]
    assert product[0] == product[1] != product[2] == product[4]

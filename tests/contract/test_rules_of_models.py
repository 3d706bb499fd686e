"""Rules in the place of torch optimizers, and torch optimizers in the place of rules."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from tests.suites import each_case
from torch import nn

import paramserve as ps
from paramserve.errors import UnknownRule
from paramserve.pytorch import Embedding
from paramserve.rules import Array

RTOL, ATOL = 1e-5, 1e-6


@dataclass(frozen=True)
class SignMomentum(ps.CustomRule):
    """value -= lr * sign of a running mean of gradients"""

    lr: float = 0.1
    beta: float = 0.5
    nesterov: bool = False

    state_names: ClassVar[tuple[str, ...]] = ("mean",)

    def update(self, value: Array, gradient: Array, state: Any, push: Any) -> None:
        state["mean"] = self.beta * state["mean"] + (1 - self.beta) * gradient
        value -= self.lr * np.sign(state["mean"])


class TorchSignMomentum(torch.optim.Optimizer):
    """The same, in torch."""

    def __init__(self, params: Any, lr: float, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # takes no closure
        for group in self.param_groups:
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.mul_(group["beta"]).add_(param.grad, alpha=1 - group["beta"])
                param.sub_(group["lr"] * mean.sign())


_SEEDED = threading.Lock()
"""Ranks are threads here, and torch has one generator for all of them."""


def small_model() -> nn.Module:
    with _SEEDED, torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> nn.Module:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return model


def close(found: nn.Module, wanted: nn.Module) -> None:
    for name, value in wanted.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=RTOL, atol=ATOL)


RULES = [
    (SignMomentum(lr=0.2), lambda p: TorchSignMomentum(p, lr=0.2)),
    (ps.SGD(lr=0.2, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.2, momentum=0.9)),
    (ps.Adam(lr=0.02, betas=(0.8, 0.9)), lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.9))),
    (
        ps.Adagrad(lr=0.2, initial_accumulator_value=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.2, initial_accumulator_value=0.5),
    ),
]


@pytest.mark.parametrize(("rule", "plain"), RULES, ids=lambda each: getattr(each, "name", ""))
def test_model_is_trained_by_a_rule_as_by_the_same_torch_optimizer(
    make_cluster: MakeCluster, rule: Any, plain: Any
) -> None:
    def work(worker: ps.Worker) -> tuple[nn.Module, dict[str, Any]]:
        model = small_model()
        optimizer = worker.optimizer(model, rule)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert "initial_accumulator_value" not in optimizer.param_groups[0]
        train(model, optimizer, 3)
        kept = optimizer.state_dict()
        for entry in kept["state"].values():
            assert set(entry) - {"step"} == set(rule.state_names)
        optimizer.load_state_dict(kept)
        return train(model, optimizer, 3), kept

    cluster = make_cluster(servers=2, workers=2, policy=ps.Sync(), registers=[SignMomentum])
    found = Ranks(cluster, work).start(0, 1).end()
    expected = small_model()
    optimizer = plain(expected.parameters())
    train(expected, optimizer, 3)
    train(expected, optimizer, 3)
    for model, kept in found.values():
        close(model, expected)
        assert kept["param_groups"][0]["lr"] == pytest.approx(rule.lr * 0.5)


def test_state_of_a_parameter_without_steps_starts_anew_when_it_is_loaded(
    make_cluster: MakeCluster,
) -> None:
    def work(worker: ps.Worker) -> None:
        model = small_model()
        optimizer = worker.optimizer(model, ps.Adagrad(lr=0.2, initial_accumulator_value=0.5))
        optimizer.load_state_dict(optimizer.state_dict())
        train(model, optimizer)
        expected = small_model()
        plain = torch.optim.Adagrad(expected.parameters(), lr=0.2, initial_accumulator_value=0.5)
        close(model, train(expected, plain))

    Ranks(make_cluster(workers=1), work).start(0).end()


def test_rule_of_a_model_with_a_table_steps_its_dense_layers_only(
    make_cluster: MakeCluster,
) -> None:
    def work(worker: ps.Worker) -> None:
        table = worker.client.table("users", 3, rule=ps.SGD(lr=0.5), init=ps.Zeros())
        model = nn.Sequential(Embedding(table), nn.Linear(3, 1))
        optimizer = worker.optimizer(model, ps.Adam(lr=0.1))
        assert optimizer.state_dict()["param_groups"][0]["params"] == [0, 1]
        before = model[1].weight.detach().clone()
        model(torch.tensor([7])).sum().backward()
        optimizer.step()
        torch.testing.assert_close(torch.from_numpy(table.pull([7])), -0.5 * before)
        assert optimizer.state_dict()["state"].keys() == {0, 1}

    Ranks(make_cluster(workers=1), work).start(0).end()


@each_case(
    ("given", "options", "kind", "text"),
    [
        (ps.SGD, {}, TypeError, r"got the class SGD: make an object of it, as in SGD\(\.\.\.\)"),
        (torch.optim.SGD, {}, TypeError, r"as in SGD\(model.parameters\(\)\)"),
        ("adam", {}, TypeError, "takes a torch optimizer or a rule, got str"),
        (ps.RowAdagrad(), {}, ValueError, "whole rows, which only tables have"),
        (SignMomentum(), {}, UnknownRule, r"rules=\[SignMomentum\]"),
        (
            ps.SGD(lr=0.1),
            {"consistency": ps.LocalSteps(every=2)},
            TypeError,
            "with LocalSteps the worker",
        ),
        (ps.SGD(lr=0.1), {"dense": "local"}, TypeError, 'with dense="local" the worker makes'),
    ],
)
def test_what_can_be_no_optimizer_is_refused(
    make_cluster: MakeCluster, given: Any, options: Any, kind: Any, text: str
) -> None:
    def work(worker: ps.Worker) -> None:
        with pytest.raises(kind, match=text):
            worker.optimizer(small_model(), given, **options)
        model = small_model()
        worker.optimizer(model, ps.SGD(lr=0.1)).step()

    Ranks(make_cluster(workers=1), work).start(0).end()


def test_hyper_parameter_out_of_its_range_is_refused_at_the_step(make_cluster: MakeCluster) -> None:
    def work(worker: ps.Worker) -> None:
        model = small_model()
        optimizer = worker.optimizer(model, ps.SGD(lr=0.1))
        model(torch.ones(2, 3)).sum().backward()
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match="lr of SGD must be"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
        optimizer.step()

    Ranks(make_cluster(workers=1), work).start(0).end()


# --- torch's optimizers as rules ------------------------------------------------------------------

TORCH_RULES = [
    torch.optim.Adam,
    partial(torch.optim.Adam, lr=0.02, amsgrad=True),
    partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    partial(torch.optim.RMSprop, lr=0.01),
    lambda params: torch.optim.Adamax(params, lr=0.05),
]


@each_case("number", range(len(TORCH_RULES)))
def test_rows_and_parameters_are_trained_by_a_torch_optimizer_as_in_torch(
    make_cluster: MakeCluster, number: int
) -> None:
    given: Any = TORCH_RULES[number]
    client = make_cluster(servers=2, workers=1).client(0)
    users = client.table("users", 3, rule=given, init=ps.Constant(0.5))
    client.define("w", np.full(3, 0.5, np.float32), rule=given)
    rows = [torch.full((3,), 0.5, requires_grad=True) for _ in range(4)]
    value = torch.full((3,), 0.5, requires_grad=True)
    of_rows = [given([row]) for row in rows]
    of_value = given([value])
    random = np.random.default_rng(number)
    for step in range(6):
        keys = random.choice(4, 2, replace=False)
        gradients = random.normal(size=(2, 3)).astype(np.float32)
        users.push(keys, gradients)
        for key, gradient in zip(keys, gradients, strict=True):
            rows[key].grad = torch.from_numpy(gradient)
            of_rows[key].step()
        client.push("w", gradients[step % 2]).result()
        value.grad = torch.from_numpy(gradients[step % 2])
        of_value.step()
    wanted = np.stack([row.detach().numpy() for row in rows])
    np.testing.assert_allclose(users.pull(np.arange(4)), wanted, rtol=RTOL, atol=ATOL)
    np.testing.assert_allclose(client.pull("w"), value.detach().numpy(), rtol=RTOL, atol=ATOL)


@each_case(
    ("given", "kind", "text"),
    [
        (torch.optim.LBFGS, TypeError, "cannot run torch.optim.LBFGS: it calls the closure"),
        (torch.optim.SparseAdam, TypeError, "SparseAdam: it takes sparse gradients"),
        (torch.optim.Adafactor, ValueError, "Adafactor looks at whole tensors"),
        (torch.optim.SGD([torch.zeros(1)], lr=0.1), TypeError, "partial"),
        (partial(torch.optim.Adam, lr=-1), ValueError, "Invalid learning rate"),
        (TorchSignMomentum, TypeError, "lr"),
        (partial(TorchSignMomentum, lr=0.1), TypeError, "cannot run the step of .*TorchSign"),
        (ps.Adagrad, TypeError, r"rule=Adagrad\(\.\.\.\)"),
        ("adam", TypeError, r"rule=ps\.Adam\(\.\.\.\), and not a name"),
        (dict, TypeError, "dict"),
    ],
)
def test_what_can_be_no_rule_of_a_table_is_refused(
    make_cluster: MakeCluster, given: Any, kind: Any, text: str
) -> None:
    client = make_cluster(workers=1).client(0)
    with pytest.raises(kind, match=text):
        client.table("users", 3, rule=given)
    client.table("users", 3, rule=ps.SGD(lr=0.1))

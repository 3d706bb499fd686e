"""What load_state_dict takes, and what it leaves behind when it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import assert_same, small_model, train
from torch import nn

from paramserve.pytorch.optimizer import adopt


def adam(model: nn.Module, lr: float = 0.05) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=lr)


def trained_state(lr: float = 0.3) -> dict[str, Any]:
    model = small_model()
    plain = adam(model, lr)
    train(model, plain, 2)
    return plain.state_dict()


def test_load_state_dict_hook_that_unpacks_the_dict_is_taken_as_in_torch() -> None:
    model, expected = small_model(), small_model()
    optimizer, plain = adam(model), adam(expected)
    adopt(FakeCluster().worker(), model, optimizer)
    for each, stepped in ((model, optimizer), (expected, plain)):
        stepped.register_load_state_dict_pre_hook(lambda _, packed: packed["inner"])
        stepped.load_state_dict({"inner": trained_state()})
        train(each, stepped, 2)
    assert_same(model, expected)


def other_kind(saved: dict[str, Any]) -> None:
    for entry in saved["state"].values():
        entry["square_avg"] = entry.pop("exp_avg_sq")


def other_shape(saved: dict[str, Any]) -> None:
    saved["state"][3]["exp_avg"] = torch.zeros(7)


def bad_rate(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["lr"] = -1.0


def no_betas(saved: dict[str, Any]) -> None:
    del saved["param_groups"][0]["betas"]


def differentiable(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["differentiable"] = True


def step_of_another_type(saved: dict[str, Any]) -> None:
    """torch itself fails on it, after it has taken the groups."""
    saved["state"][0]["step"] = [3]


def no_groups(saved: dict[str, Any]) -> None:
    del saved["param_groups"]


def more_groups(saved: dict[str, Any]) -> None:
    saved["param_groups"].append(saved["param_groups"][0])


def amsgrad(saved: dict[str, Any]) -> None:
    saved["param_groups"][0]["amsgrad"] = True


CHANGES = [
    more_groups,
    amsgrad,
    other_kind,
    other_shape,
    bad_rate,
    no_betas,
    differentiable,
    step_of_another_type,
    no_groups,
]


@pytest.mark.parametrize("change", CHANGES)
def test_load_state_dict_refused_leaves_everything_as_it_was(change) -> None:
    model, expected, cluster = small_model(), small_model(), FakeCluster()
    optimizer, plain = adam(model), adam(expected)
    adopt(cluster.worker(), model, optimizer)
    train(model, optimizer, 2)
    train(expected, plain, 2)
    groups = [dict(group) for group in optimizer.param_groups]
    saved = trained_state()
    change(saved)
    with pytest.raises((ValueError, TypeError, KeyError)):
        optimizer.load_state_dict(saved)
    assert cluster.stored == []
    assert optimizer.param_groups == groups
    assert len(optimizer.state) == 0
    train(model, optimizer, 2)
    train(expected, plain, 2)
    assert_same(model, expected)


def test_load_state_dict_with_a_momentum_that_the_servers_have_not_is_refused() -> None:
    model, other, cluster = small_model(), small_model(), FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    assert (cluster.stored, len(optimizer.state)) == ([], 0)


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "ASGD", "Rprop", "Adagrad", "RAdam"])
def test_state_dict_of_parameters_of_none_and_one_element_goes_to_torch_and_back(name) -> None:
    shapes = ((0, 2), (3,), ())
    models = [nn.ParameterList([torch.ones(shape).double() for shape in shapes]) for _ in range(2)]
    kind = getattr(torch.optim, name)
    optimizer, plain = (kind(model.parameters(), lr=0.1) for model in models)
    adopt(FakeCluster().worker(), models[0], optimizer)
    for model, stepped in zip(models, (optimizer, plain), strict=True):
        for param in model:
            param.grad = torch.full_like(param, 0.5)
        stepped.step()
    saved, wanted = optimizer.state_dict(), plain.state_dict()
    assert saved["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        assert list(saved["state"][index]) == list(entry)
        for key, value in entry.items():
            torch.testing.assert_close(saved["state"][index][key], value)
    plain.load_state_dict(saved)
    optimizer.load_state_dict(wanted)
    optimizer.step()
    plain.step()
    assert_same(*models)

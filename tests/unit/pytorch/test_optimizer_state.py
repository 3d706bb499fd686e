"""state_dict and load_state_dict go through the servers, in torch's layout, both ways; what is
refused leaves everything as it was."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model, train
from torch import nn

from paramserve.pytorch.optimizer import adopt

KINDS = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2}),
    (torch.optim.Adam, {"weight_decay": 0.1}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.ASGD, {"t0": 1.0}),
    (torch.optim.Adafactor, {}),
]


def partly_train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Three steps, in which one parameter never and another once has a gradient."""
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        model[0].bias.grad = None
        if step:
            model[3].bias.grad = None
        optimizer.step()


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_dict_equals_torch(kind, options) -> None:
    model, expected = small_model(), small_model()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    plain = kind(expected.parameters(), lr=0.05, **options)
    partly_train(model, adopt(FakeCluster().worker(), model, optimizer))
    partly_train(expected, plain)
    fetched, wanted = optimizer.state_dict(), plain.state_dict()
    assert fetched["param_groups"] == wanted["param_groups"]
    assert fetched["state"].keys() == wanted["state"].keys()
    for index, entry in wanted["state"].items():
        assert list(fetched["state"][index]) == list(entry)
        for name, value in entry.items():
            torch.testing.assert_close(fetched["state"][index][name], value)
    assert not optimizer._fetched.has_copy


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
def test_state_dict_keeps_the_buffers_of_a_momentum_that_is_0_since(kind) -> None:
    model, expected = small_model(), small_model()
    optimizer = kind(model.parameters(), lr=0.05, momentum=0.9)
    plain = kind(expected.parameters(), lr=0.05, momentum=0.9)
    adopt(FakeCluster().worker(), model, optimizer)
    for each, trained in ((optimizer, model), (plain, expected)):
        partly_train(trained, each)
        each.param_groups[0]["momentum"] = 0.0
        partly_train(trained, each)
    for _ in range(2):
        fetched, wanted = optimizer.state_dict(), plain.state_dict()
        assert fetched["state"].keys() == wanted["state"].keys()
        for index, entry in wanted["state"].items():
            assert list(fetched["state"][index]) == list(entry)
            for name, value in entry.items():
                torch.testing.assert_close(fetched["state"][index][name], value)
        for state in (fetched, wanted):  # a buffer of one's own, for when it is above 0 again
            for entry in state["state"].values():
                entry["momentum_buffer"] = torch.full_like(entry["momentum_buffer"], 0.25)
            state["param_groups"][0]["momentum"] = 0.0
        optimizer.load_state_dict(fetched)
        plain.load_state_dict(wanted)
    for each, trained in ((optimizer, model), (plain, expected)):
        each.param_groups[0]["momentum"] = 0.9
        partly_train(trained, each)
    assert_same(model, expected)


def test_load_state_dict_only_rank_0_stores() -> None:
    model = small_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.05)
    train(model, plain, 3)
    saved = plain.state_dict()
    cluster = FakeCluster(2)

    def work(worker):
        mine = small_model()
        optimizer = adopt(worker, mine, torch.optim.Adam(mine.parameters(), lr=1.0))
        optimizer.load_state_dict(saved)
        assert not optimizer._fetched.has_copy
        train(mine, optimizer, 1)
        return optimizer.state_dict()["state"][0]["step"].item()

    assert on_all_ranks(cluster, work) == [4.0, 4.0]
    assert {rank for rank, _, _ in cluster.stored} == {0}


def test_load_state_dict_parameter_without_state_starts_anew() -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.Adam(model.parameters()))
    train(model, optimizer, 2)
    empty = torch.optim.Adam(small_model().parameters()).state_dict()
    optimizer.load_state_dict(empty)
    assert optimizer.state_dict()["state"] == {}
    assert cluster.block("model").counts == [0, 0, 0, 0]


def test_state_dict_hooks_run_as_in_torch() -> None:
    model = small_model()
    optimizer = adopt(
        FakeCluster().worker(), model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    train(model, optimizer, 1)
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "note": 1})
    seen = optimizer.state_dict()
    assert seen["note"] == 1
    assert len(seen["state"]) == 4


def test_state_dict_of_a_wrong_kind_before_adoption_defines_nothing() -> None:
    model = small_model()
    cluster = FakeCluster()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    del optimizer.state[model[0].weight]["exp_avg"]
    with pytest.raises(ValueError, match="exp_avg"):
        adopt(cluster.worker(), model, optimizer)
    assert cluster.blocks == []


# --- `optimizer.state` itself --------------------------------------------------------------------


def set_anew(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state = defaultdict(dict)


def clear(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state.clear()


def fill_in_place(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    for entry in optimizer.state.values():
        entry["exp_avg"].zero_()


def fill_one(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    if model[0].weight in optimizer.state:
        optimizer.state[model[0].weight]["exp_avg"][0] = 1.0


def remove_one(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state.pop(model[0].weight, None)


def empty_one(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state[model[0].weight] = {}


def replace_a_tensor(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    entry = optimizer.state[model[0].weight]
    entry["exp_avg"] = torch.zeros_like(entry["exp_avg"])


def scale_data(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state[model[0].weight]["exp_avg"].data.mul_(0.5)


def write_as_array(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.state[model[0].weight]["exp_avg"].numpy()[...] = float("nan")


CHANGES = [
    set_anew,
    clear,
    fill_in_place,
    fill_one,
    remove_one,
    empty_one,
    replace_a_tensor,
    scale_data,
    write_as_array,
]


@pytest.mark.parametrize("change", CHANGES)
def test_state_that_was_changed_is_refused_once_and_stays_on_the_servers(change) -> None:
    model, expected = small_model(), small_model()
    plain = torch.optim.Adam(expected.parameters(), lr=0.05)
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.Adam(model.parameters(), lr=0.05))
    for then in (optimizer.step, optimizer.state_dict):
        train(model, optimizer, 2)
        change(optimizer, model)
        with pytest.raises(RuntimeError, match=r"optimizer\.state was changed.*Applied: no"):
            then()
    train(model, optimizer, 2)
    for _ in range(3):
        train(expected, plain, 2)
    assert_same(model, expected)


def test_state_reads_as_torch_has_it_and_is_fetched_anew_after_a_step() -> None:
    model, expected = small_model(), small_model()
    plain = torch.optim.Adam(expected.parameters(), lr=0.05)
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.Adam(model.parameters(), lr=0.05))
    assert optimizer.state[model[0].weight] == {}
    for _ in range(2):
        train(model, optimizer, 1)
        train(expected, plain, 1)
        for param, other in zip(model.parameters(), expected.parameters(), strict=True):
            entry = optimizer.state[param]
            torch.testing.assert_close(entry, plain.state[other])
            optimizer.state[param] = dict(entry)  # as trainers do that move states to a device


def test_state_of_nan_and_of_loaded_lists_is_as_it_was_and_what_is_nested_is_watched() -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, adam(model))
    param = model[0].weight
    loaded = {"exp_avg": torch.full((2,), float("nan")), "parts": [{"a": torch.zeros(())}, "x"]}
    optimizer._fetched.show({param: loaded})
    train(model, optimizer, 1)
    optimizer._fetched.show({param: loaded})
    optimizer.state[param]["parts"][0]["a"].data.fill_(1.0)
    with pytest.raises(RuntimeError, match="was changed"):
        optimizer.step()
    assert loaded["parts"][0]["a"] == 0.0


@pytest.mark.parametrize("changes", [False, True])
def test_state_that_a_closure_looks_at_is_fetched_anew_after_the_step(changes: bool) -> None:
    model, expected = small_model(), small_model()
    optimizer, plain = adopt(FakeCluster().worker(), model, adam(model)), adam(expected)
    train(model, optimizer, 1)
    train(expected, plain, 1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        loss.backward()
        if changes:
            fill_in_place(optimizer, model)
        else:
            assert len(optimizer.state) == 4
        return loss

    if changes:
        with pytest.raises(RuntimeError, match=r"optimizer\.state was changed.*Applied: no"):
            optimizer.step(closure)
        optimizer.step()
    else:
        optimizer.step(closure)
    plain.zero_grad()
    loss_of(expected, 1).backward()
    plain.step()
    assert_same(model, expected)
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[param], plain.state[other])


def test_state_that_was_changed_leaves_the_scale_of_a_scaler_as_it_was() -> None:
    model, expected = small_model(), small_model()
    optimizer, plain = adopt(FakeCluster().worker(), model, adam(model)), adam(expected)
    train(model, optimizer, 1)
    train(expected, plain, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    fill_in_place(optimizer, model)
    with pytest.raises(RuntimeError, match="was changed"):
        scaler.step(optimizer)
    scaler.step(optimizer)
    plain.zero_grad()
    loss_of(expected, 1).backward()
    plain.step()
    for param, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[param], plain.state[other])


# --- what is refused, and what is taken ----------------------------------------------------------


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
    assert not optimizer._fetched.has_copy
    train(model, optimizer, 2)
    train(expected, plain, 2)
    assert_same(model, expected)


def test_load_state_dict_with_a_momentum_that_the_servers_have_not_is_refused() -> None:
    model, other, cluster = small_model(), small_model(), FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    saved = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9).state_dict()
    with pytest.raises(ValueError):
        optimizer.load_state_dict(saved)
    assert (cluster.stored, optimizer._fetched.has_copy) == ([], False)


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

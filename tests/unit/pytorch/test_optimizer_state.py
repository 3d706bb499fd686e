"""state_dict and load_state_dict go through the servers, in torch's layout, both ways."""

from __future__ import annotations

import io

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
    assert len(optimizer.state) == 0


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


@pytest.mark.parametrize("direction", ["to torch", "from torch", "before adoption"])
@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_state_dict_moves_between_torch_and_servers(kind, options, direction) -> None:
    first, expected = small_model(), small_model()
    served = kind(first.parameters(), lr=0.05, **options)
    if direction == "to torch":
        adopt(FakeCluster().worker(), first, served)
    partly_train(first, served)
    stream = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": served.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream)

    second = small_model(seed=9)
    second.load_state_dict(saved["model"])
    continued = kind(second.parameters(), lr=0.7, **options)
    if direction == "before adoption":
        continued.load_state_dict(saved["optimizer"])
        adopt(FakeCluster().worker(), second, continued)
    elif direction == "from torch":
        adopt(FakeCluster().worker(), second, continued)
        continued.load_state_dict(saved["optimizer"])
    else:
        continued.load_state_dict(saved["optimizer"])
    train(second, continued)

    plain = kind(expected.parameters(), lr=0.05, **options)
    partly_train(expected, plain)
    train(expected, plain)
    assert_same(second, expected)
    assert continued.param_groups[0]["lr"] == 0.05


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
        assert len(optimizer.state) == 0
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

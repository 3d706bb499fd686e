"""`torch.distributed.checkpoint` reads and writes an adopted optimizer's state, without a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.unit.pytorch.fake_tables import TableCluster
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model, train
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import paramserve as ps
from paramserve.pytorch.embedding import Embedding
from paramserve.pytorch.optimizer import adopt

KINDS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.Adam, {}),
    (torch.optim.NAdam, {}),
]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


FORMS = {"by name": None, "whole": WHOLE, "flat": FLAT}
CASES = [
    (kind, settings, form)
    for kind, settings in KINDS
    for form in FORMS
    if (settings or kind is not torch.optim.SGD or form != "whole")  # torch takes no empty state
]


def assert_equal_state(given: Any, wanted: Any) -> None:
    if isinstance(wanted, dict):
        assert given.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_equal_state(given[key], value)
    elif isinstance(wanted, list):
        for mine, theirs in zip(given, wanted, strict=True):
            assert_equal_state(mine, theirs)
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-6)
    else:
        assert given == wanted


@pytest.mark.parametrize(("kind", "settings", "form"), CASES)
def test_checkpoint_state_set_on_a_fresh_optimizer_goes_on_as_torch(kind, settings, form) -> None:
    model, expected = small_model(), small_model()
    plain = kind(expected.parameters(), lr=0.05, **settings)
    train(expected, plain, 2)
    saved = get_optimizer_state_dict(expected, plain, options=FORMS[form])
    model.load_state_dict(expected.state_dict())
    cluster = FakeCluster()
    optimizer = adopt(cluster.worker(), model, kind(model.parameters(), lr=0.7, **settings))
    set_optimizer_state_dict(model, optimizer, saved, options=FORMS[form])
    assert cluster.steps() == []
    train(model, optimizer, 2)
    train(expected, plain, 2)
    assert_same(model, expected)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage")
@pytest.mark.parametrize(("kind", "settings"), KINDS)
def test_checkpoint_of_a_fresh_optimizer_is_loaded_in_place_and_goes_on(
    kind, settings, tmp_path
) -> None:
    """The recipe of torch: a state dict of the right form is made first, and loaded into."""
    first = small_model()
    optimizer = adopt(FakeCluster().worker(), first, kind(first.parameters(), lr=0.05, **settings))
    train(first, optimizer, 2)
    optimizer.zero_grad()
    saved = {"model": first.state_dict(), "optim": get_optimizer_state_dict(first, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)

    cluster = FakeCluster()
    second = small_model(seed=5)
    continued = adopt(cluster.worker(), second, kind(second.parameters(), lr=0.05, **settings))
    form = {"model": second.state_dict(), "optim": get_optimizer_state_dict(second, continued)}
    dcp.load(form, checkpoint_id=tmp_path, no_dist=True)
    assert_equal_state(form["optim"], saved["optim"])
    set_optimizer_state_dict(second, continued, form["optim"])
    assert cluster.steps() == []
    assert_equal_state(continued.state_dict(), optimizer.state_dict())


def test_checkpoint_on_one_of_two_ranks_leaves_the_others_alone() -> None:
    cluster = FakeCluster(2)

    def work(worker):
        model = small_model()
        optimizer = adopt(worker, model, torch.optim.Adam(model.parameters(), lr=0.05))
        train(model, optimizer, 2)
        optimizer.zero_grad()
        if worker.rank == 0:
            state = get_optimizer_state_dict(model, optimizer)["state"]
            assert {entry["step"].item() for entry in state.values()} == {2.0}
        train(model, optimizer, 1)
        return optimizer.state_dict()["state"][0]["step"].item()

    assert on_all_ranks(cluster, work) == [3.0, 3.0]


def test_checkpoint_counts_no_own_step_and_exchanges_nothing() -> None:
    cluster = FakeCluster(policy=ps.LocalSteps(every=2))
    model = small_model()
    optimizer = adopt(cluster.worker(), model, torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, 1)
    optimizer.zero_grad()
    for _ in range(3):
        get_optimizer_state_dict(model, optimizer)
    assert cluster.steps() == []
    train(model, optimizer, 1)
    assert len(cluster.steps()) == 1


class WithTable(nn.Module):
    def __init__(self, worker: Any) -> None:
        super().__init__()
        self.words = Embedding(worker.client.table("words", 3))
        self.body = nn.Linear(3, 2)
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(ids)))


def test_checkpoint_of_several_groups_beside_a_table_has_each_parameters_own_state() -> None:
    worker = TableCluster().worker()
    model = WithTable(worker)
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.2}]
    optimizer = adopt(worker, model, torch.optim.Adam(groups, lr=0.05))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([1, 2])).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    saved = get_optimizer_state_dict(model, optimizer)
    assert [group["params"] for group in saved["param_groups"]] == [
        ["body.weight", "body.bias"],
        ["head.weight", "head.bias"],
    ]
    for name, param in [*model.named_parameters()][1:]:
        assert saved["state"][name]["exp_avg"].shape == param.shape, name
    before = optimizer.state_dict()
    optimizer.param_groups[1]["lr"] = 7.0
    set_optimizer_state_dict(model, optimizer, saved)
    assert_equal_state(optimizer.state_dict(), before)


def test_step_with_a_rate_of_zero_is_a_step_all_the_same() -> None:
    model, cluster = small_model(), FakeCluster()
    optimizer = adopt(cluster.worker(), model, torch.optim.Adam(model.parameters(), lr=0.0))
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1

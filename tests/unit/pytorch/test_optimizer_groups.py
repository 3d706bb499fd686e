"""Edits of `param_groups` after adoption do what they do in torch, or the next step is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import assert_same, small_model, train
from torch import nn

import paramserve as ps
from paramserve.pytorch.optimizer import adopt

Groups = list[dict[str, Any]]
POLICIES = [
    ps.Sync(),
    ps.LocalSteps(every=1, outer=ps.SGD(lr=1.0)),
]  # the servers take the steps over


def remove(groups: Groups, model: nn.Module) -> None:
    del groups[0]["params"][1]


def filtered(groups: Groups, model: nn.Module) -> None:
    groups[1]["params"] = [param for param in groups[1]["params"] if param.ndim > 1]


def reverse(groups: Groups, model: nn.Module) -> None:
    groups.reverse()
    groups[0]["params"].reverse()


def pop(groups: Groups, model: nn.Module) -> None:
    groups.pop(0)


def clear(groups: Groups, model: nn.Module) -> None:
    groups.clear()


def move_all(groups: Groups, model: nn.Module) -> None:
    groups[1]["params"] += groups[0]["params"]
    groups[0]["params"] = []


FOLLOWED = [remove, filtered, reverse, pop, clear, move_all]


def two_groups(model: nn.Module) -> Groups:
    return [
        {"params": [*model[0].parameters()], "lr": 0.0},
        {"params": [*model[3].parameters()], "lr": 0.1},
    ]


@pytest.mark.parametrize("edit", FOLLOWED)
def test_edit_of_groups_is_followed_as_in_torch(edit: Callable[[Groups, nn.Module], None]) -> None:
    for kind, policy in product((torch.optim.SGD, torch.optim.Adam), POLICIES):
        model, expected = small_model(), small_model()
        own, worker = kind(two_groups(model), lr=1.0), FakeCluster(policy=policy).worker()
        optimizer = adopt(worker, model, own)
        plain = kind(two_groups(expected), lr=1.0)
        for each, stepped in ((model, optimizer), (expected, plain)):
            train(each, stepped, 1)
            stepped.param_groups[0]["lr"] = 0.05
            train(each, stepped, 1)
            edit(stepped.param_groups, each)
            for group in stepped.param_groups:
                group["lr"] /= 2
            train(each, stepped, 2)
        assert_same(model, expected)


def test_state_dict_after_edits_has_the_parameters_that_are_left() -> None:
    model = small_model()
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.Adam(two_groups(model), lr=1.0))
    train(model, optimizer, 1)
    optimizer.param_groups.reverse()
    del optimizer.param_groups[1]["params"][0]
    saved = optimizer.state_dict()
    assert [group["params"] for group in saved["param_groups"]] == [[0, 1], [2]]
    shapes = [tuple(saved["state"][i]["exp_avg"].shape) for i in range(3)]
    assert shapes == [(3, 8), (3,), (2,)]
    optimizer.load_state_dict(saved)
    train(model, optimizer, 1)
    assert optimizer.state_dict()["state"][2]["step"] == 2


def append(groups: Groups, model: nn.Module) -> None:
    groups[0]["params"].append(nn.Parameter(torch.ones(2)))


def replace(groups: Groups, model: nn.Module) -> None:
    groups[1]["params"][1] = nn.Parameter(torch.ones(3))


def new_group(groups: Groups, model: nn.Module) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.ones(2))]})


def move_one(groups: Groups, model: nn.Module) -> None:
    groups[0]["params"].append(groups[1]["params"].pop())


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (append, "number 2 was put into group 0.*add_param_group"),
        (replace, "number 1 was put into group 1.*add_param_group"),
        (new_group, "number 0 was put into group 2.*add_param_group"),
        (move_one, r"3\.weight, 3\.bias were defined as one group.*\[0, 1\]"),
    ],
)
def test_edit_of_groups_that_the_servers_cannot_follow_is_refused_at_the_step(
    edit: Callable[[Groups, nn.Module], None], text
) -> None:
    for policy in POLICIES:
        cluster, model = FakeCluster(policy=policy), small_model()
        optimizer = adopt(cluster.worker(), model, torch.optim.SGD(two_groups(model), lr=1.0))
        edit(optimizer.param_groups, model)
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(ValueError, match=text):
            train(model, optimizer, 1)
        assert cluster.steps() == [], policy
        assert all(map(torch.equal, model.parameters(), before)), policy

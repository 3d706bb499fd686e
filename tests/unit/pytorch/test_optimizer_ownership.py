"""Each parameter is stepped by one optimizer, once, however it is viewed."""

from __future__ import annotations

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster
from tests.unit.pytorch.test_optimizer_step import assert_same, loss_of, small_model, train
from torch import nn

import paramserve as ps
from paramserve.pytorch.optimizer import adopt


class Views(nn.Module):
    """Parameters that are parts of one tensor [4, 4]."""

    def __init__(self, *parts: object) -> None:
        super().__init__()
        whole = torch.arange(16.0).reshape(4, 4)
        self.parts = nn.ParameterList([nn.Parameter(whole[part]) for part in parts])


@pytest.mark.parametrize(
    "parts",
    [
        (slice(None), slice(None)),
        (slice(0, 3), slice(2, 4)),
        ((slice(None), 1), slice(1, 2)),
        ((slice(None), slice(0, 2)), (slice(None), slice(1, 3))),
    ],
    ids=["whole", "rows", "a column and a row", "columns"],
)
def test_adopt_parameters_with_common_memory_are_refused(parts) -> None:
    """In one group, in two, and in one that is added later."""
    text = r"'parts\.0' and 'parts\.1' share memory"
    model = Views(*parts)
    first, second = model.parts
    for groups in ([first, second], [{"params": [first]}, {"params": [second], "lr": 0.2}]):
        cluster = FakeCluster()
        with pytest.raises(ValueError, match=text):
            adopt(cluster.worker(), model, torch.optim.SGD(groups, lr=0.1))
        assert cluster.blocks == []
    optimizer = adopt(FakeCluster().worker(), model, torch.optim.SGD([first], lr=0.1))
    with pytest.raises(ValueError, match=text):
        optimizer.add_param_group({"params": [second]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "parts",
    [(0, 1), ((slice(None), 0), (slice(None), 1)), (slice(0, 4, 2), slice(1, 4, 2))],
    ids=["rows", "columns", "every second row"],
)
def test_adopt_parts_of_one_tensor_without_common_elements_train_as_in_torch(parts) -> None:
    models = Views(*parts), Views(*parts)
    adopted = adopt(
        FakeCluster().worker(), models[0], torch.optim.SGD(models[0].parameters(), lr=0.1)
    )
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1)
    for model, optimizer in zip(models, (adopted, plain), strict=True):
        for _ in range(2):
            optimizer.zero_grad()
            sum(part.square().sum() for part in model.parts).backward()
            optimizer.step()
    assert_same(*models)


@pytest.mark.parametrize("policy", [ps.Sync(), ps.LocalSteps(every=2)], ids=["served", "local"])
def test_step_of_an_optimizer_whose_parameter_another_one_took_is_refused(policy) -> None:
    cluster = FakeCluster(policy=policy)
    worker, model = cluster.worker(), small_model()
    first = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1), name="first")
    second = adopt(worker, model, torch.optim.SGD([model[3].weight], lr=0.1), name="second")
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"'first' steps no more.*'3\.weight'.*'second'"):
        first.step()
    assert cluster.steps("first") == []
    second.step()


def test_step_of_an_optimizer_whose_parameter_was_added_to_another_one_is_refused() -> None:
    worker, model = FakeCluster().worker(), small_model()
    first = adopt(worker, model, torch.optim.SGD(model[0].parameters(), lr=0.1), name="first")
    second = adopt(worker, model, torch.optim.SGD(model[3].parameters(), lr=0.1), name="second")
    train(model, first, 1)
    second.add_param_group({"params": [model[0].bias]})
    with pytest.raises(RuntimeError, match=r"'0\.bias'"):
        train(model, first, 1)
    train(model, second, 1)


@pytest.mark.parametrize("policy", [ps.Sync(), ps.LocalSteps(every=2)], ids=["served", "local"])
def test_group_added_to_an_optimizer_that_steps_no_more_is_refused_and_the_other_goes_on(
    policy,
) -> None:
    cluster = FakeCluster(policy=policy)
    worker, model = cluster.worker(), small_model()
    first = adopt(worker, model, torch.optim.SGD([model[0].weight], lr=0.1), name="first")
    second = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1), name="second")
    blocks = len(cluster.blocks)
    with pytest.raises(RuntimeError, match=r"'first' steps no more.*'0\.weight'.*'second'"):
        first.add_param_group({"params": [model[0].bias]})
    assert len(first.param_groups) == 1
    assert len(cluster.blocks) == blocks
    train(model, second, 1)

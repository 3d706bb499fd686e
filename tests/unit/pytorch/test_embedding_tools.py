"""What torch users run over a model's parameters works with gradients of rows collected."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.unit.pytorch.fake_tables import TableCluster
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from paramserve.pytorch.embedding import Embedding
from paramserve.pytorch.optimizer import adopt


class Net(nn.Module):
    def __init__(self, worker) -> None:
        super().__init__()
        self.words = Embedding(worker.client.table("words", 2))
        self.head = nn.Linear(2, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids))


def collected() -> tuple[Net, torch.optim.Optimizer]:
    worker = TableCluster().worker()
    model = Net(worker)
    optimizer = adopt(worker, model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.tensor([1, 2, 3, 4, 5])).sum().backward()
    return model, optimizer


@pytest.mark.parametrize("average", [None, get_ema_multi_avg_fn(0.5)], ids=["mean", "ema"])
def test_averaged_model_between_backward_and_step_averages_the_dense_layers(average) -> None:
    model, optimizer = collected()
    averaged = AveragedModel(model, multi_avg_fn=average)
    for _ in range(2):
        averaged.update_parameters(model)
        optimizer.step()
        model(torch.tensor([6, 7])).sum().backward()
    averaged.update_parameters(model)
    assert averaged.module.head.weight.shape == (1, 2)
    assert not torch.equal(averaged.module.head.weight, model.head.weight)


def test_parameters_as_a_vector_have_no_rows_in_them() -> None:
    model, optimizer = collected()
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert vector.shape == (3,)
    assert sum(param.numel() for param in model.parameters()) == 3
    nn.utils.vector_to_parameters(vector, model.parameters())
    optimizer.step()
    assert model.words.table.pushes[-1].keys == [1, 2, 3, 4, 5]


def test_tools_that_go_over_gradients_find_those_of_rows() -> None:
    model, optimizer = collected()
    expected = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.testing.assert_close(norm, expected)
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert model.words.rows.grad.shape == (5, 2)
    assert model.words.rows.grad.abs().max() <= 0.01
    model.double()
    assert model.words.rows.grad.dtype == torch.float64
    model.float()
    assert copy.deepcopy(model).words.rows is model.words.rows
    optimizer.step()
    assert model.words.rows.grad is None
    assert model.words.rows.shape == (0, 2)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_of_torch_func_are_refused_with_what_to_do(transform) -> None:
    model, _ = collected()
    pulls = len(model.words.table.pulls)
    head = dict(model.head.named_parameters(prefix="head"))

    def loss(params: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, params, (ids,)).sum()

    through = {
        "grad": lambda: torch.func.grad(loss)(head, torch.tensor([1, 2])),
        "vmap": lambda: torch.func.vmap(model)(torch.tensor([[1, 2], [3, 4]])),
    }
    with pytest.raises(TypeError, match=r"inside torch\.func"):
        through[transform]()
    assert len(model.words.table.pulls) == pulls
    assert loss(head, torch.tensor([1, 2])).requires_grad

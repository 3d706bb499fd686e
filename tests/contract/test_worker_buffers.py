"""Buffers that change their shape, or are no more, while a model is trained."""

from __future__ import annotations

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from torch import nn
from torch.nn.utils import remove_spectral_norm, spectral_norm
from torch.optim import SGD

import paramserve as ps
from paramserve.errors import ShapeMismatch


def step(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 2)).square().mean().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:buffer '0.weight_v'")
def test_buffer_that_is_removed_keeps_its_last_value_in_the_result(
    make_cluster: MakeCluster,
) -> None:
    kept = {}

    def train(worker: ps.Worker) -> None:
        model = nn.Sequential(spectral_norm(nn.Linear(2, 3)), nn.BatchNorm1d(3))
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        for _ in range(10):  # after which buffers are assigned
            step(optimizer, model)
        kept.update({name: value.clone() for name, value in model.named_buffers()})
        remove_spectral_norm(model[0])
        model[1].running_mean.fill_(7.0)

    cluster = make_cluster(workers=1)
    with pytest.warns(UserWarning, match="buffer '0.weight_u' is no longer in the model"):
        Ranks(cluster, train).start(0).end()
    found = cluster.client().pull()
    assert (found["0.weight_u"] == kept["0.weight_u"].numpy()).all()
    assert (found["1.running_mean"] == 7.0).all(), "the others are those of the end"


def test_buffer_that_grows_is_refused_with_what_to_do(make_cluster: MakeCluster) -> None:
    class Growing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 1)
            self.register_buffer("seen", torch.zeros(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, torch.ones(1)])
            return super().forward(x)

    def train(worker: ps.Worker) -> None:
        model = Growing()
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        for _ in range(10):
            step(optimizer, model)

    with pytest.raises(ShapeMismatch, match=r"'seen' has shape \[10\].* \[0\].*buffers=\"local\""):
        Ranks(make_cluster(workers=1), train).start(0).end()

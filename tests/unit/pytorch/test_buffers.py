"""Buffers and untrained parameters: part of the result, assigned by rank 0."""

from __future__ import annotations

import pytest
import torch
from tests.unit.pytorch.fakes import FakeCluster, on_all_ranks
from torch import nn

from paramserve.pytorch.buffers import BUFFERS_EVERY
from paramserve.pytorch.optimizer import adopt


class Net(nn.Module):
    """A layer that no optimizer has, a BatchNorm, and buffers of several dtypes."""

    def __init__(self, fill: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Linear(3, 2).bfloat16()
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 1)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("causal", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(fill + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.backbone(x.bfloat16()).float()))

    def trained(self) -> list[nn.Parameter]:
        return [*self.norm.parameters(), *self.head.parameters()]


def train(worker, net: Net, steps: int, **options) -> Net:
    optimizer = adopt(worker, net, torch.optim.SGD(net.trained(), lr=0.01), **options)
    generator = torch.Generator().manual_seed(worker.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 3, generator=generator)).square().mean().backward()
        optimizer.step()
    return net


def loadable(cluster: FakeCluster) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(value) for name, value in cluster.result().items()}


def test_buffers_result_is_the_whole_state_dict_of_rank_0() -> None:
    cluster = FakeCluster(2)
    nets = on_all_ranks(cluster, lambda worker: train(worker, Net(worker.rank), 13))
    loaded = Net(7.0)
    loaded.load_state_dict(loadable(cluster))
    for name, value in nets[0].state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    assert loaded.norm.num_batches_tracked == 13
    assert torch.equal(nets[1].backbone.weight, nets[0].backbone.weight)
    assert not torch.equal(nets[1].norm.running_mean, nets[0].norm.running_mean)


def test_buffers_are_assigned_every_few_steps_and_the_rest_at_the_end() -> None:
    cluster = FakeCluster()
    worker = cluster.worker()
    train(worker, Net(), 2 * BUFFERS_EVERY + 1)
    tracked = next(b for b in cluster.blocks if b.dtype.name == "int64")
    assert tracked.values_of("norm.num_batches_tracked") == 2 * BUFFERS_EVERY
    names = {piece.name for _, block, _ in cluster.stored for piece in block.pieces}
    assert names == {
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "mask", "causal")
    }
    worker.optimizers.finish()
    assert tracked.values_of("norm.num_batches_tracked") == 2 * BUFFERS_EVERY + 1
    assert cluster.stored[-3][1].pieces[0].name == "backbone.weight"


def test_buffers_local_are_never_sent_but_untrained_parameters_are() -> None:
    cluster = FakeCluster(2)
    nets = on_all_ranks(
        cluster, lambda worker: train(worker, Net(worker.rank), BUFFERS_EVERY, buffers="local")
    )
    assert cluster.result().keys() == dict(nets[0].named_parameters()).keys()
    assert torch.equal(nets[1].backbone.weight, nets[0].backbone.weight)


def test_buffers_replaced_by_the_model_are_found() -> None:
    cluster = FakeCluster()
    worker = cluster.worker()
    net = Net()
    adopt(worker, net, torch.optim.SGD(net.trained(), lr=0.01))
    net.norm.running_mean = torch.tensor([3.0, 4.0])
    worker.optimizers.finish()
    assert cluster.result()["norm.running_mean"].tolist() == [3.0, 4.0]


@pytest.mark.parametrize("where", ["buffer", "parameter"])
def test_buffers_of_a_dtype_that_cannot_be_held_are_refused(where) -> None:
    net = Net()
    if where == "buffer":
        net.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    else:
        net.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    cluster = FakeCluster()
    with pytest.raises(TypeError, match="'phase'"):
        adopt(cluster.worker(), net, torch.optim.SGD(net.trained(), lr=0.01))
    assert cluster.blocks == []
    del net.phase
    adopt(cluster.worker(), net, torch.optim.SGD(net.trained(), lr=0.01))

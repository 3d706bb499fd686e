"""Ranks that bring different models to one optimizer: refused at once, with the names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Ranks
from torch import nn
from torch.optim import SGD

import paramserve as ps
from paramserve.errors import DefineMismatch


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model


class Counts(nn.Linear):
    def __init__(self, name: str) -> None:
        super().__init__(2, 1)
        self.register_buffer(name, torch.zeros(1))


def adopting(build: Callable[[int], nn.Module]) -> Callable[[ps.Worker], None]:
    def train(worker: ps.Worker) -> None:
        model = build(worker.rank)
        worker.optimizer(model, SGD(model.parameters(), lr=0.1))

    return train


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize("wrapped", [0, 1])
def test_model_that_one_rank_wraps_is_refused_with_the_names(
    make_cluster: MakeCluster, wrapped: int, ranks: tuple[int, int]
) -> None:
    def build(rank: int) -> nn.Module:
        return Wrapped(nn.Linear(2, 1)) if rank == wrapped else nn.Linear(2, 1)

    with pytest.raises(DefineMismatch, match=r"block 0 of group 'model': .*'weight'.* came") as e:
        Ranks(make_cluster(workers=2), adopting(build)).start(*ranks).end()
    assert "'module.weight'" in str(e.value)
    assert "on all or on none" in str(e.value)


def test_buffer_of_another_name_on_one_rank_is_refused(make_cluster: MakeCluster) -> None:
    train = adopting(lambda rank: Counts(f"calls{rank}"))
    with pytest.raises(DefineMismatch, match=r"\['calls0'\], now \['calls1'\] came"):
        Ranks(make_cluster(workers=2), train).start(0, 1).end()


def test_parameters_that_the_function_defines_in_the_group_first_are_no_mismatch(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> None:
        worker.client.define("temperature", [1.0], group="model")
        model = nn.Linear(2, 1)
        worker.optimizer(model, SGD(model.parameters(), lr=0.1))

    Ranks(make_cluster(workers=2), train).start(0, 1).end()

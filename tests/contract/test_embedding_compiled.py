"""`torch.compile` over a model with keyed modules leaves the client to Python."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from tests.contract.role_cluster import clusters
from torch import Tensor, nn

from paramserve.client.row_slots import Lent
from paramserve.client.table import Table
from paramserve.compiling import load_table
from paramserve.core.table.options import Constant
from paramserve.pytorch import Embedding, EmbeddingBag
from paramserve.rules import Add
from paramserve.rules.rows import row_layout

DIM = 3
load_table(Add(), row_layout(Add(), DIM, "float32"))


@pytest.fixture
def table() -> Iterator[Table]:
    with clusters() as make:
        client = make(workers=1).client(0)
        yield client.table("users", dim=DIM, rule=Add(), init=Constant(0.5))


class Model(nn.Module):
    def __init__(self, table: Table) -> None:
        super().__init__()
        self.one, self.bag = Embedding(table), EmbeddingBag(table, mode="sum", padding_idx=3)

    def forward(self, ids: Tensor) -> Tensor:
        both = torch.cat([self.one(ids), self.bag(ids[:, None])], 1)
        return torch.tanh(both).sum()


@pytest.mark.filterwarnings("ignore:table .* has collected gradients")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo's own, at any break
def test_compiled_model_pulls_and_collects_as_it_does_without(table: Table) -> None:
    """Dynamo would warn of calls that it cannot trace, and make slots of memory that are none."""
    model, steps, graphs = Model(table), [], []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    for forward in (model, torch.compile(model, backend=backend)):
        for ids in (torch.arange(5), torch.tensor([3, 3])):
            loss = forward(ids)
            loss.backward()
            steps.append((loss.item(), *model.one.rows.collected()))
            model.one.rows.drop()
    assert any("tanh" in graph.code for graph in graphs), "the dense part is compiled"
    for plain, compiled in zip(steps[:2], steps[2:], strict=True):
        assert plain[0] == compiled[0]
        assert torch.equal(plain[1], compiled[1])
        assert torch.equal(plain[2], compiled[2])
    torch._dynamo.reset()
    gc.collect()  # here, so that an error of an object that ends is this test's


def test_lent_memory_that_was_not_made_ends_without_an_error() -> None:
    """An interrupt, or a tool that makes objects by itself, can leave one without its slot."""
    Lent((1, 1)).__del__()

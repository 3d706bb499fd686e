"""What a table's rows collect between two steps, and what torch's tools do to it."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from tests.unit.pytorch.fake_tables import FakeTable, TableCluster
from torch import Tensor, nn

from paramserve.pytorch import Embedding
from paramserve.pytorch.embedding import Rows

pytestmark = pytest.mark.filterwarnings("ignore:table .* has collected gradients")
"""The tests take them from the rows themselves."""

DIM = 3
SIZE = 8
FIRST = torch.tensor([5, 1, 5])
SECOND = torch.tensor([[1, 7]])


@pytest.fixture
def table() -> FakeTable:
    made = TableCluster().worker().client.table("users", DIM)
    made.put(np.arange(SIZE), np.ones((SIZE, DIM), np.float32))
    return made


@pytest.fixture
def ours(table: FakeTable) -> Embedding:
    return Embedding(table)


@pytest.fixture
def theirs() -> nn.Embedding:
    return nn.Embedding(SIZE, DIM, _weight=torch.ones(SIZE, DIM))


def dense(rows: Rows) -> Tensor:
    gradient = torch.zeros(SIZE, DIM)
    keys, values = rows.collected()
    gradient[keys] = values
    return gradient


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 2, out.numel()).reshape(out.shape)).sum()


def test_rows_accumulate_over_backwards(ours: Embedding, theirs: nn.Embedding) -> None:
    for module in (ours, theirs):
        for ids in (FIRST, SECOND, FIRST):
            loss_of(module(ids)).backward()
    torch.testing.assert_close(dense(ours.rows), theirs.weight.grad)
    assert dense(ours.rows).any(), "it stays until it is sent"
    ours.rows.drop()
    assert not dense(ours.rows).any()


def test_rows_several_forwards_before_one_backward(ours: Embedding, theirs: nn.Embedding) -> None:
    for module in (ours, theirs):
        outs = [module(FIRST), module(SECOND), module(FIRST)]
        sum(loss_of(out) * (i + 1) for i, out in enumerate(outs)).backward()
    torch.testing.assert_close(dense(ours.rows), theirs.weight.grad)


def test_rows_second_backward_through_one_graph_counts_once_more(
    ours: Embedding, theirs: nn.Embedding
) -> None:
    for module in (ours, theirs):
        loss = loss_of(module(FIRST) ** 2)
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(dense(ours.rows), theirs.weight.grad)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("whose", ["module", "optimizer"])
def test_rows_zero_grad_drops_what_was_collected(
    ours: Embedding, set_to_none: bool, whose: str
) -> None:
    zeroing = nn.Sequential(ours) if whose == "module" else torch.optim.SGD(ours.parameters(), 1.0)
    loss_of(ours(FIRST)).backward()
    zeroing.zero_grad(set_to_none=set_to_none)
    assert len(ours.rows.collected().keys) == 0, (
        "not a gradient of zeros: its keys would be stepped"
    )
    loss_of(ours(FIRST)).backward()
    zeroing.zero_grad(set_to_none=set_to_none)
    loss_of(ours(SECOND)).backward()
    assert ours.rows.collected().keys.tolist() == [1, 7]


def test_rows_gradient_that_is_zero_by_itself_is_kept(ours: Embedding) -> None:
    (ours(FIRST) * 0).sum().backward()
    assert ours.rows.collected().keys.tolist() == [5, 1]


def test_rows_gradient_of_another_shape_is_refused(ours: Embedding) -> None:
    loss_of(ours(FIRST)).backward()
    ours.rows.data, ours.rows.grad = torch.zeros(1, DIM), None
    ours.rows.grad = torch.zeros(1, DIM)
    with pytest.raises(RuntimeError, match=r"\[1, 3\] now, and 2 rows"):
        ours.rows.collected()


def test_rows_autograd_grad_collects_nothing(ours: Embedding) -> None:
    out = ours(FIRST)
    scale = torch.ones((), requires_grad=True)
    torch.autograd.grad((out * scale).sum(), scale)
    assert len(ours.rows.collected().keys) == 0


def test_rows_of_checkpointed_layers_are_torchs(ours: Embedding, theirs: nn.Embedding) -> None:
    for module in (ours, theirs):
        out = torch.utils.checkpoint.checkpoint(module, FIRST, use_reentrant=False)
        loss_of(out**2).backward()
    torch.testing.assert_close(dense(ours.rows), theirs.weight.grad)


def test_rows_apart_leave_out_what_is_not_finite(ours: Embedding) -> None:
    ours.rows.apart = True
    for bad in (float("nan"), float("-inf")):
        (
            ours(FIRST) * torch.tensor([[bad] + [1.0] * (DIM - 1), [1.0] * DIM, [1.0] * DIM])
        ).sum().backward()
    assert ours.rows.take_bad().tolist() == [5]
    assert ours.rows.take_bad().tolist() == []
    keys, values = ours.rows.collected()
    assert (keys.tolist(), values.tolist()) == ([1], [[2.0] * DIM])


def test_rows_are_gone_with_their_table() -> None:
    table = FakeTable(None, "users", DIM)
    rows = weakref.ref(Embedding(table).rows)
    assert Embedding(table).rows is not None
    del table
    assert rows() is None

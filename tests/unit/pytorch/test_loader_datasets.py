"""Which datasets a worker's loaders keep alive: none that the training function has released."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from paramserve.client.loop_progress import LoopProgress
from paramserve.pytorch.loader import load, sampler
from paramserve.worker import Worker


class Chunk(Dataset[Any]):
    def __init__(self) -> None:
        self.rows = torch.arange(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class NoReference:
    """A dataset that no weak reference can point to."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows = torch.arange(8)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def tensors() -> TensorDataset:
    return TensorDataset(torch.arange(8), torch.ones(8))


@pytest.fixture
def worker() -> Worker:
    client: Any = SimpleNamespace(
        rank=0,
        connection=SimpleNamespace(
            workers=1, incarnation=1, control=None, restarts=False, before=0
        ),
        steps=SimpleNamespace(missed_by={}, retiring=False, clocks={}, loop=LoopProgress()),
    )
    return Worker(client, seed=3)


def static(worker: Worker, dataset: Any) -> None:
    assert len(list(load(worker, dataset, batch_size=4, batches_per_step=1))) == 2


def leased(worker: Worker, dataset: Any) -> None:
    load(worker, dataset, batch_size=4, shards="dynamic")


def own(worker: Worker, dataset: Any) -> None:
    assert len(list(sampler(worker, dataset))) == 8


def left(worker: Worker, use: Any, make: Any, count: int) -> int:
    """Datasets in memory of those that were used one after another."""
    seen = []
    for _ in range(count):
        dataset = make()
        rows = dataset.tensors[0] if isinstance(dataset, TensorDataset) else dataset.rows
        seen.append(weakref.ref(rows))
        use(worker, dataset)
        del dataset, rows
    gc.collect()
    return sum(each() is not None for each in seen)


@pytest.mark.parametrize("make", [tensors, Chunk])
@pytest.mark.parametrize("use", [static, leased, own])
def test_datasets_that_were_let_go_of_are_freed(worker: Worker, use: Any, make: Any) -> None:
    assert left(worker, use, make, 5) == 0
    assert not worker.passes


def test_datasets_without_weak_references_only_the_last_few_are_kept(worker: Worker) -> None:
    few = left(worker, static, NoReference, 12)
    assert few == left(worker, static, NoReference, 12) <= 4


@pytest.mark.parametrize("make", [tensors, Chunk, NoReference])
def test_datasets_in_use_go_on_with_the_next_epoch(worker: Worker, make: Any) -> None:
    dataset = make()
    first, second = list(sampler(worker, dataset)), list(sampler(worker, dataset))
    assert first != second
    again = make()
    assert list(sampler(worker, again)) == first

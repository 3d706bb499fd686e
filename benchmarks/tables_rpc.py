"""Rival: `nn.Embedding` over torch.distributed.rpc. Dense ids: it has no index and needs none.

What makes it fast, and is done here: what `rival_rpc.py` says, huge pages for the weights, one row
number and not one key for each id, both servers asked at once, and Adagrad on the rows of a sparse
gradient in blocks that stay in the cache (32,768 rows: 15 ms). `torch.optim.Adagrad` with a sparse
gradient sorts and copies (27 to 37 ms) and is timed beside it, as `push_optim`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import rpc

from benchmarks.rival_rpc import cluster
from benchmarks.tables_load import Array, Batches, Keys, TableLoad, drive
from benchmarks.workloads import medians

BLOCK_ROWS = 1024
"""Rows in a block of Adagrad: 15 ms for 32,768 rows at dim 64; with 256 rows 24 ms, whole 29 ms."""


class TableServer:
    """Every n-th row of an embedding, its state, and both ways to update them."""

    def __init__(self, load: TableLoad) -> None:
        rows = -(-load.rows // load.servers)
        self._load = load
        self.embedding = torch.nn.Embedding(rows, load.dim, sparse=True)
        self._optimizer = torch.optim.Adagrad(self.embedding.parameters(), lr=load.lr, eps=load.eps)
        self._state = self._optimizer.state[self.embedding.weight]["sum"]
        self._marks = torch.zeros(rows, dtype=torch.int64)
        """Last place of each row in the batch."""
        self.lock = threading.Lock()
        """RPC runs calls of one client in several threads."""

    def push(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        rows, gradients = self._distinct(rows, gradients)
        weight = self.embedding.weight.detach()
        blocks = zip(rows.split(BLOCK_ROWS), gradients.split(BLOCK_ROWS), strict=True)
        for some, gradient in blocks:
            state = self._state.index_select(0, some).addcmul_(gradient, gradient)
            self._state.index_copy_(0, some, state)
            values = weight.index_select(0, some)
            values.addcdiv_(gradient, state.sqrt_().add_(self._load.eps), value=-self._load.lr)
            weight.index_copy_(0, some, values)

    def push_optim(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        weight = self.embedding.weight
        with torch.sparse.check_sparse_tensor_invariants(False):  # said aloud, or torch warns
            weight.grad = torch.sparse_coo_tensor(rows[None], gradients, weight.shape)
            self._optimizer.step()

    def _distinct(
        self, rows: torch.Tensor, gradients: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row once, with the sum of its gradients."""
        places = torch.arange(rows.numel())
        self._marks[rows] = places
        once = self._marks.index_select(0, rows) == places
        if bool(once.all()):
            return rows, gradients
        kept, again = torch.nonzero(once).ravel(), torch.nonzero(~once).ravel()
        distinct, summed = rows[kept], gradients.index_select(0, kept)
        self._marks[distinct] = torch.arange(kept.numel())
        summed.index_add_(0, self._marks[rows[again]], gradients.index_select(0, again))
        return distinct, summed


_table: TableServer
"""Table of this process: what the functions below, called from the client, work on."""


class _Hold:
    """Makes a server's rows in its own process."""

    def __init__(self, load: TableLoad) -> None:
        self._load = load

    def __call__(self) -> Any:
        global _table
        _table = TableServer(self._load)


@torch.no_grad()
def take(rows: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _table.embedding(rows)
    return found


@torch.no_grad()
def apply(rows: torch.Tensor, gradients: torch.Tensor) -> None:
    with _table.lock:
        _table.push(rows, gradients)


def apply_optim(rows: torch.Tensor, gradients: torch.Tensor) -> None:
    with _table.lock:
        _table.push_optim(rows, gradients)


class Client:
    """Id i is row i // servers of server i % servers."""

    def __init__(self, load: TableLoad) -> None:
        self._load = load
        self._names = [f"server{number}" for number in range(load.servers)]

    def _parts(self, ids: Keys) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name of each server, positions of its ids, their rows."""
        every = torch.from_numpy(ids)
        owner, rows = every % len(self._names), every // len(self._names)
        places = [torch.nonzero(owner == number).ravel() for number in range(len(self._names))]
        return [(name, at, rows[at]) for name, at in zip(self._names, places, strict=True)]

    def pull(self, ids: Keys) -> Array:
        parts = self._parts(ids)
        asked = [rpc.rpc_async(name, take, (rows,)) for name, _, rows in parts]
        values = torch.empty(ids.size, self._load.dim)
        for (_, places, _), found in zip(parts, asked, strict=True):
            values.index_copy_(0, places, found.wait())
        return values.numpy()

    def push(self, ids: Keys, gradients: Array) -> object:
        return self.send(ids, gradients)()

    def send(
        self, ids: Keys, gradients: Array, how: Callable[..., None] = apply
    ) -> Callable[[], object]:
        whole = torch.from_numpy(gradients)
        sent = [
            rpc.rpc_async(name, how, (rows, whole.index_select(0, places)))
            for name, places, rows in self._parts(ids)
        ]
        return partial(torch.futures.wait_all, sent)


def table(load: TableLoad, scratch: Path) -> dict[str, float]:
    """The rows come from `nn.Embedding` itself, so there is nothing to fill."""
    found: dict[str, float] = cluster(scratch, load.servers, 1, _Hold(load), _client, load)[0]
    return found


def _client(rank: int, load: TableLoad) -> dict[str, float]:
    client = Client(load)
    figures = drive(load, client, dense=True)
    batches = Batches(load, dense=True, seed=1)
    gradients = batches.gradients(load.batch)
    ids: list[Keys] = [np.zeros(0, np.int64)]

    def optim() -> None:
        client.send(ids[0], gradients, apply_optim)()

    def draw() -> None:
        ids[0] = batches.uniform()

    count = max(1, load.calls // 3)
    return figures | medians({"push_optim": optim}, count, before={"push_optim": draw}, block=count)

"""Tables in this process, for `paramserve.pytorch`: a dict of rows, stepped by plain SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from tests.unit.pytorch.fakes import FakeClient, FakeCluster, FakeTicket

from paramserve.client.rows import TablePush
from paramserve.client.string_keys import hashed
from paramserve.compiling import load_routing
from paramserve.errors import NonFinite

LR = 0.1


def first_value(key: int, dim: int) -> np.ndarray:
    """What an unknown key reads as: from the key only."""
    return np.random.default_rng(key & 0xFFFF_FFFF).standard_normal(dim).astype(np.float32)


@dataclass
class Pushed:
    """What one step did to one table."""

    keys: list[int]
    tick: bool
    weight: float
    together: bool
    """With dense blocks, in the same message."""


class FakeTable:
    """Refuses what a real one would; hands out arrays that are the caller's to spoil."""

    wide = None

    def __init__(self, client: Any, name: str, dim: int, lr: float = LR) -> None:
        self.client, self.name, self.group, self.dim, self.lr = client, name, name, dim, lr
        self.wide: str | None = None
        self.values: dict[int, np.ndarray] = {}
        self.pulls: list[tuple[list[int], bool]] = []
        self.pushes: list[Pushed] = []

    def keys_of(self, strings: Any) -> np.ndarray:
        return hashed(strings, f"keys of table {self.name!r}")

    def pull(self, keys: np.ndarray, *, learns: bool = True, exact: bool = False) -> np.ndarray:
        assert keys.dtype == np.int64
        assert len(keys), "an empty pull is a message for nothing"
        self.pulls.append((keys.tolist(), learns))
        rows = []
        for key in keys.ravel().tolist():
            row = self.values.get(key)
            if row is None:
                row = first_value(key, self.dim)
            rows.append(row)
        return np.array(rows, np.float32).reshape(*keys.shape, self.dim)

    def put(self, keys: np.ndarray, values: np.ndarray) -> None:
        assert keys.dtype == np.int64
        assert values.shape == (len(keys), self.dim)
        assert values.dtype == np.float32
        for key, value in zip(keys.tolist(), values, strict=True):
            self.values[key] = value.copy()

    def keys(self) -> np.ndarray:
        return np.array(list(self.values), np.int64)

    def take(self, push: TablePush, pushed: Pushed) -> None:
        keys, gradients = np.array(push.keys), np.array(push.gradients)
        assert keys.dtype == np.int64
        assert gradients.dtype == np.float32
        assert gradients.shape == (len(keys), self.dim)
        if not np.isfinite(gradients).all():
            raise NonFinite(f"a row of {self.name}", fix="lower lr")
        self.pushes.append(pushed)
        total: dict[int, np.ndarray] = {}
        for key, gradient in zip(keys.tolist(), gradients, strict=True):
            total[key] = total.get(key, 0) + gradient
        for key, gradient in total.items():
            value = self.values.setdefault(key, first_value(key, self.dim))
            value -= np.float32(self.lr) * gradient


class TableClient(FakeClient):
    """A client with tables: the same object for the same name."""

    def __init__(self, cluster: FakeCluster, rank: int) -> None:
        super().__init__(cluster, rank)
        self.rank = rank
        self.tables: dict[str, FakeTable] = {}
        self.load_tables: dict[str, str] = {}

    def table(self, name: str, dim: int, *, rule: Any = None, lr: float = LR) -> FakeTable:
        load_routing()
        return self.tables.setdefault(name, FakeTable(self, name, dim, lr))

    def blocks(self) -> list[Any]:
        return self._cluster.blocks

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a client is not copied")

    def step(self, *args: Any, tables: Sequence[TablePush] = (), **options: Any) -> FakeTicket:
        tick, weight = options.get("tick", True), options.get("weight", 1.0)
        ticket = super().step(*args, **options)
        self._take(tables, tick, weight, together=True)
        return ticket

    def push_tables(
        self,
        pushes: Sequence[TablePush],
        *,
        tick: bool = True,
        leased: bool = False,
        weight: float = 1.0,
        skip: bool = False,
        numbered: Any,
    ) -> Any:
        assert not skip or all(push.keys is None for push in pushes)
        self._take(pushes, tick, weight, together=False)
        outcome = SimpleNamespace(values={}, version=0, staleness=0, skipped=False)
        ticket = SimpleNamespace(result=lambda timeout_s=None: outcome, release=lambda: None)
        numbered(ticket)
        return ticket

    def _take(
        self, pushes: Sequence[TablePush], tick: bool, weight: float, *, together: bool
    ) -> None:
        for push in pushes:
            if push.keys is None:
                none = np.empty(0, np.int64), np.empty((0, push.table.dim), np.float32)
                push = TablePush(push.table, *none)
            pushed = Pushed(np.array(push.keys).tolist(), tick, weight, together)
            push.table.take(push, pushed)


class TableCluster(FakeCluster):
    """A cluster whose workers have tables."""

    def worker(self, rank: int = 0, seed: int = 7) -> Any:
        worker = super().worker(rank, seed)
        worker.client = TableClient(self, rank)
        return worker

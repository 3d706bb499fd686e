"""What one core does within one process, beside `torch.index_select` with known positions.

Rows are taken by the kernels that a server runs for a request, on keys that are there. Messages,
routing and double keys are not part of it: `tables_ours.py` has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paramserve as ps
from benchmarks.tables_load import Array, Ballast, Batches, Keys, TableLoad, keys_of
from benchmarks.workloads import medians
from paramserve.core.table import compiled
from paramserve.core.table.index import Index
from paramserve.core.table.memory import zeros
from paramserve.core.table.options import TableOptions, Uniform
from paramserve.core.table.store import Purpose, RowStore
from paramserve.rules.base import PushInfo, Rule
from paramserve.rules.rows import apply_rows, initial_state, prepare_rows, row_layout

INDEX_BYTES = 96
"""Bytes of all arrays that an index has one after the other, for each key that it has in the
end."""
PUSH = PushInfo(worker=0, clock=0, version=0, staleness=0, weight=1.0, scale=1.0)


class Rows:
    """A server's store and its rule, called as a server calls them for one request."""

    def __init__(self, load: TableLoad, rule: Rule) -> None:
        self._layout = row_layout(rule, load.dim, "float32")
        compiled.prepare()
        prepare_rows(rule)
        state = initial_state(rule, self._layout)
        self.store = RowStore(self._layout, state, TableOptions(Uniform(-0.5, 0.5)), stream=1)
        self._rule = rule
        self._places = np.arange(load.batch, dtype=np.int32)

    @property
    def row_bytes(self) -> int:
        """Values and state."""
        return 4 * (self._layout.dim + self._layout.state_words)

    def fill(self, load: TableLoad) -> None:
        for begin, end in load.parts():
            self.store.take(keys_of(np.arange(begin, end)), 0, Purpose.PUT)
        batches = Batches(load)
        for _ in range(load.settling_pulls):
            self.store.take(batches.uniform(), 0, Purpose.PUT)

    def pull(self, keys: Keys, out: Array) -> None:
        taken = self.store.take(keys, 0, Purpose.PUT)
        self.store.read(taken.rows, keys, out, self._places[: keys.size])

    def push(self, keys: Keys, gradients: Array) -> None:
        taken = self.store.take(keys, 0, Purpose.PUSH)
        view = self.store.view(taken.rows, keys)
        apply_rows(self._rule, view, gradients, self._rule.hyper(), PUSH)


def pull(load: TableLoad, scratch: Path) -> dict[str, float]:
    """`index_select` of the rows of a tensor, and our index and gather; both into their own array.

    They are called in turn. Both have huge pages where the kernel gives them (see `harness`).
    """
    rows = Rows(load, ps.Adagrad(lr=load.lr))
    rows.fill(load)
    weights = torch.full((load.rows, load.dim), 0.5)
    batches = Batches(load, dense=True)
    out = zeros(load.batch, load.dim // 2).view(np.float32)  # begins a page, as memory of a slot
    selected = torch.zeros(load.batch, load.dim)
    ids, keys = torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)

    def draw() -> None:
        nonlocal ids, keys
        drawn = batches.uniform()
        ids, keys = torch.from_numpy(drawn), keys_of(drawn)

    calls: dict[str, Callable[[], Any]] = {
        "index_select": lambda: torch.index_select(weights, 0, ids, out=selected),
        "gather": lambda: rows.pull(keys, out),
    }
    return medians(calls, load.calls, before=dict.fromkeys(calls, draw), block=1)


def push(load: TableLoad, scratch: Path) -> dict[str, float]:
    """Our push kernels, on keys that are each there once."""
    figures: dict[str, float] = {}
    batches = Batches(load)
    gradients = batches.gradients(load.batch)
    keys = np.zeros(0, np.int64)

    def draw() -> None:
        nonlocal keys
        keys = batches.distinct()

    for name, rule in (
        ("adagrad", ps.Adagrad(lr=load.lr)),
        ("row_adagrad", ps.RowAdagrad(lr=load.lr)),
    ):
        rows = Rows(load, rule)
        rows.fill(load)
        calls = {name: lambda rows=rows: rows.push(keys, gradients)}
        figures |= medians(calls, load.calls, before={name: draw}, block=min(10, load.calls))
        del rows, calls
    return figures


def index(load: TableLoad, scratch: Path) -> dict[str, float]:
    """Seconds for each key: looked up while there, looked for while absent, and entered, which
    includes the growing: every request moves some entries to a larger array."""
    compiled.prepare()
    table = Index()
    found = np.empty(load.batch, np.int64)
    ballast = Ballast(load.rows * INDEX_BYTES)
    ballast.give(ballast.left)
    seconds = {"insert": 0.0, "absent": 0.0}
    for begin in range(0, load.rows, load.batch):
        rows = np.arange(begin, min(begin + load.batch, load.rows))
        keys = keys_of(rows)
        began = time.perf_counter()
        table.move(keys.size)
        moved = time.perf_counter()
        table.find(keys, found[: keys.size])
        looked = time.perf_counter()
        table.insert(keys, rows)
        seconds["insert"] += time.perf_counter() - looked + moved - began
        seconds["absent"] += looked - moved
    figures = {name: total / load.rows for name, total in seconds.items()}
    batches = Batches(load)
    keys = np.zeros(0, np.int64)

    def draw() -> None:
        nonlocal keys
        table.move(load.batch)
        keys = batches.uniform()

    calls = {"lookup": lambda: table.find(keys, found)}
    one = medians(calls, load.calls, before={"lookup": draw}, block=min(10, load.calls))
    return figures | {"lookup": one["lookup"] / load.batch}


def growth(load: TableLoad, scratch: Path) -> dict[str, float]:
    """The longest request, and the most memory for each byte of values and state, while a store
    grows: by pulls and pushes of new keys in turn."""
    before = resident_bytes()
    ballast = Ballast(load.table_bytes * 3 // 2)
    rows = Rows(load, ps.Adagrad(lr=load.lr))
    gradients = np.ones((load.batch, load.dim), np.float32)
    out = np.zeros((load.batch, load.dim), np.float32)
    longest, most = 0.0, 0.0
    for number, begin in enumerate(range(0, load.rows, load.batch)):
        keys = keys_of(np.arange(begin, min(begin + load.batch, load.rows)))
        ballast.give(load.batch * rows.row_bytes * 3 // 2)
        began = time.perf_counter()
        if number % 2:
            rows.push(keys, gradients[: keys.size])
        else:
            rows.pull(keys, out)
        longest = max(longest, time.perf_counter() - began)
        if begin > load.rows // 8:
            most = max(most, rows.store.memory_bytes / (len(rows.store) * rows.row_bytes))
    held = (resident_bytes() - ballast.left - before) / (len(rows.store) * rows.row_bytes)
    return {"longest": longest, "memory_most": most, "resident": held}


def resident_bytes() -> int:
    """Resident bytes of this process, by /proc."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

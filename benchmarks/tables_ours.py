"""Ours: tables through `client.table`, one worker and servers on this host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import paramserve as ps
from benchmarks.processes import MB, arena_mb
from benchmarks.tables_load import (
    Array,
    Ballast,
    Batches,
    Keys,
    Processors,
    SizesLoad,
    TableLoad,
    check,
    drive,
    drive_pushes,
    keys_of,
)
from benchmarks.workloads import medians
from paramserve.rules import Rule

WARM_CALLS = 12
"""Calls to a table that grows before the one that is timed."""


class Target:
    """A table, where a push is done when its ticket says so."""

    def __init__(self, table: ps.Table) -> None:
        self._table = table

    def pull(self, keys: Keys) -> Array:
        return self._table.pull(keys)

    def push(self, keys: Keys, gradients: Array) -> object:
        return self.send(keys, gradients)()

    def send(self, keys: Keys, gradients: Array) -> Callable[[], object]:
        return self._table.push(keys, gradients).result


def table(load: TableLoad, scratch: Path) -> dict[str, float]:
    """Adagrad; rows are created with the initial values of their keys."""
    return _run(_adagrad, load)


def row_wise(load: TableLoad, scratch: Path) -> dict[str, float]:
    """Pushes to row-wise Adagrad."""
    return _run(_row_wise, load)


def growth(load: TableLoad, scratch: Path) -> dict[str, float]:
    """The longest pull or push of new keys while the table grows, by the clock and by processor
    time, and its memory at the end, for each byte of values and state."""
    return _run(_growth, load)


def arenas(load: TableLoad, scratch: Path) -> dict[str, float]:
    """Shared memory of a client whose batches vary in size, in that of its largest batch."""
    return _run(_arenas, load)


def sizes(load: SizesLoad, scratch: Path) -> dict[str, float]:
    """Median seconds of a pull of `batch` keys, by the rows that the table has then."""
    return _run(_sizes, load)


def _run(work: Callable[..., dict[str, float]], load: TableLoad) -> dict[str, float]:
    result = ps.run(
        work,
        args=(load,),
        servers=load.servers,
        consistency=ps.Async(),
        engine=ps.Local(threads_per_worker=1),
    )
    figures: dict[str, float] = result.returns[0]
    return figures


def _table(worker: ps.Worker, load: TableLoad, rule: Rule, name: str = "rows") -> ps.Table:
    return worker.client.table(name, dim=load.dim, rule=rule, init=ps.Uniform(-0.5, 0.5))


def _fill(table: ps.Table, load: TableLoad, begin: int = 0) -> None:
    for first, last in load.parts():
        if last > begin:
            keys = keys_of(np.arange(max(first, begin), last))
            table.put(keys, table.pull(keys))
    batches = Batches(load)
    for _ in range(load.settling_pulls):
        table.pull(batches.uniform())


def _adagrad(worker: ps.Worker, load: TableLoad) -> dict[str, float]:
    table = _table(worker, load, ps.Adagrad(lr=load.lr, eps=load.eps))
    _fill(table, load)
    figures = drive(load, Target(table))
    if len(table) != load.rows:
        raise AssertionError(f"the table has {len(table)} rows, not {load.rows}")
    return figures


def _row_wise(worker: ps.Worker, load: TableLoad) -> dict[str, float]:
    table = _table(worker, load, ps.RowAdagrad(lr=load.lr, eps=load.eps))
    _fill(table, load)
    check(load, Target(table), Batches(load), row_wise=True)
    return drive_pushes(load, Target(table))


def _growth(worker: ps.Worker, load: TableLoad) -> dict[str, float]:
    """Pushes of keys that no row has.

    Another table grows first: kernels are compiled then, and the servers' system has used up what
    it kept of pages that the host has taken back.
    """
    ballast = Ballast(load.table_bytes * 3 // 2)
    for name, rows in (("warm", WARM_CALLS * load.batch), ("rows", load.rows)):
        table = _table(worker, load, ps.Adagrad(lr=load.lr, eps=load.eps), name)
        figures = _grow(table, replace(load, rows=min(rows, load.rows)), ballast)
    return figures


def _grow(table: ps.Table, load: TableLoad, ballast: Ballast) -> dict[str, float]:
    gradients = np.ones((load.batch, load.dim), np.float32)
    processors = Processors()
    longest = most = 0.0
    for begin in range(0, load.rows, load.batch):
        keys = keys_of(np.arange(begin, min(begin + load.batch, load.rows)))
        ballast.give(load.table_bytes // load.rows * load.batch * 3 // 2)
        before, began = processors.seconds(), time.perf_counter()
        table.push(keys, gradients[: keys.size]).result()
        longest = max(longest, time.perf_counter() - began)
        most = max(most, float((processors.seconds() - before).max()))
    memory = table.memory_bytes() / (len(table) * load.table_bytes / load.rows)
    return {"longest": longest, "processor": most, "memory": memory}


def _arenas(worker: ps.Worker, load: TableLoad) -> dict[str, float]:
    """Each batch is pulled and pushed; sizes by the logarithm, the largest one among them."""
    table = _table(worker, load, ps.Adagrad(lr=load.lr, eps=load.eps))
    chance = np.random.default_rng(0)
    counts = np.exp(chance.uniform(np.log(load.batch // 64), np.log(load.batch), load.varied))
    counts[load.varied // 2] = load.batch
    most = 0.0
    for count in counts.astype(int):
        keys = keys_of(chance.integers(load.rows // 8, size=count))
        values = table.pull(keys)
        table.push(keys, values).result()
        most = max(most, arena_mb(os.getpid()))
    return {"most": most * MB / (load.batch * load.batch_row_bytes)}


def _sizes(worker: ps.Worker, load: SizesLoad) -> dict[str, float]:
    table = _table(worker, load, ps.Adagrad(lr=load.lr, eps=load.eps))
    figures: dict[str, float] = {}
    keys = np.zeros(0, np.int64)
    filled = 0
    for rows in load.sizes:
        now = replace(load, rows=rows)
        _fill(table, now, filled)
        filled = rows
        batches = Batches(now)

        def draw(batches: Batches = batches) -> None:
            nonlocal keys
            keys = batches.uniform()

        name = f"pull_{rows}"
        calls = {name: lambda: table.pull(keys)}
        figures |= medians(calls, load.calls, before={name: draw}, block=min(10, load.calls))
    return figures

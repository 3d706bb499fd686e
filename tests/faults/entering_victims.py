"""A training function that steps two tables and dense values in Sync. Imports no torch."""

from __future__ import annotations

import numpy as np

import paramserve as ps
from paramserve.client import BlockPush
from paramserve.client.rows import TablePush

SYNC = ps.Sync(reduce="sum")
ROW = np.ones((1, 2), np.float32)


def trains(worker: ps.Worker) -> tuple[int, int]:
    """Add ones until the driver says that it is enough. Returns its steps and the clocks that it
    missed."""
    client = worker.client
    names = ("words", "films")
    tables = [client.table(n, dim=2, rule=ps.Add(), init=ps.Zeros()) for n in names]
    client.define("enough", np.zeros(1), rule=ps.Add(), group="control", consistency=ps.Async())
    client.define("w", np.zeros(1), rule=ps.Add())
    block = next(b for b in client.connection.exchange.blocks.values() if b.group_name == "default")
    steps = 0
    while not client.pull("enough")[0]:
        slot = client.dense.gradient_slot(block)
        slot[:] = 1.0
        pushes = [TablePush(table, [1], ROW) for table in tables]
        ticket = client.dense.step("default", [BlockPush(block, slot)], pull=[block], tables=pushes)
        ticket.result()
        ticket.release()
        steps += 1
    for group in (*names, "default"):
        client.rest(group)
    return steps, client.steps.missed

"""A training function for runs whose number of workers changes. Imports no torch."""

from __future__ import annotations

import numpy as np

import paramserve as ps

RANKS = 4


def adds(worker: ps.Worker, deaf: bool = False) -> tuple[int, int]:
    """Add ones in this rank's own place, until the driver says that it is enough or that this
    worker is to end, unless it is deaf to that. Returns the incarnation and the clock."""
    client = worker.client
    one = np.zeros(RANKS)
    client.define("w", one, rule=ps.Add())
    client.define("enough", np.zeros(1), rule=ps.Add(), group="control")
    one[worker.rank] = 1.0
    while not client.pull("enough")[0]:
        if client.steps.retiring and not deaf:
            break
        client.push_pull({"w": one}, tick=True)
    return worker.incarnation, worker.clock

"""A place where the workers of an example meet, so that all begin at the same time."""

from __future__ import annotations

import time

import numpy as np

import paramserve as ps

POLL_S = 0.01


def meet(worker: ps.Worker) -> None:
    """Return when every worker of the run has called this; a parameter counts them."""
    client = worker.client
    client.define("arrived", np.zeros(1), rule=ps.Add(), group="arrived")
    arrived = client.push_pull({"arrived": np.ones(1)}, tick=True)["arrived"]
    while arrived < worker.workers:
        time.sleep(POLL_S)
        arrived = client.pull("arrived")

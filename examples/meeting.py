"""A place where the workers of an example meet, so that all begin, or end, at the same time."""

from __future__ import annotations

import time

import numpy as np

import paramserve as ps

POLL_S = 0.01


def meet(worker: ps.Worker, place: str = "arrived") -> None:
    """Return when every worker of the run has called this; a parameter counts them.

    Args:
        place: another one for each time that they meet.
    """
    client = worker.client
    client.define(place, np.zeros(1), rule=ps.Add(), group=place)
    arrived = client.push_pull({place: np.ones(1)}, tick=True)[place]
    while arrived < worker.workers:
        time.sleep(POLL_S)
        arrived = client.pull(place)

"""What a client could not send: deadlines while a window is full, steps that were put together."""

from __future__ import annotations

import time

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster

from paramserve.client.exchange import WINDOW
from paramserve.consistency.built_in import Sync
from paramserve.errors import NonFinite, PullTimeout
from paramserve.rules import Add


def test_pull_behind_a_full_window_keeps_its_own_deadline(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=2, policy=Sync())
    client = cluster.client(0)
    client.define("w", np.zeros(4), rule=Add())
    for _ in range(WINDOW):
        client.tick()  # the other worker never comes
    began = time.monotonic()
    with pytest.raises(PullTimeout):
        client.pull("w", timeout_s=0.1)
    assert time.monotonic() - began < 5.0


def test_staged_push_that_overflows_is_told_to_its_ticket(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1, policy=Sync())
    client = cluster.client(0)
    client.define("w", np.zeros(4), rule=Add())
    largest = np.full(4, np.finfo(np.float64).max)
    first, second = client.push("w", largest), client.push("w", largest)
    with np.errstate(over="ignore"), pytest.raises(NonFinite):
        client.tick()
    client.push("w", np.ones(4))
    client.tick().result()
    for ticket in (first, second):
        with pytest.raises(NonFinite):
            ticket.result()
    assert (client.pull("w") == 1.0).all()

"""Workers that join a run which steps several synchronous groups at once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.faults import entering_victims as victims
from tests.faults.leftovers import nothing_left
from tests.faults.test_elastic import WAIT_S, until

import paramserve as ps

GROUPS = {"words", "films", "default"}


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    with nothing_left():
        yield


def taking_part(client: ps.Client) -> set[frozenset[int]]:
    """The ranks that the groups wait for, as the shards say."""
    groups = [
        group
        for beat in client.connection.reports()
        for group in beat.groups
        if group.name in GROUPS
    ]
    return {frozenset(rank for rank, _ in group.clocks) for group in groups}


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_that_join_step_tables_and_dense_values_with_the_others(servers: int) -> None:
    job = ps.start(
        victims.trains, workers=1, servers=servers, consistency=victims.SYNC, timeout_s=WAIT_S
    )
    try:
        with job.handle().connect() as client:
            until(lambda: taking_part(client) == {frozenset({0})})
            job.scale(3)
            until(lambda: taking_part(client) == {frozenset({0, 1, 2})})
            client.assign("enough", np.ones(1))
            returns = job.wait().returns
    finally:
        job.stop()
    assert [returns[rank][1] for rank in range(3)] == [0, 0, 0]
    assert all(returns[rank][0] > 0 for rank in range(3))

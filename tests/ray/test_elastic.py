"""Another number of workers on a Ray cluster: where they go, what is given back, and no room."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from tests.faults import elastic_victims as victims

import paramserve as ps
from paramserve.errors import CannotPlace
from paramserve.launch.entries import Key

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]

WAIT_S = 60.0


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def free(resource: str) -> float:
    import ray

    found: float = ray.available_resources().get(resource, 0.0)
    return found


def take_part(client: ps.Client, *ranks: int) -> None:
    """Wait until each of these ranks has added something from now on."""
    before = client.pull("w")
    until(lambda: all(client.pull("w")[rank] > before[rank] for rank in ranks))


@contextlib.contextmanager
def running(engine: ps.OnRay, **options: Any) -> Iterator[tuple[ps.Job, ps.Client]]:
    """A run that is under way; afterwards all is given back."""
    until(lambda: free("gadget") == 8)
    job = ps.start(victims.adds, engine=engine, timeout_s=2 * WAIT_S, **options)
    try:
        with job.handle().connect() as client:
            until(lambda: len(client.blocks()) == 2)
            yield job, client
    finally:
        job.stop()
    until(lambda: free("gadget") == 8)


def test_places_of_added_workers_are_taken_and_given_back() -> None:
    gadget = ps.Needs(num_cpus=0, resources={"gadget": 1})
    has_gadgets = ps.Needs(label_selector={"zone": "in(a,b)"})
    engine = ps.OnRay(servers="spread", server=has_gadgets, worker=gadget)
    with running(engine, servers=2, consistency=ps.Async()) as (job, client):
        until(lambda: free("gadget") == 7)
        job.scale(3)
        take_part(client, 0, 1, 2)
        found: Any = {key: each for each, key in job._supervisor._processes.items()}
        nodes = [found[Key("server", number)].node for number in (0, 1)]
        for rank in range(3):
            assert found[Key("worker", rank)].node == nodes[rank % 2]
        until(lambda: free("gadget") == 5)
        job.scale(1)
        until(lambda: free("gadget") == 7)
        job.scale(2)
        take_part(client, 0, 1)
        until(lambda: free("gadget") == 6)
        client.assign("enough", np.ones(1))
        assert [each[0] for _, each in sorted(job.wait().returns.items())] == [1, 2, 1]


def test_scale_past_the_room_that_there_is_goes_on_with_as_many() -> None:
    widget = ps.Needs(num_cpus=0, resources={"widget": 1})
    with running(ps.OnRay(worker=widget, place_s=3)) as (job, client):
        with pytest.raises(CannotPlace, match=r"1 widget .*for worker 1 within 3 s"):
            job.scale(2)
        assert job.status().workers == {0: "running"}
        take_part(client, 0)
        client.assign("enough", np.ones(1))
        assert job.wait().returns.keys() == {0}

"""How many Python-level calls a server spends on a request: the count is the same on every machine.

Counted are calls of Python functions and of built-in ones, as a profiler counts them, from the
moment when a request's bytes can be read until its answer is sent: without clocks, and without what
plans whether the loop waits next. After a sleep each call costs a server 1 to 2 us on an ordinary
cloud machine.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.suites import each_case

from paramserve.compiling import load_table
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.rules import SGD
from paramserve.rules.rows import row_layout

MakeCluster = Callable[..., RoleCluster]
STEPS = 10
BEGINS = "StreamConnection._readable"
PLANS = "BaseEventLoop.call_soon"
CLOCKS = ("time", "monotonic")
NAMES_OF_8_KB = {"w": 2048}


class ServerCalls:
    """A profile function of the servers' thread."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._inside: list[str] = []
        """Python functions that have not returned, from `BEGINS` on."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            name = frame.f_code.co_qualname
            if self._inside or name == BEGINS:
                self._inside.append(name)
                self._count(name)
        elif event == "return":
            del self._inside[-1:]
        elif event == "c_call" and self._inside:
            self._count(argument.__qualname__)

    def _count(self, name: str) -> None:
        if PLANS not in self._inside and name.rpartition(".")[2] not in CLOCKS:
            self.calls[name] += 1


def calls_of(cluster: RoleCluster, step: Callable[[], object]) -> float:
    """What the servers spend on a step, when it has been made before."""
    for _ in range(5):
        step()
    counter = ServerCalls()
    cluster.on_server(lambda: sys.setprofile(counter))
    try:
        for _ in range(STEPS):
            step()
    finally:
        cluster.on_server(lambda: sys.setprofile(None))
    counted = sum(counter.calls.values()) / STEPS
    told = "\n".join(f"{count / STEPS:6.1f} {name}" for name, count in counter.calls.most_common())
    print(f"{counted} calls a step\n{told}")
    return counted


def names(count: int) -> dict[str, int]:
    return {f"p{number}": 100 for number in range(count)}


@pytest.fixture
def make(make_cluster: MakeCluster) -> Iterator[MakeCluster]:
    before = sys.getprofile()
    yield make_cluster
    assert sys.getprofile() is before


@each_case(
    ("kind", "policy", "sizes", "left_out", "most"),
    [
        ("unix", Async(), NAMES_OF_8_KB, (), 50),
        ("unix", Sync(), NAMES_OF_8_KB, (), 48),
        ("tcp", Async(), NAMES_OF_8_KB, (), 68),
        ("unix", Async(), names(20), (), 50),
        ("unix", Async(), names(1000), (), 50),
        ("unix", Async(), names(1000), ("p500",), 62),
        ("unix", Sync(), names(1000), ("p500",), 60),
    ],
    ids=["async", "sync", "tcp", "20 names", "1000 names", "999 names", "999 names in sync"],
)
def test_step_of_one_worker_costs_a_server_few_calls(
    make: MakeCluster,
    kind: str,
    policy: Policy,
    sizes: dict[str, int],
    left_out: tuple[str, ...],
    most: int,
) -> None:
    cluster = make(kind, workers=1, policy=policy)
    client = cluster.client(0)
    client.define({name: np.zeros(size, np.float32) for name, size in sizes.items()}, rule=SGD(0.1))

    def step() -> None:
        gradients = {name: client.gradient(name) for name in sizes if name not in left_out}
        for each in gradients.values():
            each[...] = 1.0
        client.push_pull(gradients, tick=True)

    assert calls_of(cluster, step) <= most


def test_synchronous_clock_of_two_workers_costs_a_server_few_calls(make: MakeCluster) -> None:
    cluster = make("unix", workers=2, policy=Sync())
    clients = [cluster.client(rank) for rank in range(2)]
    values = {"w": np.zeros(2048, np.float32)}
    in_threads(*(lambda each=each: each.define(values, rule=SGD(0.1)) for each in clients))

    def push_pull(client: Any) -> None:
        gradient = client.gradient("w")
        gradient[...] = 1.0
        client.push_pull({"w": gradient}, tick=True)

    def step() -> None:
        in_threads(*(lambda each=each: push_pull(each) for each in clients))

    assert calls_of(cluster, step) <= 224


def test_rows_of_a_table_cost_a_server_few_calls(make: MakeCluster) -> None:
    load_table(SGD(0.1), row_layout(SGD(0.1), 4, "float32"))
    cluster = make("unix")
    table = cluster.client().table("rows", dim=8, rule=SGD(0.1))
    keys, gradients = np.arange(100), np.ones((100, 8), np.float32)
    table.push(keys, gradients)
    assert calls_of(cluster, lambda: table.pull(keys)) <= 72
    assert calls_of(cluster, lambda: table.push(keys, gradients).result()) <= 78

"""How many calls a small step makes: bounds that hold on every machine."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster
from tests.contract.step_calls import STEPS, Calls, counted, table
from tests.suites import each_case

import paramserve
from paramserve.client import Client
from paramserve.compiling import load_table
from paramserve.consistency.built_in import Sync
from paramserve.rules import SGD, Adagrad
from paramserve.rules.rows import row_layout
from paramserve.worker import Worker

Step = Callable[[], object]
SMALL = 2048
"""Floats of a tensor of 8 KB."""
SEPARATE = 20
"""Tensors that are defined one by one: each is a block of its own."""
TRIES = 5
"""Of a count that something else may fall into."""
SIZES = pytest.mark.parametrize(("count", "size"), [(1, SMALL), (20, 100), (200, 100)])


class Tensors:
    """A client with some tensors.

    Args:
        together: whether they are defined in one call.
    """

    def __init__(self, client: Client, count: int, size: int, *, together: bool = True) -> None:
        self.client = client
        self.names = [f"p{number}" for number in range(count)]
        self.gradients: dict[str, np.ndarray[Any, Any]] = {}
        self._ones = {name: np.ones(size, np.float32) for name in self.names}
        if together:
            client.define(self._ones, rule=SGD(0.1))
            return
        for name, value in self._ones.items():
            client.define(name, value, rule=SGD(0.1))

    def lend(self) -> None:
        """Gradients written to shared memory."""
        self.gradients = {name: self.client.gradient(name) for name in self.names}
        for gradient in self.gradients.values():
            gradient[...] = 1.0

    def own(self) -> None:
        """Gradients in the program's own memory."""
        self.gradients = self._ones

    def push_pull(self) -> None:
        self.client.push_pull(self.gradients, copy=False)

    def step(self) -> None:
        self.client.push_pull(self.gradients, tick=True, copy=False)

    def push(self) -> None:
        self.client.push(self.gradients).result()

    def pull(self) -> None:
        self.client.pull(self.names, copy=False)

    def copy(self) -> None:
        self.client.pull(self.names)


class Rows:
    """A client with a table, and a batch of its rows."""

    def __init__(self, client: Client) -> None:
        self._table = client.table("users", dim=8, rule=Adagrad(lr=0.1))
        self._keys = np.arange(100)
        self._gradients = np.ones((100, 8), np.float32)

    def pull(self) -> None:
        self._table.pull(self._keys)

    def push(self) -> None:
        self._table.push(self._keys, self._gradients).result()


def check(cluster: RoleCluster, step: Step, most: int, before: Step | None = None) -> None:
    calls = counted(cluster, step, before).client
    assert calls.total() <= most, table(calls)


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> RoleCluster:
    return make_cluster("unix")


@SIZES
def test_client_calls_of_a_step_do_not_depend_on_its_names(
    cluster: RoleCluster, count: int, size: int
) -> None:
    tensors = Tensors(cluster.client(), count, size)
    check(cluster, tensors.push_pull, 60, tensors.lend)
    check(cluster, tensors.push_pull, 65, tensors.own)
    check(cluster, tensors.push, 68)
    check(cluster, tensors.pull, 52)


def test_client_calls_of_a_step_of_several_blocks(cluster: RoleCluster) -> None:
    tensors = Tensors(cluster.client(), SEPARATE, 100, together=False)
    check(cluster, tensors.push_pull, 60 + 3 * SEPARATE, tensors.lend)
    check(cluster, tensors.push_pull, 60 + 7 * SEPARATE, tensors.own)
    check(cluster, tensors.pull, 60 + 2 * SEPARATE)
    check(cluster, tensors.copy, 60 + 4 * SEPARATE)


@SIZES
def test_client_calls_of_a_pull_are_one_more_for_each_copy(
    cluster: RoleCluster, count: int, size: int
) -> None:
    tensors = Tensors(cluster.client(), count, size)
    check(cluster, tensors.copy, 61 + count)


@each_case(("kind", "pull", "push"), [("unix", 68, 73), ("tcp", 132, 96)])
def test_client_calls_of_rows(make_cluster: MakeCluster, kind: str, pull: int, push: int) -> None:
    """A table without codecs spends no call on them."""
    load_table(Adagrad(lr=0.1), row_layout(Adagrad(lr=0.1), 8, "float32"))
    cluster = make_cluster(kind)
    rows = Rows(cluster.client())
    check(cluster, rows.pull, pull)
    check(cluster, rows.push, push)


@each_case(("kind", "sends"), [("unix", "send"), ("tcp", "sendmsg")])
def test_a_step_is_one_message_each_way(make_cluster: MakeCluster, kind: str, sends: str) -> None:
    """One call of the system for each: a header goes with its payload, there and back."""
    cluster = make_cluster(kind)
    tensors = Tensors(cluster.client(), 1, SMALL)
    client = counted(cluster, tensors.push_pull, tensors.lend).client
    assert moved(client) == {sends: 1, "recv_into": 1}
    on_server = Calls()
    cluster.on_server(lambda: sys.setprofile(on_server))
    tries = []
    for _ in range(TRIES):
        for _ in range(STEPS):
            tensors.push_pull()
        cluster.on_server(lambda: tries.append(moved(on_server.take())))
    cluster.on_server(lambda: sys.setprofile(None))
    # A heartbeat of the server may fall into some.
    assert {sends: STEPS, "recv_into": STEPS} in tries


def moved(calls: Counter[str]) -> dict[str, int]:
    """Calls that move bytes through a socket."""
    names = {f"socket.{name}": name for name in ("send", "sendmsg", "recv_into")}
    return {names[name]: count for name, count in calls.items() if name in names}


def test_own_calls_of_an_optimizers_step(make_cluster: MakeCluster) -> None:
    """Torch has some 40 more around each step."""
    model = torch.nn.Linear(20, 10)
    cluster = make_cluster("unix", workers=1)
    worker = Worker(cluster.client(0), 3)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def backward() -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)

    own = str(Path(paramserve.__file__).parent)
    calls = counted(cluster, optimizer.step, backward, own).client
    assert calls.total() <= 153, table(calls)


def test_client_calls_of_a_synchronous_step(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1, policy=Sync())
    tensors = Tensors(cluster.client(0), 20, 100)
    check(cluster, tensors.step, 92, tensors.lend)


@each_case(("kind", "client", "server"), [("unix", 56, 45), ("tcp", 60, 45)])
def test_functions_of_a_small_synchronous_step(
    make_cluster: MakeCluster, kind: str, client: int, server: int
) -> None:
    """Of Python, without builtins, and on the server without those of its event loop."""
    cluster = make_cluster(kind, workers=1, policy=Sync())
    tensors = Tensors(cluster.client(0), 1, SMALL)
    calls = counted(cluster, tensors.step, tensors.lend).client
    assert functions(calls) <= client, table(calls)
    on_server = Calls(str(Path(paramserve.__file__).parent))
    cluster.on_server(lambda: sys.setprofile(on_server))
    tries = []
    for _ in range(TRIES):
        for _ in range(STEPS):
            tensors.lend()
            tensors.step()
        cluster.on_server(lambda: tries.append(on_server.take()))
    cluster.on_server(lambda: sys.setprofile(None))
    fewest = min(tries, key=functions)  # a heartbeat of the server may fall into some
    assert functions(fewest) <= server * STEPS, table(fewest)


def functions(calls: Counter[str]) -> int:
    return sum(count for name, count in calls.items() if ".py:" in name or name[0] == "<")

"""How often a step goes over its gradient and its values: bounds that hold on every machine.

A step of 100 MB takes as long as its memory is read and written. Only kernels, and copies by numpy
in the places named below, do either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.suites import each_case

from paramserve.client import Client
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.rules import SGD
from paramserve.rules import kernels as found
from paramserve.worker import Worker

SIZE = 40_000
"""Elements: more than the client copies with a call of numpy each."""
RULE, LOOK, COPY_AND_LOOK = "rule", "largest", "copy_largest"
WATCHED = (
    *("largest", "copy_largest", "add_into", "add_scaled_into", "squared_norm", "compensate"),
    *("scaled_into", "round_into", "multiply"),
)


class Passes:
    """Counts the elements that each kernel goes over, in passes over `SIZE`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._elements = Counter[str]()
        for name in WATCHED:
            monkeypatch.setattr(found, name, self._watching(name, getattr(found, name)))
        of_rule = found.block_kernel

        def block_kernel(*arguments: Any) -> Callable[..., int]:
            kernel = of_rule(*arguments)

            def counted(value: Any, gradient: Any, state: Any, out: Any, *rest: Any) -> int:
                start, stop = rest[:2]
                self._elements[RULE if out.size else f"{RULE}, no out"] += stop - start
                return int(kernel(value, gradient, state, out, *rest))

            return counted

        monkeypatch.setattr(found, "block_kernel", block_kernel)

    def _watching(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(first: Any, *rest: Any) -> Any:
            self._elements[name] += first.size
            return kernel(first, *rest)

        return counted

    def of(self, step: Callable[[], object]) -> dict[str, float]:
        """What a step goes over."""
        self._elements.clear()
        step()
        return {name: count / SIZE for name, count in self._elements.items()}


class Worked:
    """A worker's client that has done one step, so that all kernels are loaded."""

    def __init__(self, client: Client, dtype: str = "float32") -> None:
        self.client = client
        self._own = np.ones(SIZE, dtype)
        client.define("w", np.zeros(SIZE, dtype), rule=SGD(0.1))
        self.lent()

    def lent(self) -> None:
        """A step whose gradient was written to shared memory."""
        gradient = self.client.gradient("w")
        gradient[:] = 1.0
        self.client.push_pull({"w": gradient}, tick=True, copy=False)

    def own(self) -> None:
        """A step whose gradient lies in the program's own memory."""
        self.client.push_pull({"w": self._own}, tick=True, copy=False)


@each_case("dtype", ["float32", "float16"])
@each_case("servers", [1, 2])
@each_case("policy", [Async(), Sync()])
def test_passes_of_a_step(
    make_cluster: MakeCluster,
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    servers: int,
    dtype: str,
) -> None:
    cluster = make_cluster("unix", workers=1, servers=servers, policy=policy)
    worked = Worked(cluster.client(0), dtype)
    passes = Passes(monkeypatch)
    # Two shards agree on a clock of Sync before they apply it, and copy the values by themselves.
    rule = RULE if servers == 1 or isinstance(policy, Async) else f"{RULE}, no out"
    read = {"round_into": 1.0} if dtype == "float16" and rule != RULE else {}
    assert passes.of(worked.lent) == {LOOK: 1.0, rule: 1.0, **read}
    assert passes.of(worked.own) == {COPY_AND_LOOK: 1.0, rule: 1.0, **read}


def test_passes_of_a_clock_of_two_workers(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster("unix", workers=2, policy=Sync())
    clients = [cluster.client(rank) for rank in (0, 1)]
    for client in clients:
        client.define("w", np.zeros(SIZE, np.float32), rule=SGD(0.1))

    def clock() -> None:
        tickets = []
        for client in clients:
            client.push("w", np.ones(SIZE, np.float32))
            tickets.append(client.tick())
        for ticket in tickets:
            ticket.result()

    clock()
    # The sum of two is one pass of numpy's.
    assert Passes(monkeypatch).of(clock) == {COPY_AND_LOOK: 2.0, f"{RULE}, no out": 1.0}


def test_passes_of_an_optimizers_step(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(SIZE, 1, bias=False)
    worker = Worker(make_cluster("unix", workers=1).client(0), 3)
    optimizer = worker.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    assert Passes(monkeypatch).of(optimizer.step) == {LOOK: 1.0, RULE: 1.0}

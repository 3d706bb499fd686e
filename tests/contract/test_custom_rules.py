"""Users' own rules on real servers: what they may do, and that nothing they do harms a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.contract.conftest import MakeCluster
from tests.contract.role_cluster import RoleCluster, in_threads
from tests.suites import each_case

from paramserve.client import BlockPush, Client
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, Sync
from paramserve.errors import NonFinite, RuleFailed, UnknownRule
from paramserve.rules import Add, Array, PushInfo
from paramserve.rules.custom import CustomRule
from paramserve.rules.torch_rule import TorchRule

SIZE = 40_000
"""Elements of float64: more than is kept whole on one shard."""


@dataclass(frozen=True)
class ByWorker(CustomRule):
    """Adds each worker's gradient times (rank + 2), and keeps the sum of the staleness."""

    lr: float = 1.0

    state_names: ClassVar[tuple[str, ...]] = ("staleness",)

    def update(
        self, value: Array, gradient: Array, state: Mapping[str, Array], push: PushInfo
    ) -> None:
        state["staleness"][...] += push.staleness
        value += self.lr * (push.worker + 2) * gradient


@dataclass(frozen=True)
class Fails(CustomRule):
    """Adds, until a gradient of 13 comes; then it does what no rule may do."""

    how: str = "raise"

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> Any:
        value += gradient
        if not (gradient == 13).any():
            return None
        if self.how == "raise":
            raise KeyError("thirteen")
        if self.how == "exit":
            raise SystemExit(1)
        if self.how == "nan":
            value[-1] = np.nan
        if self.how == "resize":
            value.resize(3, refcheck=False)
        if self.how == "dtype":
            value.dtype = np.int64
        return value if self.how == "return" else None


@dataclass(frozen=True)
class Centered(CustomRule):
    """Moves each tensor by its gradient less the gradient's mean."""

    whole_tensors: ClassVar[bool] = True

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None:
        value -= gradient - gradient.mean()


@dataclass(frozen=True)
class Unstartable(CustomRule):
    state_names: ClassVar[tuple[str, ...]] = ("m",)

    def init(self, name: str, size: int, dtype: Any) -> Array:
        raise RuntimeError("no state today")

    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


@dataclass(frozen=True)
class Scribbles(Add):
    """By the protocol alone: `CustomRule` is not between it and the gradient."""

    name: ClassVar[str] = "Scribbles"

    def apply(self, value: Any, gradient: Any, *rest: Any) -> None:
        super().apply(value, gradient, *rest)
        gradient[:] = 7.0


RULES = (ByWorker, Fails, Centered, Unstartable, Scribbles)
MISBEHAVIOUR = {
    "raise": r"KeyError: 'thirteen' \(.*test_custom_rules.py:\d+ in update: raise KeyError",
    "exit": "SystemExit",
    "nan": "NaN or Inf after the update",
    "resize": "ValueError",
    "dtype": "into int64",
    "return": "returned ndarray",
}
Make = Callable[..., RoleCluster]


@pytest.fixture
def make(make_cluster: MakeCluster, shards: int) -> Make:
    def made(policy: Policy | None = None, workers: int = 1) -> RoleCluster:
        policy = policy if policy is not None else Async()
        return make_cluster(servers=shards, policy=policy, workers=workers, registers=RULES)

    return made


def step(client: Client, gradient: Any, name: str = "w") -> None:
    ticket = client.push(name, gradient)
    client.tick()
    ticket.result()


def test_async_rule_sees_worker_and_staleness(make: Make) -> None:
    cluster = make(workers=2)
    first, second = cluster.client(0), cluster.client(1)
    block = first.define("w", np.zeros(SIZE), rule=ByWorker(lr=0.5))
    first.push("w", np.ones(SIZE)).result()
    second.push("w", np.ones(SIZE)).result()
    assert set(first.pull("w")) == {0.5 * 2 + 0.5 * 3}
    assert set(first.dense.fetch(block, 1)[0]) == {1.0}


def test_hyper_parameters_travel_with_a_push_to_a_rule_that_the_client_does_not_know(
    make: Make,
) -> None:
    cluster = make(workers=1)
    owner, other = cluster.client(0), cluster.client()
    owner.define("w", np.zeros(SIZE), rule=ByWorker())
    (block,) = other.blocks()
    slot = other.dense.gradient_slot(block)
    slot[:] = 1.0
    other.dense.step("default", [BlockPush(block, slot, None, (4.0,))]).result()
    assert set(owner.pull("w")) == {4.0}


def test_nan_written_to_a_gradient_that_waits_for_its_clock_is_in_no_value(make: Make) -> None:
    cluster = make(Sync(), workers=2)
    clients = [cluster.client(rank) for rank in range(2)]
    block = clients[0].define("w", np.zeros(SIZE), rule=ByWorker())
    lent = clients[0].gradient("w")
    lent[:] = 1.0
    clients[0].push("w", lent)
    tickets = [clients[0].tick()]
    lent[-1] = np.nan
    clients[1].push("w", np.ones(SIZE))
    tickets += [clients[1].tick()]
    for ticket in tickets:
        with pytest.raises(NonFinite, match=r"do not write to a gradient after") as error:
            ticket.result()
        assert error.value.applied == "no"
    assert not clients[0].pull("w").any()
    for client in clients:
        client.push("w", np.ones(SIZE))
        tickets += [client.tick()]
    assert [ticket.result().version for ticket in tickets[2:]] == [1, 1]
    assert set(clients[0].pull("w")) == {1.0}
    assert set(clients[0].dense.fetch(block, 1)[0]) == {0.0}


def test_sync_rule_sees_the_reduced_gradient(make: Make) -> None:
    cluster = make(Sync(), workers=2)
    clients = [cluster.client(rank) for rank in range(2)]
    clients[0].define("w", np.zeros(SIZE), rule=ByWorker())
    for _ in range(2):
        in_threads(
            *(
                lambda c=c, g=g: step(c, np.full(SIZE, g))
                for c, g in zip(clients, (1.0, 3.0), strict=True)
            )
        )
    assert set(clients[0].pull("w")) == {4.0}  # twice the mean of 1 and 3, worker -1


@each_case("how", MISBEHAVIOUR)
def test_async_push_to_a_rule_that_fails_is_refused_and_the_servers_go_on(
    make: Make, how: str
) -> None:
    cluster = make(workers=1)
    client = cluster.client(0)
    client.define("w", np.zeros(SIZE), rule=Fails(how))
    client.define("v", np.zeros(SIZE), rule=Add())
    client.push({"w": np.ones(SIZE), "v": np.ones(SIZE)}).result()
    bad = np.full(SIZE, 13.0)
    with pytest.raises(RuleFailed, match=MISBEHAVIOUR[how]) as caught:
        client.push({"w": bad, "v": bad}).result()
    assert caught.value.applied == "no"
    assert "'Fails'" in caught.value.failed
    assert "'w'" in caught.value.failed
    client.push("w", np.ones(SIZE)).result()
    assert set(client.pull("w")) == {2.0}
    assert set(client.pull("v")) == {1.0}


def test_rule_by_the_protocol_cannot_write_to_the_clients_gradient(make: Make) -> None:
    client = make().client(0)
    block = client.define("w", np.zeros(SIZE), rule=Scribbles())
    slot = client.dense.gradient_slot(block)
    slot[:] = 1.0
    client.dense.step("default", [BlockPush(block, slot)]).result()
    assert set(slot) == {1.0}
    assert set(client.pull("w")) == {1.0}


def test_async_failure_on_one_shard_is_told_as_unknown(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(servers=2, workers=1, registers=RULES)
    client = cluster.client(0)
    client.define("w", np.zeros(SIZE), rule=Fails())
    bad = np.ones(SIZE)
    bad[-1] = 13.0
    with pytest.raises(RuleFailed) as caught:
        client.push("w", bad).result()
    assert caught.value.applied == "unknown"
    value = client.pull("w")
    assert (value[0], value[-1]) == (1.0, 0.0)


@each_case("how", MISBEHAVIOUR)
def test_sync_clock_that_a_rule_fails_is_refused_everywhere(make: Make, how: str) -> None:
    cluster = make(Sync(), workers=2)
    clients = [cluster.client(rank) for rank in range(2)]
    clients[0].define("w", np.zeros(SIZE), rule=Fails(how))
    clients[0].define("v", np.zeros(SIZE), rule=Add())
    bad = np.ones(SIZE)
    bad[-1] = 13.0  # on the last shard only

    def work(client: Client) -> None:
        ticket = client.push({"w": bad, "v": bad})
        client.tick()
        with pytest.raises(RuleFailed, match=MISBEHAVIOUR[how]) as caught:
            ticket.result()
        assert caught.value.applied == "no"
        ticket = client.push({"w": np.ones(SIZE), "v": np.ones(SIZE)})
        client.tick()
        ticket.result()

    in_threads(*(lambda c=c: work(c) for c in clients))
    assert set(clients[0].pull("w")) == {1.0}
    assert set(clients[0].pull("v")) == {1.0}


def test_sync_clock_with_clipping_that_a_rule_fails_says_what_others_may_have_done(
    make: Make, shards: int
) -> None:
    cluster = make(Sync(), workers=1)
    client = cluster.client(0)
    plain = client.define("v", np.zeros(SIZE), rule=Add())
    block = client.define("w", np.zeros(SIZE), rule=Fails())

    def clipped(last: float) -> None:
        slot, other = client.dense.gradient_slot(block), client.dense.gradient_slot(plain)
        slot[:], slot[-1], other[:] = 1.0, last, 1.0
        push = [BlockPush(plain, other), BlockPush(block, slot)]
        client.dense.step("default", push, clip_norm=1e9).result()

    with pytest.raises(RuleFailed, match="thirteen") as caught:
        clipped(13.0)
    assert caught.value.applied == ("no" if shards == 1 else "unknown")
    assert (client.pull("w")[-1], client.pull("v")[-1]) == (0.0, 0.0)
    clipped(1.0)
    assert client.pull("w")[-1] == 1.0


def test_sync_values_assigned_while_a_clock_waits_are_not_lost(make: Make) -> None:
    cluster = make(Sync(), workers=2)
    clients, driver = [cluster.client(rank) for rank in range(2)], cluster.client()
    clients[0].define("w", np.zeros(SIZE), rule=ByWorker())
    tickets = [clients[0].push("w", np.ones(SIZE))]
    clients[0].tick()
    driver.assign("w", np.full(SIZE, 10.0))
    tickets.append(clients[1].push("w", np.ones(SIZE)))
    clients[1].tick()
    for ticket in tickets:
        ticket.result()
    assert set(driver.pull("w")) == {11.0}


@each_case("policy", [Async(), Sync()], ids=["async", "sync"])
def test_whole_tensors_are_not_cut(make: Make, policy: Policy, shards: int) -> None:
    cluster = make(policy)
    client = cluster.client(0)
    shapes = {"a": (3,), "b": (100, 101), "c": (), "d": (90, 101)}
    values = {name: np.zeros(shape) for name, shape in shapes.items()}
    block = client.define(values, rule=Centered())
    assert set(block.spec.cuts) <= set(block.starts)
    assert len(set(block.spec.cuts)) == shards + 1
    rng = np.random.default_rng(0)
    gradients = {name: np.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    ticket = client.push(gradients)
    client.tick()
    ticket.result()
    found = client.pull(list(shapes))
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient.mean() - gradient, atol=1e-12)


def test_torch_class_runs_on_the_servers(make: Make) -> None:
    import torch

    client = make().client(0)
    start = np.linspace(-1.0, 1.0, SIZE)
    client.define("w", start, rule=TorchRule.of("Adagrad", lr=0.1))
    tensor = torch.tensor(start, requires_grad=True)
    optimizer = torch.optim.Adagrad([tensor], lr=0.1)
    for n in range(3):
        client.push("w", start * n + 1).result()
        tensor.grad = torch.tensor(start * n + 1)
        optimizer.step()
    np.testing.assert_allclose(client.pull("w"), tensor.detach().numpy(), rtol=1e-12)


@dataclass(frozen=True)
class Unregistered(CustomRule):
    def update(self, value: Any, gradient: Any, state: Any, push: Any) -> None: ...


def test_unregistered_rule_is_refused_and_its_name_stays_free(make: Make) -> None:
    cluster = make()
    client, other = cluster.client(0), cluster.client()
    for _ in range(2):
        with pytest.raises(UnknownRule, match=r"rules=\[Unregistered\].*--rules module:Unreg") as e:
            client.define("w", np.ones(SIZE), rule=Unregistered())
        assert e.value.applied == "no"
    other.define("w", np.full(SIZE, 2.0), rule=Add())
    client.push("w", np.ones(SIZE)).result()
    assert set(client.pull("w")) == {3.0}
    assert [block.id for block in client.blocks()] == [block.id for block in other.blocks()]


def test_rule_that_cannot_start_is_refused_and_its_name_stays_free(make: Make) -> None:
    client = make().client(0)
    with pytest.raises(RuleFailed, match=r"'Unstartable' cannot start on 'w'.*no state today"):
        client.define("w", np.ones(3), rule=Unstartable())
    client.define("w", np.ones(5), rule=Add())
    assert client.pull("w").shape == (5,)

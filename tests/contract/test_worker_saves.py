"""What a worker saves comes back to the incarnation that goes on for it, as of its last step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import wait_until
from torch import nn
from torch.optim import SGD

import paramserve as ps
from paramserve.errors import Overloaded
from paramserve.pytorch import Embedding

STEPS = 6
NEVER = -1


class Sampler:
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self.drawn = 0

    def draw(self) -> float:
        self.drawn += 1
        return float(self._generator.random())

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.bit_generator.state = state["generator"]
        self.drawn = state["drawn"]


def sampling(clock: int) -> Callable[[ps.Worker], list[float]]:
    """Training on draws; rank 0 dies after it has drawn for the step of `clock`."""

    def train(worker: ps.Worker) -> list[float]:
        sampler = Sampler(worker.rank)
        sampler.load_state_dict(worker.saved("sampler", sampler.state_dict()))
        worker.save("sampler", sampler.state_dict)
        model = nn.Linear(1, 1)
        optimizer = worker.optimizer(model, SGD(model.parameters(), lr=0.1))
        taken = []
        while worker.clock < STEPS:
            taken.append(sampler.draw())
            if (worker.rank, worker.clock, worker.incarnation) == (0, clock, 1):
                raise Killed
            optimizer.zero_grad()
            model(torch.tensor([taken[-1:]])).square().mean().backward()
            optimizer.step()
        assert sampler.drawn == STEPS
        return taken

    return train


@pytest.mark.parametrize("policy", [ps.Sync(), ps.Async(), ps.LocalSteps(every=1)], ids=str)
@pytest.mark.parametrize("clock", [0, 1, 4])
def test_function_that_is_asked_at_each_step_is_found_as_of_the_last_one(
    make_cluster: MakeCluster, policy: Any, clock: int
) -> None:
    cluster = make_cluster("unix", servers=2, workers=2, policy=policy, restarts=True)
    ranks = Ranks(cluster, sampling(clock)).start(0, 1)
    found = ranks.end()
    assert ranks.restarts == [0]
    whole = Sampler(0)
    expected = [whole.draw() for _ in range(STEPS)]
    assert found[0] == expected[clock:]
    assert len(found[1]) == STEPS


def step(worker: ps.Worker) -> None:
    """Of the key-value API; ends the clock of the group "default"."""
    worker.client.push_pull({"w": np.ones(4)}, tick=True)


def test_what_is_saved_by_the_key_value_api_and_over_several_restarts(
    make_cluster: MakeCluster,
) -> None:
    """Names that a later incarnation has not saved again stay; what no step has told is lost."""
    cluster = make_cluster("unix", servers=2, workers=1, policy=ps.Async(), restarts=True)
    found: list[Any] = []

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(4), rule=ps.Add())
        found.append([worker.clock, *(worker.saved(name, "none") for name in "abcd")])
        if worker.incarnation == 1:
            worker.save("a", {"rng": torch.get_rng_state(), "at": (1, None)})
            worker.save("b", np.arange(3))
            given = [1]
            worker.save("c", given)
            given.append(2)
            assert worker.saved("c") == [1], "a copy"
            step(worker)
            worker.save("b", np.arange(2))
            step(worker)
            step(worker)
        elif worker.incarnation == 2:
            worker.save("c", None)
            step(worker)
            worker.save("c", "after the last step")
        if worker.incarnation < 3:
            worker.save("d", worker.clock)
            raise Killed

    Ranks(cluster, train).start(0).end()
    first, second, third = found
    assert first == [0, "none", "none", "none", "none"]
    for each in second, third:
        assert torch.equal(each[1]["rng"], torch.get_rng_state())
        assert each[1]["at"] == (1, None)
        assert each[2].tolist() == [0, 1]
    assert (second[0], *second[3:]) == (3, [1], "none")
    assert (third[0], *third[3:]) == (4, None, "none")


def test_step_that_is_taken_again_finds_what_was_saved_before_it(
    make_cluster: MakeCluster,
) -> None:
    """Of its last step only one of two shards has had its part: the new incarnation repeats it."""
    cluster = make_cluster("unix", servers=2, workers=1, restarts=True)
    found: list[tuple[int, int]] = []

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(4), rule=ps.Add())
        found.append((worker.clock, worker.saved("at", NEVER)))
        while worker.clock < 5:
            worker.save("at", worker.clock)
            if worker.clock == 3 and worker.incarnation == 1:
                only_the_first(worker)
            step(worker)

    def only_the_first(worker: ps.Worker) -> None:
        exchange = worker.client.connection.exchange
        transmit, group = exchange._transmit, cluster.servers[0].role.shard.groups[0].state

        def lossy(shard: Any, message: Any) -> None:
            if shard.number > 0:
                wait_until(lambda: group.clocks[0] == 4)
                raise Killed
            transmit(shard, message)

        exchange._transmit = lossy

    Ranks(cluster, train).start(0).end()
    assert found == [(0, NEVER), (3, 2)]


def test_saves_of_steps_with_two_optimizers_and_a_table(make_cluster: MakeCluster) -> None:
    """Each save goes with the step that follows it, of whichever group; in a call of several
    groups with the last of them."""
    cluster = make_cluster("tcp", servers=2, workers=1, policy=ps.Sync(), restarts=True)
    found: list[Any] = []

    def train(worker: ps.Worker) -> None:
        found.append((worker.saved("d"), worker.saved("g")))
        users = worker.client.table("users", dim=2, rule=ps.Adagrad(lr=0.1))
        models = {"d": nn.Linear(1, 1), "g": nn.Sequential(Embedding(users), nn.Linear(2, 1))}
        optimizers = {
            name: worker.optimizer(each, SGD(each.parameters(), lr=0.1), name=name)
            for name, each in models.items()
        }
        inputs = {"d": torch.ones(1, 1), "g": torch.tensor([1, 2])}
        for number in range(worker.clock, 4):
            for name, model in models.items():
                if (number, name, worker.incarnation) == (2, "g", 1):
                    raise Killed
                worker.save(name, number)
                model(inputs[name]).sum().backward()
                optimizers[name].step()
        tables = [g.state for g in cluster.servers[0].role.shard.groups.values() if g.state.table]
        assert not any(each.saved.by_rank for each in tables)

    Ranks(cluster, train).start(0).end()
    assert found == [(None, None), (2, 1)]


def test_wrong_saves_are_refused_and_change_nothing(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("unix", workers=1)

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(4), rule=ps.Add())
        worker.save("a", 1)
        broken: list[object] = [2]
        worker.save("b", lambda: broken[0])
        sampler = Sampler(0)
        with pytest.raises(TypeError, match=r"save\('a'\): state\['x'\] is a .*Logger.*To fix"):
            worker.save("a", {"x": __import__("logging").getLogger()})
        with pytest.raises(TypeError, match=r"save\('a'\) got a Sampler.*worker\.track\('a'"):
            worker.save("a", sampler)
        with pytest.raises(TypeError, match="a text that is not empty, not 3"):
            worker.save(3, 4)  # type: ignore[arg-type]
        with pytest.raises(Overloaded, match=r"of 5000\d+ bytes .* at most 4194304.*#an-average"):
            worker.save("a", np.zeros(5_000_000, np.uint8))
        assert (worker.saved("a"), worker.saved("b")) == (1, 2)
        broken[0] = object()
        with pytest.raises(TypeError, match=r"save\('b'\): state is a builtins.object"):
            step(worker)
        assert (worker.clock, worker.client.pull("w").tolist()) == (0, [0.0] * 4)
        with pytest.raises(ValueError, match=r"names that begin with 'paramserve\.'"):
            worker.save("paramserve.random", 1)
        broken[0] = 3
        step(worker)
        assert (worker.saved("a"), worker.saved("b"), worker.saved("c", 9)) == (1, 3, 9)

    Ranks(cluster, train).start(0).end()


def test_what_is_saved_after_the_last_step_is_found_by_who_goes_on(
    make_cluster: MakeCluster,
) -> None:
    """Also where the worker has ended in order; what functions give is of the last step."""
    cluster = make_cluster("unix", servers=2, workers=1, policy=ps.Sync(), restarts=True)
    found: list[Any] = []

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(4), rule=ps.Add())
        found.append((worker.clock, worker.saved("best"), worker.saved("count")))
        counted = [0]
        worker.save("count", lambda: counted)
        step(worker)
        counted[0] += 1
        worker.save("best", worker.clock)

    for _ in range(3):
        Ranks(cluster, train).start(0).end()
    assert found == [(0, None, None), (1, 1, [0]), (2, 2, [0])]

"""Values of a model that readers and ranks find: dtypes that the servers do not hold, what a rank
assigns, and the optimizer's state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import wait_until
from tests.contract.test_model_owners import (
    State,
    Train,
    assert_equal,
    dies,
    ended,
    loss_of,
    own,
    read,
    two_layers,
)
from torch import nn
from torch.optim import SGD, Adam

import paramserve as ps
from paramserve.cli import cli
from paramserve.config import CheckpointPlan
from paramserve.launch.reading import Reader
from paramserve.pytorch import Embedding
from paramserve.pytorch.served import Served

# --- dtypes that the servers do not hold ----------------------------------------------------------

BUFFERS = {
    "mask": torch.tensor([[True, False], [False, True]]),
    "bytes": torch.tensor([0, 255], dtype=torch.uint8),
    "shorts": torch.tensor([-32768, 7], dtype=torch.int16),
    "count": torch.tensor(3, dtype=torch.int32),
    "large": torch.tensor([2**62 + 1]),
    "wide": torch.tensor([0.1], dtype=torch.float64),
    "sixteen": torch.tensor([0.1, 65504.0, float("-inf")], dtype=torch.float16),
    "bits": torch.tensor([0.1, float("nan"), 3e38, 0.0], dtype=torch.bfloat16),
}


@pytest.mark.usefixtures("tables_ready")
@pytest.mark.parametrize(
    "options", [{}, {"buffers": "mean"}, {"dense": "local"}], ids=["rank0", "mean", "dense"]
)
def test_buffers_are_read_in_the_models_own_dtypes(
    make_cluster: MakeCluster, options: dict[str, str], tmp_path: Path
) -> None:
    plan = CheckpointPlan(folder=str(tmp_path / "runs"), run="test")
    cluster = make_cluster(servers=2, workers=1, checkpoints=plan)

    def train(worker: ps.Worker) -> State:
        model: Any = two_layers()
        for name, value in BUFFERS.items():
            model.register_buffer(name, value)
        model["left"] = nn.Linear(2, 1).bfloat16()
        model["tied"] = model["left"]
        if options.get("dense"):
            model["rows"] = Embedding(worker.client.table("rows", 3, rule=ps.SGD(lr=0.1)))
        params = [*model["body"].parameters(), *model["head"].parameters()]
        optimizer = worker.optimizer(model, SGD(params, lr=0.1), **options)
        loss_of(model, 0, 0).backward()
        optimizer.step()
        return {name: each for name, each in own(model).items() if "rows" not in name}

    expected = Ranks(cluster, train).start(0).end()[0]
    cluster.checkpoint()
    states = [Reader(cluster.client()).state_dict("model")]
    for kind, load in (("torch", torch.load), ("safetensors", load_file)):
        arguments = ["checkpoints", "export", plan.folder, "--to", kind, "--out", tmp_path / kind]
        done = CliRunner().invoke(cli, [str(each) for each in arguments])
        assert done.exit_code == 0, done.output
        states.append(load(tmp_path / kind))
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert state[name].dtype == value.dtype, name
            assert torch.equal(state[name].nan_to_num(7.0), value.nan_to_num(7.0)), name


# --- values that a rank assigns -------------------------------------------------------------------


def optimizers_of(worker: ps.Worker, model: Any) -> list[torch.optim.Optimizer]:
    return [
        worker.optimizer(model, SGD(model[name].parameters(), lr=0.1), name=name)
        for name in ("body", "head")
    ]


def step(worker: ps.Worker, model: Any, optimizers: list[torch.optim.Optimizer]) -> None:
    model.zero_grad()
    loss_of(model, worker.rank, 0).backward()
    for each in optimizers:
        each.step()


def write(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)


def assert_written(state: State) -> None:
    assert_equal(state, {name: torch.full_like(each, 0.25) for name, each in state.items()})


@pytest.mark.parametrize(
    "policy", [ps.Async(), ps.AsyncLocalSteps(4, outer=ps.DelayedNesterov())], ids=["", "own steps"]
)
def test_steps_of_a_slower_rank_are_in_no_value_that_is_assigned(
    make_cluster: MakeCluster, policy: Any
) -> None:
    cluster = make_cluster(workers=2, policy=policy)

    def train(worker: ps.Worker) -> State:
        model = two_layers()
        optimizers = optimizers_of(worker, model)
        if worker.rank == 0:
            write(model)
        else:
            wait_until(lambda: worker.client.connection.open_collective({0}) is not None)
            step(worker, model, optimizers)
        worker.assign()
        return own(model)

    returned = Ranks(cluster, train).start(0, 1).end()
    for state in (*returned.values(), read(cluster, "head")):
        assert_written(state)


def test_lowest_rank_that_lives_assigns_where_rank_0_is_dead(make_cluster: MakeCluster) -> None:
    cluster, dead = make_cluster(workers=2, policy=ps.Async()), list[int]()

    def train(worker: ps.Worker) -> State:
        model = two_layers()
        optimizers = optimizers_of(worker, model)
        worker.barrier()
        if worker.rank == 0:
            dead.append(worker.rank)
            raise Killed
        wait_until(lambda: worker.client.connection.is_dead([0]))
        write(model)
        worker.assign()
        assert_written(own(model))
        step(worker, model, optimizers)
        return own(model)

    ranks = Ranks(cluster, train, again=False).start(0, 1)
    ranks.until(lambda: dead)
    cluster.mark_dead(0)
    ranks.end()


def test_rank_that_comes_back_behind_its_last_step_tells_that_it_assigns_nothing(
    make_cluster: MakeCluster,
) -> None:
    def train(worker: ps.Worker) -> State:
        model = two_layers()
        optimizers = optimizers_of(worker, model)
        for number in range(worker.clock, 3):
            dies(worker, 0, 2)
            if number == 2:
                write(model)
                worker.assign()
            step(worker, model, optimizers)
        return own(model)

    with pytest.warns(UserWarning, match="rank 0 was started again, and worker.assign") as warned:
        cluster, ranks = ended(make_cluster, train)
    assert len(warned) == 1
    assert_equal(ranks.returned[0], ranks.returned[1])
    assert_equal(read(cluster, "head"), ranks.returned[0])


@pytest.mark.parametrize("change", ["assign", "load"])
def test_rank_that_came_back_writes_for_all_optimizers_behind_a_step_of_one(
    make_cluster: MakeCluster, change: str
) -> None:
    def training(victim: int | None) -> Train:
        def train(worker: ps.Worker) -> State:
            model = two_layers()
            body = worker.optimizer(model, SGD(model["body"].parameters(), lr=0.1))
            momentum = SGD(model["head"].parameters(), lr=0.1, momentum=0.9)
            head = worker.optimizer(model, momentum, name="head")
            for number in range(worker.clock, 4):
                dies(worker, victim, 2)
                if number == 3 and change == "assign":
                    with torch.no_grad():
                        model["head"].weight.mul_(0.5)
                    worker.assign()
                elif number == 3:
                    state = head.state_dict()
                    state["state"].clear()
                    head.load_state_dict(state)
                model.zero_grad()
                loss_of(model, worker.rank, number).backward()
                body.step()
                if number != 2:
                    head.step()
            return own(model)

        return train

    _, unbroken = ended(make_cluster, training(None), workers=1)
    cluster, ranks = ended(make_cluster, training(0), workers=1)
    assert ranks.restarts == [0]
    assert_equal(ranks.returned[0], unbroken.returned[0])
    assert_equal(read(cluster, "head"), unbroken.returned[0])


# --- the optimizer's state ------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2], ids=["at adoption", "later"])
def test_state_that_is_loaded_is_there_after_a_death_before_it_was_stored(
    make_cluster: MakeCluster, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, store = list[int](), Served._store

    def dies_in_a_call(served: Served, *args: Any) -> None:
        calls.extend([1] * (served._worker.rank == 0))
        if served._worker.rank == 0 and len(calls) == nth:
            served._worker.client.drain()
            raise Killed
        store(served, *args)

    def momentum(factor: float) -> tuple[nn.Module, SGD]:
        model = two_layers()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.full_like(param, factor)
        return model, optimizer

    def train(worker: ps.Worker) -> State:
        model, loaded = momentum(1.0)
        optimizer = worker.optimizer(model, loaded)
        optimizer.load_state_dict(momentum(2.0)[1].state_dict())
        for number in range(worker.clock, 2):
            optimizer.zero_grad()
            loss_of(model, worker.rank, number).backward()
            optimizer.step()
        return own(model)

    expected = ended(make_cluster, train)[1].returned
    monkeypatch.setattr(Served, "_store", dies_in_a_call)
    _, ranks = ended(make_cluster, train)
    assert ranks.restarts == [0]
    assert_equal(ranks.returned[0], expected[0])
    assert_equal(ranks.returned[1], expected[0])


@pytest.mark.parametrize("loads", [{0, 1}, {0}], ids=["all ranks", "rank 0"])
def test_state_that_is_loaded_is_there_before_another_rank_steps(
    make_cluster: MakeCluster, loads: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, store = threading.Event(), Served._store

    def stores_late(served: Served, *args: Any) -> None:
        if served._worker.rank == 0:
            stepped.wait(0.5)
        store(served, *args)

    def train(worker: ps.Worker) -> None:
        model = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        optimizer = SGD(model.parameters(), lr=1.0, momentum=0.5)
        if worker.rank in loads:
            optimizer.state[model[0]]["momentum_buffer"] = torch.full((2,), 4.0)
        adopted = worker.optimizer(model, optimizer)
        if worker.rank == 1:
            model[0].grad = torch.ones(2)
            adopted.step()
            stepped.set()

    monkeypatch.setattr(Served, "_store", stores_late)
    cluster = make_cluster(workers=2, policy=ps.Async())
    Ranks(cluster, train).start(0, 1).end()
    assert read(cluster)["0"].tolist() == [-3.0, -3.0]


def test_state_that_is_loaded_after_adoption_is_not_loaded_by_a_worker_that_comes_back(
    make_cluster: MakeCluster,
) -> None:
    plain = Adam([nn.Parameter(torch.ones(2))])
    plain.param_groups[0]["params"][0].grad = torch.ones(2)
    for _ in range(10):
        plain.step()
    saved = plain.state_dict()

    def train(worker: ps.Worker) -> float:
        model = nn.ParameterList([nn.Parameter(torch.ones(2))])
        optimizer = worker.optimizer(model, Adam(model.parameters()))
        optimizer.load_state_dict(saved)
        for _ in range(worker.clock, 4):
            dies(worker, 0, 2)
            model[0].grad = torch.ones(2)
            optimizer.step()
        return float(optimizer.state_dict()["state"][0]["step"])

    _, ranks = ended(make_cluster, train, workers=1)
    assert ranks.restarts == [0]
    assert ranks.returned[0] == 14

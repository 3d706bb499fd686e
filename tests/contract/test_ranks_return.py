"""A rank that comes back goes on with the collectives of the step at which it died: in each form of
loop, with one optimizer and several, wherever between its calls it dies."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.contract.conftest import MakeCluster
from tests.contract.ranks import Killed, Ranks
from tests.contract.role_cluster import DEADLINES
from tests.contract.test_model_owners import State, loss_of, own, two_layers
from torch.optim import SGD
from torch.utils.data import TensorDataset

import paramserve as ps
from paramserve.client import timeouts
from paramserve.errors import CollectiveMismatch, ParamServeError
from paramserve.training import collectives

STEPS, OF_EPOCH, DIES_AT = 6, 2, 4
"""Steps in all and in an epoch, and the step at whose beginning a rank dies."""
IN_PASS = 4
"""For `Case.where`: it dies behind the first step of an epoch."""
LIVE_S = 10.0
"""Less than the wait for ranks that live and wait for this one: a step finds it at its second look,
5 s after the first one."""

pytestmark = pytest.mark.filterwarnings("ignore:rank . has waited")
"""A busy machine takes a second for a step."""


class Case(NamedTuple):
    """One training function, and where a rank of it dies."""

    loop: str
    call: str
    optimizers: int
    victim: int | None = None
    where: int = 0
    """Which of its three calls follows its death; 3: none."""


class Program:
    """Makes three collectives of one kind before or behind each step, or each epoch."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, worker: ps.Worker) -> tuple[State, list[Any], int]:
        model = two_layers()
        parts = [model] if self.case.optimizers == 1 else [model["body"], model["head"]]
        optimizers = [
            worker.optimizer(model, SGD(each.parameters(), lr=0.01), name=f"part {number}")
            for number, each in enumerate(parts)
        ]
        if self.case.loop.startswith("print"):
            worker.print0(f"goes on at {worker.clock}")
        worker.barrier()  # of the setup: it is made again
        results: list[Any] = []
        for calls, number in self._events(worker):
            if calls:
                results = self._collect(worker, model, number)
                continue
            at = (worker.rank, worker.incarnation, self._done(worker), self.case.where)
            if at == (self.case.victim, 1, DIES_AT + 1, IN_PASS):
                worker.client.drain()
                raise Killed
            model.zero_grad()
            scale = sum(each for each in results if each is not None) or 1.0
            (scale * loss_of(model, worker.rank, number)).backward()
            in_turn = "turn" in self.case.loop
            for each in optimizers[number % 2 :][:1] if in_turn else optimizers:
                each.step()
        return own(model), results, worker._position.last_call

    def _events(self, worker: ps.Worker) -> Iterator[tuple[bool, int]]:
        """Collectives (True) and steps, each with its number."""
        both = "both" in self.case.loop
        before, behind = both or "behind" not in self.case.loop, both or "behind" in self.case.loop
        if "own" in self.case.loop:
            begins = self._done(worker) if worker.clock else 0
            for number in range(begins, STEPS):
                if before:
                    yield True, number
                if "rate" in self.case.loop:
                    assert worker.clock == number
                yield False, number
                if behind:
                    yield True, number
                if "every" in self.case.loop:
                    assert worker.clock == number + 1
        elif "loader" in self.case.loop:
            numbers = torch.arange(2 * STEPS) // 2
            loader: Any = worker.loader(TensorDataset(numbers), batch_size=1, shuffle=False)
            for (number,) in loader:
                if before:
                    yield True, int(number)
                yield False, int(number)
                if behind:
                    yield True, int(number)
        else:
            numbers = torch.arange(2 * OF_EPOCH) // 2
            loader = worker.loader(TensorDataset(numbers), batch_size=1, shuffle=False)
            epochs = STEPS // OF_EPOCH
            for epoch in loader.epochs(epochs) if "epochs" in self.case.loop else range(epochs):
                drawn = "drawn" in self.case.loop
                if before and not drawn:
                    yield True, OF_EPOCH * epoch
                batches = iter(loader)
                if drawn:
                    yield True, OF_EPOCH * epoch
                for (number,) in batches:
                    yield False, OF_EPOCH * epoch + int(number)
                if behind:
                    yield True, OF_EPOCH * (epoch + 1)

    def _done(self, worker: ps.Worker) -> int:
        clocks = worker.client.steps.clocks
        each = [clocks.get(group, 0) for group in worker.optimizers.groups]
        return sum(each) if "turn" in self.case.loop else each[0]

    def _collect(self, worker: ps.Worker, model: Any, number: int) -> list[Any]:
        results = []
        for which in range(4):
            at = (worker.rank, worker.incarnation, self._done(worker))
            if at == (self.case.victim, 1, DIES_AT) and which == self.case.where:
                worker.client.drain()
                raise Killed
            if which < 3:
                results.append(self._call(worker, model, number + which / 8))
        return results

    def _call(self, worker: ps.Worker, model: Any, value: float) -> Any:
        if self.case.call == "none":
            return None
        if self.case.call == "barrier":
            worker.barrier()
            return None
        if self.case.call == "all_reduce":
            return worker.all_reduce(value if worker.rank == 0 else -1.0, "rank0")
        with torch.no_grad():
            for param in model.parameters():
                param.lerp_(torch.full_like(param, value if worker.rank == 0 else -1.0), 0.5)
        worker.assign()
        return None


def start(make_cluster: MakeCluster, case: Case, request_s: float = 10.0) -> Ranks:
    deadlines = structs.replace(DEADLINES, request_s=request_s)
    cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync(), deadlines=deadlines)
    return Ranks(cluster, Program(case)).start(0, 1)


def play(make_cluster: MakeCluster, case: Case, request_s: float) -> dict[int, Any]:
    ranks = start(make_cluster, case, request_s)
    returned = ranks.end()
    assert ranks.restarts == ([] if case.victim is None else [case.victim])
    return returned


def check(
    make_cluster: MakeCluster,
    case: Case,
    victim: int,
    request_s: float,
    values: bool = True,
    places: Sequence[int] = (0, 1, 3),  # before its calls, between two, and behind them
) -> None:
    """Wherever a rank dies, the ranks end with the values of the unbroken run, and wait for none
    that lives."""
    whole = play(make_cluster, case, request_s)
    for where in places:
        began = time.monotonic()
        dying = case._replace(victim=victim, where=where)
        returned = play(make_cluster, dying, request_s)
        took = time.monotonic() - began
        for rank, (state, results, seen) in returned.items():
            assert (results, seen) == whole[rank][1:], (dying, rank)
            for name, value in state.items():
                expected = whole[0][0] if values else returned[0][0]
                assert torch.equal(value, expected[name]), (dying, rank, name)
        assert took < LIVE_S, dying


COMES_BACK = [
    *itertools.product(("own", "print own rate every", "epochs"), (2,), (1.0,)),
    *itertools.product(("print own", "loader", "range"), (1,), (1.0,)),
]
COMES_BACK_SLOW = [
    *itertools.product(("own rate", "print own rate", "print own every"), (1, 2), (1.0,)),
    *itertools.product(("own", "print own rate every", "epochs"), (1,), (1.0,)),
    *itertools.product(("print own", "loader", "range"), (2,), (1.0,)),
    *itertools.product(("own",), (1, 2), (10.0,)),
]


@pytest.mark.parametrize(
    ("loop", "optimizers", "request_s"),
    [*COMES_BACK, *(pytest.param(*each, marks=pytest.mark.slow) for each in COMES_BACK_SLOW)],
)
def test_rank_that_comes_back_goes_on_with_the_collectives_of_its_step(
    make_cluster: MakeCluster, loop: str, optimizers: int, request_s: float
) -> None:
    check(make_cluster, Case(loop, "barrier", optimizers), 1, request_s)
    check(make_cluster, Case(loop, "all_reduce", optimizers), optimizers - 1, request_s)
    check(make_cluster, Case(loop, "assign", optimizers), 1, request_s)


@pytest.mark.parametrize("loop", ["own turn", "loader turn"])
@pytest.mark.parametrize("victim", [0, 1])
def test_optimizers_that_step_in_turn_have_the_collectives_of_their_step(
    make_cluster: MakeCluster, loop: str, victim: int
) -> None:
    """The clock of one optimizer is the same before several steps."""
    check(make_cluster, Case(loop, "all_reduce", 2), victim, 1.0)


@pytest.mark.parametrize("loop", ["drawn range", "drawn epochs"])
def test_call_between_iter_and_the_first_batch_is_one_before_the_pass(
    make_cluster: MakeCluster, loop: str
) -> None:
    """Also where the next incarnation goes on within that pass: its steps count from the first
    batch that it asks for."""
    case = Case(loop, "all_reduce", 1)
    check(make_cluster, case, 1, 1.0, places=(0, 1, 3, IN_PASS))


@pytest.mark.parametrize("loop", ["own", "print own", "print own rate", "print own every"])
def test_rank_that_comes_back_makes_only_the_collectives_of_its_setup(
    make_cluster: MakeCluster, loop: str
) -> None:
    check(make_cluster, Case(loop, "none", 1), 1, 1.0)


@pytest.mark.parametrize(
    "loop",
    [
        *("own behind", "loader behind", "epochs both"),
        *(
            pytest.param(loop, marks=pytest.mark.slow)
            for loop in ("print own behind rate", "print own behind every", "epochs behind")
        ),
    ],
)
def test_rank_that_has_left_out_collectives_is_not_waited_for_in_them(
    make_cluster: MakeCluster, loop: str
) -> None:
    """It died behind a step, or an epoch, whose calls its next incarnation does not make."""
    check(make_cluster, Case(loop, "barrier", 2), 1, 1.0)
    check(make_cluster, Case(loop, "assign", 1), 1, 1.0, values=False)


@pytest.mark.filterwarnings("ignore:rank 0 was started again, and worker.assign")
@pytest.mark.parametrize("loop", ["own", "epochs"])
def test_ranks_have_the_same_values_where_an_assignment_of_rank_0_is_lost(
    make_cluster: MakeCluster, loop: str
) -> None:
    check(make_cluster, Case(loop, "assign", 2), 0, 1.0, values=False)


@pytest.mark.parametrize("loop", ["own both", "loader both"])
@pytest.mark.parametrize("where", [0, 1])
def test_calls_before_a_step_and_behind_it_that_cannot_be_told_apart_end_the_run(
    make_cluster: MakeCluster, loop: str, where: int
) -> None:
    """It died behind a step, and its next incarnation makes only the calls before the next one."""
    ranks = start(make_cluster, Case(loop, "barrier", 1, 1, where))
    with pytest.raises(CollectiveMismatch, match="make all collectives before the step, or all"):
        ranks.until(lambda: len(ranks.returned) == 2)


@pytest.mark.filterwarnings("ignore:.* ended without rank 1, which was started again")
@pytest.mark.parametrize("where", [0, 1])
def test_clock_that_is_asked_for_before_the_calls_of_the_setup_ends_the_run_with_the_way_out(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, where: int
) -> None:
    monkeypatch.setattr(timeouts, "SAY_S", 0.2)
    monkeypatch.setattr(timeouts, "LOOK_S", 0.4)
    monkeypatch.setattr(collectives, "ASK_S", 0.2)

    def train(worker: ps.Worker) -> None:
        worker.client.define("w", np.zeros(2), rule=ps.Add())
        start = worker.clock
        worker.all_reduce(-1.0)
        for number in range(start, STEPS):
            for which in range(2):
                if (worker.rank, worker.incarnation, number, which) == (1, 1, DIES_AT, where):
                    worker.client.drain()
                    raise Killed
                if which == 0:
                    worker.all_reduce(float(number))
            worker.client.push_pull({"w": np.ones(2)}, tick=True)

    deadlines = structs.replace(DEADLINES, request_s=1.0)
    cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync(), deadlines=deadlines)
    ranks = Ranks(cluster, train).start(0, 1)
    with pytest.raises(ParamServeError) as raised:
        ranks.until(lambda: len(ranks.returned) == 2)
    assert "behind" in raised.value.fix
    assert "of the setup" in raised.value.fix


def test_stream_that_goes_on_where_it_was_saved_hears_of_its_end(make_cluster: MakeCluster) -> None:
    """Rank 1 dies behind its last batch, and asks nothing but what it has saved."""

    def train(worker: ps.Worker) -> int:
        worker.client.define("w", np.zeros(2), rule=ps.Add())
        at = worker.saved("at", 0)
        while worker.all_reduce(at < 3, "min"):
            assert at < 3
            at += 1
            worker.save("at", at)
            worker.client.push_pull({"w": np.ones(2)}, tick=True)
            if (worker.rank, worker.incarnation, at) == (1, 1, 3):
                raise Killed
        return at

    cluster = make_cluster(workers=2, restarts=True, policy=ps.Sync())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "worker.all_reduce.. ended without rank 1")
        assert Ranks(cluster, train).start(0, 1).end() == {0: 3, 1: 3}

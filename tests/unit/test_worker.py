"""What a training function is given, and what happens around it."""

from __future__ import annotations

import random
import sys
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
from tests.suites import each_case

from paramserve import seeding
from paramserve.client.staging import Staging
from paramserve.config import Credentials
from paramserve.consistency.base import Policy
from paramserve.consistency.built_in import Async, ElasticAverage, LocalSteps
from paramserve.consistency.registry import PolicyTraits
from paramserve.engine.child import Bootstrap
from paramserve.observe.history import History
from paramserve.worker import Resumed, Worker, WorkerConfig, main
from paramserve.worker import process as worker_module


class RecordsCalls:
    """A client that has no connection and notes what is asked of it."""

    def __init__(self, rank: int = 1) -> None:
        self.rank = rank
        self.workers = 3
        self.incarnation = 1
        self.repeated = 0
        self.retiring = self.restarts = False
        self.resumed: dict[str, int] = {}
        self.clocks = {"default": 4, "model": 7}
        self.connection = self.steps = self.saving = self
        self.staged = Staging()
        self.calls: list[Any] = []
        self.policies: dict[str, Policy] = {}

    def terms(self, group: str) -> PolicyTraits:
        policy = self.policies.get(group, Async())
        return PolicyTraits(policy.collects, policy.on_nonfinite == "refuse", policy)

    def clock(self, group: str = "default") -> int:
        return self.clocks.get(group, 0)

    def log(self, clock: int, values: dict[str, float]) -> None:
        assert clock == 7
        self.calls.append(("log", values))

    def send_log(self) -> None:
        self.calls.append("send log")

    def tell_saved(self) -> None:
        """Nothing was saved."""

    def drain(self) -> None:
        self.calls.append("drain")

    def latest(self, name: str) -> bytes:
        return b""

    def ask(self, name: str, function: object) -> None:
        """No step is made."""

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def client() -> RecordsCalls:
    return RecordsCalls()


@pytest.fixture
def worker(client: RecordsCalls) -> Worker:
    return Worker(client, seed=5)  # a fake


def test_worker_is_who_its_client_is(worker: Worker) -> None:
    assert (worker.rank, worker.workers, worker.incarnation, worker.seed) == (1, 3, 1, 5)
    assert repr(worker) == "Worker(rank=1, workers=3)"


def test_clock_is_the_optimizers_once_there_is_one(worker: Worker, client: RecordsCalls) -> None:
    client.clocks = {"default": 4, "lm": 9}
    assert worker.clock == 4
    worker.optimizers.adopt("lm", [], History(), lambda: None)
    assert worker.clock == 9


def test_clock_is_the_models_before_the_optimizer_is_adopted(worker: Worker) -> None:
    assert worker.clock == 7, "of an older incarnation"
    worker.optimizers.adopt("model", [], History(), lambda: None)
    assert worker.clock == 7


@pytest.mark.parametrize(("incarnation", "before"), [(1, 0), (2, 7)])
def test_steps_before_are_those_of_older_incarnations(
    worker: Worker, client: RecordsCalls, incarnation: int, before: int
) -> None:
    client.incarnation = incarnation
    assert worker.course.steps_left == before
    worker.course.steps_left -= before
    client.clocks["model"] += 5
    assert worker.course.steps_left == 0, "its own steps are not left out"


@pytest.mark.parametrize("policy", [LocalSteps(every=8), ElasticAverage(rho=0.1, every=8)])
def test_batches_per_step_are_the_own_steps_of_the_optimizers_group(
    worker: Worker, client: RecordsCalls, policy: Policy
) -> None:
    client.policies["lm"] = policy
    assert worker.optimizers.batches_per_step == 1, "no optimizer steps there yet"
    worker.optimizers.adopt("lm", [], History(), lambda: None)
    assert worker.optimizers.batches_per_step == 8


class LikeATensor:
    def item(self) -> float:
        return 0.5


@each_case(
    ("value", "logged"), [(1, 1.0), (0.25, 0.25), (np.float32(2), 2.0), (LikeATensor(), 0.5)]
)
def test_log_takes_numbers_of_every_kind(
    worker: Worker, client: RecordsCalls, value: Any, logged: float
) -> None:
    worker.log(loss=value)
    assert client.calls.pop() == ("log", {"loss": logged})
    assert client.calls == []


class LikeATensorOfThree:
    def item(self) -> float:
        raise RuntimeError("a Tensor with 3 elements cannot be converted to Scalar")


@each_case("value", ["high", None, [1.0], np.zeros(3), np.zeros(0), LikeATensorOfThree()])
def test_log_refuses_what_is_no_number_and_names_it(
    worker: Worker, client: RecordsCalls, value: Any
) -> None:
    with pytest.raises(TypeError, match="loss is"):
        worker.log(loss=value)
    assert client.calls == []


def test_log_refuses_an_int_that_no_float_can_hold(worker: Worker, client: RecordsCalls) -> None:
    with pytest.raises(ValueError, match="loss is too large"):
        worker.log(loss=10**400)
    assert client.calls == []


@each_case("name", ["", "red\x1b[31m", "two\nlines", "x" * 513])
def test_log_refuses_a_name_that_define_refuses(
    worker: Worker, client: RecordsCalls, name: str
) -> None:
    with pytest.raises(ValueError, match=r"worker\.log: the name .* has control characters"):
        worker.log(**{"loss": 1.0, name: 2.0})
    assert client.calls == []


def test_finish_installs_then_waits_then_leaves(worker: Worker, client: RecordsCalls) -> None:
    worker.optimizers.finish_by(lambda: client.calls.append("first"))
    worker.optimizers.finish_by(lambda: client.calls.append("second"))
    worker.finish()
    assert client.calls == ["first", "second", "drain", "close"]


def test_finish_warns_of_values_that_no_optimizer_took(
    worker: Worker, client: RecordsCalls
) -> None:
    worker.load_state = {"critic": {}}
    worker.finish()  # every rank has them, and rank 0 tells
    client.rank = 0
    with pytest.warns(UserWarning, match=r"not loaded .* \(critic\): no worker.optimizer"):
        worker.finish()


# --- the entry -----------------------------------------------------------------------------------


def run_main(
    monkeypatch: pytest.MonkeyPatch,
    client: RecordsCalls,
    function: Any,
    *args: Any,
    **kwargs: Any,
) -> list[tuple[str, bytes]]:
    """Run the entry in this process; returns what it reports."""
    reports: list[tuple[str, bytes]] = []

    def connect(
        addresses: tuple[str, ...], credentials: Credentials, *, rank: int, **more: Any
    ) -> RecordsCalls:
        assert (addresses, credentials.token, rank) == (("unix:/nowhere",), b"token", 1)
        return client

    def report(kind: str, body: bytes) -> None:
        client.calls.append(kind)
        reports.append((kind, body))

    monkeypatch.setattr(worker_module.Connection, "join", connect)
    monkeypatch.setattr(worker_module, "Client", lambda connection: connection)
    payload = msgspec.msgpack.encode(WorkerConfig(1, ("unix:/nowhere",), 17))
    state, legacy, finders = random.getstate(), np.random.get_state(), list(sys.meta_path)
    try:
        main(
            Bootstrap(
                "worker 1",
                payload,
                Credentials(b"token").encode(),
                report,
                on_orphaned=lambda callback: None,
                on_stop=lambda callback: None,
                load=lambda: (function, args, kwargs),
            )
        )
    finally:
        random.setstate(state)
        np.random.set_state(legacy)
        sys.meta_path[:] = finders  # without the one that would seed torch
    return reports


def test_main_reports_what_the_function_returned_after_leaving(
    monkeypatch: pytest.MonkeyPatch, client: RecordsCalls
) -> None:
    def train(worker: Worker, a: int, *, b: int) -> dict[str, int]:
        return {"rank": worker.rank, "sum": a + b}

    reports = run_main(monkeypatch, client, train, 1, b=2)
    assert client.calls == ["ready", "drain", "close", "returned"]
    assert cloudpickle.loads(reports[-1][1]) == {"rank": 1, "sum": 3}


def test_main_of_a_later_incarnation_reports_where_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, client: RecordsCalls
) -> None:
    client.incarnation, client.repeated = 3, 2
    reports = dict(run_main(monkeypatch, client, lambda worker: worker.clock))
    assert client.calls[:2] == ["ready", "resumed"]
    assert msgspec.msgpack.decode(reports["resumed"], type=Resumed) == Resumed(3, 7, 2)
    assert cloudpickle.loads(reports["returned"]) == 7


def test_main_seeds_the_generators_by_rank(
    monkeypatch: pytest.MonkeyPatch, client: RecordsCalls
) -> None:
    def train(worker: Worker) -> tuple[float, float]:
        return random.random(), float(np.random.rand())

    first = cloudpickle.loads(run_main(monkeypatch, client, train)[-1][1])
    assert cloudpickle.loads(run_main(monkeypatch, client, train)[-1][1]) == first
    assert random.Random(seeding.rank_seed(17, 1)).random() == first[0]


def test_main_function_that_raises_does_not_leave_as_if_done(
    monkeypatch: pytest.MonkeyPatch, client: RecordsCalls
) -> None:
    def train(worker: Worker) -> None:
        raise LookupError("no data")

    with pytest.raises(LookupError):
        run_main(monkeypatch, client, train)
    assert client.calls == ["ready", "send log"]


def test_main_return_value_that_cannot_be_pickled_is_an_error(
    monkeypatch: pytest.MonkeyPatch, client: RecordsCalls
) -> None:
    def train(worker: Worker) -> Any:
        return (each for each in ())

    with pytest.raises(TypeError, match="what the training function returned"):
        run_main(monkeypatch, client, train)
    assert "close" not in client.calls

"""Another number of workers while a run goes on; engine and coordinator here are puppets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.role_cluster import wait_until
from tests.unit.launch.puppets import PLAN, Puppets, started

from paramserve.config import Deadlines
from paramserve.errors import CannotPlace, CoordinatorGone, ParamServeError, Timeout
from paramserve.launch import supervisor as module
from paramserve.launch.entries import Key
from paramserve.messages import Failed, Ok


class Coordinator:
    """The line to a coordinator that agrees, unless `says` is something else."""

    status = None
    error = None
    dropped_records = 0

    def __init__(self, *settings: object) -> None:
        self.addresses: tuple[str, ...] = ()
        self.says: Callable[[int], Ok | Failed | None] = Ok
        self.asked: list[int] = []
        self.dead: list[tuple[int, int]] = []
        self.records: list[Any] = []
        self.latest: dict[str, float] = {}

    def tick(self, now: float) -> None: ...
    def ask_now(self, now: float, timeout_s: float) -> None: ...
    def forget(self, call: int) -> None: ...
    def close(self) -> None: ...

    def silent(self, now: float) -> dict[Any, int]:
        return {}

    def mark_dead(self, rank: int, *, final: bool = True, incarnation: int = 0) -> None:
        self.dead.append((rank, incarnation))

    def scale(self, workers: int) -> int:
        self.asked.append(workers)
        return len(self.asked)

    def answer(self, call: int, timeout_s: float = 0.0) -> Ok | Failed | None:
        return self.says(call)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Two workers that are up, and the line to their coordinator."""
    monkeypatch.setattr(module, "Overview", Coordinator)
    deadlines = Deadlines(request_s=0.02, retire_s=0.02, stop_s=0.02)
    engine = Puppets()
    supervisor = started(replace(PLAN, deadlines=deadlines), engine)
    engine.serve("worker 0", "worker 1")
    yield SimpleNamespace(supervisor=supervisor, engine=engine, coordinator=supervisor.overview)
    supervisor.abandon()


def test_scale_up_asks_the_coordinator_then_launches_the_same_function(
    run: SimpleNamespace,
) -> None:
    run.supervisor.scale(4)
    assert run.coordinator.asked == [4]
    assert [role.name for role in run.engine.roles][-2:] == ["worker 2", "worker 3"]
    assert run.engine.roles[-1].code == b"the function"
    assert run.engine.roles[-1].payload == f"3 at {run.supervisor.addresses}".encode()
    assert run.engine.kept == ["worker 2", "worker 3"]
    assert run.supervisor.roster.worker_states()[3] == "starting"


def test_scale_down_ends_who_stays_too_long_and_says_so(run: SimpleNamespace) -> None:
    stubborn = run.engine.processes["worker 1"]
    stubborn.deaf = True
    wait_until(lambda: run.supervisor.roster.entries[Key("worker", 1)].ready)
    run.supervisor.scale(1)
    wait_until(lambda: run.supervisor.roster.worker_states()[1] == "retired")
    wait_until(lambda: (1, 1) in run.coordinator.dead)
    assert stubborn.asked == ["interrupt", "kill"]
    assert run.supervisor.state == "running"
    assert run.supervisor.failures == {}


def test_scale_up_again_launches_when_the_old_process_has_ended(run: SimpleNamespace) -> None:
    old = run.engine.processes["worker 1"]
    wait_until(lambda: run.supervisor.roster.entries[Key("worker", 1)].ready)
    run.supervisor.scale(1)
    run.supervisor.scale(2)
    old.end(0)
    wait_until(lambda: run.engine.processes["worker 1"] is not old)
    assert run.coordinator.dead == [(1, 1)]
    assert run.supervisor.roster.worker_states() == {0: "running", 1: "starting"}
    assert run.engine.kept == ["worker 1"]


def test_scale_without_room_changes_nothing(run: SimpleNamespace) -> None:
    run.engine.room = 1
    with pytest.raises(CannotPlace, match="the machine is full"):
        run.supervisor.scale(4)
    assert run.coordinator.asked == []
    assert run.supervisor.roster.target == 2
    run.supervisor.scale(3)
    assert run.supervisor.roster.target == 3


def test_scale_that_the_coordinator_refuses_changes_nothing(run: SimpleNamespace) -> None:
    run.coordinator.says = lambda call: Failed(call, "ParamServeError", "no more", "no", "stop")
    with pytest.raises(ParamServeError, match="no more"):
        run.supervisor.scale(3)
    assert run.supervisor.roster.target == 2
    assert "worker 2" not in run.engine.processes
    assert run.engine.kept == []


def test_scale_without_an_answer_says_that_it_is_unknown(run: SimpleNamespace) -> None:
    run.coordinator.says = lambda call: None
    with pytest.raises(Timeout, match="has not agreed to 3 workers") as told:
        run.supervisor.scale(3)
    assert told.value.applied == "unknown"
    assert run.engine.kept == []


def test_scale_with_a_broken_line_says_that_the_coordinator_is_gone(run: SimpleNamespace) -> None:
    def broken(call: int) -> None:
        raise ConnectionResetError("reset")

    run.coordinator.says = broken
    with pytest.raises(CoordinatorGone, match="not scaled to 3 workers"):
        run.supervisor.scale(3)


def test_scale_whose_process_cannot_start_is_taken_back(run: SimpleNamespace) -> None:
    run.engine.fails_at = "worker 3"
    with pytest.raises(ParamServeError, match="could not be started: no more processes"):
        run.supervisor.scale(4)
    assert run.coordinator.asked == [4, 2]
    assert run.engine.processes["worker 2"].asked == ["kill"]
    assert run.engine.kept == []
    assert run.supervisor.roster.worker_states() == {0: "running", 1: "running"}
    run.engine.fails_at = ""
    run.supervisor.scale(3)
    assert run.supervisor.roster.target == 3


def test_scale_of_a_run_that_ends_meanwhile_is_refused_and_leaves_no_one_waiting(
    run: SimpleNamespace,
) -> None:
    def falls(call: int) -> None:
        run.engine.processes["server 0"].end(-11)

    run.coordinator.says = falls
    with pytest.raises(ParamServeError, match=r"not scaled to 3 workers: it ends .*SIGSEGV"):
        run.supervisor.scale(3)


def test_scale_of_a_run_that_is_stopped_meanwhile_is_refused_before_its_values_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Overview", Coordinator)
    engine, refused, read = Puppets(), threading.Event(), threading.Event()

    def collect(attempt: Any) -> None:
        refused.wait(5.0)
        read.set()

    supervisor = started(replace(PLAN, deadlines=Deadlines()), engine, collect=collect)
    engine.serve("worker 0", "worker 1")
    coordinator: Any = supervisor.overview
    coordinator.says = lambda call: supervisor.stop()
    with pytest.raises(ParamServeError, match="not scaled to 3 workers: it ends"):
        supervisor.scale(3)
    assert not read.is_set()
    refused.set()
    supervisor.abandon()


@pytest.mark.parametrize("how", ["stop", "abandon"])
def test_scale_after_the_end_is_refused(run: SimpleNamespace, how: str) -> None:
    getattr(run.supervisor, how)()
    assert run.supervisor.ended.wait(10.0)
    with pytest.raises(ParamServeError, match="not scaled to 3 workers: it is stopped") as told:
        run.supervisor.scale(3)
    assert told.value.applied == "no"

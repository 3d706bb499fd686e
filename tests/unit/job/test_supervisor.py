"""What the supervisor does to an engine's processes; the engine here starts none."""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from paramserve.config import Credentials, Deadlines, PolicySpec
from paramserve.engine.base import Ended, Event, Process, Reported, Role
from paramserve.errors import CannotPlace, CoordinatorGone, ParamServeError, ServerGone, Timeout
from paramserve.job import supervisor as module
from paramserve.job.plan import Plan
from paramserve.job.roster import Key
from paramserve.job.supervisor import Supervisor
from paramserve.messages import Failed, Ok

PLAN = Plan(
    servers=1,
    workers=2,
    consistency=PolicySpec("Async"),
    worker_payload=lambda rank, addresses: f"{rank} at {addresses}".encode(),
    worker_code=b"the function",
    threads_per_worker=3,
)


class Puppet:
    """A process that ends when it is told to."""

    pid = 0
    why = ""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exit_status: int | None = None
        self.asked: list[str] = []
        self.deaf = False

    def interrupt(self) -> None:
        self.asked.append("interrupt")
        if not self.deaf:
            self.end(143)

    def kill(self) -> None:
        self.asked.append("kill")
        self.end(-9)

    def end(self, status: int) -> None:
        if self.exit_status is None:
            self.exit_status = status

    def wait(self, timeout_s: float) -> int | None:
        return self.exit_status


class Puppets:
    """An engine and its fleet: runs nothing; fails where it is told to."""

    plain = False
    room_s = 0.0
    tls = None

    def __init__(
        self, fails_at: str = "", close_fails: bool = False, shares_host: bool = True
    ) -> None:
        self.shares_host = shares_host
        self.fails_at = fails_at
        self.close_fails = close_fails
        self.roles: list[Role] = []
        self.processes: dict[str, Puppet] = {}
        self.told: set[Process] = set()
        self.closed = threading.Event()
        self.reports: deque[Event] = deque()
        self.room = 99
        self.kept: list[str] = []
        """Names for which room was made and not given back."""

    def open(self, roles: Sequence[str] = ()) -> Puppets:
        self.opened_for = list(roles)
        return self

    def launch(self, role: Role) -> Process:
        if role.name == self.fails_at:
            raise OSError("no more processes")
        self.roles.append(role)
        self.processes[role.name] = Puppet(role.name)
        return self.processes[role.name]

    def make_room(self, roles: Sequence[Role]) -> None:
        if len(roles) > self.room:
            raise CannotPlace("the machine is full", fix="wait")
        self.kept += [role.name for role in roles]

    def give_back(self, names: Sequence[str]) -> None:
        self.kept = [name for name in self.kept if name not in names]

    def report(self, name: str, kind: str, body: bytes = b"") -> None:
        self.reports.append(Reported(self.processes[name], kind, body))

    def serve(self, *workers: str) -> None:
        """Let coordinator and servers be up, and these workers."""
        for name in self.processes:
            if not name.startswith("worker") or name in workers:
                self.report(name, "ready", msgspec.msgpack.encode(1))

    def events(self, timeout_s: float) -> Sequence[Event]:
        found: list[Event] = []
        while self.reports:
            found.append(self.reports.popleft())
        for process in list(self.processes.values()):
            if process.exit_status is not None and process not in self.told:
                self.told.add(process)
                found.append(Ended(process, process.exit_status))
        if not found:
            threading.Event().wait(min(timeout_s, 0.001))
        return found

    def close(self) -> None:
        self.closed.set()
        if self.close_fails:
            raise LookupError("close")


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_roles_say_what_to_start_and_keep_the_token_to_themselves() -> None:
    engine = Puppets()
    supervisor = Supervisor(PLAN, engine)
    supervisor.abandon()
    assert [(role.name, role.entry) for role in engine.roles] == [
        ("coordinator", "paramserve.coordinator:main"),
        ("server 0", "paramserve.server:main"),
        ("worker 0", "paramserve.worker:main"),
        ("worker 1", "paramserve.worker:main"),
    ]
    assert [role.environment["OMP_NUM_THREADS"] for role in engine.roles] == ["1", "1", "3", "3"]
    assert engine.roles[3].payload == f"1 at {supervisor.addresses}".encode()
    assert len({role.secret for role in engine.roles}) == 1
    assert len(Credentials.decode(engine.roles[0].secret).token) == 32
    assert [role.code for role in engine.roles] == [b"", b"", b"the function", b"the function"]
    assert engine.opened_for == ["coordinator", "server 0", "worker 0", "worker 1"]
    for role in engine.roles:
        assert role.secret not in role.payload
        assert role.secret.hex() not in repr(role) + str(role.environment)


def test_launch_that_fails_leaves_nothing(tmp_path: Path) -> None:
    engine = Puppets(fails_at="worker 1")
    with pytest.raises(OSError, match="no more processes"):
        Supervisor(PLAN, engine)
    assert engine.closed.is_set()
    assert list(tmp_path.iterdir()) == []


def test_failed_process_ends_the_others_and_removes_the_folder(tmp_path: Path) -> None:
    engine = Puppets()
    supervisor = Supervisor(PLAN, engine)
    assert len(list(tmp_path.iterdir())) == 1
    engine.processes["server 0"].end(-11)
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, ServerGone)
    assert "server 0 was killed by SIGSEGV" in str(supervisor.error)
    for name in ("coordinator", "worker 0", "worker 1"):
        assert engine.processes[name].asked[0] == "interrupt"
    assert engine.closed.is_set()
    assert list(tmp_path.iterdir()) == []
    assert supervisor.state == "failed"
    with pytest.raises(ServerGone):
        supervisor.connect()


def forget_fails() -> None:
    raise LookupError("forget")


@pytest.mark.parametrize("broken", ["close", "forget"])
def test_cleanup_that_fails_is_the_error_and_keeps_nobody_waiting(
    tmp_path: Path, broken: str
) -> None:
    engine = Puppets(close_fails=broken == "close")
    supervisor = Supervisor(PLAN, engine, forget=forget_fails if broken == "forget" else None)
    supervisor.stop()
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, LookupError)
    assert str(supervisor.error) == broken
    assert supervisor.state == "failed"
    assert engine.closed.is_set()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LookupError):
        supervisor.connect()


def test_cleanup_that_fails_does_not_hide_why_the_run_ended() -> None:
    engine = Puppets(close_fails=True)
    supervisor = Supervisor(PLAN, engine, forget=forget_fails)
    engine.processes["server 0"].end(-11)
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, ServerGone)


class NotesItsEnd:
    """A client that notes what it is closed for."""

    def __init__(self) -> None:
        self.reasons: list[ParamServeError | None] = []

    def close(self, reason: ParamServeError | None = None) -> None:
        self.reasons.append(reason)


@pytest.mark.parametrize("failed", [True, False])
def test_clients_are_closed_with_the_error_of_the_run(failed: bool) -> None:
    engine, client = Puppets(), NotesItsEnd()
    supervisor = Supervisor(PLAN, engine)
    supervisor._clients.append(client)  # type: ignore[arg-type] # a fake
    if failed:
        engine.processes["server 0"].end(-11)
    else:
        supervisor.stop()
    assert supervisor.ended.wait(10.0)
    assert client.reasons == [supervisor.error]
    assert (supervisor.error is not None) is failed


def test_folder_is_short_enough_for_sockets_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    supervisor = Supervisor(PLAN, Puppets())
    supervisor.abandon()
    assert len(supervisor.addresses[0].removeprefix("unix:")) <= 107


# --- another number of workers ----------------------------------------------------------------


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
    supervisor = Supervisor(replace(PLAN, deadlines=deadlines), engine)
    engine.serve("worker 0", "worker 1")
    yield SimpleNamespace(supervisor=supervisor, engine=engine, coordinator=supervisor.overview)
    supervisor.abandon()


def until(true: Callable[[], object]) -> None:
    for _ in range(10_000):
        if true():
            return
        threading.Event().wait(0.001)
    raise AssertionError("it never came")


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
    until(lambda: run.supervisor.roster.entries[Key("worker", 1)].ready)
    run.supervisor.scale(1)
    until(lambda: run.supervisor.roster.worker_states()[1] == "retired")
    until(lambda: (1, 1) in run.coordinator.dead)
    assert stubborn.asked == ["interrupt", "kill"]
    assert run.supervisor.state == "running"
    assert run.supervisor.failures == {}


def test_scale_up_again_launches_when_the_old_process_has_ended(run: SimpleNamespace) -> None:
    old = run.engine.processes["worker 1"]
    until(lambda: run.supervisor.roster.entries[Key("worker", 1)].ready)
    run.supervisor.scale(1)
    run.supervisor.scale(2)
    old.end(0)
    until(lambda: run.engine.processes["worker 1"] is not old)
    assert run.coordinator.dead == [(1, 1)]
    assert run.supervisor.roster.worker_states() == {0: "running", 1: "starting"}
    assert run.engine.kept == ["worker 1"]


def test_scale_without_room_changes_nothing(run: SimpleNamespace) -> None:
    run.engine.room = 1
    with pytest.raises(CannotPlace, match="the machine is full"):
        run.supervisor.scale(4)
    assert run.coordinator.asked == []
    assert run.supervisor.roster.wanted == 2
    run.supervisor.scale(3)
    assert run.supervisor.roster.wanted == 3


def test_scale_that_the_coordinator_refuses_changes_nothing(run: SimpleNamespace) -> None:
    run.coordinator.says = lambda call: Failed(call, "ParamServeError", "no more", "no", "stop")
    with pytest.raises(ParamServeError, match="no more"):
        run.supervisor.scale(3)
    assert run.supervisor.roster.wanted == 2
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
    assert run.supervisor.roster.wanted == 3


def test_scale_of_a_run_that_ends_meanwhile_is_refused_and_keeps_nobody_waiting(
    run: SimpleNamespace,
) -> None:
    def falls(call: int) -> None:
        run.engine.processes["server 0"].end(-11)

    run.coordinator.says = falls
    with pytest.raises(ParamServeError, match=r"not scaled to 3 workers: it ends .*SIGSEGV"):
        run.supervisor.scale(3)


@pytest.mark.parametrize("how", ["stop", "abandon"])
def test_scale_after_the_end_is_refused(run: SimpleNamespace, how: str) -> None:
    getattr(run.supervisor, how)()
    assert run.supervisor.ended.wait(10.0)
    with pytest.raises(ParamServeError, match="not scaled to 3 workers: it is stopped") as told:
        run.supervisor.scale(3)
    assert told.value.applied == "no"


def test_run_that_was_scaled_ends_when_all_have_returned(run: SimpleNamespace) -> None:
    run.supervisor.scale(3)
    for name in ("worker 0", "worker 1", "worker 2"):
        run.engine.report(name, "returned")
    assert run.supervisor.ended.wait(10.0)
    assert run.supervisor.state == "finished"

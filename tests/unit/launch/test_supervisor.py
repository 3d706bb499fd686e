"""What the supervisor does to an engine's processes; the engine here starts none."""

from __future__ import annotations

import io
import re
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.contract.role_cluster import wait_until
from tests.suites import each_case
from tests.unit.launch.puppets import PLAN, Puppets, started

from paramserve.config import Credentials, Deadlines
from paramserve.errors import ClientClosed, ParamServeError, ServerGone, WorkerFailed
from paramserve.launch import supervisor as module
from paramserve.launch.attempt import Attempt
from paramserve.launch.roster import Restart
from paramserve.launch.supervisor import Supervisor
from paramserve.observe import watch
from paramserve.observe.status import RunStatus

pytestmark = pytest.mark.usefixtures("_no_coordinator_is_waited_for")


def test_roles_say_what_to_start_and_keep_the_token_to_themselves() -> None:
    engine = Puppets()
    supervisor = started(PLAN, engine)
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
        started(PLAN, engine)
    assert engine.closed.is_set()
    assert list(tmp_path.iterdir()) == []


@each_case("where", ["Thread.start", "os.mkdir", "atexit.register"])
def test_start_that_an_exception_leaves_leaves_nothing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Puppets()
    holder: Any = module
    *path, name = ("threading." * (where == "Thread.start") + where).split(".")
    for part in path:
        holder = getattr(holder, part)
    real = getattr(holder, name)

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    monkeypatch.setattr(holder, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        started(PLAN, engine)
    monkeypatch.undo()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert engine.closed.is_set()
    assert {process.exit_status for process in engine.processes.values()} <= {143}
    assert not list(tmp_path.glob("paramserve-*"))


def test_failed_process_ends_the_others_and_removes_the_folder(tmp_path: Path) -> None:
    engine = Puppets()
    supervisor = started(PLAN, engine)
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


class Reads:
    """What a run does to keep its values: notes which processes had been told to end by then."""

    def __init__(self, engine: Puppets) -> None:
        self.told: list[str] | None = None
        self._engine = engine

    def __call__(self, attempt: Attempt) -> None:
        self.told = [name for name, each in self._engine.processes.items() if each.asked]


def test_run_that_fails_is_read_before_its_servers_end() -> None:
    engine = Puppets()
    reads = Reads(engine)
    supervisor = started(PLAN, engine, collect=reads)
    engine.serve("worker 0", "worker 1")
    engine.processes["worker 1"].end(-11)
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, WorkerFailed)
    assert reads.told == ["worker 0"], "the other one has ended"
    assert (supervisor.state, supervisor.ended_early) == ("failed", True)
    assert engine.processes["server 0"].exit_status == 143


def test_worker_that_has_returned_may_end_in_order_also_where_another_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = Puppets()
    plan = replace(PLAN, deadlines=Deadlines(exit_s=0.05))
    supervisor = started(plan, engine, collect=Reads(engine))
    engine.serve("worker 0", "worker 1")
    engine.processes["worker 0"].deaf = True
    engine.report("worker 0", "returned", b"")
    engine.processes["worker 1"].end(-11)
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, WorkerFailed)
    assert "worker 0 still ran 0.05 s after the end of its function" in capsys.readouterr().err


class Stands:
    """What is watched: a line of progress that does not change."""

    def status(self) -> RunStatus:
        return RunStatus("running", 1.0, {0: "running"}, {}, {})


def test_worker_that_is_started_again_is_told_at_once_above_the_line_of_progress() -> None:
    engine, out = Puppets(), io.StringIO()
    with watch(Stands(), every_s=0.01, console=Console(file=out, force_terminal=True, width=120)):
        supervisor = started(replace(PLAN, on_worker_death=Restart(2)), engine)
        engine.serve("worker 0", "worker 1")
        wait_until(lambda: "running" in out.getvalue())  # a line is there, for others to come above
        for _ in range(2):
            dead = engine.processes["worker 1"]
            dead.end(-11)
            wait_until(lambda dead=dead: engine.processes["worker 1"] is not dead)
        engine.processes["worker 1"].end(-11)
        assert supervisor.ended.wait(10.0)
    lines = re.split(r"\r\x1b\[2K|\n", out.getvalue())  # on a terminal: what erases a line ends it
    shown = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in lines]
    told = "paramserve: worker 1 was killed by SIGSEGV; it is started again"
    assert [line for line in shown if "SIGSEGV" in line] == [f"{told} (1 of 2)", f"{told} (2 of 2)"]
    assert isinstance(supervisor.error, WorkerFailed)


def forget_fails() -> None:
    raise LookupError("forget")


@each_case("broken", ["close", "forget"])
def test_cleanup_that_fails_is_the_error_and_leaves_no_one_waiting(
    tmp_path: Path, broken: str
) -> None:
    engine = Puppets(close_fails=broken == "close")
    supervisor = started(PLAN, engine, forget=forget_fails if broken == "forget" else None)
    supervisor.stop()
    assert supervisor.ended.wait(10.0)
    assert isinstance(supervisor.error, LookupError)
    assert str(supervisor.error) == broken
    assert supervisor.state == "failed"
    assert engine.closed.is_set()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(LookupError):
        supervisor.connect()


class NotesItsEnd:
    """A client that notes what it is closed for."""

    def __init__(self) -> None:
        self.reasons: list[ParamServeError | None] = []

    def close(self, reason: ParamServeError | None = None) -> None:
        self.reasons.append(reason)


@each_case("failed", [True, False])
def test_clients_are_closed_with_the_error_of_the_run(failed: bool) -> None:
    engine, client = Puppets(), NotesItsEnd()
    supervisor = started(PLAN, engine)
    clients: list[Any] = supervisor.attempt.clients
    clients.append(client)
    if failed:
        engine.processes["server 0"].end(-11)
    else:
        supervisor.stop()
    assert supervisor.ended.wait(10.0)
    (reason,) = client.reasons
    if failed:
        assert reason is supervisor.error
    else:
        assert isinstance(reason, ClientClosed)
        assert "was stopped" in str(reason)


def test_folder_is_short_enough_for_sockets_whatever_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    supervisor = started(PLAN, Puppets())
    supervisor.abandon()
    assert len(supervisor.addresses[0].removeprefix("unix:")) <= 107


def test_wait_for_another_attempt_ends_with_its_time() -> None:
    one: Any = SimpleNamespace(state="resuming", attempt=object(), ended=threading.Event())
    assert not Supervisor.goes_on(one, one.attempt, 0.05)
    assert Supervisor.goes_on(one, object(), 0.05)  # type: ignore[arg-type]

"""What the supervisor does to an engine's processes; the engine here starts none."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.unit.launch.puppets import PLAN, Puppets

from paramserve.config import Credentials
from paramserve.errors import ParamServeError, ServerGone
from paramserve.launch import supervisor as module
from paramserve.launch.supervisor import Supervisor


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


@pytest.mark.parametrize("where", ["Thread.start", "make_directory", "atexit.register"])
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
        Supervisor(PLAN, engine)
    monkeypatch.undo()
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
    assert engine.closed.is_set()
    assert {process.exit_status for process in engine.processes.values()} <= {143}
    assert not list(tmp_path.glob("paramserve-*")) or where == "make_directory"


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
def test_cleanup_that_fails_is_the_error_and_leaves_no_one_waiting(
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
    supervisor._clients.append(client)  # a fake
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

"""A run that goes on from a checkpoint when a server has ended; the engine here starts none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.checkpoint import sample
from tests.unit.launch.puppets import PLAN, Puppet, Puppets, started

from paramserve.checkpoint.folder import Folder
from paramserve.checkpoint.storage import LocalFolder
from paramserve.config import CoordinatorConfig, Deadlines, ServerConfig
from paramserve.engine.base import Failure
from paramserve.errors import CheckpointDamaged, CheckpointError, ParamServeError, ServerGone
from paramserve.launch import supervisor
from paramserve.launch.attempt import Attempt
from paramserve.launch.checkpoints import Checkpoint, Recovery, recovery_of
from paramserve.launch.supervisor import Supervisor
from paramserve.messages import CheckpointReport, GroupReport, ServerBeat, Status

pytestmark = pytest.mark.usefixtures("_no_coordinator_is_waited_for")


class Run:
    """A run of puppets that writes checkpoints to a folder."""

    def __init__(
        self, root: Path, resume: bool = False, strict: bool = False, **options: Any
    ) -> None:
        death = options.pop("on_server_death", "resume")
        settings = Checkpoint(root, strict=strict, on_server_death=death)
        recovery = recovery_of("train", settings, resume)
        assert recovery is not None
        self.recovery: Recovery = recovery
        self.engine = Puppets()
        self.forgotten = 0
        plan = replace(
            PLAN, checkpoints=recovery.plan(7), deadlines=options.pop("deadlines", Deadlines())
        )
        self.supervisor: Supervisor = started(
            plan, self.engine, recovery=recovery, forget=self._forget, **options
        )

    def _forget(self) -> None:
        self.forgotten += 1

    def write(self, *numbers: int) -> None:
        with Folder(LocalFolder(self.recovery.folder)).claimed(self.recovery.run) as folder:
            for number in numbers:
                sample.save(folder, number)

    def serve(self) -> None:
        """Let everything be up that is launched now."""
        roles = len(self.engine.roles)
        assert roles % 4 == 0
        self.engine.serve("worker 0", "worker 1")
        self.until(lambda: self.supervisor.state == "running")

    def return_workers(self) -> None:
        for name in ("worker 0", "worker 1"):
            self.engine.report(name, "returned", b"")
            self.engine.processes[name].end(0)

    def kill(self, name: str) -> None:
        """A process ends; everything is launched anew."""
        roles = len(self.engine.roles)
        self.engine.processes[name].end(-9)
        self.until(lambda: len(self.engine.roles) == roles + 4)

    def configs(self, attempt: int) -> tuple[CoordinatorConfig, ServerConfig]:
        """What coordinator and server were told."""
        of_coordinator, of_server, *_ = self.engine.roles[4 * attempt :]
        return (
            msgspec.msgpack.decode(of_coordinator.payload, type=CoordinatorConfig),
            msgspec.msgpack.decode(of_server.payload, type=ServerConfig),
        )

    def until(self, true: Callable[[], object]) -> None:
        for _ in range(10_000):
            if true():
                return
            threading.Event().wait(0.001)
        raise AssertionError(f"it never came: {self.supervisor.state}, {self.supervisor.error}")


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs = list[Run]()

    def begun(**options: Any) -> Run:
        runs.append(Run(tmp_path / "runs", **options))
        return runs[-1]

    yield begun
    for run in runs:
        run.supervisor.abandon()


def status(version: int, clock: int, **report: Any) -> Status:
    groups = GroupReport("model", version, ((0, clock), (1, clock + 1)), 0, ())
    untrained = GroupReport("model.buffers", 3, (), 0, ())
    return Status(
        1,
        (),
        (ServerBeat(0, (groups, untrained)),),
        (),
        (),
        0,
        checkpoints=CheckpointReport(**report),
    )


@pytest.mark.parametrize("lost", ["server 0", "coordinator"])
def test_run_goes_on_from_its_newest_checkpoint(
    begin: Callable[..., Run], lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin()
    run.serve()
    run.write(3, 4)
    run.supervisor.overview.status = status(17, 8, committed=2)
    run.kill(lost)
    first, second = run.configs(0), run.configs(1)
    for config in first:
        assert (config.checkpoints.resume, config.checkpoints.run) == ("", run.recovery.run)
    for config in second:
        assert config.checkpoints.resume == "step-4"
        assert config.checkpoints.resume_folder == config.checkpoints.folder == run.recovery.folder
        assert (config.checkpoints.run, config.checkpoints.seed) == (run.recovery.run, 7)
    assert {each.cluster for each in first}.isdisjoint(each.cluster for each in second)
    assert {each.directory for each in (*first, *second)} == {first[0].directory}
    assert len({role.secret for role in run.engine.roles}) == 1, "handles stay valid"
    assert run.forgotten == 1
    run.serve()
    (back,) = run.supervisor.rollbacks
    assert back.path == f"{run.recovery.folder}/step-4"
    assert isinstance(back.error, ParamServeError)
    assert f"{lost} was killed by SIGKILL" in str(back.error)
    assert (back.clocks_before, back.clocks, back.updates_lost) == ({"model": 8}, {"model": 4}, 17)
    run.until(lambda: run.supervisor.rollbacks[0].seconds > 0.0)
    assert "goes on from the checkpoint" in capsys.readouterr().err
    told = run.supervisor.checkpoints
    assert told is not None
    assert (told.path, told.written) == (back.path, 2)
    run.return_workers()
    assert run.supervisor.ended.wait(10.0)
    assert (run.supervisor.state, run.supervisor.error) == ("finished", None)


def test_run_without_a_checkpoint_yet_begins_anew(begin: Callable[..., Run]) -> None:
    run = begin()
    run.serve()
    run.kill("server 0")
    assert run.configs(1)[1].checkpoints.resume == ""
    assert run.supervisor.rollbacks[0].path == ""


def test_worker_that_is_up_as_its_attempt_ends_resumes_nothing(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin()
    run.serve()
    kill = Puppet.kill

    def kill_once_it_is_up(puppet: Puppet) -> None:
        if puppet.name == "worker 0":
            run.engine.report("worker 0", "ready", msgspec.msgpack.encode(1))
        kill(puppet)

    monkeypatch.setattr(Puppet, "kill", kill_once_it_is_up)
    run.kill("server 0")
    assert [back.seconds for back in run.supervisor.rollbacks] == [0.0]


def test_checkpoint_that_a_server_finds_damaged_is_left_out(
    begin: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin()
    run.serve()
    run.write(1, 2)
    run.supervisor.overview.status = status(17, 8, committed=2)
    run.kill("server 0")
    told = CheckpointDamaged("the hash of step-2/values differs", fix="use the one before")
    failure = Failure("CheckpointDamaged", str(told), "", told.failed, told.fix, "no")
    run.engine.report("server 0", "failed", msgspec.msgpack.encode(failure))
    run.kill("server 0")
    assert [run.configs(n)[1].checkpoints.resume for n in range(3)] == ["", "step-2", "step-1"]
    run.serve()
    (back,) = run.supervisor.rollbacks
    assert (back.path, back.clocks) == (f"{run.recovery.folder}/step-1", {"model": 1})
    assert (back.clocks_before, back.updates_lost) == ({"model": 8}, 17)
    assert "server 0 was killed" in str(back.error)
    assert f"goes on from the checkpoint {back.path}" in capsys.readouterr().err


def test_run_goes_on_where_its_folder_is_from_another_working_directory(
    begin: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recovery = recovery_of("train", "runs", False)
    assert recovery is not None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert recovery.folder == str(tmp_path / "runs")
    assert recovery.plan(7).folder == recovery.folder


def test_servers_that_read_a_checkpoint_may_be_up_later(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paramserve.launch.checkpoints.RESTORE_BYTES_S", 1.0)
    run = begin()
    run.serve()
    run.write(1)
    run.kill("server 0")
    assert run.recovery.resume_point is not None
    more = float(run.recovery.resume_point.manifest.nbytes)
    assert [run.configs(n)[1].deadlines.start_s for n in range(2)] == [60.0, 60.0 + more]
    assert run.supervisor.roster.start_by > time.monotonic() + more
    run.write(2)
    run.kill("coordinator")
    assert run.configs(2)[0].deadlines.start_s < 60.0 + 2 * more  # for each its own


def test_run_ends_where_all_that_it_has_written_is_damaged(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    run = begin()
    run.serve()
    run.write(1)
    manifest = tmp_path / "runs" / "manifest-1.json"
    manifest.write_bytes(manifest.read_bytes()[:-3])
    run.engine.processes["server 0"].end(-9)
    assert run.supervisor.ended.wait(10.0)
    assert type(run.supervisor.error) is CheckpointError
    assert "the only checkpoint in" in str(run.supervisor.error)
    assert isinstance(run.supervisor.error.__cause__, ServerGone)
    assert run.supervisor.rollbacks == []
    assert manifest.exists()


def test_checkpoint_of_another_model_ends_the_run_with_that_error(
    begin: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    with Folder(LocalFolder(tmp_path / "runs")).claimed("before") as folder:
        sample.save(folder, 1)
    run = begin(resume=True)
    assert run.configs(0)[1].checkpoints.resume == "step-1"
    failure = Failure("CheckpointError", "", "", "is of another model", "train that one", "no")
    run.engine.report("server 0", "failed", msgspec.msgpack.encode(failure))
    assert run.supervisor.ended.wait(10.0)
    assert type(run.supervisor.error) is CheckpointError
    assert "is of another model" in str(run.supervisor.error)


def test_server_lost_while_values_are_read_costs_no_result(begin: Callable[..., Run]) -> None:
    reads = list[str]()

    def collect(attempt: Attempt) -> None:
        reads.append("read")
        if len(reads) == 1:
            run.engine.processes["server 0"].end(-9)
            run.until(lambda: run.supervisor.state == "resuming")
            raise ServerGone("gone", fix="none")

    run = begin(collect=collect)
    run.serve()
    run.write(5)
    run.engine.report("worker 0", "steps", b"of the first attempt")
    run.return_workers()
    run.until(lambda: len(run.engine.roles) == 8)
    run.serve()
    run.engine.report("worker 1", "steps", b"of the second")
    run.return_workers()
    assert run.supervisor.ended.wait(10.0)
    assert [body for _, _, body in run.supervisor.reports] == [b"of the second"]
    assert (reads, run.supervisor.error) == (["read", "read"], None)
    assert run.supervisor.state == "finished"


def test_reading_that_outlives_its_servers_changes_nothing_of_the_new_attempt(
    begin: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "PREPARE_END_S", 0.01)
    failed = threading.Event()

    def collect(attempt: Attempt) -> None:
        if attempt is not first:
            assert failed.wait(10.0)
            attempt.readout.table_files = {"users": "second"}
            return
        run.engine.processes["coordinator"].end(-9)
        run.until(lambda: run.supervisor.state == "finishing" and run.supervisor.attempt != first)
        attempt.readout.table_files = {"users": "first"}
        threading.Timer(0.1, failed.set).start()
        raise ServerGone("gone", fix="none")

    run = begin(collect=collect)
    first = run.supervisor.attempt
    run.serve()
    run.write(5)
    run.return_workers()
    run.until(lambda: len(run.engine.roles) == 8)
    run.serve()
    run.return_workers()
    assert run.supervisor.ended.wait(10.0)
    assert (run.supervisor.error, run.supervisor.state) == (None, "finished")
    assert run.supervisor.attempt.readout.table_files == {"users": "second"}


def test_client_that_is_being_connected_ends_with_its_attempt(begin: Callable[..., Run]) -> None:
    """No coordinator listens: else that is tried for `start_s`."""
    run = begin()
    run.serve()
    attempt, why = run.supervisor.attempt, ServerGone("server 0 is gone", fix="none")
    closing = threading.Timer(0.1, attempt.close_clients, [why])
    closing.start()
    began = time.monotonic()
    with pytest.raises(ServerGone, match="server 0 is gone"):
        attempt.connect()
    assert 0.05 < time.monotonic() - began < 5.0
    with pytest.raises(ServerGone, match="server 0 is gone"):
        attempt.connect()


def test_checkpoint_that_fails_ends_a_strict_run(begin: Callable[..., Run]) -> None:
    reads = list[str]()
    run = begin(strict=True, collect=lambda _: reads.append("read"))
    run.serve()
    run.supervisor.overview.status = status(1, 1, failed=1, why="no space left on device")
    assert run.supervisor.ended.wait(10.0)
    assert isinstance(run.supervisor.error, CheckpointError)
    assert "no space left on device" in str(run.supervisor.error)
    assert reads == ["read"]

"""Processes that are forked from a prepared one are as if they had been started afresh."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.test_engine_contract import (
    HERE,
    WAIT_S,
    bodies,
    report_of,
    role,
    status_of,
    until_ended,
)

from paramserve.engine.base import Event, Role
from paramserve.engine.child import EXIT_UNKNOWN
from paramserve.engine.local import PREPARED_MAX, Local, LocalFleet

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd here")
STARTS = 50


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFleet]:
    monkeypatch.syspath_prepend(HERE)
    with contextlib.closing(Local().open(["coordinator", "server 0", "worker 0"])) as opened:
        yield opened


def run(fleet: LocalFleet, wanted: Role) -> list[Event]:
    fleet.launch(wanted)
    return until_ended(fleet)


def parents(fleet: LocalFleet) -> list[int]:
    """Pids of the prepared processes that fork."""
    return [each._popen.pid for each in fleet._prepared if each.usable]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_processes_are_forks_of_one_process(fleet: LocalFleet) -> None:
    first = fleet.launch(role("pause"))
    report_of(fleet, "up")
    second = fleet.launch(role("pause"))
    report_of(fleet, "up")
    assert [parent_of(first.pid), parent_of(second.pid)] == parents(fleet) * 2
    assert f"paramserve {first.name}".encode() in Path(f"/proc/{first.pid}/cmdline").read_bytes()


def test_few_processes_are_started_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    with contextlib.closing(Local().open(["worker 0"])) as fleet:
        assert parent_of(fleet.launch(role("pause")).pid) == os.getpid()


def test_each_fork_draws_other_random_numbers(fleet: LocalFleet) -> None:
    drawn = [bodies(run(fleet, role("draw")))["drawn"] for _ in range(3)]
    assert len(set(drawn)) == 3


def test_what_the_driver_has_changed_since_holds(
    fleet: LocalFleet,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run(fleet, role("echo"))
    monkeypatch.setenv("PARAMSERVE_TEST_DRIVER", "changed")
    assert bodies(run(fleet, role("environment", b"PARAMSERVE_TEST_DRIVER"))) == {
        "value": b"changed"
    }
    monkeypatch.chdir(tmp_path)
    assert bodies(run(fleet, role("streams"))) == {"here": bytes(tmp_path)}
    fleet.close()  # all that was printed is shown then
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


def test_driver_whose_stdout_changes_forks_from_the_same_process(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    run(fleet, role("echo"))
    out = os.dup(1)
    try:
        with open(tmp_path / "out", "wb") as file:
            os.dup2(file.fileno(), 1)
        later = fleet.launch(role("pause"))
    finally:
        os.dup2(out, 1)
        os.close(out)
    report_of(fleet, "up")
    assert [parent_of(later.pid)] == parents(fleet)


def test_threads_of_a_role_are_set_before_anything_is_imported(fleet: LocalFleet) -> None:
    for threads in ("1", "3", "1", "2"):
        fleet.launch(role("serve", environment={"OMP_NUM_THREADS": threads}))
        pid = int(report_of(fleet, "up"))
        environment = Path(f"/proc/{parent_of(pid)}/environ").read_bytes().split(b"\0")
        if parent_of(pid) != os.getpid():
            assert f"OMP_NUM_THREADS={threads}".encode() in environment
    assert len(parents(fleet)) == PREPARED_MAX
    assert parent_of(pid) == os.getpid(), "a third one is not worth it"


def test_module_that_starts_a_thread_is_not_forked(fleet: LocalFleet) -> None:
    wanted = Role("a thread", "threaded_entry:tell", b"", b"")
    for _ in range(2):
        assert int(bodies(run(fleet, wanted))["threads"]) > 1
    assert parents(fleet) == []


def test_module_that_initialises_cuda_is_not_forked_and_this_is_told(
    fleet: LocalFleet, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = Role("with CUDA", "cuda_entry:tell", b"", b"")
    for _ in range(2):
        assert int(bodies(run(fleet, wanted))["parent"]) == os.getpid()
    assert parents(fleet) == []
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "started one by one: importing cuda_entry has initialised CUDA" in caplog.text


@pytest.mark.parametrize("imports", [(), ("torch",)], ids=["plain", "torch"])
def test_fork_inherits_no_file_thread_or_held_lock(
    fleet: LocalFleet, imports: tuple[str, ...]
) -> None:
    streams = ["/dev/null", "pipe", "pipe"]
    reports, driver = "pipe", "anon_inode"
    for _ in range(2):
        told = json.loads(bodies(run(fleet, role("inherited", imports=imports)))["inherited"])
        assert told == {
            "files": [*streams, driver, reports],
            "tasks": 2,
            "threads": ["MainThread", "driver-watch"],
            "held": [],
            "collector": True,
            "torch": bool(imports),
        }


def test_many_starts_leave_nothing_behind(fleet: LocalFleet) -> None:
    run(fleet, role("descriptors"))
    gc.collect()
    before, threads = os.listdir("/dev/fd"), threading.active_count()
    for number in range(STARTS):
        seen = run(fleet, role("descriptors"))
        assert (bodies(seen)["kept"], status_of(seen)) == (b"[]", 0), number
    gc.collect()  # what earlier tests have left may go meanwhile
    assert len(os.listdir("/dev/fd")) <= len(before)
    assert threading.active_count() <= threads
    [parent] = parents(fleet)
    assert Path(f"/proc/{parent}/task/{parent}/children").read_text() == ""
    assert len(os.listdir(f"/proc/{parent}/fd")) < 10


def test_prepared_process_that_is_killed_is_done_without(fleet: LocalFleet) -> None:
    process = fleet.launch(role("serve"))
    report_of(fleet, "up")
    os.kill(parents(fleet)[0], signal.SIGKILL)
    assert len(run(fleet, role("echo"))) == 4
    process.interrupt()
    seen = until_ended(fleet)
    assert bodies(seen) == {"cleaned": b""}
    assert status_of(seen) == EXIT_UNKNOWN
    assert "forked it is gone" in process.why


def test_interrupted_fork_leaves_no_answer_for_the_next(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fleet, role("echo"))
    [used] = fleet._prepared

    class Interrupts:
        """A socket on which Ctrl-C comes while an answer is waited for."""

        def __init__(self, real: socket.socket) -> None:
            self._real = real

        def recv(self, size: int) -> bytes:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    used._control = Interrupts(used._control)  # type: ignore[assignment]  # wrapped
    with pytest.raises(KeyboardInterrupt):
        fleet.launch(role("echo"))
    assert not used.usable
    assert len(run(fleet, role("echo"))) == 4


@pytest.fixture
def ignored_sigchld() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.usefixtures("ignored_sigchld")
def test_driver_that_ignores_sigchld_hears_how_a_fork_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(HERE)
    with contextlib.closing(Local().open(["coordinator", "server 0", "worker 0"])) as fleet:
        assert status_of(run(fleet, role("exit_with", b"7"))) == 7
        process = fleet.launch(role("spin", b"/nowhere"))
        report_of(fleet, "up")
        process.kill()
        assert process.wait(WAIT_S) == -signal.SIGKILL


@pytest.mark.usefixtures("ignored_sigchld")
def test_driver_that_ignores_sigchld_says_so_of_what_it_started_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(HERE)
    with contextlib.closing(Local().open()) as fleet:
        process = fleet.launch(role("exit_with", b"7"))
        assert status_of(until_ended(fleet)) == EXIT_UNKNOWN
        assert "this process ignores SIGCHLD" in process.why


def test_what_is_started_again_waits_for_no_prepared_process(
    fleet: LocalFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(fleet, role("echo"))
    monkeypatch.setenv("PARAMSERVE_TEST_DRIVER", "changed")
    assert parent_of(fleet.launch(role("pause")).pid) == os.getpid()


def test_driver_with_many_open_files_hears_how_a_fork_ended(fleet: LocalFleet) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, before[1]), before[1]))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):  # more than select() takes
            stack.enter_context(open(os.devnull))
        assert status_of(run(fleet, role("exit_with", b"7"))) == 7

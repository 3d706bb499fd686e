"""What every engine promises, over every engine."""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec
import numpy as np
import pytest
from tests.suites import each_case

import paramserve as ps
from paramserve.engine.base import Ended, Engine, Event, Failure, Fleet, Reported, Role
from paramserve.engine.child import EXIT_FAILED, EXIT_TERMINATED
from paramserve.engine.local import Local
from paramserve.engine.on_ray import OnRay
from paramserve.errors import ParamServeError

HERE = Path(__file__).parent
SECRET = b"the-cluster-token-0123456789abcd"
WAIT_S = 20.0
RUN_WAIT_S = 60.0


def until_ended(fleet: Fleet, count: int = 1) -> list[Event]:
    """All events until `count` processes have ended."""
    seen: list[Event] = []
    while sum(isinstance(event, Ended) for event in seen) < count:
        found = fleet.events(WAIT_S)
        assert found, f"nothing happened after {seen}"
        seen += found
    return seen


def local(request: pytest.FixtureRequest) -> Engine:
    return Local()


MANY = ["coordinator", "server 0", "worker 0"]
"""So many processes are forked from a prepared one."""


class Forks(Local):
    """`Local` as it starts the processes of a run."""

    def open(self, roles: Sequence[str] = (), environment: Mapping[str, str] = {}) -> Fleet:
        return super().open([*roles, *MANY], environment)


def forks(request: pytest.FixtureRequest) -> Engine:
    return Forks()


def on_ray(request: pytest.FixtureRequest) -> Engine:
    request.getfixturevalue("ray_cluster")
    return OnRay()


ENGINES: dict[str, Callable[[pytest.FixtureRequest], Engine]] = {
    "Local": local,
    "Local, forks": forks,
    "OnRay": on_ray,
}

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd here")


ON_RAY = pytest.param("OnRay", marks=pytest.mark.slow)
"""What `make test` checks on Ray is in tests/ray."""


@pytest.fixture(params=[ON_RAY if name == "OnRay" else name for name in ENGINES])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.syspath_prepend(HERE)
    return ENGINES[request.param](request)


@pytest.fixture(params=[Local, Forks])
def local_fleet(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """For what is promised of children only; each such test says why."""
    monkeypatch.syspath_prepend(HERE)
    with contextlib.closing(request.param().open()) as opened:
        yield opened


@pytest.fixture
def fleet(engine: Engine) -> Iterator[Fleet]:
    with contextlib.closing(engine.open()) as opened:
        yield opened


def role(entry: str, payload: bytes = b"", **more: object) -> Role:
    return Role(f"a {entry}", f"engine_entries:{entry}", payload, SECRET, **more)


def report_of(fleet: Fleet, kind: str) -> bytes:
    while True:
        found = fleet.events(WAIT_S)
        assert found, f"no report {kind!r} came"
        for event in found:
            if isinstance(event, Reported) and event.kind == kind:
                return event.body
            assert not isinstance(event, Ended), event


def status_of(events: list[Event]) -> int:
    last = events[-1]
    assert isinstance(last, Ended), events
    return last.status


def bodies(events: list[Event]) -> dict[str, bytes]:
    return {event.kind: event.body for event in events if isinstance(event, Reported)}


@contextlib.contextmanager
def ends(pid: int, within_s: float = 2.0) -> Iterator[None]:
    """Check that a process, anybody's child, ends during this block or soon after."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:  # ended already
        yield
        return
    try:
        yield
        assert select.select([fd], [], [], within_s)[0], f"process {pid} still runs"
    finally:
        os.close(fd)


# --- what an entry is given and what it tells --------------------------------------------------


def test_entry_is_told_its_name_payload_and_secret(fleet: Fleet) -> None:
    fleet.launch(role("echo", b"what to do"))
    told = bodies(until_ended(fleet))
    assert told == {"name": b"a echo", "payload": b"what to do", "secret": SECRET}


def test_large_payload_and_report_arrive_whole_before_the_end(fleet: Fleet) -> None:
    payload = os.urandom(5 << 20)
    fleet.launch(role("echo", payload))
    seen = until_ended(fleet)
    assert [type(event) for event in seen] == [Reported, Reported, Reported, Ended]
    assert bodies(seen)["payload"] == payload


def test_launch_does_not_wait_for_a_child_to_read_a_large_payload(fleet: Fleet) -> None:
    process = fleet.launch(role("pause", bytes(8 << 20)))
    assert process.exit_status is None


def test_environment_of_a_role_is_set(fleet: Fleet) -> None:
    fleet.launch(role("environment", b"OMP_NUM_THREADS", environment={"OMP_NUM_THREADS": "3"}))
    assert bodies(until_ended(fleet)) == {"value": b"3"}


def test_environment_of_a_fleet_is_there_when_the_interpreter_starts(engine: Engine) -> None:
    """Python reads the seed of its hashes once: setting it later changes nothing."""
    told = set()
    for seed in ("7", "7", "8"):
        with contextlib.closing(engine.open(["worker 0"], {"PYTHONHASHSEED": seed})) as fleet:
            fleet.launch(Role("worker 0", "engine_entries:hashes", b"", SECRET))
            told.add((seed, bodies(until_ended(fleet))["hashes"]))
    assert len(told) == 2
    for _, both in told:
        own, started = both.split()
        assert own == started
    assert len({both for _, both in told}) == 2


def test_local_environment_is_added_to_the_drivers(
    local_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On other nodes the driver's environment means nothing.
    monkeypatch.setenv("PARAMSERVE_TEST_DRIVER", "kept")
    local_fleet.launch(role("environment", b"PARAMSERVE_TEST_DRIVER"))
    assert bodies(until_ended(local_fleet)) == {"value": b"kept"}


def test_code_of_the_owner_is_loaded(fleet: Fleet) -> None:
    kept = 40
    fleet.launch(role("code", code=cloudpickle.dumps(lambda: kept + 2)))
    assert bodies(until_ended(fleet)) == {"answer": b"42"}


def test_host_is_told_where_processes_do_not_share_one(fleet: Fleet) -> None:
    fleet.launch(role("where"))
    host = bodies(until_ended(fleet))["host"].decode()
    assert (host == "") == fleet.shares_host
    if host:
        with socket.create_server((host, 0)):  # an address of a machine, here of this one
            pass


def test_several_processes_are_told_apart(fleet: Fleet) -> None:
    first = fleet.launch(role("exit_with", b"4"))
    second = fleet.launch(role("exit_with", b"5"))
    ended = {e.process: e.status for e in until_ended(fleet, 2) if isinstance(e, Ended)}
    assert ended == {first: 4, second: 5}


def test_entry_must_name_module_and_function() -> None:
    with pytest.raises(ValueError, match=r"package\.module:function"):
        Role("x", "no_function", b"", b"")


# --- how it ends --------------------------------------------------------------------------------


def test_entry_that_raises_reports_the_exception(fleet: Fleet) -> None:
    fleet.launch(role("fail", b"such key"))
    seen = until_ended(fleet)
    failure = msgspec.msgpack.decode(bodies(seen)["failed"], type=Failure)
    assert failure.kind == "LookupError"
    assert failure.text == "no such key here"
    assert "engine_entries.py" in failure.traceback
    assert status_of(seen) == EXIT_FAILED


def test_entry_that_does_not_exist_reports_that(fleet: Fleet) -> None:
    fleet.launch(Role("lost", "no_such_module_here:main", b"", SECRET))
    failure = msgspec.msgpack.decode(bodies(until_ended(fleet))["failed"], type=Failure)
    assert failure.kind == "ModuleNotFoundError"


def test_kill_ends_a_process_that_hears_nothing(fleet: Fleet, tmp_path: Path) -> None:
    process = fleet.launch(role("spin", bytes(tmp_path / "marker")))
    report_of(fleet, "up")
    process.interrupt()
    assert process.wait(0.05) is None
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    assert status_of(until_ended(fleet)) == -signal.SIGKILL
    process.kill()
    process.interrupt()


def test_interrupt_ends_in_order(fleet: Fleet) -> None:
    process = fleet.launch(role("pause"))
    report_of(fleet, "up")
    process.interrupt()
    seen = until_ended(fleet)
    assert bodies(seen) == {"cleaned": b""}
    assert status_of(seen) == EXIT_TERMINATED


def test_interrupt_calls_what_the_entry_registered(fleet: Fleet) -> None:
    process = fleet.launch(role("serve"))
    report_of(fleet, "up")
    process.interrupt()
    seen = until_ended(fleet)
    assert bodies(seen) == {"cleaned": b""}
    assert status_of(seen) == 0


def test_interrupt_before_the_entry_runs_is_not_lost(fleet: Fleet) -> None:
    process = fleet.launch(role("serve"))
    process.interrupt()
    assert status_of(until_ended(fleet)) in (0, EXIT_TERMINATED, -signal.SIGTERM)


def test_death_by_a_signal_is_told(fleet: Fleet) -> None:
    process = fleet.launch(role("pause"))
    report_of(fleet, "up")
    os.kill(process.pid, signal.SIGKILL)
    assert status_of(until_ended(fleet)) == -signal.SIGKILL
    assert process.exit_status == -signal.SIGKILL


def test_name_may_be_launched_again_after_its_end(engine: Engine) -> None:
    with contextlib.closing(engine.open(["a exit_with"])) as fleet:
        for status in (3, 4):
            fleet.launch(role("exit_with", str(status).encode()))
            assert status_of(until_ended(fleet)) == status


def test_room_that_was_made_is_used_given_back_and_made_again(engine: Engine) -> None:
    with contextlib.closing(engine.open(["server 0"])) as fleet:
        for status in (3, 4):
            added = [Role(f"worker {n}", "engine_entries:exit_with", b"", SECRET) for n in (1, 2)]
            fleet.make_room([])
            fleet.make_room(added)
            one = replace(added[0], payload=str(status).encode())
            fleet.launch(one)
            assert status_of(until_ended(fleet)) == status
            fleet.give_back(["worker 1", "worker 2", "worker 99"])


def test_closed_fleet_makes_no_room(fleet: Fleet) -> None:
    fleet.close()
    with pytest.raises(RuntimeError, match="closed"):
        fleet.make_room([role("echo")])
    fleet.give_back(["a echo"])


def test_ctrl_c_is_ignored_in_children(fleet: Fleet) -> None:
    fleet.launch(role("interrupt_self"))
    seen = until_ended(fleet)
    assert bodies(seen) == {"survived": b""}
    assert status_of(seen) == 0


def test_children_are_outside_the_terminals_process_group(fleet: Fleet) -> None:
    process = fleet.launch(role("pause"))
    report_of(fleet, "up")
    assert os.getpgid(process.pid) != os.getpgrp()


@needs_pidfd
@pytest.mark.parametrize("how", ["kill", "end"])
def test_what_a_child_started_ends_with_it(fleet: Fleet, how: str) -> None:
    process = fleet.launch(role("start_another", how.encode()))
    if how == "end":
        with ends(int(bodies(until_ended(fleet))["started"])):
            return
    with ends(int(report_of(fleet, "started"))):
        process.kill()


# --- secrets and leaks --------------------------------------------------------------------------


@needs_proc
def test_secret_and_payload_are_in_no_argv_or_environment(fleet: Fleet) -> None:
    process = fleet.launch(role("pause", b"the-payload-of-this-role"))
    report_of(fleet, "up")
    for name in ("cmdline", "environ"):
        public = Path(f"/proc/{process.pid}/{name}").read_bytes()
        assert public
        for hidden in (SECRET, SECRET.hex().encode(), b"the-payload-of-this-role"):
            assert hidden not in public


def test_role_does_not_print_its_secret() -> None:
    shown = repr(role("echo", b"the-payload"))
    assert "token" not in shown
    assert "the-payload" not in shown


def test_local_child_passes_no_descriptor_on(local_fleet: Fleet) -> None:
    # An actor has Ray's own descriptors, which are not ours to close.
    local_fleet.launch(role("descriptors"))
    assert bodies(until_ended(local_fleet))["kept"] == b"[]"


def test_close_ends_everything_and_frees_descriptors_and_threads(engine: Engine) -> None:
    descriptors, threads = sorted(os.listdir("/dev/fd")), threading.active_count()
    fleet = engine.open(["coordinator", "server 0", "never launched"])
    running = [fleet.launch(role("pause")) for _ in range(3)]
    ended = fleet.launch(role("exit_with", b"0"))
    until_ended(fleet)
    fleet.close()
    fleet.close()
    assert ended.exit_status == 0
    assert all(process.exit_status is not None for process in running)
    assert threading.active_count() == threads
    if fleet.shares_host:  # otherwise connections of a library come and go
        assert sorted(os.listdir("/dev/fd")) == descriptors


def test_closed_fleet_starts_nothing(fleet: Fleet) -> None:
    fleet.close()
    with pytest.raises(RuntimeError, match="closed"):
        fleet.launch(role("echo"))


def test_two_fleets_of_one_engine_do_not_meet(engine: Engine) -> None:
    with contextlib.closing(engine.open()) as one, contextlib.closing(engine.open()) as other:
        process = one.launch(role("pause"))
        other.launch(role("echo"))
        assert len(until_ended(other)) == 4
        other.close()
        assert process.exit_status is None


@each_case("kind", [Local, Forks])
def test_local_interpreter_that_does_not_exist_leaves_nothing_open(kind: type[Local]) -> None:
    descriptors = sorted(os.listdir("/dev/fd"))
    with (
        contextlib.closing(kind(python="/no/such/python").open()) as fleet,
        pytest.raises(FileNotFoundError),
    ):
        fleet.launch(role("echo"))
    assert sorted(os.listdir("/dev/fd")) == descriptors


# --- the driver's death ------------------------------------------------------------------------

DRIVER = """
import os, sys, threading
sys.path.insert(0, {here!r})
from paramserve.engine.base import Reported, Role
from paramserve.engine.local import Local
from paramserve.engine.on_ray import OnRay

fleet = Local().open({names!r})
roles = [
    Role("a", "engine_entries:pause", b"", b"", directory={directory!r}),
    Role("b", "engine_entries:spin", {marker!r}, b""),
    Role("c", "engine_entries:start_another", b"wait", b""),
]
# Launched by a thread that ends: the children must follow the process, not the thread.
starter = threading.Thread(target=lambda: [fleet.launch(role) for role in roles])
starter.start()
starter.join()
seen = []
while len(seen) < 3:
    seen += [e for e in fleet.events(20.0) if isinstance(e, Reported)]
if {forks!r}:
    keeper = os.fork()  # holds copies of the driver's pipes when the driver is gone
    if keeper == 0:
        sys.stdin.read()
        os._exit(0)
pids = [e.process.pid for e in seen] + [int(e.body) for e in seen if e.kind == "started"]
print(*pids, flush=True)
sys.stdin.read()
"""


@needs_pidfd
@each_case("forks", [False, True], ids=["alone", "with-a-fork-that-lives-on"])
@each_case(
    ("how", "names"),
    [(signal.SIGKILL, []), (signal.SIGKILL, MANY), (None, [])],
    ids=["killed", "killed, forks", "returns"],
)
def test_local_drivers_death_leaves_nothing(
    tmp_path: Path, forks: bool, how: signal.Signals | None, names: list[str]
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "s0.sock").touch()
    marker = tmp_path / "callback-ran"
    script = DRIVER.format(
        here=str(HERE), directory=str(directory), marker=bytes(marker), forks=forks, names=names
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert driver.stdout is not None
    assert driver.stdin is not None
    with driver.stdout, driver.stdin, contextlib.ExitStack() as stack:
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 4
        for pid in pids:
            stack.enter_context(ends(pid))
        if how is None:
            driver.stdin.close()
        else:
            driver.send_signal(how)
        driver.wait(WAIT_S)
        stack.close()
        assert marker.exists()
        assert not directory.exists()


# --- another number of workers ------------------------------------------------------------------


POLICIES = {
    "Sync": ps.Sync(reduce="sum"),
    "Async": ps.Async(),
    "BoundedStaleness": ps.BoundedStaleness(bound=2),
}


@contextlib.contextmanager
def started(engine: Engine, **options: Any) -> Iterator[tuple[ps.Job, ps.Client]]:
    """A run of one worker that adds ones until it is enough, and a client once it is at work."""
    entries = importlib.import_module("engine_entries")
    job = ps.start(entries.adds, engine=engine, **options)
    try:
        with job.handle().connect() as client:
            until(lambda: len(client.blocks()) == 2)
            yield job, client
    finally:
        job.stop()


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + RUN_WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def take_part(client: ps.Client, *incarnations: tuple[int, int]) -> None:
    """Wait until each of these (rank, incarnation) has added something from now on."""
    before = client.pull("w")
    until(lambda: all(client.pull("w")[each] > before[each] for each in incarnations))


def until_states(job: ps.Job, *states: str) -> None:
    until(lambda: tuple(job.status().workers.values()) == states)


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        ("Local", "Sync"),
        pytest.param("Local", "Async", marks=pytest.mark.slow),
        pytest.param("Local", "BoundedStaleness", marks=pytest.mark.slow),
        pytest.param("OnRay", "Async", marks=pytest.mark.slow),
    ],
    indirect=["engine"],
)
def test_run_is_scaled_up_down_and_up_and_counts_every_push_once(
    engine: Engine, policy: str
) -> None:
    with started(engine, servers=2, consistency=POLICIES[policy]) as (job, client):
        job.scale(3)
        take_part(client, (0, 1), (1, 1), (2, 1))
        job.scale(1)
        until_states(job, "running", "retired", "retired")
        take_part(client, (0, 1))
        job.scale(2)
        take_part(client, (0, 1), (1, 2))
        client.assign("enough", np.ones(1))
        result = job.wait()
    added = result.values["default"]["w"]
    assert {rank: each[0] for rank, each in result.returns.items()} == {0: 1, 1: 2, 2: 1}
    for rank, (incarnation, steps) in result.returns.items():
        assert added[rank, incarnation] == steps
    assert not any(result.dropped.values()), "no gradient is dropped on the way in or out"
    assert added[1, 1] > 0
    assert np.count_nonzero(added) == 4
    assert job.status().workers == {0: "returned", 1: "returned", 2: "retired"}
    assert (result.failures, result.restarts) == ({}, [])
    with pytest.raises(ParamServeError, match="not scaled to 2 workers: it is finished") as told:
        job.scale(2)
    assert told.value.applied == "no"


def test_run_scaled_to_what_means_nothing_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    with started(Local()) as (job, client):
        for workers, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
            with pytest.raises(error, match="workers must be"):
                job.scale(workers)  # what is tested
        assert job.status().workers.keys() == {0}
        take_part(client, (0, 1))

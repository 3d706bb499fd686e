"""Deaths in a run whose processes somebody else has started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.contract.agents import WithAgents, end, settle, start_agent, token_in
from tests.faults import external_victims
from tests.faults.leftovers import all_end, nothing_left

import paramserve as ps
from paramserve.errors import CannotPlace, ServerGone, WorkerFailed
from paramserve.job.entries import Key

MODULE = "tests.faults.external_victims"
LATE_S = 4.0
WAIT_S = 30.0


@pytest.fixture(autouse=True)
def _leaves_nothing() -> Iterator[None]:
    settle()
    with nothing_left():
        yield
        settle()


@pytest.fixture
def engine(tmp_path: Path, pipe: str, monkeypatch: pytest.MonkeyPatch) -> WithAgents:
    monkeypatch.setenv(external_victims.PIPE, pipe)
    return WithAgents(train=f"{MODULE}:regress").within(tmp_path)


def role_pids(job: ps.Job) -> dict[Key, int]:
    return {key: process.pid for process, key in job._supervisor._processes.items()}


def agent_of(job: ps.Job, key: Key) -> int:
    """The pid of the agent that runs a role: its process's parent."""
    return psutil.Process(role_pids(job)[key]).ppid()


def started(engine: WithAgents, pipe: str, on_worker_death: str = "stop") -> ps.Job:
    """A run of which rank 0 has told that it is in the middle of its steps."""
    job = ps.start(
        external_victims.regress,
        workers=2,
        engine=engine,
        consistency=ps.Async(),
        on_worker_death=on_worker_death,
    )
    assert Path(pipe).read_text() == "here\n"
    return job


def test_killed_agent_of_a_worker_stops_the_run(engine: WithAgents, pipe: str) -> None:
    job = started(engine, pipe)
    with all_end(list(role_pids(job).values())):
        os.kill(agent_of(job, Key("worker", 1)), signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGKILL"):
            job.wait()
        del job


def test_killed_agent_with_continue_the_others_go_on(engine: WithAgents, pipe: str) -> None:
    job = started(engine, pipe, "continue")
    with all_end(list(role_pids(job).values())):
        os.kill(agent_of(job, Key("worker", 1)), signal.SIGKILL)
        while not job._supervisor.failures:
            time.sleep(0.01)
        before = job.status().workers
        job.stop()
        result = job.wait()
    assert set(result.failures) == {1}
    assert isinstance(result.failures[1], WorkerFailed)
    assert result.stopped
    assert len(before) == 2
    del job, result


def test_killed_agent_of_a_server_is_server_gone(engine: WithAgents, pipe: str) -> None:
    job = started(engine, pipe)
    with all_end(list(role_pids(job).values())):
        os.kill(agent_of(job, Key("server", 0)), signal.SIGKILL)
        with pytest.raises(ServerGone, match="server 0 was killed by SIGKILL"):
            job.wait()
        del job


def test_worker_that_raises_is_told_with_its_traceback(tmp_path: Path) -> None:
    engine = WithAgents(train=f"{MODULE}:fail").within(tmp_path)
    with pytest.raises(WorkerFailed, match=r"(?s)worker 1.*LookupError: no batch 3"):
        ps.run(external_victims.fail, workers=2, engine=engine)


def rank_of(worker: ps.Worker) -> int:
    """What agents run here."""
    return worker.rank


def test_agents_that_come_after_start_s_run_the_role(tmp_path: Path) -> None:
    token_file = token_in(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.extend(
            start_agent(address, token_file, f"{rank_of.__module__}:rank_of") for _ in range(3)
        )

    starter = threading.Timer(LATE_S, start)
    starter.start()
    try:
        result = ps.run(
            rank_of,
            workers=1,
            engine=ps.External(address, token_file=token_file, wait_s=WAIT_S),
            deadlines=ps.Deadlines(start_s=LATE_S - 1.0),
        )
    finally:
        starter.cancel()
        starter.join()
        for agent in started:
            agent.wait(WAIT_S)
        end(started)
    assert result.returns == {0: 0}
    assert [agent.returncode for agent in started] == [0, 0, 0]


def test_run_without_agents_says_so_once(tmp_path: Path) -> None:
    engine = ps.External(token_file=token_in(tmp_path), wait_s=0.2)
    with pytest.raises(CannotPlace) as caught:
        ps.run(external_victims.fail, workers=1, engine=engine)
    told = str(caught.value)
    assert told.startswith("no agent took coordinator in 0.2 s")
    assert told.count("no agent took") == told.count("To fix:") == 1

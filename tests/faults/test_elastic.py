"""Workers that join or retire while a run trains, and die at it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.faults import elastic_victims as victims
from tests.faults.leftovers import all_end, settle

import paramserve as ps
from paramserve.cli import cli
from paramserve.errors import ParamServeError, WorkerFailed
from paramserve.launch.entries import Key
from paramserve.launch.roster import OnWorkerDeath

pytestmark = pytest.mark.usefixtures("leaves_nothing")

WAIT_S = 60.0
SYNC, ASYNC = ps.Sync(reduce="sum"), ps.Async()
"""Each kind of end is tried with one of them: the simulated clusters try every pair."""


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


class Run:
    """A run of `victims.adds` that is under way."""

    def __init__(self, job: ps.Job, client: ps.Client) -> None:
        self.job = job
        self.client = client

    def pid(self, rank: int) -> int:
        found = self.job._supervisor._processes.items()
        return next(process.pid for process, key in found if key == Key("worker", rank))

    def kill(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    def take_part(self, *ranks: int) -> None:
        """Wait until each of these ranks has added something from now on."""
        before = self.client.pull("w")
        until(lambda: all(self.client.pull("w")[rank] > before[rank] for rank in ranks))

    def until_state(self, rank: int, state: str) -> None:
        until(lambda: self.job.status().workers[rank] == state)

    def end(self) -> ps.Result:
        self.client.assign("enough", np.ones(1))
        return self.job.wait()


@contextlib.contextmanager
def running(workers: int, deaf: bool = False, **options: Any) -> Iterator[Run]:
    job = ps.start(victims.adds, args=(deaf,), workers=workers, timeout_s=WAIT_S, **options)
    try:
        with job.handle().connect() as client:
            until(lambda: len(client.blocks()) == 2)
            run = Run(job, client)
            run.take_part(*range(workers))
            yield run
    finally:
        job.stop()


def test_joiner_that_is_killed_fails_the_run() -> None:
    with running(1, consistency=SYNC) as run:
        run.job.scale(2)
        run.take_part(1)
        with all_end([run.pid(0)]):
            run.kill(1)
            with pytest.raises(WorkerFailed, match="worker 1 was killed by SIGKILL"):
                run.job.wait()
        with pytest.raises(ParamServeError, match=r"not scaled to 3 workers: it is failed .*SIGK"):
            run.job.scale(3)


@pytest.mark.parametrize(
    ("on_worker_death", "policy"),
    [("continue", SYNC), (ps.Restart(1), ASYNC)],
    ids=["continue", "again"],
)
def test_joiner_that_is_killed_is_gone_on_without_or_restarted(
    policy: Any, on_worker_death: OnWorkerDeath
) -> None:
    with running(1, consistency=policy, on_worker_death=on_worker_death) as run:
        run.job.scale(2)
        run.take_part(0, 1)
        run.kill(1)
        if on_worker_death == "continue":
            run.until_state(1, "dead")
            run.take_part(0)
            result = run.end()
            assert result.returns.keys() == {0}
            assert "SIGKILL" in str(result.failures[1])
        else:
            until(lambda: run.job._supervisor.restarts)
            run.take_part(0, 1)
            result = run.end()
            assert [result.returns[rank][0] for rank in (0, 1)] == [1, 2]
            assert [each.rank for each in result.restarts] == [1]


@pytest.mark.parametrize(
    ("on_worker_death", "policy"),
    [("stop", ASYNC), ("continue", SYNC), (ps.Restart(1), SYNC)],
    ids=["stop", "continue", "again"],
)
def test_retiring_worker_that_is_killed_is_no_failure(
    policy: Any, on_worker_death: OnWorkerDeath
) -> None:
    with running(2, deaf=True, consistency=policy, on_worker_death=on_worker_death) as run:
        run.job.scale(1)
        assert run.job.status().workers == {0: "running", 1: "retiring"}
        run.kill(1)
        run.until_state(1, "retired")
        run.take_part(0)
        result = run.end()
    assert result.returns.keys() == {0}
    assert (result.failures, result.restarts) == ({}, [])


def test_retiring_worker_that_goes_on_is_ended_and_its_rank_is_free_again() -> None:
    engine = ps.Local(deadlines=ps.Deadlines(retire_s=0.2))
    with running(2, deaf=True, engine=engine) as run:
        with all_end([run.pid(1)]):
            run.job.scale(1)
            run.job.scale(2)
            run.until_state(1, "retiring")
        run.take_part(0, 1)
        result = run.end()
    assert [result.returns[rank][0] for rank in (0, 1)] == [1, 2]


def test_scale_down_while_workers_start_waits_for_none_of_them() -> None:
    job = ps.start(victims.adds, workers=3, timeout_s=WAIT_S)
    try:
        job.scale(1)
        with job.handle().connect() as client:
            until(lambda: len(client.blocks()) == 2)
            run = Run(job, client)
            run.take_part(0)
            assert run.end().returns[0][0] == 1
    finally:
        job.stop()


def test_command_scale_opens_and_retires_ranks_of_plain_processes(tmp_path: Path) -> None:
    token = str(tmp_path / "token")
    assert CliRunner().invoke(cli, ["token", token]).exit_code == 0
    command = [sys.executable, "-c", "from paramserve.cli import main; main()"]
    command += ["serve", "--bind", "127.0.0.1:0", "--workers", "1", "--token-file", token]

    def scale(workers: int) -> None:
        arguments = ["scale", address, "--workers", str(workers), "--token-file", token]
        told = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert f"has {workers} workers from now on" in told.output

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().rpartition(" ")[2].strip()
        try:
            with pytest.raises(ParamServeError, match="more ranks than workers"):
                ps.connect(address, rank=1, token_file=token)
            scale(2)
            with ps.connect(address, rank=1, workers=2, token_file=token) as worker:
                client = worker.client
                client.define("w", np.zeros(1), rule=ps.Add())
                client.push_pull({"w": np.ones(1)}, tick=True)
                assert not client.steps.retiring
                scale(1)
                until(lambda: client.push_pull({"w": np.ones(1)}) and client.steps.retiring)
            with pytest.raises(ParamServeError, match="started for 1 workers"):
                ps.connect(address, rank=1, token_file=token)
        finally:
            process.terminate()
    assert process.returncode == 0
    settle()

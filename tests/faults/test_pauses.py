"""All processes of a run stand still for longer than `stall_s`, and go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
STALL_S = 2.5
PAUSE_S = STALL_S + 1.0
APART_S = 0.2
"""Processes do not go on at one moment: those that judge silence are the first here."""

SCRIPT = f"""
import os, sys, time
import numpy as np
import paramserve as ps

def train(worker, end):
    worker.client.define("w", np.zeros(4), rule=ps.Add())
    while not os.path.exists(end):
        worker.client.push("w", np.ones(4))
        worker.client.tick().result()
        time.sleep(0.01)
    return worker.incarnation

engine = ps.Local(deadlines=ps.Deadlines(heartbeat_s=0.2, stall_s={STALL_S}))
job = ps.start(
    train, args=sys.argv[1:], workers=2, consistency=ps.Async(), engine=engine
)

def wait_for_steps():
    groups = job.status().groups
    before = groups["default"].version if groups else 0
    while not (groups := job.status().groups) or groups["default"].version < before + 3:
        time.sleep(0.01)

wait_for_steps()
print(*(process.pid for process in job._supervisor._processes), flush=True)
sys.stdin.readline()
wait_for_steps()
print("on", flush=True)
print(job.wait().returns, flush=True)
"""


def test_run_goes_on_after_a_pause_of_all_its_processes(tmp_path: Path) -> None:
    end = tmp_path / "end"
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(end)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        pids = [driver.pid]
        try:
            pids += map(int, driver.stdout.readline().split())
            assert len(pids) == 5, driver.communicate()
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            time.sleep(PAUSE_S)
            for pid in pids:  # the driver, the coordinator, the server, the workers
                os.kill(pid, signal.SIGCONT)
                time.sleep(APART_S)
            driver.stdin.write("\n")
            driver.stdin.flush()
            on = driver.stdout.readline()
            assert on == "on\n", driver.communicate()
            end.touch()
            out, errors = driver.communicate(timeout=30)
            assert (driver.returncode, out) == (0, "{0: 1, 1: 1}\n"), errors
            assert "the coordinator did not run for" in errors
        finally:
            for pid in pids[1:]:  # a process that stands still does not see the driver end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            driver.kill()

"""Ctrl-C, a driver that ends without waiting, and a driver that forks."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests.faults import victims
from tests.faults.drivers import driver
from tests.faults.leftovers import all_end, folders

import paramserve as ps
from paramserve.compiling import load_kernels
from paramserve.rules import SGD

STOPS_WITHIN_S = 2.0


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    """Workers that compile them first say so, in the output that is looked at here."""
    load_kernels(np.dtype("float32"), SGD(lr=0.1))


WAITS = ("job.wait()", "for _ in job.snapshots(every=10**6, name='default'): pass")
BLOCK = "with job: job.wait()"


@pytest.mark.parametrize(
    "then", [*(pytest.param(each, marks=pytest.mark.slow) for each in WAITS), BLOCK]
)
def test_ctrl_c_stops_within_2_s_and_says_in_one_line_how_far_it_got(pipe: str, then: str) -> None:
    caught = f"try:\n    {then}\nexcept KeyboardInterrupt:\n    sys.exit(130)"
    with driver(pipe, caught) as run, all_end(run.children):
        began = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        _, told = run.process.communicate()
        assert time.monotonic() - began < STOPS_WITHIN_S
    assert run.process.returncode == 130
    goes_on = "" if then == BLOCK else "; the run goes on until .*"
    assert re.fullmatch(
        rf"paramserve: interrupted, last heard after [\d.]+ s: .*, 2 of 2 workers{goes_on}\n", told
    )
    assert folders() == set()


def test_driver_that_ends_without_waiting_takes_its_run_along(pipe: str) -> None:
    with driver(pipe, "sys.stdin.read()") as run, all_end(run.children):
        _, told = run.process.communicate()
    assert run.process.returncode == 0
    assert told == ""
    assert folders() == set()


def test_fork_of_the_driver_that_exits_leaves_the_run_alone(pipe: str) -> None:
    forks = """
import os
sys.stdin.read()
if os.fork() == 0:
    sys.exit(0)
os.wait()  # for the fork: it is the first to end
print(job.status().state, flush=True)
job.stop()
"""
    with driver(pipe, forks) as run, all_end(run.children):
        out, _ = run.process.communicate()
    assert out == "running\n"
    assert run.process.returncode == 0


RUNS = """
import sys
import paramserve as ps
from tests.faults import victims

print(flush=True)  # where the other scripts write pids
try:
    ps.run(victims.regress, args=(sys.argv[1], {at}), workers=2, checkpoint={folder!r})
except KeyboardInterrupt as interrupt:
    print(interrupt.result.checkpoints.written, flush=True)
    sys.exit(143)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_a_run_in_order_with_its_last_checkpoint(
    number: signal.Signals, pipe: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "kept")
    with driver(pipe, "", script=RUNS.replace("{folder!r}", repr(folder))) as run:
        run.process.send_signal(number)
        out, told = run.process.communicate()
    assert run.process.returncode == 143
    assert out == "1\n"
    assert f"the run goes on from {folder}" in told
    assert folders() == set()


def test_sigterm_means_again_what_it_meant_when_the_run_is_over() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's, where it was started here
    try:
        ps.run(victims.count, workers=1)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)

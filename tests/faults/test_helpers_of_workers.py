"""What a worker has started and left behind prints on, until the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import paramserve as ps

LONG_S = 10.0
HELPER = """\
import os, pathlib, sys, time
worker = int(sys.argv[2])
while os.getppid() == worker:
    time.sleep(0.01)
for number in range(20):  # longer than the driver takes to see the worker's end
    print("helper line", number, flush=True)
    time.sleep(0.02)
pathlib.Path(sys.argv[1]).write_text("done")
"""


def starts_helper(worker: ps.Worker, told: str) -> None:
    if worker.rank == 0:
        arguments = [sys.executable, "-S", "-c", HELPER, told, str(os.getpid())]
        subprocess.Popen(arguments, start_new_session=True)
        return
    until = time.monotonic() + LONG_S
    while not Path(told).exists() and time.monotonic() < until:
        time.sleep(0.01)


def test_helper_that_outlives_its_worker_prints_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "told"
    ps.run(starts_helper, args=(str(told),), workers=2, show="none")
    assert told.exists()  # nothing ended it
    assert "[rank 0] helper line 19\n" in capfd.readouterr().out

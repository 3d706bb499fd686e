"""What a worker does after its training function has returned: exit handlers run to their end."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

import pytest

import paramserve as ps

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STOP_S = 0.05


def flushes_at_exit(worker: ps.Worker, path: str, seconds: float) -> None:
    """Register a handler that takes this long before it writes a file, as loggers do."""

    def flush() -> None:
        time.sleep(seconds)
        Path(path).write_text("flushed")

    atexit.register(flush)


def test_exit_handler_that_takes_longer_than_a_stop_runs_to_its_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    ps.run(flushes_at_exit, args=(str(path), 10 * STOP_S), deadlines=ps.Deadlines(stop_s=STOP_S))
    assert path.read_text() == "flushed"
    assert capfd.readouterr().err == ""


def test_exit_handler_that_takes_too_long_is_cut_and_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    ps.run(flushes_at_exit, args=(str(path), 60.0), deadlines=ps.Deadlines(exit_s=0.1))
    assert not path.exists()
    told = capfd.readouterr().err
    assert "worker 0 still ran 0.1 s after the end of its function" in told
    assert "Deadlines(exit_s=...)" in told

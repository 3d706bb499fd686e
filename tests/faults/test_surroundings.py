"""Runs of drivers in unusual surroundings: closed streams, odd paths, locales, ignored signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.leftovers import folders

SCRIPT = """
import signal
import sys
from pathlib import Path

import paramserve as ps
{before}


def train(worker):
    print("in the worker")
    {train}
    return 7


try:
    told = str(ps.run(train).returns)
except Exception as error:
    told = f"{{type(error).__name__}}: {{error}}"
Path(sys.argv[1]).write_bytes(told.encode("utf-8", "backslashreplace"))
"""
SLOW = pytest.mark.slow
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def outcome(
    folder: Path, *, before: str = "", train: str = "", streams: str = "", **environment: str
) -> str:
    """What a driver, started by a shell that redirects its streams, gets of a run."""
    script, told = folder / "script.py", folder / "told"
    script.write_text(SCRIPT.format(before=before, train=train))
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {streams}', sys.executable, script, told],
        env={**os.environ, **environment},
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert folders() == set()
    return told.read_text()


@pytest.mark.parametrize(
    "streams", ["<&- >&- 2>&-", *(pytest.param(each, marks=SLOW) for each in (">&-", "2>&-"))]
)
def test_run_with_closed_streams(tmp_path: Path, streams: str) -> None:
    assert outcome(tmp_path, streams=streams) == "{0: 7}"


def test_run_with_paths_of_any_kind(tmp_path: Path) -> None:
    """Some that the locale cannot decode, and a path object among the import paths."""
    folder = tmp_path / "für"
    folder.mkdir()
    (folder / "beside.py").write_text("def fail(): raise LookupError('beside')\n")
    told = outcome(
        folder,
        before="sys.path.insert(0, Path('elsewhere'))",
        train="import beside; beside.fail()",
        **ASCII,
        TMPDIR=str(folder),
    )
    assert told.startswith("WorkerFailed: worker 0 raised LookupError: beside")
    assert "beside.py" in told


def test_worker_that_dies_where_sigchld_is_ignored_is_told_by_its_signal(
    tmp_path: Path,
) -> None:
    """Here one of those that have no name."""
    told = outcome(
        tmp_path,
        before="signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
        train="import os; os.kill(os.getpid(), signal.SIGRTMIN + 1)",
    )
    assert "worker 0 was killed by signal 35 before its function returned" in told

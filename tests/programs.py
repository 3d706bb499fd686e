"""Programs that a test starts as a user would, in an environment without anybody else's Ray."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.ray.nodes import quiet

ROOT = Path(__file__).parents[1]
TIMEOUT_S = 240


def alone(folder: Path) -> dict[str, str]:
    """An environment without Ray's variables but those that keep it quiet, and one thread each."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    found = {**kept, **quiet(folder), "OMP_NUM_THREADS": "1"}
    del found["RAY_TMPDIR"]  # the path of Ray's sockets would be too long below this test's folder
    return found


def run(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run a command at the root of the checkout; what it printed."""
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout

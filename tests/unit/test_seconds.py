"""The quick run fails where a folder of tests exceeds its budget, and names its slowest files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.seconds import folder_of
from tests.suites import each_case

ROOT = Path(__file__).parents[2]
CONFTEST = """
import pytest
from tests.seconds import Seconds
def pytest_configure(config):
    config.pluginmanager.register(Seconds({"spins": 0.2, "waits": 0.2}))
"""
SPINS = """
import time
def test_it():
    until = time.process_time() + 0.4
    while time.process_time() < until: pass
"""
WAITS = "import time\ndef test_it():\n    time.sleep(0.3)\n"


@each_case(
    ("file", "folder"),
    [
        ("tests/sim/test_a.py", "sim"),
        ("tests/unit/core/table/test_a.py", "unit/core"),
        ("tests/unit/test_a.py", "unit"),
    ],
)
def test_folders_of_unit_tests_are_told_apart(file: str, folder: str) -> None:
    assert folder_of(file) == folder


def test_folder_over_its_budget_fails_the_quick_run(tmp_path: Path) -> None:
    for folder, name, text in (
        ("spins", "test_much.py", SPINS),
        ("waits", "test_waits.py", WAITS),
    ):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / name).write_text(text)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    quick = run("-m", "not slow", "-n", "2", "--dist", "loadfile")
    assert quick.returncode == 1, quick.stdout
    assert "2 passed" in quick.stdout
    assert "spins exceeds its budget" in quick.stdout
    assert "s tests/spins/test_much.py" in quick.stdout
    assert "waits exceeds" not in quick.stdout
    whole = run()
    assert whole.returncode == 0, whole.stdout
    assert " of 0" in whole.stdout

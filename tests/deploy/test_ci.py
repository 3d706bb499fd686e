"""`.ci/run`: what it makes of tests that fail beside others and pass alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / ".ci"
MAKEFILE = f"""\
test:
\t@{sys.executable} -m pytest -ra tests
"""
FLAKY = """\
from pathlib import Path

def test_flaky_{number}():
    runs = Path(__file__).with_suffix(".{number}")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    assert len(runs.read_text()) > {failures}, "too early"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose `make test` runs the tests in its folder `tests`."""
    shutil.copytree(CI, tmp_path / ".ci")
    (tmp_path / "Makefile").write_text(MAKEFILE)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sound.py").write_text("def test_sound():\n    pass\n")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def run_ci(project: Path, *tests: str) -> tuple[int, str]:
    text = "\n".join(tests)
    if text:
        (project / "tests" / "test_flaky.py").write_text(text)
    ran = subprocess.run(
        ["bash", ".ci/run"],
        cwd=project,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return ran.returncode, ran.stdout


def flaky(number: int, failures: int) -> str:
    """A test that fails in its first runs."""
    return FLAKY.format(number=number, failures=failures)


def test_sound_tests_run_once(project: Path) -> None:
    status, output = run_ci(project)
    assert (status, output.count("1 passed")) == (0, 1)


def test_failures_that_pass_alone_are_flaky(project: Path) -> None:
    status, output = run_ci(project, flaky(0, 1), flaky(1, 2))
    assert status == 0
    for number in range(2):
        name = f"tests/test_flaky.py::test_flaky_{number}"
        assert f"FLAKY {name}: AssertionError: too early" in output


def test_failure_that_stays_fails_the_run(project: Path) -> None:
    status, output = run_ci(project, flaky(0, 3))
    assert status == 1
    assert "FAILED again tests/test_flaky.py::test_flaky_0" in output


def test_many_failures_are_not_run_again(project: Path) -> None:
    status, output = run_ci(project, *(flaky(number, 1) for number in range(4)))
    assert status == 1
    assert "4 failed tests to run again (1 to 3): not run again" in output


@pytest.mark.parametrize("text", ["import no_such_module\n", "raise KeyboardInterrupt\n"])
def test_collection_that_fails_fails_the_run(project: Path, text: str) -> None:
    assert run_ci(project, text)[0] == 1


def test_failed_lint_fails_the_run(project: Path) -> None:
    """A failure before pytest starts is not excused by the failures of an earlier run."""
    run_ci(project, flaky(0, 5))
    (project / "Makefile").write_text("test:\n\t@false\n")
    assert run_ci(project)[0] == 1

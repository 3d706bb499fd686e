"""paramserve without paramserve-plan: everything else works, and `paramserve plan` says how to get
it."""

from __future__ import annotations

import subprocess
import sys

from paramserve import __version__

WITHOUT = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "paramserve_plan":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
"""
COMMAND = "from paramserve.cli import main; sys.exit(main(sys.argv[1:]))"
OTHER_VERSION = """
import sys, types
sys.modules["paramserve_plan"] = types.ModuleType("paramserve_plan")
sys.modules["paramserve_plan.command"] = types.ModuleType("paramserve_plan.command")
"""
FIX = f"pip install 'paramserve[plan]=={__version__}'"


def without(code: str, *arguments: str, begin: str = WITHOUT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", begin + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_plan_without_the_planner_says_how_to_get_it() -> None:
    """One line on the error stream, as of every command; nothing where JSON is read."""
    done = without(COMMAND, "plan", "--json", "--workers", "3")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("paramserve: ParamServeError: paramserve plan did not start: ")
    assert "(No module named 'paramserve_plan'). Applied: no. " in done.stderr
    assert f"To fix: {FIX}, or from a clone: pip install . ./packages/plan" in done.stderr
    assert done.stderr.count("\n") == 1


def test_plan_of_another_version_is_told_with_the_one_to_install() -> None:
    done = without(COMMAND, "plan", "--json", begin=OTHER_VERSION)
    assert (done.returncode, done.stdout) == (1, "")
    assert "cannot import name 'plan'" in done.stderr
    assert FIX in done.stderr


def test_help_without_the_planner_lists_it_as_not_installed() -> None:
    done = without(COMMAND, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = (each for each in done.stdout.splitlines() if each.split()[:1] == ["plan"])
    assert line.split(maxsplit=1)[1] == "Not installed: pip install 'paramserve[plan]'"


def test_import_paramserve_needs_nothing_of_the_planner() -> None:
    code = """
import paramserve as ps, paramserve.cli
for name in ps.__all__:
    getattr(ps, name)
print(sorted(name for name in sys.modules if name.startswith("paramserve_")))
"""
    done = without(code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr

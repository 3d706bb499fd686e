"""Run the tests that failed in `make test` again, each alone: what passes then is flaky.

    python .ci/again.py LOG        (LOG: what `make test` printed)

Exit status 0: pytest came to its end, at most `FAILURES_MAX` tests failed, and each of them passed
alone within `TRIES_MAX` tries. Each is printed as FLAKY with its first error: a flaky test is a
fault, which the next change fixes. Any other end of `make test` stays a failure: of ruff or mypy, a
collection that failed, an interrupt.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

FAILURES_MAX = 3
"""Failed tests that are run again; more of them are no accident."""
TRIES_MAX = 2
"""Times that each runs again, alone."""
ALONE_TIMEOUT_S = 600.0
"""Seconds of one such try."""
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
"""Where pytest writes the ids of the tests that failed."""
_END = re.compile(r"^=+ (?=.*\b\d+ (?:failed|errors?)\b).*\b\d+ passed\b.* in [\d.]+s.*=+$", re.M)
"""Pytest's closing line of a run with failures in which tests were run."""


def read_failures(log: str) -> list[str]:
    """The ids of the tests that failed; empty: pytest did not come to its end."""
    if _END.search(log) is None or not LAST_FAILED.is_file():
        return []
    return sorted(json.loads(LAST_FAILED.read_text()))


def find_error(test: str, log: str) -> str:
    """The error of a test as pytest's summary has it, one line."""
    for line in log.splitlines():
        for kind in ("FAILED", "ERROR"):
            head = f"{kind} {test}"
            if line == head or line.startswith(f"{head} - "):
                return line.removeprefix(head).removeprefix(" - ") or "no message"
    return "not in the summary"


def passes_alone(test: str) -> bool:
    """Whether a test passes in a process of its own, within `TRIES_MAX` tries."""
    command = [sys.executable, "-m", "pytest", test]
    for _ in range(TRIES_MAX):
        try:
            if subprocess.run(command, timeout=ALONE_TIMEOUT_S).returncode == 0:
                return True
        except subprocess.TimeoutExpired:
            print(f"{test} did not end in {ALONE_TIMEOUT_S:.0f} s", flush=True)
    return False


def main(path: str) -> int:
    """Run the failures of a log again; the exit status."""
    log = Path(path).read_text(errors="replace")
    failures = read_failures(log)
    if not failures or len(failures) > FAILURES_MAX:
        print(f"\n{len(failures)} failed tests to run again (1 to {FAILURES_MAX}): not run again")
        return 1
    print(f"\n{len(failures)} failed tests run again, each alone", flush=True)
    broken = [test for test in failures if not passes_alone(test)]
    for test in failures:
        kind = "FAILED again" if test in broken else "FLAKY"
        print(f"{kind} {test}: {find_error(test, log)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

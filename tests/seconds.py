"""What each folder of tests costs in processor time: told at the end, and a quick run fails where
one exceeds its budget.

Processor time of the test's own process and of the children that it waited for; a machine that does
something else besides takes longer and needs no more of it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest

QUICK = "not slow"
"""The marks of a run that has budgets: `make test`."""
BUDGET_S: Mapping[str, float] = {
    "api": 150,
    "benchmarks": 90,
    "contract": 800,
    "deploy": 90,
    "examples": 100,
    "faults": 400,
    "learning": 200,
    "ray": 90,
    "sim": 550,
    "unit": 90,
    "unit/checkpoint": 90,
    "unit/client": 60,
    "unit/codecs": 90,
    "unit/core": 90,
    "unit/pytorch": 150,
    "unit/rules": 150,
    "unit/transport": 60,
}
"""Seconds by folder, of those that cost more than 3 s: three times that, and more where kernels may
be compiled first. A machine of half the speed stays within them."""
SLOWEST = 10
"""Files that are named for a folder that exceeds its budget."""


def folder_of(file: str) -> str:
    """The folder below `tests`, and of unit tests the one below that."""
    parts = Path(file).parts[:-1]
    return "/".join(parts[1:3] if parts[1:2] == ("unit",) else parts[1:2]) or "."


class Seconds:
    """Adds up what tests cost, by file; in each of the processes that share them, and then all."""

    def __init__(self, budgets: Mapping[str, float] = BUDGET_S) -> None:
        self.by_file: Counter[str] = Counter()
        self._budgets = budgets

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        before = sum(os.times()[:4])
        result = yield
        self.by_file[item.nodeid.partition("::")[0]] += sum(os.times()[:4]) - before
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["seconds"] = dict(self.by_file)
        elif self.over() and session.config.option.markexpr == QUICK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """One of several processes has ended."""
        self.by_file.update(getattr(node, "workeroutput", {}).get("seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        by_folder = self.by_folder()
        if not by_folder:
            return
        terminalreporter.section("processor time")
        for folder, spent in by_folder.most_common():
            known = self._budgets.get(folder)
            terminalreporter.line(
                f"{spent:6.1f} s {folder}" + (f" of {known:.0f}" if known else "")
            )
        if terminalreporter.config.option.markexpr == QUICK:
            for folder in self.over():
                terminalreporter.line(f"{folder} exceeds its budget (tests/seconds.py):", red=True)
                files = Counter({f: s for f, s in self.by_file.items() if folder_of(f) == folder})
                for file, spent in files.most_common(SLOWEST):
                    terminalreporter.line(f"  {spent:6.1f} s {file}")

    def by_folder(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for file, spent in self.by_file.items():
            found[folder_of(file)] += spent  # type: ignore[assignment]  # seconds are fractions
        return found

    def over(self) -> list[str]:
        """The folders that cost more than they may."""
        spent = self.by_folder()
        return sorted(each for each, budget in self._budgets.items() if spent[each] > budget)

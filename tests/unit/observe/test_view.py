"""A run that is shown while it goes on."""

from __future__ import annotations

import io
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
from rich.console import Console
from tests.suites import each_case
from tests.unit.observe.test_progress import UNDER_ASYNC, at

from paramserve.errors import CoordinatorGone
from paramserve.observe import RunStatus, watch
from paramserve.observe.view import checked


class AsksBack:
    """A run whose status is asked for; tells when that happened."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def status(self) -> RunStatus:
        self.asked.set()
        return at(1.0, 10)


@each_case("show", ["table", "line"])
@each_case("terminal", [False, True], ids=["file", "terminal"])
def test_watch_prints_and_ends_its_thread(terminal: bool, show: Literal["table", "line"]) -> None:
    out, run = io.StringIO(), AsksBack()
    threads = threading.active_count()
    console = Console(file=out, force_terminal=terminal, width=120)
    with watch(run, every_s=0.001, console=console, show=show):
        assert run.asked.wait(10.0)
    assert "model: 10 steps" in out.getvalue()
    assert threading.active_count() == threads


class AnswersLater(AsksBack):
    """Its coordinator does not answer the first two times."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 2

    def status(self) -> RunStatus:
        self.left -= 1
        if self.left >= 0:
            raise CoordinatorGone("no answer", fix="none")
        return super().status()


def test_watch_goes_on_behind_a_status_that_was_not_told() -> None:
    out, run = io.StringIO(), AnswersLater()
    with watch(run, every_s=0.001, console=Console(file=out, width=120)):
        assert run.asked.wait(10.0)
    assert "model: 10 steps" in out.getvalue()


class IsStale:
    """A run whose workers have old values."""

    def status(self) -> RunStatus:
        return RunStatus("running", 1.0, {0: "running"}, {"m": UNDER_ASYNC}, {})


def test_watch_in_a_file_tells_of_each_worker_at_the_end() -> None:
    out = io.StringIO()
    with watch(IsStale(), every_s=60.0, console=Console(file=out, width=200)):
        pass
    first, last = out.getvalue().splitlines()
    assert "9 steps" in first
    assert "2: 1.0 (max 2)" in last


def test_watch_prints_a_last_line_even_for_a_short_run() -> None:
    out = io.StringIO()
    with watch(AsksBack(), every_s=60.0, console=Console(file=out, width=120)):
        pass
    assert out.getvalue().count("\n") == 1


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Makes this process look like a notebook's; what its one output has shown."""
    shown: list[str] = []

    class Output:
        def update(self, told: dict[str, str], raw: bool) -> None:
            shown.append(told["text/plain"])

    def display(told: dict[str, str], raw: bool, display_id: bool) -> Output:
        assert shown == []
        assert (raw, display_id) == (True, True)
        shown.append(told["text/plain"])
        return Output()

    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=None)
    module.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


@each_case("terminal", [False, True])
def test_table_is_shown_on_a_terminal_if_nothing_else_is_said(
    monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", Stream(terminal))
    assert checked(None) == ("table" if terminal else "none")
    assert [checked("line"), checked("none"), checked("table")] == ["line", "none", "table"]
    monkeypatch.setattr(sys, "stderr", None)
    assert checked(None) == "none"


def test_unknown_way_to_show_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="'tabel': did you mean table"):
        checked("tabel")
    with pytest.raises(ValueError, match="not True"), watch(AsksBack(), show=True):  # type: ignore[arg-type]
        pass


def test_watch_that_shows_nothing_asks_nothing() -> None:
    run = AsksBack()
    with watch(run, every_s=0.0, show="none"):
        pass
    assert not run.asked.is_set()


def test_watch_in_a_notebook_replaces_one_output(notebook: list[str]) -> None:
    assert checked(None) == "table"
    run = AsksBack()
    with watch(run, every_s=0.001):
        assert run.asked.wait(10.0)
    assert len(notebook) >= 2
    assert all("model: 10 steps" in line for line in notebook)


def test_watch_on_a_terminal_leaves_output_to_a_file_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, console = Stream(terminal=False), Console(file=io.StringIO(), force_terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    with watch(AsksBack(), every_s=60.0, console=console):
        print("[rank 0] a line of a worker")
    assert out.getvalue() == "[rank 0] a line of a worker\n"

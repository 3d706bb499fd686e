"""Feeds the reporters of a run, each in a thread of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from paramserve.errors import ParamServeError
from paramserve.messages import Record
from paramserve.observe.history import Steps
from paramserve.observe.metrics import Monotonic
from paramserve.observe.progress import ENDED
from paramserve.observe.status import RunStatus
from paramserve.reporters.base import Report, RunInfo

EVERY_S = 1.0
"""Seconds between two reports: servers report once a second."""
HANG_S = 30.0
"""How long one report may take; after that its reporter is called no more."""
CLOSE_S = 10.0
"""How long the last report and `close` may take at the end of a run."""


class Reported(Protocol):
    """What has a status, for instance a `paramserve.Job`."""

    def status(self) -> RunStatus: ...


class Feed:
    """The reporters of a run, from before its start until behind its end.

    Args:
        reporters: with a method `report`, and `open`, `begin` and `close` where they have them.
        say: tells of one that is dropped.
        every_s: between two reports.
    Raises:
        TypeError: one of them is no reporter.
    """

    def __init__(
        self,
        reporters: Iterable[Any],
        write: Callable[[str], None],
        every_s: float = EVERY_S,
    ) -> None:
        self._lines = [_Line(each, write, every_s) for each in checked(reporters)]
        self._over = threading.Event()

    def open(self, run: RunInfo) -> None:
        """Have each get ready; what one raises is raised, and those before it are closed."""
        with contextlib.ExitStack() as undo:
            for line in self._lines:
                line.call("open", run)
                undo.callback(line.call, "close")
            undo.pop_all()

    def start(
        self, reported: Reported, *, ends: bool = True, steps: Callable[[], Steps] = dict
    ) -> None:
        """Start to report this run or cluster.

        Args:
            ends: whether the last report is of its end; else it is when `close` is called.
            steps: outcomes of each worker's steps, for the last report.
        """
        for line in self._lines:
            line.start(reported, ends, steps)
        if self._lines:
            name = "paramserve-reports"
            threading.Thread(target=self._watch, name=name, daemon=True).start()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            for line in self._lines:
                line.check()

    def extend(self, records: Iterable[Record]) -> None:
        """What workers have logged: it comes with the next reports."""
        for line in self._lines:
            line.records.extend(records)

    def close(self) -> None:
        """The run has ended: wait until each has had its last report, for `CLOSE_S` at most."""
        self._over.set()
        for line in self._lines:
            line.over.set()
        until = time.monotonic() + CLOSE_S
        for line in self._lines:
            line.join(until - time.monotonic())


RECORDS_MAX = 1_000_000
"""Records that wait for one reporter; the oldest go first."""


class _Line:
    """One reporter, and its thread."""

    def __init__(self, reporter: Any, write: Callable[[str], None], every_s: float) -> None:
        self._reporter = reporter
        self._write = write
        self._every_s = every_s
        self._counters = Monotonic()
        self._thread: threading.Thread | None = None
        self._steps: Callable[[], Steps] = dict
        self._dropped = threading.Lock()
        self._since: float | None = None
        """When the report began that it is at."""
        self.records: deque[Record] = deque(maxlen=RECORDS_MAX)
        self.over = threading.Event()

    def call(self, method: str, *args: Any) -> None:
        hook = getattr(self._reporter, method, None)
        if hook is not None:
            hook(*args)

    def start(self, reported: Reported, ends: bool, steps: Callable[[], Steps]) -> None:
        self._steps = steps
        self._thread = threading.Thread(
            target=self._follow, args=(reported, ends), name="paramserve-report", daemon=True
        )
        self._thread.start()

    def join(self, seconds: float) -> None:
        if self._thread is None:
            self.call("close")
            return
        self._thread.join(max(seconds, 0.0))
        if self._thread.is_alive():
            self._drop(f"has not ended within {CLOSE_S:g} s of the run's end")

    def _follow(self, reported: Reported, ends: bool) -> None:
        try:
            try:
                self.call("begin")
                self._report(reported, ends)
            finally:
                self.call("close")
        except BaseException as error:
            self._drop(f"raised {type(error).__name__}: {error}")

    def _report(self, reported: Reported, ends: bool) -> None:
        ended = False
        while not ended:
            self.over.wait(self._every_s)
            status = reported.status()
            ended = self.over.is_set() or (ends and status.state in ENDED)
            self._since = time.monotonic()
            self._reporter.report(self._next(status, ended))
            self._since = None
            if self._dropped.locked():
                return

    def check(self) -> None:
        """Drop it if it hangs."""
        since = self._since
        if since is not None and time.monotonic() - since > HANG_S:
            self._drop(f"has been at one report for more than {HANG_S:g} s")

    def _next(self, status: RunStatus, ended: bool) -> Report:
        records = [self.records.popleft() for _ in range(len(self.records))]
        steps = self._steps() if ended else {}
        return Report(status, self._counters.samples(status), records, ended, steps=steps)

    def _drop(self, why: str) -> None:
        if self._dropped.acquire(blocking=False):
            self._write(f"{named(self._reporter)} {why}; it is told nothing more, the run goes on")


def checked(reporters: Iterable[Any]) -> list[Any]:
    """Reporters as `report_to` was given them.

    Raises:
        TypeError: one of them has no method `report`, or is a class.
    """
    if not isinstance(reporters, Iterable) or isinstance(reporters, str):
        raise TypeError(
            f"report_to takes a list of reporters, as report_to=[ps.CSV('run.csv')], not "
            f"{reporters!r}"
        )
    instances = list(reporters)
    for each in instances:
        if isinstance(each, type):
            raise TypeError(
                f"report_to takes objects: write {each.__name__}(...), and not {each.__name__}"
            )
        if not callable(getattr(each, "report", None)):
            raise TypeError(
                f"report_to takes reporters, which have a method report(report), not {each!r}"
            )
    return instances


def named(reporter: Any) -> str:
    """What a reporter is called in a line."""
    return f"the reporter {type(reporter).__name__}"


def missing(package: str, reporter: str, error: ImportError) -> ParamServeError:
    """What is raised where a reporter's package is not installed."""
    return ParamServeError(
        f"ps.{reporter} needs the package {package}: {error}",
        fix=f"pip install {package}",
    )

"""A run's report as one HTML page, and as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator

from paramserve.observe.history import Steps
from paramserve.observe.report import (
    EVENTS_MAX,
    Curves,
    Event,
    RunReport,
    check_writable,
    page,
    summaries,
    to_json,
    write,
)
from paramserve.observe.status import RunStatus, WorkerLoad
from paramserve.reporters.base import Report, Reporter, RunInfo

EVERY_S = 30.0
"""Seconds between two writings: a run that is killed has a report that is at most so old."""
PAGE, DATA = "report.html", "report.json"


class HTML(Reporter):
    """Write a report of the run: `<folder>/report.html`, one page that needs no network, and the
    same as data, `<folder>/report.json`.

    They are written when the run is started, every 30 s and at the end. The page has the
    configuration, a curve of each name and rank that workers logged, the staleness, where the time
    of a step goes, and when workers came and died, policies changed, checkpoints were written and
    the run went back to one, to about a second. Staleness and waiting by step come at the end only.

    Example:
        ps.run(train, report_to=[ps.HTML("runs/a")])

    Args:
        folder: is made; a report that is there is replaced when the run is started. A run that
            goes on from a checkpoint (`resume=`) keeps it, as `report-1.html` and so on.
            `paramserve report A B` shows the runs of several folders in one page.
    Raises:
        OSError: of `ps.run`, before anything is started: the folder cannot be written to.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self._run: RunInfo | None = None
        self._curves = Curves()
        self._events: list[Event] = []
        self._before: RunStatus | None = None
        self._loads: dict[int, WorkerLoad] = {}
        self._written_s = 0.0

    def open(self, run: RunInfo) -> None:
        os.makedirs(self.folder, exist_ok=True)
        for name in (PAGE, DATA):
            check_writable(os.path.join(self.folder, name))
        self._run = run
        self._curves, self._events, self._before, self._loads = Curves(), [], None, {}
        self._written_s = 0.0

    def begin(self) -> None:
        assert self._run is not None
        if self._run.resumed:
            self._keep_earlier()
        self._write(self._now(RunStatus("starting", 0.0, {}, {}, {}), {}))

    def _keep_earlier(self) -> None:
        """Give the report of the run before, which this one goes on from, a name of its own."""
        number, present = 1, set(os.listdir(self.folder))
        while not present.isdisjoint({_numbered(PAGE, number), _numbered(DATA, number)}):
            number += 1
        for name in present.intersection((PAGE, DATA)):
            old = os.path.join(self.folder, name)
            os.rename(old, os.path.join(self.folder, _numbered(name, number)))

    def report(self, report: Report) -> None:
        assert self._run is not None
        status = report.status
        if self._before is None:
            self._written_s = report.time_s
            self._curves.started_s = report.time_s - status.seconds
        self._curves.extend(report.records)
        self._events += changes(self._before, status)
        del self._events[:-EVENTS_MAX]
        self._before = status
        self._loads |= status.loads
        if report.last or report.time_s - self._written_s >= EVERY_S:
            self._written_s = report.time_s
            self._write(self._now(status, report.steps))

    def _now(self, status: RunStatus, steps: Steps) -> RunReport:
        assert self._run is not None
        return RunReport(
            run=self._run.settings(),
            versions=self._run.versions,
            state=status.state,
            seconds=status.seconds,
            curves=self._curves.by_name(),
            steps=summaries(steps, status.groups),
            step_s=self._curves.step_s(),
            events=list(self._events),
            left_out=len(self._curves.left_out),
            loads=dict(self._loads),
        )

    def _write(self, report: RunReport) -> None:
        name = os.path.basename(self.folder)
        write(os.path.join(self.folder, DATA), to_json(report))
        write(os.path.join(self.folder, PAGE), page({name: report}).encode())


def _numbered(name: str, number: int) -> str:
    stem, extension = os.path.splitext(name)
    return f"{stem}-{number}{extension}"


def changes(before: RunStatus | None, now: RunStatus) -> Iterator[Event]:
    """What has happened to a run between two looks at it; None: there was none before."""
    states = before.workers if before is not None else now.workers
    for rank, state in now.workers.items():
        was = states.get(rank)
        if was == state:
            continue
        kind = {"dead": "death", "retired": "retired"}.get(state, "")
        if state in ("starting", "running"):
            kind = {None: "join", "dead": "restart"}.get(was, "")
        if kind:
            text = f"rank {rank}: {was if was is not None else 'new'} -> {state}"
            yield Event(kind, text, time_s=now.seconds, rank=rank)
    for name, group in now.trained.items():
        earlier = before.groups.get(name) if before is not None else None
        if earlier is not None and earlier.policy and earlier.policy != group.policy:
            text = f"{name}: {earlier.policy} -> {group.policy}"
            yield Event("policy", text, time_s=now.seconds, clock=group.clock)
    for rollback in now.rollbacks[len(before.rollbacks) if before is not None else 0 :]:
        yield Event("rollback", rollback.line(), time_s=now.seconds)
    yield from _checkpoints(before, now)


def _checkpoints(before: RunStatus | None, now: RunStatus) -> Iterator[Event]:
    earlier = before.checkpoints if before is not None else None
    saved = now.checkpoints
    if saved is None:
        return
    if saved.path and saved.path != (earlier.path if earlier is not None else ""):
        yield Event("checkpoint", saved.told(), time_s=max(now.seconds - saved.age_s, 0.0))
    if saved.failed > (earlier.failed if earlier is not None else 0):
        yield Event("failed", f"a checkpoint: {saved.why}", time_s=now.seconds)

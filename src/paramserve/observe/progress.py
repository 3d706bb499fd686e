"""Progress lines: what the workers log, steps per second, and staleness.

On a terminal and in a notebook one line is rewritten in place, with others about each worker's
staleness and about checkpoints; elsewhere (a file, a CI log) a line is added at each interval, and
the others at the end. The last ones stay.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paramserve.observe.status import GroupStatus, RunStatus, in_bytes

WINDOW_S = 3.0
"""Steps per second are those of the last seconds: servers report once a second."""
ENDED = ("finished", "stopped", "failed")
WORKERS_SHOWN = 16
"""In the line about each worker's staleness."""
INDENT = " " * 9
"""Before what goes on about the line above: as wide as its seconds."""


class Watched(Protocol):
    """What has a status, for instance a `paramserve.Job`."""

    def status(self) -> RunStatus: ...


class Progress:
    """Puts a run's status into words. Keeps what it needs to tell a speed; starts nothing."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def line(self, status: RunStatus) -> str:
        """One line about where the run stands now.

        What the workers have logged stands first, staleness last.
        """
        live, wanted = status.staffing
        parts = [f"{status.seconds:6.1f} s"]
        if wanted:
            parts.append(f"{live}/{wanted} workers")
        parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
        if not any(group.steps for group in status.trained.values()):
            parts.append(status.state)
        for name, group in status.trained.items():
            if group.steps:
                parts += self._group(name, group, status)
        return "  ".join(parts)

    def by_worker(self, status: RunStatus) -> str:
        """How stale each worker's gradients are and how many were dropped, where any are; or
        nothing."""
        parts = []
        for name, group in status.trained.items():
            stale = group.staleness_by_rank
            ranks = sorted({*stale, *group.dropped_by_rank})
            if group.dropped or any(each.max for each in stale.values()):
                told = [_worker(rank, group) for rank in ranks[:WORKERS_SHOWN]]
                more = f", and {len(ranks) - len(told)} more" * (len(ranks) > len(told))
                parts.append(f"{name}, staleness by worker: {', '.join(told)}{more}")
        return "  ".join(parts)

    def checkpoints(self, status: RunStatus) -> str:
        """How old the last checkpoint is, and how often the run went back to one; or nothing."""
        told = [status.checkpoints.line()] if status.checkpoints is not None else []
        if count := len(status.rollbacks):
            told.append(f"went back {'once' if count == 1 else f'{count} times'}")
        return "  ".join(told)

    def _group(self, name: str, group: GroupStatus, status: RunStatus) -> list[str]:
        rate = self._rate(name, group.steps, status)
        under = f" ({group.policy})" if group.policy else ""
        parts = [f"{name}{under}: {group.steps:,} steps"]
        if rate is not None:
            parts.append(f"{rate:,.0f} steps/s")
        for count, what in (
            (group.skipped, "skipped"),
            (group.dropped, "dropped"),
            (group.buffered, "buffered"),
            *_of_table(group),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        if group.sent_by_rank:
            parts.append(f"sent {in_bytes(group.sent_bytes)} of {in_bytes(group.plain_bytes)}")
        if group.coming:
            parts.append(group.coming)
        parts.append(f"staleness {group.staleness.mean:.1f} (max {group.staleness.max})")
        return parts

    def _rate(self, name: str, steps: int, status: RunStatus) -> float | None:
        """Steps per second of late; once the run has ended, from the first step to the last."""
        now = (status.seconds, steps)
        if name in self._seen and steps < self._seen[name][-1][1]:  # it went back to a checkpoint
            del self._seen[name], self._first[name]
        first = self._first.setdefault(name, now)
        seen = self._seen.setdefault(name, deque([now]))
        if seen[-1][1] != steps:  # a new report of the servers
            seen.append(now)
        while len(seen) > 2 and seen[0][0] < status.seconds - WINDOW_S:
            seen.popleft()
        since, until = first if status.state in ENDED else seen[0], seen[-1]
        seconds = until[0] - since[0]
        return (until[1] - since[1]) / seconds if seconds > 0 else None


def _of_table(group: GroupStatus) -> tuple[tuple[int, str], ...]:
    """Numbers of its keyed table, if it is one, with what they count."""
    table = group.table
    if table is None:
        return ()
    rows = (table.rows, f"rows ({in_bytes(table.memory_bytes)})")
    return (rows, (table.evicted, "evicted"), (table.unadmitted, "unadmitted"))


def _worker(rank: int, group: GroupStatus) -> str:
    stale = group.staleness_by_rank.get(rank)
    text = f"{rank}: {stale.mean:.1f} (max {stale.max})" if stale is not None else f"{rank}: -"
    dropped = group.dropped_by_rank.get(rank, 0)
    return f"{text} {dropped:,} dropped" if dropped else text


def fold(line: str, width: int) -> list[str]:
    """A line in as many as a terminal of this width needs, each of whole parts."""
    folded: list[str] = []
    for part in re.split(r"(?<=\S)  (?=\S)", line):
        longer = f"{folded[-1]}  {part}" if folded else part
        if folded and len(longer) > width:
            folded.append(INDENT + part)
        else:
            folded[-1:] = [longer]
    return folded


class Shown(Protocol):
    """Where progress is shown."""

    def show(self, lines: list[str], last: bool) -> None:
        """Show where the run stands: one line, and maybe others about workers and checkpoints.

        Args:
            last: no other will come.
        """
        ...


class OnTerminal:
    """Lines that are rewritten in place; what the program prints meanwhile stands above them."""

    def __init__(self, console: Console, stack: ExitStack) -> None:
        # Standard output may be a file, while this is on the terminal.
        beside = sys.stdout is not None and sys.stdout.isatty()
        live = Live(console=console, auto_refresh=False, redirect_stdout=beside)
        self._live = stack.enter_context(live)
        self._console = console

    def show(self, lines: list[str], last: bool) -> None:
        folded = (part for line in lines for part in fold(line, self._console.width))
        text = Text("\n".join(folded), no_wrap=True, overflow="ellipsis")
        self._live.update(text, refresh=True)


class InFile:
    """A line at each interval, and the others at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def show(self, lines: list[str], last: bool) -> None:
        text = Text("\n".join(lines if last else lines[:1]))
        self._console.print(text, soft_wrap=True)


class InNotebook:
    """One output of the cell, which is replaced."""

    def __init__(self) -> None:
        self._output: Any = None

    def show(self, lines: list[str], last: bool) -> None:
        told = {"text/plain": "\n".join(lines)}
        if self._output is None:
            display = import_module("IPython.display").display
            self._output = display(told, raw=True, display_id=True)
        else:
            self._output.update(told, raw=True)


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def wanted(progress: bool | None) -> bool:
    """Whether a run shows its progress, as its `progress=` says: None: on a terminal and in a
    notebook."""
    if progress is not None:
        return progress
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


@contextmanager
def watch(
    watched: Watched, *, every_s: float = 1.0, console: Console | None = None
) -> Iterator[None]:
    """Show the progress of a run, for the length of the `with` block.

    Example:
        with observe.watch(job):
            result = job.wait()

    Args:
        watched: a job, or a handle of a cluster.
        every_s: how often.
        console: where to; standard error if None, so that a program's own output stays clean, and
            in a notebook the cell.
    """
    progress = Progress()
    over = threading.Event()
    failed: list[bool] = []

    def follow() -> None:
        while True:
            ended = over.wait(every_s)
            if failed:
                return
            status = watched.status()
            lines = [progress.line(status)]
            more = progress.by_worker(status), progress.checkpoints(status)
            lines += [INDENT + each for each in more if each]
            shown.show(lines, ended)
            if ended:
                return

    with ExitStack() as stack:
        shown = _shown(console, stack)
        thread = threading.Thread(target=follow, name="paramserve-progress", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            failed.append(True)  # what went wrong is told elsewhere, and last
            raise
        finally:
            over.set()
            thread.join()


def _shown(console: Console | None, stack: ExitStack) -> Shown:
    if console is None and in_notebook():
        return InNotebook()
    chosen = console if console is not None else Console(stderr=True)
    return OnTerminal(chosen, stack) if chosen.is_terminal else InFile(chosen)

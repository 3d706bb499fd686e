"""Progress lines: steps per second, what the workers log, and staleness.

On a terminal one line is rewritten in place, with a second one about each worker's staleness;
elsewhere (a file, a CI log) a line is added at each interval, and the second one at the end. The
last ones stay.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from paramserve.observe.status import GroupStatus, RunStatus, in_bytes

WINDOW_S = 3.0
"""Steps per second are those of the last seconds: servers report once a second."""
ENDED = ("finished", "stopped", "failed")
WORKERS_SHOWN = 16
"""In the line about each worker's staleness."""


class Watched(Protocol):
    """What has a status, for instance a `paramserve.Job`."""

    def status(self) -> RunStatus: ...


class Progress:
    """Puts a run's status into words. Keeps what it needs to tell a speed; starts nothing."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[tuple[float, int]]] = {}
        self._first: dict[str, tuple[float, int]] = {}

    def line(self, status: RunStatus) -> str:
        """One line about where the run stands now."""
        live, wanted = status.staffing
        parts = [f"{status.seconds:6.1f} s", f"{live}/{wanted} workers"]
        if not any(group.steps for group in status.groups.values()):
            parts.append(status.state)
        for name, group in status.groups.items():
            if group.steps:
                parts += self._group(name, group, status)
        parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
        return "  ".join(parts)

    def by_worker(self, status: RunStatus) -> str:
        """How stale each worker's gradients are and how many were dropped, where any are; or
        nothing."""
        parts = []
        for name, group in status.groups.items():
            stale = group.staleness_by_rank
            ranks = sorted({*stale, *group.dropped_by_rank})
            if group.dropped or any(each.max for each in stale.values()):
                told = [_worker(rank, group) for rank in ranks[:WORKERS_SHOWN]]
                more = f", and {len(ranks) - len(told)} more" * (len(ranks) > len(told))
                parts.append(f"{name}, staleness by worker: {', '.join(told)}{more}")
        return "  ".join(parts)

    def _group(self, name: str, group: GroupStatus, status: RunStatus) -> list[str]:
        rate = self._rate(name, group.steps, status)
        under = f" ({group.policy})" if group.policy else ""
        parts = [f"{name}{under}: {group.steps:,} steps"]
        if rate is not None:
            parts.append(f"{rate:,.0f} steps/s")
        parts.append(f"staleness {group.staleness.mean:.1f} (max {group.staleness.max})")
        for count, what in (
            (group.skipped, "skipped"),
            (group.dropped, "dropped"),
            (group.buffered, "buffered"),
            *_of_table(group),
        ):
            if count:
                parts.append(f"{count:,} {what}")
        return [*parts, group.coming] if group.coming else parts

    def _rate(self, name: str, steps: int, status: RunStatus) -> float | None:
        """Steps per second of late; once the run has ended, from the first step to the last."""
        now = (status.seconds, steps)
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


@contextmanager
def watch(
    watched: Watched, *, every_s: float = 1.0, console: Console | None = None
) -> Iterator[None]:
    """Show the progress of a run, for the length of the `with` block.

    Args:
        watched: a job.
        every_s: how often.
        console: where to; standard error if None, so that a program's own output stays clean.
    """
    shown = console if console is not None else Console(stderr=True)
    live = Live(console=shown, auto_refresh=False) if shown.is_terminal else None
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
            if (live is not None or ended) and (workers := progress.by_worker(status)):
                lines.append("         " + workers)
            text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
            if live is not None:
                live.update(text, refresh=True)
            else:
                shown.print(text, soft_wrap=True)
            if ended:
                return

    thread = threading.Thread(target=follow, name="paramserve-progress", daemon=True)
    with live if live is not None else nullcontext():
        thread.start()
        try:
            yield
        except BaseException:
            failed.append(True)  # what went wrong is told elsewhere, and last
            raise
        finally:
            over.set()
            thread.join()

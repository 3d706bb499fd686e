"""Progress lines: steps per second, what the workers log, and staleness.

On a terminal one line is rewritten in place; elsewhere (a file, a CI log) a line is added at each
interval. A last line stays.
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

from paramserve.observe.status import GroupStatus, RunStatus

WINDOW_S = 3.0
"""Steps per second are those of the last seconds: servers report once a second."""
ENDED = ("finished", "stopped", "failed")


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
        live = sum(state in ("running", "returned") for state in status.workers.values())
        parts = [f"{status.seconds:6.1f} s", f"{live}/{len(status.workers)} workers"]
        if not any(group.steps for group in status.groups.values()):
            parts.append(status.state)
        for name, group in status.groups.items():
            if group.steps:
                parts += self._group(name, group, status)
        parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
        return "  ".join(parts)

    def _group(self, name: str, group: GroupStatus, status: RunStatus) -> list[str]:
        rate = self._rate(name, group.steps, status)
        parts = [f"{name}: {group.steps:,} steps"]
        if rate is not None:
            parts.append(f"{rate:,.0f} steps/s")
        parts.append(f"staleness {group.staleness.mean:.1f} (max {group.staleness.max})")
        if group.skipped:
            parts.append(f"{group.skipped:,} skipped")
        return parts

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


@contextmanager
def watch(
    watched: Watched, *, every_s: float = 1.0, console: Console | None = None
) -> Iterator[None]:
    """Show how a run gets on, for the length of the `with` block.

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
            text = Text(progress.line(watched.status()), no_wrap=True, overflow="ellipsis")
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

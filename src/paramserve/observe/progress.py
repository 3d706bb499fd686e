"""Lines about how far a run is: what the workers log, steps per second, and staleness."""

from __future__ import annotations

import re

from paramserve.observe.amounts import in_bytes
from paramserve.observe.rates import Rates
from paramserve.observe.status import GroupStatus, RunStatus

ENDED = ("finished", "stopped", "failed")
WORKERS_SHOWN = 16
"""Most workers in the line about each worker's staleness."""
INDENT = " " * 9
"""Indent of what goes on about the line above: as wide as its seconds."""


class Progress:
    """Puts a run's status into words. Keeps what it needs to tell a speed; starts nothing."""

    def __init__(self) -> None:
        self._rates = Rates()

    def line(self, status: RunStatus) -> str:
        """One line about where the run stands now.

        What the workers have logged stands first, staleness last.
        """
        live, expected = status.staffing
        parts = [f"{status.seconds:6.1f} s"]
        if expected:
            parts.append(f"{live}/{expected} workers")
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
                shares = [_worker(rank, group) for rank in ranks[:WORKERS_SHOWN]]
                more = f", and {len(ranks) - len(shares)} more" * (len(ranks) > len(shares))
                parts.append(f"{name}, staleness by worker: {', '.join(shares)}{more}")
        return "  ".join(parts)

    def checkpoints(self, status: RunStatus) -> str:
        """How old the last checkpoint is, and how often the run went back to one; or nothing."""
        parts = [status.checkpoints.line()] if status.checkpoints is not None else []
        if count := len(status.rollbacks):
            parts.append(f"went back {'once' if count == 1 else f'{count} times'}")
        return "  ".join(parts)

    def _group(self, name: str, group: GroupStatus, status: RunStatus) -> list[str]:
        whole = status.state in ENDED
        rate = self._rates.of(name, status.seconds, group.steps, whole=whole)
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
        for what, coded, plain in (
            ("sent", group.sent_bytes, group.plain_bytes),
            ("read", group.read_bytes, group.read_plain_bytes),
        ):
            if plain:
                parts.append(f"{what} {in_bytes(coded)} of {in_bytes(plain)}")
        if group.coming:
            parts.append(group.coming)
        parts.append(f"staleness {group.staleness.mean:.1f} (max {group.staleness.max})")
        return parts


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

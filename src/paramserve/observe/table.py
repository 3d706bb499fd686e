"""A run as a table that is redrawn: how far it is, a row for each worker and each server."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paramserve.observe.amounts import in_bytes
from paramserve.observe.progress import ENDED, INDENT, Progress, fold
from paramserve.observe.rates import Rates
from paramserve.observe.status import GroupStatus, RunStatus

ROWS_LEAST = 3
"""Workers, and servers, that are shown at least, however low the terminal is."""
AROUND = 6
"""Lines of a terminal that are not rows or words: the bar, two headings, what is left out of each
table, and one that stays free."""
SHOWN_FIRST = ("dead", "starting", "retiring", "running", "stopped", "returned", "retired")
"""States in the order in which workers are shown, where there is no room for all."""
STYLES = {"dead": "bold red", "starting": "yellow", "retiring": "yellow", "returned": "dim"}
LOSS = "loss"
"""What is shown of what each worker logs, if it does; else the first name."""
UNKNOWN = "-"


class LiveTable:
    """Draws a run's status. Keeps what it needs to tell speeds; starts nothing."""

    def __init__(self) -> None:
        self._words = Progress()
        self._rates = Rates()
        self._since = 0.0, 0.0
        """When the part of the present loop that was done was first told, and how much that was."""
        self._done = 0.0
        """How much it was when it was last told."""

    def draw(self, status: RunStatus, width: int, height: int) -> RenderableType:
        """The table, of at most this many columns, and lines if it can be.

        Where it has no room for all workers or servers, it says how many it leaves out.
        """
        lines = fold(self._words.line(status), width)
        parts: list[RenderableType] = [_text(lines)]
        looped = self._looped(status, width)
        if looped is not None:
            parts.append(looped)
        text = self._words.checkpoints(status)
        below = fold(text, width) if text else []
        servers = sorted(status.servers)
        room = max(height - AROUND - len(lines) - len(below), 2 * ROWS_LEAST)
        for_servers = max(min(len(servers), room // 2), min(len(servers), ROWS_LEAST))
        if status.workers:
            parts.append(self._workers(status, max(room - for_servers, ROWS_LEAST)))
        if servers:
            parts.append(self._servers(status, servers, max(for_servers, ROWS_LEAST)))
        if below:
            parts.append(_text(below))
        return Group(*parts)

    def _looped(self, status: RunStatus, width: int) -> RenderableType | None:
        """A bar of how far the loop over batches is, with the time left; None: it is not known."""
        done = status.looped
        if not done or status.state in ENDED:
            return None
        if not self._done or done < self._done:  # another loop
            self._since = status.seconds, done
        self._done = done
        began, before = self._since
        remaining = ""
        if done > before and status.seconds > began:
            seconds = (1.0 - done) * (status.seconds - began) / (done - before)
            remaining = f"about {in_time(seconds)} left"
        row = Table.grid(padding=(0, 1))
        bar = ProgressBar(total=1.0, completed=done, width=max(width - 40, 10))
        row.add_row(INDENT[:-1], bar, f"{done:4.0%}", remaining)
        return row

    def _workers(self, status: RunStatus, rows: int) -> RenderableType:
        metric = _metric(status)
        columns = ["worker", "state", "steps", "steps/s"]
        columns += [metric] if metric else []
        encodes = any(load.encoded_s for load in status.loads.values())
        columns += ["staleness", "waits", *(["codec"] if encodes else []), "memory"]
        table = _table(columns)
        ranks = sorted(
            status.workers, key=lambda rank: (SHOWN_FIRST.index(status.workers[rank]), rank)
        )
        for rank in sorted(ranks[:rows]):
            state = status.workers[rank]
            cells = [Text(str(rank)), Text(state, STYLES.get(state, ""))]
            cells += [Text(each) for each in self._of_worker(status, rank, metric, encodes)]
            table.add_row(*cells)
        return _with_rest(table, len(ranks) - rows, "worker")

    def _of_worker(
        self, status: RunStatus, rank: int, metric: str | None, encodes: bool
    ) -> list[str]:
        groups = status.trained.values()
        steps = max((group.steps_by_rank.get(rank, -1) for group in groups), default=-1)
        rate = self._rates.of(("steps", rank), status.seconds, steps) if steps >= 0 else None
        lives = status.workers[rank] == "running"
        cells = [_in_short(steps) if steps >= 0 else UNKNOWN]
        cells.append(f"{rate:,.1f}" if rate is not None and lives else UNKNOWN)
        if metric:
            value = status.logged.get(rank, {}).get(metric)
            cells.append(f"{value:.4g}" if value is not None else UNKNOWN)
        cells.append(_staleness(groups, rank))
        load = status.loads.get(rank) if lives else None
        if load is None:
            return cells + [UNKNOWN] * (3 if encodes else 2)
        cells.append(self._share(("waits", rank), load.seconds, load.waited_s))
        if encodes:
            cells.append(self._share(("codec", rank), load.seconds, load.encoded_s))
        cells.append(in_bytes(load.memory_bytes) if load.memory_bytes else UNKNOWN)
        return cells

    def _servers(self, status: RunStatus, servers: Sequence[int], rows: int) -> RenderableType:
        table = _table(["server", "values", "tables", "pushes/s", "waiting", "memory"])
        for shard in servers[:rows]:
            load = status.servers[shard]
            rate = self._rates.of(("pushes", shard), status.seconds, load.pushes)
            table.add_row(
                str(shard),
                in_bytes(load.value_bytes),
                in_bytes(load.table_bytes),
                f"{rate:,.0f}" if rate is not None and status.state not in ENDED else UNKNOWN,
                f"{load.waiting:,}",
                in_bytes(load.memory_bytes) if load.memory_bytes else UNKNOWN,
            )
        return _with_rest(table, len(servers) - rows, "server")

    def _share(self, name: tuple[str, int], seconds: float, part: float) -> str:
        share = self._rates.share(name, seconds, part)
        return f"{share:.0%}" if share is not None else UNKNOWN


def in_time(seconds: float) -> str:
    """Seconds for people: "42 s", "7 min", "3 h 05 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def _in_short(steps: int) -> str:
    return f"{steps:,}" if steps < 10_000_000 else f"{steps / 1e6:,.1f} M"


def _metric(status: RunStatus) -> str | None:
    names = [name for each in status.logged.values() for name in each]
    return LOSS if LOSS in names else (names[0] if names else None)


def _staleness(groups: Iterable[GroupStatus], rank: int) -> str:
    shares = [group.staleness_by_rank[rank] for group in groups if rank in group.staleness_by_rank]
    pushes = sum(each.pushes for each in shares)
    if not pushes:
        return UNKNOWN
    mean = sum(each.mean * each.pushes for each in shares) / pushes
    return f"{mean:.1f} (max {max(each.max for each in shares)})"


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for number, name in enumerate(columns):
        text = number == 0 or name == "state"
        # As text: the name of what is logged may look like markup.
        table.add_column(Text(name), justify="left" if text else "right", no_wrap=True)
    return table


def _with_rest(table: Table, more: int, noun: str) -> RenderableType:
    if more <= 0:
        return table
    return Group(table, _text([f" and {more} more {noun}{'s' if more > 1 else ''}"]))


def _text(lines: Sequence[str]) -> Text:
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")

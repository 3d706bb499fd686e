"""Predictions on a terminal (a table, the arithmetic behind it, bars) or as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from paramserve.errors import ParamServeError
from paramserve_plan.prediction import Prediction
from paramserve_plan.setting import Setting
from paramserve_plan.shards import Sweep

BAR = 50
"""Characters of the longest bar."""
PARTS = (("compute", "█"), ("exchange", "▒"), ("waiting", "·"))


@dataclass(frozen=True)
class Row:
    """One line of the table: a policy in a setting. `sweep`: None if it was not asked for."""

    policy: str
    setting: Setting
    prediction: Prediction
    sweep: Sweep | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        found = asdict(self.prediction)
        found["staleness"] = self.prediction.staleness._asdict()
        found |= {
            "policy": self.policy,
            "limit": self.prediction.limit,
            "one_way_s": self.setting.one_way_s,
        }
        if self.sweep is not None:
            found["shards_needed"] = self.sweep.needed
            found["floor_s"] = self.sweep.floor_s
            found["by_shards"] = [[each.shards, each.step_s] for each in self.sweep.points]
        return found


def show(rows: Sequence[Row], console: Console) -> None:
    console.print(table(rows))
    console.print(links(rows))
    console.print(EXPLAINED, highlight=False, soft_wrap=True)
    console.print(ONE_WAY, highlight=False, soft_wrap=True)
    for each in dict.fromkeys(arithmetic(row.setting) for row in rows):
        console.print(each, highlight=False, soft_wrap=True)
    console.print()
    for line in bars(rows):
        console.print(line, highlight=False, no_wrap=True, crop=False)
    for row in rows:
        for line in curve(row):
            console.print(line, highlight=False, no_wrap=True, crop=False)


def table(rows: Sequence[Row]) -> Table:
    """How fast, one line for each prediction."""
    made = Table(box=SIMPLE, pad_edge=False)
    made.add_column("workers x shards", overflow="fold")
    dropping = any(row.prediction.dropped_share for row in rows)
    for name in ("step", "steps/s", "waiting", "staleness", *["dropped"] * dropping, "limit"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = row.prediction
        stale = found.staleness
        made.add_row(
            label(row),
            in_seconds(found.step_s),
            f"{found.steps_per_s:.4g}",
            f"{found.waiting_share:.0%}",
            f"{stale.mean:.3g}, {stale.p95}, {stale.largest}",
            *[f"{found.dropped_share:.0%}"] * dropping,
            found.limit,
        )
    return made


def links(rows: Sequence[Row]) -> Table:
    """What goes over the links, and how many shards are needed; one line for each prediction."""
    made = Table(box=SIMPLE, pad_edge=False)
    made.add_column("a step, each way", overflow="fold")
    for name in ("worker link", "use", "server link", "use", "server", "needs"):
        made.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = row.prediction
        made.add_row(
            label(row),
            in_bytes(found.worker_bytes),
            f"{found.worker_link_use:.0%}",
            in_bytes(found.server_bytes),
            f"{found.server_link_use:.0%}",
            f"{found.server_use:.0%}",
            needed(row.sweep),
        )
    return made


def needed(found: Sweep | None) -> str:
    """The number of shards, in a cell."""
    if found is None:
        return ""
    return f"{found.needed}" if found.needed is not None else f"best {found.best}"


EXPLAINED = (
    "waiting: held back because of other workers. staleness: mean, 95%, largest. use: of a link, "
    "in each direction. server: use of its processor. needs: the smallest number of shards with "
    "which a step is within 10% of one with servers without limits; best: none is, and more would "
    "cost more than they gain."
)
ONE_WAY = (
    "By hand, one way. Links are full duplex. Where no worker waits (Async), one worker's push and "
    "another's pull overlap: a step takes at least this. In Sync the values come back after the "
    "last push: twice this, and the slowest worker's compute."
)


def arithmetic(setting: Setting) -> str:
    """How long the bytes of one step take in one direction."""
    network = setting.network
    into_one = setting.workers * setting.link_bytes / setting.shards
    return (
        f"  {setting.workers} x {in_bytes(setting.link_bytes)} / {setting.shards} = "
        f"{in_bytes(into_one)} into each server at {network.server_gbps:g} Gb/s: "
        f"{in_seconds(setting.server_link_s)}; out of each worker at {network.worker_gbps:g} "
        f"Gb/s: {in_seconds(setting.worker_link_s)}; so {in_seconds(setting.one_way_s)}"
    )


def bars(rows: Sequence[Row]) -> Iterator[str]:
    """A step's time in its parts, one bar for each row."""
    longest_s = max(row.prediction.step_s for row in rows)
    width = max(len(label(row)) for row in rows)
    yield "A step: " + ", ".join(f"{mark} {name}" for name, mark in PARTS)
    for row in rows:
        found = row.prediction
        scale = BAR * found.step_s / max(longest_s, 1e-12)
        shares = (found.compute_share, found.exchange_share, found.waiting_share)
        text = "".join(
            mark * round(share * scale) for share, (_, mark) in zip(shares, PARTS, strict=True)
        )
        yield f"{label(row):{width}} {text} {in_seconds(found.step_s)}"


def curve(row: Row) -> Iterator[str]:
    if row.sweep is None:
        return
    longest_s = max(each.step_s for each in row.sweep.points)
    yield f"\nStep by shards, {row.policy}, {row.setting.workers} workers:"
    for each in row.sweep.points:
        mark = " <- needed" if each.shards == row.sweep.needed else ""
        bar = "█" * max(1, round(BAR * each.step_s / max(longest_s, 1e-12)))
        yield f"{each.shards:6} {bar} {in_seconds(each.step_s)}{mark}"


def label(row: Row) -> str:
    return f"{row.policy}, {row.prediction.workers} x {row.prediction.shards}"


def in_seconds(seconds: float) -> str:
    """Time with three digits and a unit."""
    for limit, factor, unit in ((1e-3, 1e6, "us"), (1.0, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def in_bytes(count: float) -> str:
    """Decimal, as links are."""
    for limit, factor, unit in ((1e6, 1e3, "kB"), (1e9, 1e6, "MB"), (1e12, 1e9, "GB")):
        if count < limit:
            return f"{count / factor:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"


COLOURS = {"compute": "#4c72b0", "exchange": "#dd8452", "waiting": "#cccccc"}


def require_matplotlib() -> None:
    """Raise `ParamServeError` if matplotlib is not there, before anything takes time."""
    try:
        import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ParamServeError(
            "a picture needs matplotlib, which is not installed",
            fix="pip install matplotlib, or leave --out away",
        ) from error


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write it: a step's parts for each row, and step time by number of shards.

    Args:
        path: its ending says the format: .png, .svg or .pdf.
    Raises:
        ParamServeError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written, or has an unknown ending.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    swept = [row for row in rows if row.sweep is not None]
    figure = Figure(figsize=(11.0 if swept else 6.0, 1.5 + 0.5 * max(5, len(rows))))
    left = figure.add_subplot(1, 2 if swept else 1, 1)
    start = [0.0] * len(rows)
    for name, colour in COLOURS.items():
        width = [
            1e3 * row.prediction.step_s * getattr(row.prediction, f"{name}_share") for row in rows
        ]
        left.barh(range(len(rows)), width, left=start, color=colour, label=name)
        start = [before + added for before, added in zip(start, width, strict=True)]
    left.set_yticks(range(len(rows)), [label(row) for row in rows])
    left.invert_yaxis()
    left.set_xlabel("one step of a worker, ms")
    left.legend()
    if swept:
        right = figure.add_subplot(1, 2, 2)
        for row in swept:
            assert row.sweep is not None
            points = row.sweep.points
            right.loglog(
                [each.shards for each in points],
                [1e3 * each.step_s for each in points],
                marker="o",
                label=f"{row.policy}, {row.setting.workers} workers",
            )
        right.set_xlabel("shards")
        right.set_ylabel("one step of a worker, ms")
        right.grid(alpha=0.3, which="both")
        right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)

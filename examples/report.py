"""What a finished run looks like: a table, a picture and the numbers behind them as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

COLORS = {"sync": "#2a6fbb", "async": "#d1661a"}
MARKERS = {"sync": "o", "async": "s"}


class Point(NamedTuple):
    """Accuracy on a part of the test set, at a version of the values and a time of the run."""

    version: int
    seconds: float
    accuracy: float


@dataclass(frozen=True)
class Run:
    """One way of training, measured: `accuracy` is that of the end, on the full test set."""

    name: str
    updates: int
    batches: int
    accuracy: float
    batches_per_second: float
    staleness: tuple[float, int] | None = None
    """Mean and largest over all pushes; None where there is no server."""
    curve: list[Point] = field(default_factory=list)


def table(runs: Sequence[Run]) -> Table:
    """One row for each run. Batches are those of all workers together."""
    found = Table(title="MNIST through a parameter server", title_justify="left")
    found.add_column("run")
    for column in ("updates", "batches", "accuracy", "steps per second", "staleness"):
        found.add_column(column, justify="right")
    for run in runs:
        found.add_row(
            run.name,
            f"{run.updates:,}",
            f"{run.batches:,}",
            f"{run.accuracy:.2%}",
            f"{run.batches_per_second:,.0f}",
            "-" if run.staleness is None else "{:.1f} (max {})".format(*run.staleness),
        )
    return found


def save(runs: Sequence[Run], folder: Path) -> Path:
    """Write `curves.json` and `accuracy.png` into a new folder."""
    folder.mkdir(parents=True)
    body = {run.name: asdict(run) for run in runs}
    (folder / "curves.json").write_text(json.dumps(body, indent=1) + "\n")
    picture([run for run in runs if run.curve], folder / "accuracy.png")
    return folder


def picture(runs: Sequence[Run], path: Path) -> None:
    """Accuracy against updates and against seconds, one line for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for run in runs:
        look = {"color": COLORS[run.name], "marker": MARKERS[run.name], "markersize": 4}
        heights = [point.accuracy for point in run.curve]
        axes[0].plot([point.version for point in run.curve], heights, label=run.name, **look)
        axes[1].plot([point.seconds for point in run.curve], heights, label=run.name, **look)
    axes[0].set(xlabel="updates of the values", ylabel="accuracy on 1,024 test images")
    axes[1].set(xlabel="seconds since the first step")
    for one in axes:
        one.set_ylim(0, 1)
        one.set_xlim(left=0)
        one.yaxis.set_major_formatter(PercentFormatter(xmax=1))
        one.grid(color="#dddddd", linewidth=0.6)
        one.spines[["top", "right"]].set_visible(False)
        one.legend(loc="lower right", frameon=False)
    figure.suptitle("MNIST ConvNet through a parameter server")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

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


# --- races: many policies against each other -----------------------------------------------------

HUES = {
    "sync": "#12416f",
    "backup": "#2a6fbb",
    "deadline": "#7fb0e0",
    "balanced": "#4b9cb8",
    "async": "#a8440a",
    "damped": "#d1661a",
    "corrected": "#e8923f",
    "dropping": "#f2b97d",
    "leases": "#8a6d3b",
    "bounded": "#3a8f3a",
    "compensated": "#8250c4",
    "buffered": "#c43c84",
    "local": "#5c5c5c",
    "own pace": "#7a7a7a",
    "elastic": "#9a9a9a",
}
"""Blue waits for a clock, orange for no worker; the bars' colours are the lines'."""
TITLES = {
    "even": "{} workers that are alike",
    "persistent": "{} workers, one of them always slow",
    "transient": "{} workers, each slow now and then",
}
SHOWN = 0.4
"""The curves are drawn from this far below the target on: there they part."""


@dataclass(frozen=True)
class Race:
    """One policy in one scenario, as its workers' logs and its servers tell.

    Attributes:
        seconds, updates: from the common first step to the target; None: it was not reached.
            An update is a version of the values.
        steps_per_second: batches of all workers together.
        staleness: mean and largest over all pushes.
        waiting: share of the workers' time that went by in pushing and pulling.
        dropped: gradients that came too late or were too stale.
        samples: that each rank computed.
        curve: accuracy on the whole test set.
    """

    name: str
    label: str
    scenario: str
    target: float
    seconds: float | None
    updates: int | None
    steps_per_second: float
    staleness: tuple[float, int]
    waiting: float
    dropped: int
    samples: dict[int, int]
    curve: list[Point]

    def cells(self) -> tuple[str, ...]:
        """The row of a table, in the order of `race_headings`."""
        total = max(sum(self.samples.values()), 1)
        return (
            f"{self.seconds:.1f}" if self.seconds is not None else "not reached",
            f"{self.updates:,}" if self.updates is not None else "-",
            f"{self.steps_per_second:.0f}",
            "{:.1f} ({})".format(*self.staleness),
            f"{self.waiting:.0%}",
            f"{self.dropped:,}",
            "/".join(f"{100 * count / total:.0f}" for count in self.samples.values()),
        )


def race_headings(races: Sequence[Race]) -> tuple[str, ...]:
    """Headings of the columns after the policy's name."""
    target = f"{races[0].target:.0%}" if races else "the target"
    return (
        f"seconds to {target}",
        "updates",
        "batches/s",
        "staleness",
        "waits",
        "dropped",
        "% by worker",
    )


def race_table(races: Sequence[Race]) -> Table:
    """One row for each policy of a scenario."""
    scenario = races[0].scenario if races else ""
    found = Table(title=f"MNIST, workers: {scenario}", title_justify="left")
    found.add_column("policy", no_wrap=True)
    for column in race_headings(races):
        found.add_column(column, justify="right")
    for race in races:
        found.add_row(race.label, *race.cells())
    return found


def race_rows(races: Sequence[Race]) -> list[str]:
    """Rows of the races as lines of Markdown."""
    heads = ("policy", *race_headings(races))
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return lines + [f"| `{one.label}` | " + " | ".join(one.cells()) + " |" for one in races]


def save_races(races: Sequence[Race], folder: Path) -> Path:
    """Write `races.json` and a picture for each scenario into a new folder."""
    folder.mkdir(parents=True)
    (folder / "races.json").write_text(json.dumps([asdict(one) for one in races], indent=1) + "\n")
    for scenario in dict.fromkeys(one.scenario for one in races):
        own = [one for one in races if one.scenario == scenario]
        race_picture(own, folder / f"consistency_{scenario}.png")
    return folder


def race_picture(races: Sequence[Race], path: Path) -> None:
    """Accuracy over seconds, and the seconds to the target as bars, which are the legend too."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import PercentFormatter

    height = max(4.0, 0.36 * len(races) + 1.0)
    figure, (lines, bars) = pyplot.subplots(1, 2, figsize=(12, height), layout="constrained")
    target = races[0].target
    for race in races:
        seconds = [point.seconds for point in race.curve]
        heights = [point.accuracy for point in race.curve]
        lines.plot(seconds, heights, color=HUES[race.name], linewidth=1.4)
    lines.axhline(target, color="#888888", linewidth=0.8, linestyle="--")
    lines.set(xlabel="seconds since the common first step", ylabel="accuracy on the test set")
    best = max((point.accuracy for race in races for point in race.curve), default=target)
    lines.set_ylim(max(target - SHOWN, 0.0), max(best, target) + 0.02)
    lines.set_xlim(left=0)
    lines.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    lines.grid(color="#dddddd", linewidth=0.6)

    last = max((point.seconds for race in races for point in race.curve), default=1.0)
    ordered = sorted(races, key=lambda one: one.seconds if one.seconds is not None else last * 2)
    for row, race in enumerate(ordered):
        color = HUES[race.name]
        if race.seconds is None:
            bars.text(0, row, " not reached", va="center", color=color)
        else:
            bars.barh(row, race.seconds, color=color, height=0.7)
            bars.text(race.seconds, row, f" {race.seconds:.1f}", va="center")
    bars.set_yticks(range(len(ordered)), [race.label for race in ordered])
    bars.invert_yaxis()
    bars.margins(x=0.12)
    bars.set(xlabel=f"seconds to {target:.0%}")
    bars.grid(axis="x", color="#dddddd", linewidth=0.6)
    bars.set_axisbelow(True)
    for one in (lines, bars):
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle("MNIST ConvNet, " + TITLES[races[0].scenario].format(len(races[0].samples)))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)

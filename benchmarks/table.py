"""The table: medians, ratios against bars, as text, Markdown and JSON. It measures nothing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

LINE = "<br>"
"""Between the bars of one row, in Markdown."""
HEADINGS = ("workload", "ours", "Ray", "RPC", "floor", "ratio", "must reach", "met?")
RIVALS = {"ray": "Ray", "rpc": "RPC", "floor": "floor"}
PACKAGES = ("paramserve", "numpy", "numba", "torch", "ray")


@dataclass(frozen=True)
class Bar:
    """What a row must reach.

    Args:
        against: label of the contestant compared with; ignored by `most`.
        reach: for `times`, how many times better than it; for `share`, the least part of its
            speed; for `cost`, the most times its cost; for `most`, the most in the row's unit.
        name: what `against` is, if its label does not say it.
    """

    form: Literal["times", "share", "cost", "most"]
    reach: float
    against: str = ""
    name: str = ""


@dataclass(frozen=True)
class Row:
    """One workload's samples, one for each round, by label.

    Args:
        better: whether more or less of the unit is better.
        notes: what else a reader must know to judge the figures.
    """

    workload: str
    unit: str
    better: Literal["more", "less"]
    samples: dict[str, list[float]]
    bars: tuple[Bar, ...] = ()
    notes: str = ""

    def median(self, label: str) -> float | None:
        values = self.samples.get(label)
        return median(values) if values else None

    def gain(self, label: str) -> float | None:
        """How many times better ours is than `label`, by medians."""
        ours, other = self.median("ours"), self.median(label)
        if ours is None or other is None:
            return None
        return ours / other if self.better == "more" else other / ours

    def judge(self, bar: Bar) -> tuple[str, str, bool | None]:
        """The ratio, the bar and whether it is met; None if a side is missing."""
        name = bar.name if bar.name else RIVALS.get(bar.against, bar.against)
        if bar.form == "most":
            ours = self.median("ours")
            met = None if ours is None else ours <= bar.reach
            return "", f"≤ {figure(bar.reach)} {self.unit}", met
        gain = self.gain(bar.against)
        if bar.form == "times":
            wanted = f"≥ {bar.reach:g}x {name}"
            text = f"{figure(gain)}x {name}" if gain is not None else ""
        elif bar.form == "share":
            wanted = f"≥ {bar.reach:.0%} of {name}"
            text = f"{gain:.0%} of {name}" if gain is not None else ""
        else:
            wanted = f"≤ {bar.reach:g}x {name}"
            text = f"{figure(1 / gain)}x {name}" if gain is not None else ""
        least = 1 / bar.reach if bar.form == "cost" else bar.reach
        return text, wanted, None if gain is None else gain >= least

    def cells(self) -> tuple[str, ...]:
        """The row's texts, in the order of `HEADINGS`."""
        judged = [self.judge(bar) for bar in self.bars]
        words = {True: "yes", False: "**no**", None: "-"}
        values = [self._value(label) for label in ("ours", "ray", "rpc", "floor")]
        return (
            f"{self.workload} ({self.unit})",
            *values,
            LINE.join(text if text else "-" for text, _, _ in judged),
            LINE.join(wanted for _, wanted, _ in judged),
            LINE.join(words[met] for _, _, met in judged),
        )

    def _value(self, label: str) -> str:
        found = self.median(label)
        return figure(found) if found is not None else ""


def figure(value: float) -> str:
    """Three digits, as one reads them."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "niceness": os.getpriority(os.PRIO_PROCESS, 0),
        "load_before": os.getloadavg()[0],
        **versions,
    }


@dataclass(frozen=True)
class Report:
    """All rows of one go, and what they were measured on."""

    rows: Sequence[Row]
    machine: dict[str, Any]
    rounds: int
    tiny: bool
    failures: Sequence[str]

    def show(self) -> None:
        """Print the table and the notes."""
        console = Console()
        table = Table(*HEADINGS, show_lines=True)
        for row in self.rows:
            table.add_row(*(cell.replace("**", "").replace(LINE, "\n") for cell in row.cells()))
        console.print(table, highlight=False)
        for row in self.rows:
            if row.notes:
                console.print(f"{row.workload}: {row.notes}", style="dim", highlight=False)

    def write(self, folder: Path) -> None:
        """Write `bench.json` and `bench.md`."""
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "machine": self.machine,
            "tiny": self.tiny,
            "rounds": self.rounds,
            "failures": list(self.failures),
            "rows": [_record(row) for row in self.rows],
        }
        (folder / "bench.json").write_text(json.dumps(record, indent=2) + "\n")
        (folder / "bench.md").write_text(self.markdown())

    def markdown(self) -> str:
        """The table as docs/benchmarks.md shows it, with the notes below: ratios, and no bars."""
        shown = HEADINGS[: HEADINGS.index("ratio") + 1]
        lines = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
        for row in self.rows:
            ratios = [text for text, _, _ in map(row.judge, row.bars) if text]
            figures = row.cells()[: len(shown) - 1]
            lines.append("| " + " | ".join([*figures, LINE.join(ratios)]) + " |")
        lines += ["", self._about(), ""]
        lines += [f"- {row.workload}: {row.notes}" for row in self.rows if row.notes]
        return "\n".join(lines) + "\n"

    def _about(self) -> str:
        if self.tiny:
            return "Tiny sizes: this shows that the benchmarks run, and nothing about speed."
        found = self.machine
        return (
            f"Medians of {self.rounds} rounds, contestants in turn; one thread for each process, "
            f"all of the same niceness; {found['cores']} cores, Python {found['python']}, torch "
            f"{found['torch']}, ray {found['ray']}."
        )


def _record(row: Row) -> dict[str, Any]:
    judged = [row.judge(bar) for bar in row.bars]
    return asdict(row) | {
        "medians": {label: row.median(label) for label in row.samples},
        "judged": [{"ratio": text, "bar": bar, "met": met} for text, bar, met in judged],
    }

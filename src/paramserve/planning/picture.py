"""Predictions as a picture, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from paramserve.errors import ParamServeError
from paramserve.planning.show import Row, label

COLOURS = {"compute": "#4c72b0", "exchange": "#dd8452", "waiting": "#cccccc"}


def require() -> None:
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
    require()
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

"""A figure of what a run has recorded: metrics and staleness of each worker, over its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from paramserve.messages import Record
from paramserve.observe.history import StepRecord
from paramserve.observe.view import in_notebook

Curves = Mapping[int, tuple[Sequence[int], Sequence[float]]]
"""Clocks by rank, and a value for each."""
WIDTH_IN, HEIGHT_IN = 7.0, 2.2
"""Size of one plot, in inches."""


def figure_of(
    metrics: Iterable[Record], steps: Mapping[str, Mapping[int, Sequence[StepRecord]]]
) -> Any:
    """A figure of matplotlib's: one plot of each metric, and one of the staleness in each group.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is nothing to plot.
    """
    try:
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError(
            "result.plot() draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    plots = {**_metrics(metrics), **_staleness(steps)}
    if not plots:
        raise ValueError(
            "there is nothing to plot: no worker has called worker.log(...), and no optimizer from "
            "worker.optimizer(...) has made a step"
        )
    size = WIDTH_IN, HEIGHT_IN * len(plots)
    figure, axes = pyplot.subplots(
        len(plots), sharex=True, squeeze=False, figsize=size, layout="constrained"
    )
    for axis, (title, curves) in zip(axes[:, 0], plots.items(), strict=True):
        for rank, (clocks, values) in sorted(curves.items()):
            axis.plot(clocks, values, label=f"rank {rank}", linewidth=1)
        axis.set_ylabel(title)
        axis.legend(fontsize="small")
    axes[-1, 0].set_xlabel("clock: steps of the worker")
    if in_notebook():
        pyplot.close(figure)  # else the cell shows it once more than its value does
    return figure


def _metrics(metrics: Iterable[Record]) -> dict[str, Curves]:
    curves: dict[str, dict[int, tuple[list[int], list[float]]]] = {}
    for record in metrics:
        for name, value in record.values.items():
            clocks, values = curves.setdefault(name, {}).setdefault(record.rank, ([], []))
            clocks.append(record.clock)
            values.append(value)
    return {**curves}


def _staleness(steps: Mapping[str, Mapping[int, Sequence[StepRecord]]]) -> dict[str, Curves]:
    return {
        f"staleness of {group}": {
            rank: ([each.clock for each in records], [float(each.staleness) for each in records])
            for rank, records in by_rank.items()
        }
        for group, by_rank in steps.items()
    }
